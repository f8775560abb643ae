"""Reads the log of a run (llmc/log/README.md) for the scripts: whole lines, and numbers that may be missing.

A number is missing where its field is not there or is null, as in a step in which a rank died. Readers leave
such a step out of what they compute of this number.
"""
import array
import json
import math
import os


class LogError(Exception):
    """A log that cannot be read: a message in one line."""


def parse(path, number, line):
    """The event of a line (bytes)."""
    try:
        event = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
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


class Steps:
    """Steps in order, as a list of events, but held by field: a long run has hundreds of thousands. A number that
    is missing is held as NaN."""

    def __init__(self, columns, rows):
        self.columns, self.rows = columns, rows

    @classmethod
    def of(cls, events):
        """Of the events of steps; of those of one step the last counts."""
        columns, row_of, length = {"step": array.array("d")}, {}, 0
        for event in events:
            row = row_of.setdefault(event["step"], length)
            for name in event:
                value = number(event, name)
                if name not in columns:
                    if value is None:
                        continue
                    columns[name] = array.array("d", [math.nan]) * length
                if row < length:
                    columns[name][row] = math.nan if value is None else value
            if row == length:
                length += 1
                for name, column in columns.items():
                    column.append(number(event, name, math.nan))
        return cls(columns, [row_of[step] for step in sorted(row_of)])

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        return Steps(self.columns, self.rows[at]) if isinstance(at, slice) else Step(self.columns, self.rows[at])

    def numbers(self, name):
        column = self.columns.get(name, ())
        values = (column[row] for row in self.rows) if len(column) else ()
        return [int(value) if value.is_integer() and name not in ("loss", "step_ms") else value
                for value in values if value == value]


class Step:
    """A step of Steps, as an event."""
    __slots__ = ("columns", "row")

    def __init__(self, columns, row):
        self.columns, self.row = columns, row

    def get(self, name):
        column = self.columns.get(name)
        value = column[self.row] if column else math.nan
        return None if value != value else int(value) if name == "step" else value

    def __getitem__(self, name):
        return self.get(name)


def read_run(directory):
    """The events of a run by kind: `steps` and `evals` in order, those that were repeated after a checkpoint
    was loaded once; all `views`; of other kinds the last event."""
    run = {"evals": {}, "views": []}

    def keep_others(events):
        """Yields steps, and keeps what is not one."""
        for event in events:
            kind = event["event"]
            if kind in ("step", "eval"):
                if number(event, "step") is None:
                    continue
                if kind == "step":
                    yield event
                else:
                    run["evals"][event["step"]] = event
            elif kind == "view":
                run["views"].append(event)
            else:
                run[kind] = event
    run["steps"] = Steps.of(keep_others(read_events(os.path.join(directory, "log.jsonl"))))
    run["evals"] = [run["evals"][step] for step in sorted(run["evals"])]
    return run


def number(event, name, missing=None):
    """The number of a field, or `missing`."""
    value = event.get(name)
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
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
