"""Reads the log of a run (llmc/log/README.md) for the scripts: whole lines, and numbers that may be missing.

A number is missing where its field is not there or is null, as in a step in which a rank died. Readers leave
such a step out of what they compute of this number.
"""
import array
import json
import math
import operator
import os
import sys

LARGEST = sys.float_info.max  # an integer of JSON may be larger


class LogError(Exception):
    """A log that cannot be read: a message in one line."""


SCAN = json.JSONDecoder().scan_once


def parse(path, number, line):
    """The event of a line (bytes)."""
    try:
        said = line.decode("utf-8")
        event, end = SCAN(said, 0)
        if said[end:] != "\n":
            event = json.loads(said)
    except (ValueError, RecursionError, StopIteration):
        event = None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        raise LogError(f"{path}:{number}: expected a JSON object with \"event\", found {line[:40]!r}")
    return event


def read_events(path):
    """Yields the events of a log. While the run goes on, the last line may be incomplete; it is left out."""
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                yield parse(path, number, line)
    except OSError as error:
        raise LogError(f"{path}: {error.strerror}; expected the directory that --out named") from None


def of_one_run(path, events):
    """The events of a log. A run that is resumed repeats some of its last steps, but none begins anew in the same log."""
    last = 0
    for event in events:
        if event["event"] == "step":
            step = number(event, "step", last)
            if step == 0 < last:
                raise LogError(f"{path}: after step {last + 1} it has the first step again: expected the log of one run")
            last = step
        yield event


class Steps:
    """Steps in order, held by field, since a long run has hundreds of thousands. A number that is missing is held as
    NaN, in series() a gap of a line."""

    def __init__(self, columns, rows):
        self.columns, self.rows = columns, rows

    @classmethod
    def of(cls, events):
        """Of the events of steps; of those of one step the last counts."""
        columns, length, kinds = {}, 0, None
        for event in events:
            if event.keys() != kinds:  # which most steps of a run have in common
                kinds = event.keys()
                for name in kinds - columns.keys():
                    if not isinstance(event[name], (str, list, dict)):
                        columns[name] = array.array("d" if name == "step" else "f", [math.nan]) * length
                kept = [(name, column.append) for name, column in columns.items()]
            for name, append in kept:
                try:
                    append(event[name])
                except (KeyError, TypeError, OverflowError):  # absent, null, no number, too large
                    append(math.nan)
            length += 1
        for name, column in columns.items():
            if not all(map(math.isfinite, column)):
                columns[name] = array.array(column.typecode, (v if math.isfinite(v) else math.nan for v in column))
        steps = columns.get("step", ())
        if all(map(operator.lt, steps, steps[1:])):
            return cls(columns, range(length))
        rows = {step: row for row, step in enumerate(steps)}
        return cls(columns, [rows[step] for step in sorted(rows)])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, some):
        return Steps(self.columns, self.rows[some])

    def having(self, name):
        """Those that have a number in this field."""
        column = self.columns.get(name)
        return Steps(self.columns, [row for row in self.rows if column[row] == column[row]] if column else [])

    def series(self, name, missing=math.nan):
        """The numbers of a field, with `missing` where there is none."""
        column = self.columns.get(name)
        values = [column[row] for row in self.rows] if column else [math.nan] * len(self)
        return values if missing != missing else [missing if value != value else value for value in values]

    def numbers(self, name):
        """The numbers of a field that are not missing."""
        return [value for value in self.series(name) if value == value]


def read_run(directory):
    """The events of a run by kind: `steps` and `evals` in order, those that were repeated after a checkpoint
    was loaded once; all `views`; of other kinds the last event. Steps count from 1, as on the terminal."""
    run, path = {"evals": {}, "views": []}, os.path.join(directory, "log.jsonl")

    def keep_others(events):
        """Yields steps, and keeps what is not one."""
        for event in events:
            kind = event["event"]
            if kind in ("step", "eval"):
                if number(event, "step") is None:
                    continue
                if kind == "step":
                    event["step"] += 1
                    yield event
                else:
                    run["evals"][event["step"]] = event
            elif kind == "view":
                run["views"].append(event)
            else:
                run[kind] = event
    run["steps"] = Steps.of(keep_others(of_one_run(path, read_events(path))))
    run["evals"] = [run["evals"][step] for step in sorted(run["evals"])]
    return run


def number(event, name, missing=None):
    """The number of a field, or `missing`."""
    value = event.get(name)
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= LARGEST
    return value if good else missing


def numbers(events, name):
    """The numbers of a field that are not missing."""
    if isinstance(events, Steps):
        return events.numbers(name)
    values = (number(event, name) for event in events)
    return [value for value in values if value is not None]


def mean(values, missing=None):
    """The mean of numbers of which there may be none."""
    return sum(values) / len(values) if values else missing


def text(value, form="{:.3f}"):
    """A number for people to read; a missing one is a dash."""
    return "-" if value is None else form.format(value)
