"""Reads and writes results of a sweep: one JSON line per finished run, short enough for the repository.

A line holds the run's key (sweep_settings.py), how it ended, means over its steps, and thinned curves.
Lines are only added, never changed. The last line of an id counts.
"""
import datetime
import json
import os

CURVE, DRIFTS = 32, 16  # points that are kept of a curve and of the drift


def short(value, digits=6):
    """Rounds numbers to few digits. (In the log, numbers that are not finite are null already.)"""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    return value


def read_results(path):
    """Reads {id: result} from a file; it is empty if there is no file. A line that a crash cut short is
    ignored."""
    results = {}
    if not os.path.exists(path):
        return results
    with open(path, encoding="utf-8") as file:
        for line in file:
            try:
                result = json.loads(line)
            except ValueError:
                continue
            results[result["id"]] = result
    return results


def add_result(path, result):
    """Appends a line. It is on the disk before this returns."""
    torn = os.path.exists(path) and os.path.getsize(path) and open(path, "rb").read()[-1:] != b"\n"
    with open(path, "a", encoding="utf-8") as file:
        file.write(("\n" if torn else "") + json.dumps(result, separators=(",", ":")) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_events(path):
    """Reads the events in the whole lines of a log. A line that is still being written is left out."""
    events = []
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                try:
                    events.append(json.loads(line))
                except ValueError:
                    break
    except OSError:
        pass
    return events


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


def mean(values):
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else None


def result_of(run, log):
    """The result of a run from its log; None if the log does not end."""
    events = read_events(log)
    kinds = {event["event"]: event for event in events}
    end, head = kinds.get("end"), kinds.get("run")
    if not end or not head or end["status"] not in ("complete", "not finite"):
        return None
    steps = [event for event in events if event["event"] == "step"]
    good = end["status"] == "complete"
    result = {
        "id": run.id, "key": run.key, "status": end["status"],
        "revision": head["git_revision"], "backend": head["backend"],
        "date": datetime.date.today().isoformat(),
        "seconds": sum(step["step_ms"] for step in steps) / 1e3,
        "parameters": head["parameters"],
        "perplexity": end.get("val_perplexity") if good else None,
        "replica_perplexity": end.get("replica_val_perplexity") if good else None,
    }
    for name in ("gradient_loss_rate", "parameter_loss_rate", "drift", "drift_expected",
                 "drift_paper", "mean_age", "extra_traffic"):
        result[name] = mean([step.get(name) for step in steps])
    # Replicas need a few steps until the distribution of their ages is stationary.
    late = steps[len(steps) // 4:]
    result["late_mean_age"] = mean([step["mean_age"] for step in late])
    result["max_age"] = max((step["max_age"] for step in steps), default=0)
    # The ratio of each step is averaged, because the drift itself falls with the learning rate.
    result["drift_ratio"] = mean([step["drift"] / step["drift_expected"] for step in late
                                  if step["drift_expected"]])
    if late and late[-1].get("max_age"):
        result["ages"] = [short(mean([step["ages"][k] for step in late]), 4)
                          for k in range(len(late[-1]["ages"]))]
    result["losses"] = [[group[-1]["step"] + 1, short(mean([step["loss"] for step in group]))]
                        for group in thin(steps, CURVE)]
    result["evaluations"] = [[event["step"], short(event["val_perplexity"])]
                             for event in events if event["event"] == "eval"]
    if any(step["drift"] for step in steps):
        result["drifts"] = [[group[-1]["step"] + 1]
                            + [short(mean([step[name] for step in group]), 4)
                               for name in ("drift", "drift_expected", "drift_paper")]
                            for group in thin(steps, DRIFTS)]
    return {name: short(value) for name, value in result.items()}
