#!/usr/bin/env python3
"""Shows how one run went: loss, step times, lost packets, and when something
became worse. Compares several.

    scripts/run_report.py RUN [--picture FILE]
    scripts/run_report.py RUN RUN ... [--picture FILE]

RUN is the directory that the run got with --out. The run may have ended or may
still go on. The script prints a summary and draws RUN/report.png and
report.svg (or FILE). The picture shows by step the loss, step times, shares of
packets lost, the drift between replicas and their lag behind the model. It
also shows the share of packets lost between each two workers.

For several runs it prints a table and draws their losses against steps, tokens
and hours: who was ahead at the same time? The picture lies beside the first
run, as compare.png and compare.svg (or FILE).
"""
import argparse
import math
import os
import signal
import statistics
import sys

import run_compare
from figure import pyplot, save
from python_packages import require
from run_log import LogError, mean, number, numbers, read_run

WINDOWS = 50  # the run is divided into at most so many parts
FEWEST = 20  # steps of a part, at least
WORSE = 1.5  # a step time that grew by this factor is reported
MOST_LATE = 4  # at most so many late ranks are named
MOST_VIEWS = 12  # at most so many changes of ranks are told
LOST_MORE = 0.01  # a share of lost packets that grew by WORSE and by this much is reported


def read(directory):
    try:
        run = read_run(directory)
    except LogError as error:
        sys.exit(f"run_report.py: {error}")
    if "run" not in run or not run["steps"]:
        sys.exit(f"run_report.py: {os.path.join(directory, 'log.jsonl')}: no step is finished yet")
    if not numbers(run["steps"], "loss"):
        sys.exit(f"run_report.py: {os.path.join(directory, 'log.jsonl')}: no step has a loss")
    return run


def quantile(values, share):
    """The smallest of the values that at least this share of them (rounded) do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered)) - 1))]


def parts(steps, fewest=FEWEST):
    """Divides the run into parts of equally many steps."""
    width = max(fewest, 1, -(-len(steps) // WINDOWS))
    return [steps[i:i + width] for i in range(0, len(steps), width)]


def changes(steps):
    """Lines that say where a measure became worse than in the best part before, or recovered: one
    line per change."""
    measures = (
        ("median step time", "step_ms", statistics.median, lambda now, best: now > WORSE * best, "{:.0f} ms"),
        ("slowest steps", "step_ms", lambda values: quantile(values, 0.95),
         lambda now, best: now > 2 * WORSE * best, "{:.0f} ms"),
        ("lost gradients", "gradient_loss_rate", mean,
         lambda now, best: now > WORSE * best and now > best + LOST_MORE, "{:.1%}"),
        ("lost parameters", "parameter_loss_rate", mean,
         lambda now, best: now > WORSE * best and now > best + LOST_MORE, "{:.1%}"))
    lines = []
    for name, field, measure, is_worse, form in measures:
        best, told = None, False
        for part in parts(steps[1:]):  # the first step warms up
            values = numbers(part, field)
            if not values:
                continue
            now = measure(values)
            if best is not None and is_worse(now, best) != told:
                told = not told
                before, after = form.format(best), form.format(now)
                lines.append((part.series("step")[0], f"{name} " + (
                    f"rose from {before} to {after}" if told else f"fell back to {after}")))
            if best is None or now < best:
                best = now
    return [f"  from step {step:<7.0f} {text}" for step, text in sorted(lines)]


def members(views):
    """Lines that say when ranks died and joined (--meet)."""
    lines = []
    for view in views:
        what = [f"{view[key]} {verb}" for key, verb in (("left", "is gone"), ("joined", "is new")) if view.get(key)]
        if what:
            lines.append(f"  from step {number(view, 'step', 0) + 1:<7d} {'; '.join(what)}: {number(view, 'ranks', 0)} ranks")
    more = len(lines) - MOST_VIEWS
    return lines if more <= 0 else lines[:MOST_VIEWS] + [f"  and {more} more: the events \"view\" of the log"]


def plural(count, what):
    return f"{count} {what}{'s' * (count != 1)}"


def times_of(timed):
    """Lines about the times of steps; none if no step has one."""
    times = timed.numbers("step_ms")
    if not any(times):
        return []
    median, late = statistics.median(times), quantile(times, 0.99)
    longest = timed.series("step_ms", 0).index(max(times))
    waiting = sum(timed.having("step_ms").numbers("communication_ms")) / sum(times)
    return [f"step time   median {median:.0f} ms; 99% within {late:.0f} ms, {late / median:.1f} times the median;",
            f"            the longest, step {timed.series('step')[longest]:.0f}, took {max(times):.0f} ms",
            f"waiting     {waiting:.0%} of the time for packets of the exchange"]


def links_of(run):
    """The worst link between two workers."""
    rows = run.get("links", {}).get("lost") or []
    between = [(lost, s, r) for r, row in enumerate(rows) for s, lost in enumerate(row)
               if r != s and isinstance(lost, (int, float))]
    if not between:
        return []
    worst, usual = max(between), statistics.median(lost for lost, _, _ in between)
    return [f"links       worst {worst[0]:.1%}, from worker {worst[1]} to {worst[2]}; median {usual:.1%}"]


def network_of(run):
    """Lines about what happened in the network."""
    steps, lines = run["steps"], []
    lost = [mean(numbers(steps, f"{phase}_loss_rate")) for phase in ("gradient", "parameter")]
    if None not in lost:
        lines.append(f"lost        {lost[0]:.1%} of gradients, {lost[1]:.1%} of parameters; oldest parameters: "
                     f"{max(numbers(steps, 'max_age'), default=0):.0f} steps")
    again = mean(numbers(steps, "extra_traffic"))
    if again:
        lines.append(f"sent again  {again:.1%} of the packets, of gradients and parameters together")
    counts = [(round(sum(numbers(steps, name))), name)
              for name in ("late", "duplicate", "rejected", "overruns", "stragglers")]
    if any(count for count, _ in counts):
        lines.append("network     " + ", ".join(f"{count} {name}" for count, name in counts if count))
    late = [(count, rank) for rank, count in enumerate(run.get("late_ranks", {}).get("steps") or []) if count]
    if late:
        lines.append("late ranks  " + ", ".join(f"rank {rank} in {plural(count, 'step')}"
                                                for count, rank in sorted(late, reverse=True)[:MOST_LATE]))
    return lines + links_of(run)


def summary(directory, run):
    """The text that is printed. It is at most 80 columns wide if the directory's name is short."""
    first, steps = run["run"], run["steps"]
    options = first.get("options") or {}
    losses, begin = numbers(steps, "loss"), steps.series("step")[0]
    status = run["end"].get("status", "has ended") if "end" in run else "goes on, or was killed"
    workers = number(first, "workers") or number(options, "workers", 0)
    lines = [f"{directory}",
             f"{options.get('algorithm', '-')} over {first.get('link', 'memory')}, {plural(workers, 'worker')} in "
             f"{plural(number(first, 'ranks', 1), 'rank')}: {steps.series('step')[-1]:.0f} of {options.get('steps', '-')} steps, "
             f"{status}",
             "",
             f"loss        {losses[0]:.3f} in {f'step {begin:.0f}, where the log begins' if begin > 1 else 'the first step'}, "
             f"{losses[-1]:.3f} in the last"]
    if run["evals"] and number(run["evals"][-1], "val_loss") is not None:
        bits = number(run["evals"][-1], "val_bits_per_byte")
        lines.append(f"validation  {run['evals'][-1]['val_loss']:.3f} after step {run['evals'][-1]['step']}"
                     + (f"; {bits:.4f} bits per byte" if bits else ""))
    lines += times_of(steps[1:] or steps) + network_of(run)
    for title, found in (("Ranks:", members(run["views"])), ("Changes:", changes(steps))):
        lines += ["", title] + found if found else []
    return lines


def thinned(steps, name, most=2000):
    """The steps and numbers of a field for a line. Of many, the smallest and the largest of each part, which look
    like all of them."""
    at, values = steps.series("step"), steps.series(name)
    if len(values) <= most:
        return at, values
    width = -(-2 * len(values) // most)
    rows = []
    for first in range(0, len(values), width):
        part = range(first, min(first + width, len(values)))
        known = [row for row in part if values[row] == values[row]] or part
        rows += sorted({min(known, key=values.__getitem__), max(known, key=values.__getitem__)})
    return [at[row] for row in rows], [values[row] for row in rows]


def averages(windows, name, of=mean):
    """A field's mean (or another measure) in each part of the run, with gaps where it is missing."""
    found = [numbers(part, name) for part in windows]
    return [of(values) if values else float("nan") for values in found]


def draw(run):
    """Draws panels with the step on the x axis, and a map of the packets lost between workers."""
    plt = pyplot()
    steps = run["steps"]
    fewest = min(FEWEST, len(steps) // 10)  # a short run has ten points
    timed, whole = parts(steps[1:] or steps, fewest), parts(steps, fewest)
    middle, centre = ([mean(part.series("step")) for part in windows] for windows in (timed, whole))
    figure, ((loss, time, lost), (drift, lag, links)) = plt.subplots(2, 3, figsize=(16, 7.5))
    loss.plot(*thinned(steps, "loss"), color="#bbbbbb", lw=0.8, label="training, each step")
    loss.plot(centre, averages(whole, "loss"), color="#1b9e77", label="training, mean")
    if run["evals"]:
        loss.plot([e["step"] for e in run["evals"]], [number(e, "val_loss", math.nan) for e in run["evals"]], "o",
                  color="#d95f02", mfc="white", label="validation")
    loss.set(title="Loss", ylabel="cross-entropy")
    for share, label, colour in ((0.5, "median", "#1b9e77"), (0.95, "95%", "#7570b3"), (1, "longest", "#d95f02")):
        time.plot(middle, averages(timed, "step_ms", lambda values, share=share: quantile(values, share)),
                  color=colour, label=label)
    time.plot(middle, averages(timed, "communication_ms"), "--", color="#444444", label="waiting for packets, mean")
    time.set(title="Time of a step", ylabel="ms", ylim=(0, None))
    for phase, colour in (("gradient", "#1b9e77"), ("parameter", "#d95f02")):
        lost.plot(middle, [100 * share for share in averages(timed, f"{phase}_loss_rate")],
                  color=colour, label=f"{phase}s")
    lost.set(title="Packets lost in the end", ylabel="%", ylim=(0, 1.1 * max(1, lost.get_ylim()[1])), xlabel="step")
    drift.plot(*thinned(steps, "drift"), color="#1b9e77", lw=0.9, label="measured")
    if any(numbers(steps, "drift_expected")):
        drift.plot(*thinned(steps, "drift_expected"), ":", color="#444444", label="formula")
    drift.set(title="Drift between replicas", ylabel=r"$\|\theta_i-\theta_j\|^2$", ylim=(0, None), xlabel="step")
    lag.plot(*thinned(steps, "lag"), color="#bbbbbb", lw=0.8, label="each step")
    lag.plot(middle, averages(timed, "lag"), color="#1b9e77", label="mean")
    lag.set(title="Replicas behind the model, on average", ylabel="steps", xlabel="step")
    if links_of(run):
        shown = links.imshow([[100 * (share or 0) for share in row] for row in run["links"]["lost"]], vmin=0,
                             cmap="viridis", interpolation="nearest")
        figure.colorbar(shown, ax=links, label="% lost")
        links.set(title="Lost between workers", xlabel="from worker", ylabel="to worker")
        links.grid(False)
    else:
        links.set_axis_off()  # the log gets these counts when the run ends; a single worker has no links
    mark_views(run["views"], time)
    for axes in (loss, time, lost, drift, lag):
        axes.legend()
        axes.xaxis.get_major_locator().set_params(integer=True)
    return figure


def mark_views(views, axes):
    """Marks where ranks died and joined."""
    for key, colour, label in (("left", "#e7298a", "a rank died"), ("joined", "#1f78b4", "a rank joined")):
        at = [number(view, "step", 0) + 1 for view in views if view.get(key)]
        for step in at:
            axes.axvline(step, color=colour, lw=1, ls="--", label=label if step == at[0] else None)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a directory with a log.jsonl")
    parser.add_argument("--picture", "--png", metavar="FILE", help="where the picture goes, as PNG and as SVG")
    arguments = parser.parse_args()
    runs = [read(directory) for directory in arguments.runs]
    require("matplotlib", target="quickstart")
    try:
        figure, path = show(arguments, runs)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        sys.exit(f"run_report.py: {' or '.join(arguments.runs)}: a line of the log is not as train_llama2 writes it: "
                 f"{error}")
    print("\n" + save(figure, path))


def show(arguments, runs):
    """Prints what the log says. Returns the figure, and where it goes."""
    if len(runs) > 1:
        beside = os.path.join(os.path.dirname(os.path.abspath(arguments.runs[0])), "compare.png")
        return run_compare.compare(arguments.runs, runs), arguments.picture or os.path.relpath(beside)
    print("\n".join(summary(arguments.runs[0], runs[0])))
    return draw(runs[0]), arguments.picture or os.path.join(arguments.runs[0], "report.png")


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program without a traceback
    main()
