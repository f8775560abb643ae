"""Reads the log of a run (llmc/log/README.md) for the scripts: whole lines, and numbers that may be missing.

A number is missing where its field is not there or is null, as in a step in which a rank died. Readers leave
such a step out of what they compute of this number.
"""
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


def read_run(directory):
    """The events of a run by kind: `steps` and `evals` in order, those that were repeated after a checkpoint
    was loaded once; all `views`; of other kinds the last event."""
    run = {"steps": {}, "evals": {}, "views": []}
    for event in read_events(os.path.join(directory, "log.jsonl")):
        kind = event["event"]
        if kind in ("step", "eval"):
            if number(event, "step") is not None:
                run[kind + "s"][event["step"]] = event
        elif kind == "view":
            run["views"].append(event)
        else:
            run[kind] = event
    for kind in ("steps", "evals"):
        run[kind] = [run[kind][step] for step in sorted(run[kind])]
    return run


def number(event, name, missing=None):
    """The number of a field, or `missing`."""
    value = event.get(name)
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return value if good else missing


def numbers(events, name):
    """The numbers of a field that are not missing."""
    values = (number(event, name) for event in events)
    return [value for value in values if value is not None]


def mean(values, missing=None):
    """The mean of numbers of which there may be none."""
    return sum(values) / len(values) if values else missing


def text(value, form="{:.3f}"):
    """A number for people to read; a missing one is a dash."""
    return "-" if value is None else form.format(value)
