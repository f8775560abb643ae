"""Reads and writes results of a sweep: one JSON line per finished run, short enough for the repository.

A line holds the run's key (sweep_settings.py), how it ended, means over its steps, and thinned curves.
Lines are only added, never changed. The last line of an id counts.
"""
import datetime
import json
import os
import sys

sys.path.insert(1, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# pylint: disable=wrong-import-position
from run_log import LogError, mean, number, numbers, read_events

CURVE, DRIFTS = 32, 16  # points that are kept of a curve and of the drift


def short(value, digits=6):
    """Rounds numbers to few digits. (In the log, numbers that are not finite are null already.)"""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    return value


def read_results(path):
    """Reads {id: result} from a file; it is empty if there is no file. A line that a crash cut short, or that is no
    result, is ignored."""
    results = {}
    if not os.path.exists(path):
        return results
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                result = json.loads(line)
            except ValueError:
                continue
            if isinstance(result, dict) and isinstance(result.get("key"), dict) and {"id", "perplexity"} <= result.keys():
                results[result["id"]] = {**result, "perplexity": number(result, "perplexity")}
    return results


def add_result(path, result):
    """Appends a line. It is on the disk before this returns."""
    torn = os.path.exists(path) and os.path.getsize(path) and open(path, "rb").read()[-1:] != b"\n"
    with open(path, "a", encoding="utf-8") as file:
        file.write(("\n" if torn else "") + json.dumps(result, separators=(",", ":")) + "\n")
        file.flush()
        os.fsync(file.fileno())


def steps_done(path):
    """The number of steps in a growing log, from its last whole line. This is cheap enough to be called
    every second."""
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 4096))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return 0
    for line in reversed(lines):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if "step" in event:
            return event["step"] + (event.get("event") == "step")
    return 0


def thin(events, count):
    """Divides events into at most `count` groups of consecutive ones."""
    size = max(1, -(-len(events) // count))
    return [events[i:i + size] for i in range(0, len(events), size)]


def result_of(run, log):
    """The result of a run from its log; None if the log does not end, or its last evaluation was stopped."""
    try:
        events = list(read_events(log))
    except LogError:
        return None
    kinds = {event["event"]: event for event in events}
    end, head = kinds.get("end"), kinds.get("run")
    if not end or not head or end.get("status") not in ("complete", "not finite"):
        return None
    if end["status"] == "complete" and kinds.get("eval", {}).get("step", end.get("step")) != end.get("step"):
        return None
    steps = [event for event in events if event["event"] == "step"]
    good = end["status"] == "complete"
    result = {
        "id": run.id, "key": run.key, "status": end["status"], "data": run.data(),
        "revision": head.get("git_revision"), "backend": head.get("backend"),
        "date": datetime.date.today().isoformat(),
        "seconds": sum(numbers(steps, "step_ms")) / 1e3,
        "parameters": number(head, "parameters"),
        "perplexity": number(end, "val_perplexity") if good else None,
        "replica_perplexity": number(end, "replica_val_perplexity") if good else None,
    }
    options = head.get("options") or {}
    result["chosen"] = {name: options[name] for name in ("wire-dtype",) if name in options}  # what auto came to
    for name in ("gradient_loss_rate", "parameter_loss_rate", "drift", "drift_expected",
                 "drift_paper", "mean_age", "extra_traffic"):
        result[name] = mean(numbers(steps, name))
    # Replicas need a few steps until the distribution of their ages is stationary.
    late = steps[len(steps) // 4:]
    result["late_mean_age"] = mean(numbers(late, "mean_age"))
    result["max_age"] = max(numbers(steps, "max_age"), default=0)
    # The ratio of each step is averaged, because the drift itself falls with the learning rate.
    result["drift_ratio"] = mean([step["drift"] / step["drift_expected"] for step in late
                                  if number(step, "drift") is not None and number(step, "drift_expected")])
    if late and late[-1].get("max_age"):
        result["ages"] = [short(mean([step["ages"][k] for step in late if number(step, "max_age") is not None]), 4)
                          for k in range(len(late[-1]["ages"]))]
    result["losses"] = [[group[-1]["step"] + 1, short(mean(numbers(group, "loss")))]
                        for group in thin(steps, CURVE)]
    result["evaluations"] = [[event["step"], short(number(event, "val_perplexity"))]
                             for event in events if event["event"] == "eval"]
    if any(numbers(steps, "drift")):
        result["drifts"] = [[group[-1]["step"] + 1]
                            + [short(mean(numbers(group, name)), 4)
                               for name in ("drift", "drift_expected", "drift_paper")]
                            for group in thin(steps, DRIFTS)]
    return {name: short(value) for name, value in result.items()}
