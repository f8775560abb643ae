#!/usr/bin/env python3
"""Compares runs: a table of what loss cost and a plot of loss curves and drift.

    scripts/sweeps/report.py --out DIR [--note TEXT] RUN RUN...

Each RUN is a directory with a log.jsonl. The others are compared with the first. The script writes
DIR/plot.png, DIR/plot.svg and DIR/table.md and prints the table. TEXT stands below the plot.
"""
import argparse
import math
import os
import sys
import textwrap

sys.path.insert(1, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
# pylint: disable=wrong-import-position
import run_log
import signal
from figure import COLOURS, pyplot, save
from python_packages import require


def read_run(directory):
    """Reads the events of a run. It is an error if the run did not end."""
    path = os.path.join(directory, "log.jsonl")
    try:
        run = run_log.read_run(directory)
    except run_log.LogError as error:
        sys.exit(f"report.py: {error}")
    if "run" not in run or "end" not in run or run["end"].get("status") != "complete":
        sys.exit(f"report.py: {path}: the run did not end; run it again")
    options = run["run"].get("options") or {}
    run["algorithm"] = options.get("algorithm", "run")
    rate = 0.0 if run["algorithm"] == "reliable" else options.get("loss-rate") or 0.0
    run["rate"] = sum(rate) / 2 if isinstance(rate, list) else rate  # of gradients and of parameters
    lost = run_log.numbers([{"lost": run["end"].get(f"{phase}_loss_rate")} for phase in ("gradient", "parameter")], "lost")
    run["lost"] = run_log.mean(lost)
    run["name"] = run["algorithm"]
    if run["name"] == "lossy" and options.get("plain"):
        run["name"] = "plain"  # the lossy algorithm exactly as in its paper
    return run


COLUMNS = ("algorithm", "lost", "perplexity", "replica", "change", "drift", "formula", "paper",
           "tokens/s")


def table(runs):
    """Rows of text: the perplexity of the fresh model and of a replica, the change against the first
    run, and the drift between replicas, as measured and by both formulas (means over the run)."""
    base = run_log.number(runs[0]["end"], "val_perplexity")
    rows = []
    for run in runs:
        end = run["end"]
        value = lambda name, form, end=end: run_log.text(run_log.number(end, name), form)
        perplexity = run_log.number(end, "val_perplexity")
        change = None if None in (perplexity, base) else 100 * (perplexity / base - 1)
        rows.append((run["name"], run_log.text(run["lost"], "{:.1%}"), value("val_perplexity", "{:.2f}"),
                     value("replica_val_perplexity", "{:.2f}"),
                     "" if run is runs[0] else run_log.text(change, "{:+.1f}%"),
                     value("drift", "{:.3g}"), value("drift_expected", "{:.3g}"), value("drift_paper", "{:.3g}"),
                     value("tokens_per_second", "{:.0f}")))
    return rows


def as_text(rows):
    widths = [max(len(row[i]) for row in rows + [COLUMNS]) for i in range(len(COLUMNS))]
    def line(row):
        return "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w)
                         for i, (cell, w) in enumerate(zip(row, widths)))
    return "\n".join([line(COLUMNS), "  ".join("-" * w for w in widths)] + [line(r) for r in rows])


def as_markdown(rows):
    line = lambda row: "| " + " | ".join(row) + " |"
    rule = "|" + "|".join([" --- "] + [" ---: "] * (len(COLUMNS) - 1)) + "|"
    return "\n".join([line(COLUMNS), rule] + [line(r) for r in rows]) + "\n"


def smooth(values, width):
    """Moving average over the last `width` values."""
    out, total = [], 0.0
    for i, value in enumerate(values):
        total += value
        if i >= width:
            total -= values[i - width]
        out.append(total / min(i + 1, width))
    return out


def label_of(run):
    """The name of a run, the share of packets that is dropped, and what is lost in the end where it is less."""
    label = f"{run['name']}, {100 * run['rate']:.0f}% dropped"
    if run["lost"] is None or abs(run["lost"] - run["rate"]) < 0.005:
        return label
    return f"{label}, {100 * run['lost']:.1f}% lost in the end"


def field(run, name):
    """A field of the steps, with gaps where it is missing or 0: a logarithm has no place for it."""
    return [value or math.nan for value in run["steps"].series(name)]


def plot_losses(axes, runs):
    for run, colour in zip(runs, COLOURS):
        steps = run["steps"].having("loss")
        losses = smooth(steps.series("loss"), max(1, len(steps) // 50))
        axes.plot(steps.series("step"), losses, color=colour, lw=1.3, label=label_of(run))
        axes.plot([event["step"] for event in run["evals"]],
                  [run_log.number(event, "val_loss", math.nan) for event in run["evals"]], "o", color=colour, ms=5,
                  mfc="white")
    axes.set(xlabel="step", ylabel="cross-entropy", title="Training loss (line), validation (circles)")
    top = [loss for run in runs for loss in run_log.numbers(run["steps"], "loss")]
    if top:
        axes.set_ylim(min(top) - 0.1, min(max(top), min(top) + 4) + 0.1)


def plot_drifts(axes, runs):
    """Plots measured drift, and both formulas with what each run has measured, in the colour of the run."""
    formulas = (("drift_expected", (0, (4, 2)), "our formula, with the run's own σ² and ρ"),
                ("drift_paper", (0, (1, 2)), "the paper's formula, 2p/(1+p) σ²"))
    shown = False
    for run, colour in zip(runs, COLOURS):
        steps = run["steps"].series("step")
        if not any(run_log.numbers(run["steps"], "drift")):
            continue
        axes.plot(steps, field(run, "drift"), color=colour, lw=1.1, alpha=0.6, label=f"{label_of(run)}: measured")
        if run["algorithm"] == "lossy":
            shown = True
            for name, style, _ in formulas:
                axes.plot(steps, field(run, name), ls=style, color=colour, lw=1.6)
    for _, style, label in formulas if shown else ():
        axes.plot([], [], ls=style, color="black", lw=1.6, label=label)
    axes.set(xlabel="step", ylabel=r"$\|\theta_i-\theta_j\|^2$, mean over pairs of replicas",
             title="Drift between replicas", yscale="log")


def plot(runs, path, note):
    """Draws the losses and the drift; returns a line that says where."""
    plt = pyplot()
    lines = [line for part in (note or "").splitlines() for line in textwrap.wrap(part, 150)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8 + 0.2 * len(lines)))
    plot_losses(left, runs)
    plot_drifts(right, runs)
    for axes in (left, right):
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    if lines:
        figure.supxlabel("\n".join(lines), fontsize=9, x=0.02, ha="left")
    return save(figure, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", required=True, help="where plot.png, plot.svg and table.md go")
    parser.add_argument("--note", help="a text below the plot")
    parser.add_argument("runs", nargs="+", help="directories with a log.jsonl")
    arguments = parser.parse_args()
    runs = [read_run(directory) for directory in arguments.runs]
    require("matplotlib", target="quickstart")
    rows = table(runs)
    print(as_text(rows))
    print("\nperplexity: of the model, the owners' fresh values; replica: of a worker's copy,"
          "\npartly stale. drift: |θi-θj|² between replicas, mean over the run, as measured,"
          "\nby our formula and by the paper's 2p/(1+p) σ².")
    if {"plain", "lossy"} <= {run["name"] for run in runs}:
        print("plain: lossy as in its paper (--plain); lossy: by default, owners broadcast"
              "\nahead of the model, and lost gradients are sent again or carried over.")
    try:
        with open(os.path.join(arguments.out, "table.md"), "w", encoding="utf-8") as file:
            file.write(as_markdown(rows))
    except OSError as error:
        sys.exit(f"report.py: {error.filename}: {error.strerror}; expected a folder for --out")
    print("\n" + plot(runs, os.path.join(arguments.out, "plot.png"), arguments.note))


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program without a traceback
    main()
