#!/usr/bin/python3
"""Compares runs: a table of what loss cost and a plot of loss curves and drift.

    scripts/sweeps/report.py --out DIR RUN RUN...

Each RUN is a directory with a log.jsonl. The others are compared with the first. The script writes
DIR/plot.png and DIR/table.md and prints the table.
"""
import argparse
import json
import math
import os
import sys


def read_run(directory):
    """Reads the events of a run, by kind. It is an error if the run did not end."""
    path = os.path.join(directory, "log.jsonl")
    run = {"name": os.path.basename(os.path.normpath(directory)), "steps": [], "evals": []}
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    event = json.loads(line)
                except ValueError:
                    sys.exit(f"report.py: {path}:{number}: expected a JSON object")
                kind = event.get("event")
                if kind == "step":
                    run["steps"].append(event)
                elif kind == "eval":
                    run["evals"].append(event)
                else:
                    run[kind] = event
    except OSError as error:
        sys.exit(f"report.py: {path}: {error.strerror}")
    if "run" not in run or "end" not in run or run["end"].get("status") != "complete":
        sys.exit(f"report.py: {path}: the run did not end; run it again")
    options = run["run"]["options"]
    run["algorithm"] = options["algorithm"]
    rate = 0.0 if options["algorithm"] == "reliable" else options["loss-rate"]
    run["rate"] = sum(rate) / 2 if isinstance(rate, list) else rate  # of gradients and of parameters
    run["name"] = options["algorithm"]
    if run["name"] == "lossy" and options.get("plain"):
        run["name"] = "plain"  # the lossy algorithm exactly as in its paper
    return run


def number(value, form="{:.2f}"):
    return "-" if value is None else form.format(value)


COLUMNS = ("algorithm", "lost", "perplexity", "replica", "change", "drift", "formula", "paper",
           "tokens/s")


def table(runs):
    """Rows of text: the perplexity of the fresh model and of a replica, the change against the first
    run, and the drift between replicas, as measured and by both formulas (means over the run)."""
    base = runs[0]["end"]["val_perplexity"]
    rows = []
    for run in runs:
        end = run["end"]
        perplexity = end["val_perplexity"]
        lost = (end["gradient_loss_rate"] + end["parameter_loss_rate"]) / 2
        rows.append((run["name"], f"{100 * lost:.1f}%", number(perplexity),
                     number(end["replica_val_perplexity"]),
                     "" if run is runs[0] else f"{100 * (perplexity / base - 1):+.1f}%",
                     number(end["drift"], "{:.3g}"), number(end["drift_expected"], "{:.3g}"),
                     number(end["drift_paper"], "{:.3g}"), f"{end['tokens_per_second']:.0f}"))
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


def plot(runs, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    colours = ["#444444", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8))
    explained = False
    for run, colour in zip(runs, colours):
        label = f"{run['name']}, {100 * run['rate']:.0f}% lost"
        steps = [e["step"] + 1 for e in run["steps"]]
        losses = smooth([e["loss"] for e in run["steps"]], max(1, len(steps) // 50))
        left.plot(steps, losses, color=colour, lw=1.3, label=label)
        if run["evals"]:
            left.plot([e["step"] for e in run["evals"]], [e["val_loss"] for e in run["evals"]],
                      "o", color=colour, ms=5, mfc="white")
        drifts = [e["drift"] for e in run["steps"]]
        if max(drifts, default=0) > 0:
            right.plot(steps, drifts, color=colour, lw=1.1, label=f"{label}: measured")
        if run["algorithm"] == "lossy" and any(e["drift_expected"] for e in run["steps"]):
            right.plot(steps, [e["drift_expected"] or math.nan for e in run["steps"]], "--",
                       color="black", lw=1.2,
                       label=None if explained else "formula, with the run's own σ² and ρ")
            if not explained:
                right.plot(steps, [e["drift_paper"] or math.nan for e in run["steps"]], ":",
                           color="black", lw=1.2, label="the paper's 2p/(1+p) σ²")
            explained = True
    left.set(xlabel="step", ylabel="cross-entropy", title="Training loss (line), validation (circles)")
    top = [e["loss"] for run in runs for e in run["steps"]]
    if top:
        left.set_ylim(min(top) - 0.1, min(max(top), min(top) + 4) + 0.1)
    right.set(xlabel="step", ylabel=r"$\|\theta_i-\theta_j\|^2$, mean over pairs of replicas",
              title="Drift between replicas", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.25)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=9)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True, help="where plot.png and table.md go")
    parser.add_argument("runs", nargs="+", help="directories with a log.jsonl")
    arguments = parser.parse_args()
    runs = [read_run(directory) for directory in arguments.runs]
    rows = table(runs)
    print(as_text(rows))
    print("\nperplexity: of the model, the owners' fresh values; replica: of a worker's copy,"
          "\npartly stale. drift: |θi-θj|² between replicas, mean over the run, as measured,"
          "\nby our formula and by the paper's 2p/(1+p) σ².")
    if {"plain", "lossy"} <= {run["name"] for run in runs}:
        print("plain: lossy as in its paper (--plain); lossy: by default, owners broadcast"
              "\nahead of the model, and lost gradients are sent again or carried over.")
    with open(os.path.join(arguments.out, "table.md"), "w", encoding="utf-8") as file:
        file.write(as_markdown(rows))
    plot(runs, os.path.join(arguments.out, "plot.png"))


if __name__ == "__main__":
    main()
