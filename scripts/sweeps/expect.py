#!/usr/bin/env python3
"""What plain loss (--plain) may cost a larger model, from the kept results of
runs from scratch.

    scripts/sweeps/expect.py [--parameters 7e9] [--tokens 140e9]
                             [--plot out/expect.png]

1. A lossy run ends where a run without loss is after fewer steps. Of each pair
   of runs this program reads the share of steps that loss costs (step_tax in
   sweep_report.py).
2. It takes the mean of that share over settings (size of the model, workers,
   tokens a step, steps, learning rate), and asks whether the share changes
   with the size of the model or with the steps.
3. It asks two published laws of L(N, D), the loss after D tokens, what losing
   that share of D costs a model of N parameters. The term of N is the same
   with and without loss, so the change is B / D^beta.

The last step is an expectation and no measurement: no run here has more
parameters than its table says. It is made for plain loss alone. A negative
share counts as 0, so that runs of a rule that costs nothing have a share, too:
that of chance, about 5% in short runs.
"""
import argparse
import glob
import json
import math
import os
import signal
import sys

from sweep_report import PAPER, PLAIN, RULES, average, finish, follows, step_tax
from sweep_results import read_results
from sweep_statistics import interval
from figure import pyplot, save  # in scripts, which sweep_report.py has added
from python_packages import require

HERE = os.path.dirname(os.path.abspath(__file__))
# B and beta. Hoffmann et al. 2022, "Training Compute-Optimal Large Language Models", equation 10; and
# Besiroglu et al. 2024, "Chinchilla Scaling: A replication attempt", which fits the same data again.
LAWS = (("Hoffmann et al.", 410.7, 0.28), ("Besiroglu et al.", 2085.43, 0.3658))


# ---- what was measured ------------------------------------------------------------------------

def read_taxes(paths):
    """Reads kept results. Returns {loss rate: {setting: shares of steps, one per seed}} of plain loss. A setting is
    a tuple (parameters, steps, workers, tokens of a step, learning rate). A loss rate of which there is only one run
    is left out, and so are runs that go on from a model or have another optimiser, and pairs of which one diverged,
    which it names."""
    runs, diverged = {}, []
    for path in paths:
        for result in read_results(path).values():
            # Files share runs; one of them may have been measured without a curve.
            if len(result.get("evaluations") or []) >= len(
                    runs.get(result["id"], {}).get("evaluations") or []):
                runs[result["id"]] = result
    options = lambda key: {name: value for name, value in key.items()
                           if name not in PLAIN and name not in ("loss-rate", "repair")}
    name = lambda key: json.dumps(options(key), sort_keys=True)
    bases = {name(result["key"]): result for result in runs.values()
             if result["key"].get("algorithm") == "reliable" and "wire-dtype" not in result["key"]}
    taxes = {}
    for result in runs.values():
        key, base = result["key"], bases.get(name(result["key"]))
        rate = key.get("loss-rate")
        if not base or not rate or key.keys() & {"start", "beta1", "clip", "optimizer"} or not follows(key, RULES[0]):
            continue
        if not (result["perplexity"] and base["perplexity"]):
            diverged.append(f"{100 * rate:g}%, seed {key.get('seed', 1)}")
        elif (tax := step_tax(base, result["perplexity"])) is not None:
            workers = key.get("workers", 1)
            tokens = workers * key.get("batch", 8) * key.get("micro-batches", 1) * key.get("seq", 1024)
            setting = (result["parameters"], key.get("steps", 1000), workers, tokens, key.get("lr", 1e-3))
            taxes.setdefault(rate, {}).setdefault(setting, []).append(tax)
    if diverged:
        print(f"expect: left out, since they or their run without loss diverged: {'; '.join(diverged)}", file=sys.stderr)
    return {rate: settings for rate, settings in sorted(taxes.items()) if sum(map(len, settings.values())) > 1}


def middle(settings):
    """The mean of the settings' means and half its 95% interval: over settings, or over all runs where there
    are only one or two settings."""
    means = [average(values) for values in settings.values()]
    runs = [tax for values in settings.values() for tax in values]
    return average(means), interval(means if len(means) > 2 else runs)


def slope(settings, column):
    """How much the share changes when a number of the setting grows tenfold: the slope of a straight line
    through the settings' means, and half its 95% interval. None if there are few settings, or if that
    number hardly varies."""
    from scipy import stats
    x = [math.log10(setting[column]) for setting in settings]
    y = [average(values) for values in settings.values()]
    if len(x) < 5 or max(x) - min(x) < 0.3:
        return None
    line = stats.linregress(x, y)
    return line.slope, float(stats.t.ppf(0.975, len(x) - 2)) * line.stderr


# ---- what it lets expect ----------------------------------------------------------------------

def cost(share, tokens, law):
    """The change of perplexity, in %, of a run that loses this share of its tokens."""
    _, B, beta = law
    return 100 * math.expm1(B / tokens ** beta * ((1 - share) ** -beta - 1))


def share(change, tokens, law):
    """The inverse of cost()."""
    _, B, beta = law
    return 1 - (1 + math.log1p(change / 100) * tokens ** beta / B) ** (-1 / beta)


def tables(taxes, parameters, tokens):
    lines = ["Steps that plain loss costs, from scratch (mean of settings, 95%); what that is worth to",
             f"{parameters:.3g} parameters after {tokens:.3g} tokens, by two laws, in % of perplexity", "",
             "| lost | settings | runs | steps | expected | the paper |",
             "| ---: | ---: | ---: | ---: | ---: | ---: |"]
    for rate, settings in taxes.items():
        mean, half = middle(settings)
        ends = [max(0, mean - half), min(0.99, mean + half)]
        costs = [cost(end, tokens, law) for law in LAWS for end in ends]
        paper = dict(PAPER).get(rate)
        lines.append(f"| {100 * rate:g}% | {len(settings)} | {sum(map(len, settings.values()))} | "
                     f"{mean:.0%} ± {100 * half:.0f} | +{min(costs):.1f} to +{max(costs):.1f} | "
                     f"{f'+{paper}' if paper else ''} |")
    lines += ["", "Per tenfold of ...:"]
    for column, what in enumerate(("parameters", "steps", "workers", "tokens a step", "learning rate")):
        for rate, settings in taxes.items():
            found = slope(settings, column)
            if found:
                lines.append(f"  {what}, {100 * rate:g}% lost: {100 * found[0]:+.0f} ± "
                             f"{100 * found[1]:.0f} points")
    lines += ["", "The paper's points as shares of steps, if its run had as many tokens:"]
    for rate, change in PAPER:
        low, high = sorted(share(change, tokens, law) for law in LAWS)
        lines.append(f"  {100 * rate:g}% lost, +{change}%: {100 * low:.0f} to {100 * high:.0f}%")
    return "\n".join(lines)


def plot(taxes, tokens, path):
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(8, 4.8))
    label, colour, _ = RULES[0]
    axes.plot(*zip(*((100 * rate, 100 * average(values)) for rate, settings in taxes.items()
                     for values in settings.values())), "o", color=colour, ms=5, alpha=0.45, mew=0)
    x, y = zip((0, 0), *((100 * rate, 100 * middle(settings)[0]) for rate, settings in taxes.items()))
    axes.plot(x, y, "-", color=colour, lw=2)
    axes.annotate(label, (x[-1], y[-1]), xytext=(10, 0), textcoords="offset points", va="center", color=colour)
    for rate, change in PAPER:
        shares = sorted(100 * share(change, tokens, law) for law in LAWS)
        axes.plot([100 * rate] * 2, shares, "-", color="black", lw=5, alpha=0.6, solid_capstyle="butt")
    axes.annotate("the paper's 7B model, by two laws", (100 * PAPER[-1][0], shares[1]), xytext=(0, 6),
                  textcoords="offset points", ha="right", fontsize=8)
    last = 100 * max(taxes)
    axes.set(xlabel="packets lost, %", ylabel="steps that this costs, %", xlim=(0, 1.2 * last),
             xticks=range(0, int(last) + 1, 10), ylim=(0, None))
    axes.set_title("The share of steps that plain loss costs a run from scratch (one point per setting)",
                   fontsize=9)
    finish(axes, legend=False)
    print("\n" + save(figure, path))


def main():
    parser = argparse.ArgumentParser(prog="expect", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", help="files of results [settings/*.jsonl]")
    parser.add_argument("--parameters", type=float, default=7e9, metavar="N", help="default: 7e9")
    parser.add_argument("--tokens", type=float, metavar="D", help="default: 20 N")
    parser.add_argument("--plot", metavar="FILE", help="draw a picture, as PNG and as SVG")
    arguments = parser.parse_args()
    require("scipy", *(["matplotlib"] if arguments.plot else []), target="sweep")
    tokens = 20 * arguments.parameters if arguments.tokens is None else arguments.tokens
    if not (0 < arguments.parameters < math.inf and 1 < tokens < math.inf):
        print("expect: --parameters and --tokens must be positive numbers", file=sys.stderr)
        return 2
    paths = arguments.results or sorted(glob.glob(os.path.join(HERE, "settings", "*.jsonl")))
    missing = [path for path in paths if not os.path.exists(path)]
    if missing:
        print(f"expect: there is no file '{missing[0]}'", file=sys.stderr)
        return 2
    try:
        taxes = read_taxes(paths)
    except OSError as error:
        print(f"expect: {error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    if not taxes:
        print("expect: no pair of runs from scratch with and without loss in these results; "
              "run scripts/sweeps/sweep.py lead", file=sys.stderr)
        return 1
    print(tables(taxes, arguments.parameters, tokens))
    if arguments.plot:
        plot(taxes, tokens, arguments.plot)
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program without a traceback
    sys.exit(main())
