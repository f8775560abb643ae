#!/usr/bin/python3
"""Shows how one run went: loss, step times, lost packets, and when something became worse. Compares several.

    scripts/run_report.py RUN [--png FILE]
    scripts/run_report.py RUN RUN ... [--png FILE]

RUN is the directory that the run got with --out. The run may have ended or may still go on. The script
prints a summary and draws RUN/report.png (or FILE). The picture shows by step the loss, step times,
shares of packets lost, the drift between replicas and their lag behind the model. It also shows the
share of packets lost between each two workers.

For several runs it prints a table and draws their losses against steps, tokens and hours (compare.png, or
FILE): who was ahead at the same time?
"""
import argparse
import json
import os
import statistics
import sys

import run_compare

WINDOWS = 50  # the run is divided into at most so many parts
FEWEST = 20  # steps of a part, at least
WORSE = 1.5  # a step time that grew by this factor is reported
MOST_LATE = 4  # at most so many late ranks are named
LOST_MORE = 0.01  # a share of lost packets that grew by WORSE and by this much is reported


def read_log(directory):
    """Reads the events of a run. While the run goes on, its log may end in the middle of a line. Steps
    that were repeated after a checkpoint was loaded count once."""
    path = os.path.join(directory, "log.jsonl")
    run = {"steps": {}, "evals": {}}
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith("\n"):
                    break
                try:
                    event = json.loads(line)
                    kind = event["event"]
                except (ValueError, KeyError, TypeError):
                    sys.exit(f"run_report.py: {path}:{number}: expected a JSON object with \"event\"")
                if kind == "step":
                    run["steps"][event["step"]] = event
                elif kind == "eval":
                    run["evals"][event["step"]] = event
                else:
                    run[kind] = event
    except OSError as error:
        sys.exit(f"run_report.py: {path}: {error.strerror}; expected the directory that --out named")
    if "run" not in run or not run["steps"]:
        sys.exit(f"run_report.py: {path}: no step is finished yet")
    run["steps"] = [run["steps"][step] for step in sorted(run["steps"])]
    run["evals"] = [run["evals"][step] for step in sorted(run["evals"])]
    return run


def quantile(values, share):
    """The smallest of the values that at least this share of them (rounded) do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered)) - 1))]


def parts(steps):
    """Divides the run into parts of equally many steps."""
    width = max(FEWEST, -(-len(steps) // WINDOWS))
    return [steps[i:i + width] for i in range(0, len(steps), width)]


def changes(steps):
    """Lines that say where a measure became worse than in the best part before, or recovered: one
    line per change."""
    measures = (
        ("median step time", lambda part: statistics.median(e["step_ms"] for e in part),
         lambda now, best: now > WORSE * best, "{:.0f} ms"),
        ("slowest steps", lambda part: quantile([e["step_ms"] for e in part], 0.95),
         lambda now, best: now > 2 * WORSE * best, "{:.0f} ms"),
        ("lost gradients", lambda part: statistics.mean(e["gradient_loss_rate"] for e in part),
         lambda now, best: now > WORSE * best and now > best + LOST_MORE, "{:.1%}"),
        ("lost parameters", lambda part: statistics.mean(e["parameter_loss_rate"] for e in part),
         lambda now, best: now > WORSE * best and now > best + LOST_MORE, "{:.1%}"))
    lines = []
    for name, measure, is_worse, form in measures:
        best, told = None, False
        for part in parts(steps[1:]):  # the first step warms up
            now = measure(part)
            if best is not None and is_worse(now, best) != told:
                told = not told
                before, after = form.format(best), form.format(now)
                lines.append((part[0]["step"], f"{name} " + (
                    f"rose from {before} to {after}" if told else f"fell back to {after}")))
            if best is None or now < best:
                best = now
    return [f"  from step {step:<7d} {text}" for step, text in sorted(lines)]


def summary(directory, run):
    """The text that is printed. It is at most 80 columns wide if the directory's name is short."""
    first, steps, options = run["run"], run["steps"], run["run"]["options"]
    last, timed = steps[-1], steps[1:] or steps
    times = [e["step_ms"] for e in timed]
    median, late = statistics.median(times), quantile(times, 0.99)
    longest = max(timed, key=lambda e: e["step_ms"])
    waiting = sum(e["communication_ms"] for e in timed) / max(1e-9, sum(times))
    status = run["end"]["status"] if "end" in run else "goes on, or was killed"
    lines = [f"{directory}",
             f"{options['algorithm']} over {first.get('link', 'memory')}, {options['workers']} workers in "
             f"{first.get('ranks', 1)} rank{'s' * (first.get('ranks', 1) > 1)}: {last['step'] + 1} of {options['steps']} steps, {status}",
             "",
             f"loss        {steps[0]['loss']:.3f} in the first step, {last['loss']:.3f} in the last"]
    if run["evals"]:
        bits = run["evals"][-1].get("val_bits_per_byte")
        lines.append(f"validation  {run['evals'][-1]['val_loss']:.3f} after step {run['evals'][-1]['step']}"
                     + (f"; {bits:.4f} bits per byte" if bits else ""))
    lines += [f"step time   median {median:.0f} ms; 99% within {late:.0f} ms, {late / median:.1f} times the median;",
              f"            the longest, step {longest['step']}, took {longest['step_ms']:.0f} ms",
              f"waiting     {waiting:.0%} of the time for the network"]
    lost = [statistics.mean(e[f"{phase}_loss_rate"] for e in steps) for phase in ("gradient", "parameter")]
    lines.append(f"lost        {lost[0]:.1%} of gradients, {lost[1]:.1%} of parameters; oldest parameters: "
                 f"{max(e['max_age'] for e in steps)} steps")
    counts = [(sum(e.get(name, 0) for e in steps), name)
              for name in ("late", "duplicate", "rejected", "overruns", "stragglers")]
    if any(count for count, _ in counts):
        lines.append("network     " + ", ".join(f"{count} {name}" for count, name in counts if count))
    late = [(steps, rank) for rank, steps in enumerate(run.get("late_ranks", {}).get("steps", [])) if steps]
    if late:
        lines.append("late ranks  " + ", ".join(f"rank {rank} in {steps} step{'s' * (steps > 1)}"
                                                for steps, rank in sorted(late, reverse=True)[:MOST_LATE]))
    if "links" in run:
        rows = run["links"]["lost"]
        between = [(lost, s, r) for r, row in enumerate(rows) for s, lost in enumerate(row) if r != s]
        worst, usual = max(between), statistics.median(lost for lost, _, _ in between)
        lines.append(f"links       worst {worst[0]:.1%}, from worker {worst[1]} to {worst[2]}; median {usual:.1%}")
    found = changes(steps)
    return lines + (["", "Changes:"] + found if found else [])


def draw(run, path):
    """Draws panels with the step on the x axis, and a map of the packets lost between workers."""
    try:
        import matplotlib  # pylint: disable=import-outside-toplevel
    except ImportError:
        sys.exit("run_report.py: no picture without Matplotlib; scripts/dependencies.sh quickstart installs it")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # pylint: disable=import-outside-toplevel
    steps = run["steps"]
    timed = parts(steps[1:] or steps)
    at = [e["step"] for e in steps]
    middle = [statistics.mean(e["step"] for e in part) for part in timed]
    figure, ((loss, time, lost), (drift, lag, links)) = plt.subplots(2, 3, figsize=(16, 7.5))
    loss.plot(at, [e["loss"] for e in steps], color="#bbbbbb", lw=0.8, label="training, each step")
    whole = parts(steps)
    loss.plot([statistics.mean(e["step"] for e in part) for part in whole],
              [statistics.mean(e["loss"] for e in part) for part in whole], color="#1b9e77", label="training, mean")
    if run["evals"]:
        loss.plot([e["step"] for e in run["evals"]], [e["val_loss"] for e in run["evals"]], "o",
                  color="#d95f02", mfc="white", label="validation")
    loss.set(title="Loss", ylabel="cross-entropy")
    for share, label, colour in ((0.5, "median", "#1b9e77"), (0.95, "95%", "#7570b3"), (1, "longest", "#d95f02")):
        time.plot(middle, [quantile([e["step_ms"] for e in part], share) for part in timed], color=colour, label=label)
    time.plot(middle, [statistics.mean(e["communication_ms"] for e in part) for part in timed], "--",
              color="#444444", label="waiting for the network, mean")
    time.set(title="Time of a step", ylabel="ms", ylim=(0, None))
    for phase, colour in (("gradient", "#1b9e77"), ("parameter", "#d95f02")):
        lost.plot(middle, [100 * statistics.mean(e[f"{phase}_loss_rate"] for e in part) for part in timed],
                  color=colour, label=f"{phase}s")
    lost.set(title="Packets lost", ylabel="%", ylim=(0, 1.1 * max(1, lost.get_ylim()[1])), xlabel="step")
    drift.plot(at, [e["drift"] for e in steps], color="#1b9e77", lw=0.9, label="measured")
    expected = [e["drift_expected"] for e in steps]
    if any(expected):
        drift.plot(at, [float("nan") if e is None else e for e in expected], ":", color="#444444", label="formula")
    drift.set(title="Drift between replicas", ylabel=r"$\|\theta_i-\theta_j\|^2$", ylim=(0, None), xlabel="step")
    lag.plot(at, [e.get("lag", 0) for e in steps], color="#bbbbbb", lw=0.8, label="each step")
    lag.plot(middle, [statistics.mean(e.get("lag", 0) for e in part) for part in timed], color="#1b9e77", label="mean")
    lag.set(title="Replicas behind the model, on average", ylabel="steps", xlabel="step")
    if "links" in run:
        shown = links.imshow([[100 * share for share in row] for row in run["links"]["lost"]], vmin=0,
                             cmap="viridis", interpolation="nearest")
        figure.colorbar(shown, ax=links, label="% lost")
        links.set(title="Lost between workers", xlabel="from worker", ylabel="to worker")
    else:
        links.set_axis_off()  # the log gets these counts when the run ends; a single worker has no links
    for axes in (loss, time, lost, drift, lag):
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=9)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("runs", metavar="RUN", nargs="+", help="a directory with a log.jsonl")
    parser.add_argument("--png", help="where the picture goes [RUN/report.png; compare.png for several runs]")
    arguments = parser.parse_args()
    runs = [read_log(directory) for directory in arguments.runs]
    if len(runs) > 1:
        run_compare.compare(arguments.runs, runs, arguments.png or "compare.png")
        return
    print("\n".join(summary(arguments.runs[0], runs[0])))
    draw(runs[0], arguments.png or os.path.join(arguments.runs[0], "report.png"))


if __name__ == "__main__":
    main()
