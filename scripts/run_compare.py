"""Compares several runs for run_report.py: a table, and a picture of the loss against steps, tokens and
hours. Whoever reaches a low loss in few steps need not be ahead after the same time.
"""
import itertools
import os

from figure import literal, pyplot
from run_log import number, text

SMOOTH = 50  # a curve is the mean over 1/SMOOTH of its run's steps, up to each step


def curve(run):
    """Adds to a run what its steps took in total: `tokens`, `hours`, and the smoothed training loss. Steps without
    a loss are left out. What a step took counts as nothing where it was not measured."""
    steps = run["steps"] = run["steps"].having("loss")
    width = max(1, len(steps) // SMOOTH)
    losses, times = steps.series("loss"), steps.series("step_ms", 0)
    run["tokens"] = list(itertools.accumulate(
        rate * time / 1e3 for rate, time in zip(steps.series("tokens_per_second", 0), times)))
    run["hours"] = list(itertools.accumulate(time / 3.6e6 for time in times))
    run["loss"] = []
    window = 0.0
    for i, loss in enumerate(losses):
        window += loss - (losses[i - width] if i >= width else 0)
        run["loss"].append(window / min(i + 1, width))


def loss_at(run, axis, place):
    """The smoothed loss of the last step that ended at `place` of the axis or before it, and a hair after it, since
    tokens are sums of products of float32; None: none had."""
    done = [loss for loss, at in zip(run["loss"], run[axis]) if at <= place * (1 + 1e-6)]
    return done[-1] if done else None


def scale(value):
    """A count with its unit: 12.3M."""
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if value >= size:
            return f"{value / size:.1f}{unit}"
    return f"{value:.0f}"


def unit_of(hours):
    """A unit in which a time is a handy number, after how many there are in an hour."""
    return (1, "h") if hours >= 1 else (60, "min") if hours >= 1 / 60 else (3600, "s")


def duration(hours):
    in_hour, unit = unit_of(hours)
    return f"{in_hour * hours:.1f} {unit}"


def table(names, runs):
    """Lines of text. The last columns compare runs where the shortest of them ended."""
    tokens, hours = (min(run[axis][-1] for run in runs) for axis in ("tokens", "hours"))
    rows = [["run", "steps", "tokens", "time", "loss", "validation", "bits/byte",
             f"at {scale(tokens)} tokens", f"after {duration(hours)}"]]
    for name, run in zip(names, runs):
        last = run["evals"][-1] if run["evals"] else {}
        val, bits = number(last, "val_loss"), number(last, "val_bits_per_byte")
        rows.append([name, str(len(run["steps"])), scale(run["tokens"][-1]), duration(run["hours"][-1]),
                     text(run["loss"][-1]), text(val), text(bits, "{:.4f}"),
                     text(loss_at(run, "tokens", tokens)), text(loss_at(run, "hours", hours))])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) if i == 0 else cell.rjust(width)
                       for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in rows]
    ahead = []
    for axis, place, said in (("tokens", tokens, f"at {scale(tokens)} tokens"),
                              ("hours", hours, f"after {duration(hours)}")):
        there = [(loss_at(run, axis, place), name) for name, run in zip(names, runs)]
        best, name = min((loss, name) for loss, name in there if loss is not None)
        ahead.append(f"{said}: {name} ({best:.3f})")
    return [*lines, "", "Lowest training loss " + "; ".join(ahead)]


def names_of(directories):
    """Short names: what the paths have after the part that all share."""
    paths = [os.path.abspath(directory) for directory in directories]
    shared = os.path.commonpath([os.path.dirname(path) for path in paths])
    return [os.fsencode(os.path.relpath(path, shared)).decode("utf-8", "replace") for path in paths]


def draw(names, runs):
    plt = pyplot()
    figure, panels = plt.subplots(1, 3, figsize=(16, 5), sharey=True)
    in_hour, unit = unit_of(max(run["hours"][-1] for run in runs))
    for name, run in zip(names, runs):
        steps = run["steps"].series("step")
        index = {step: i for i, step in enumerate(steps)}
        marks = [(index[e["step"]], number(e, "val_loss")) for e in run["evals"]
                 if e["step"] in index and number(e, "val_loss") is not None]
        for axes, axis in zip(panels, (steps, run["tokens"], [in_hour * hours for hours in run["hours"]])):
            some = slice(None, None, -(-len(steps) // 4000))  # of a smooth curve
            (line,) = axes.plot(axis[some], run["loss"][some], lw=1.2, label=literal(name))
            axes.plot([axis[i] for i, _ in marks], [loss for _, loss in marks], "o", mfc="white",
                      color=line.get_color(), ms=5)
    top = max(run["loss"][len(run["loss"]) // 20] for run in runs)
    bottom = min(min(run["loss"]) for run in runs)
    for axes, what in zip(panels, ("step", "tokens", f"time of training, {unit}")):
        axes.set(xlabel=what, xlim=(0, None), ylim=(bottom - 0.05 * (top - bottom), top + 0.05 * (top - bottom) + 1e-3))
    panels[0].set(ylabel="cross-entropy", title="Training (lines) and validation (circles)")
    panels[0].legend()
    return figure


def compare(directories, runs):
    """Prints the table. Returns the figure."""
    for run in runs:
        curve(run)
    names = names_of(directories)
    print("\n".join(table(names, runs)))
    return draw(names, runs)
