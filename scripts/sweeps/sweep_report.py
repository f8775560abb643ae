"""Writes tables and plots of a sweep: what each loss rate costs, paired by seed, with intervals.

report() writes table.md, table.csv and the plots of all runs that are finished.
"""
import csv
import math
import os
import textwrap

from report import smooth  # first: it makes scripts known, where figure.py is
import figure as figure_files
from sweep_rounds import GRADIENTS, PARAMETERS, sent_again
from sweep_settings import plain
from sweep_statistics import equivalence, interval

# Weintraub, Banner & Orda 2025, Llama-2 7B on 64 GPUs: loss rate, change of perplexity in %.
# 0.8% at 10% is their claim; the others as secondary sources quote their table.
PAPER = ((0.1, 0.8), (0.2, 2.6), (0.3, 3.8))


# ---- rows -----------------------------------------------------------------------------------

def step_tax(base, perplexity):
    """The share of steps that loss costs: 1 - s/S, where S is the number of steps of the run without
    loss, and s the step from which on its curve of evaluations stays below `perplexity`. A negative
    share counts as 0. None without a curve."""
    curve = [point for point in base.get("evaluations") or [] if point[1] is not None]
    if len(curve) < 2 or perplexity is None:
        return None
    last = curve[-1][0]
    if perplexity <= curve[-1][1]:
        return 0.0
    for (s0, p0), (s1, p1) in zip(reversed(curve[:-1]), reversed(curve[1:])):
        if p0 >= perplexity:
            return 1 - (s0 + (s1 - s0) * (p0 - perplexity) / (p0 - p1)) / last
    return 1.0


def base_of(run, results):
    """The result that a run is compared with. Where it has several bases, that is the first one's, with the
    geometric mean of their perplexities; None while one is missing."""
    bases = [results.get(base) for base in (run.baseline, *run.also)]
    if None in bases or len(bases) == 1:
        return None if None in bases else bases[0]
    perplexities = [base["perplexity"] for base in bases]
    return {**bases[0], "perplexity": None if None in perplexities else
            math.exp(average([math.log(perplexity) for perplexity in perplexities]))}


def group_runs(settings, results):
    """Groups the finished runs by section and label, with their baselines where those are finished.
    Groups are in the order of the file; those that differ in the loss rate alone are ordered by it."""
    groups = {}
    for section in settings.sections:
        # As long as only runs without loss are finished, there is nothing to compare.
        if all(run.lossless() for run in section.runs if run.id in results) and \
           not all(run.lossless() for run in section.runs):
            continue
        for run in section.runs:
            if run.id not in results:
                continue
            group = groups.setdefault((section.name, run.label()), {
                "section": section, "label": run.label(), "run": run, "members": []})
            if run.id not in (member[-1].id for member in group["members"]):
                group["members"].append((run.value("seed", "1"), results[run.id], base_of(run, results), run))
    place, kinds = {section: i for i, section in enumerate(settings.sections)}, {}
    def order(group):
        run = group["run"]
        kind = (run.value("algorithm", "lossy").replace("reliable", "lossy"),
                *(run.options[name] for name in run.section.varying if name != "seed"
                  and "rate" not in name and name != "algorithm"))
        first = kinds.setdefault((run.section, kind), len(kinds))
        return place[run.section], not run.lossless(), first, run.rates()
    return sorted(groups.values(), key=order)


def average(values):
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else None


def summarise(group):
    """Numbers of one row of the table."""
    members = group["members"]
    row = {"section": group["section"].title, "run": group["label"],
           "seeds": [seed for seed, *_ in members]}
    mean = lambda name: average([result.get(name) for _, result, _, _ in members])
    for name in ("perplexity", "replica_perplexity", "gradient_loss_rate", "parameter_loss_rate",
                 "drift", "drift_expected", "drift_paper", "drift_ratio", "mean_age",
                 "late_mean_age", "extra_traffic"):
        row[name] = mean(name)
    row["max_age"] = max(result["max_age"] for _, result, _, _ in members)
    row["seconds"] = mean("seconds")
    row["diverged"] = sum(not result["perplexity"] for _, result, _, _ in members)  # also where only validation did
    row["changes"], row["taxes"] = [], []
    for _, result, base, run in members:
        if run.baseline == run.id or not base or not result["perplexity"] or not base["perplexity"]:
            continue
        row["changes"].append(100 * (result["perplexity"] / base["perplexity"] - 1))
        row["taxes"].append(step_tax(base, result["perplexity"]))
    row["mean"] = average(row["changes"])
    row["interval"] = interval(row["changes"])
    row.update(equivalence(row["changes"]))
    taxes = [tax for tax in row["taxes"] if tax is not None]
    row["step_tax"], row["tax_interval"] = average(taxes), interval(taxes)
    return row


def number(value, form):
    return "" if value is None else form.format(value)


def percent_pair(row):
    gradient, parameter = row["gradient_loss_rate"], row["parameter_loss_rate"]
    if gradient is None or parameter is None:
        return ""
    if abs(gradient - parameter) < 0.005:
        return f"{50 * (gradient + parameter):.2f}"
    return f"{100 * gradient:.1f}, {100 * parameter:.1f}"


HEADINGS = ("run", "lost, %", "seeds", "perplexity", "change per seed, %", "mean, %", "±95%",
            "90% from", "to", "within", "n for 0.5%", "n for 1%", "step tax", "±95%", "drift", "formula", "paper", "mean age", "oldest", "sent again")


def cells(row):
    changes = " ".join(f"{change:+.2f}" for change in row["changes"])
    within = "" if row["low"] is None else f"{row['within']:g}%" if row["within"] else "not shown"
    return (row["run"], percent_pair(row), str(len(row["seeds"])),
            number(row["perplexity"], "{:.3f}") + (" (diverged)" if row["diverged"] else ""),
            changes, number(row["mean"], "{:+.2f}"), number(row["interval"], "{:.2f}"),
            number(row["low"], "{:+.2f}"), number(row["high"], "{:+.2f}"), within,
            *(str(count) for count in row["seeds_needed"]), number(row["step_tax"], "{:.0%}"), number(row["tax_interval"], "{:.0%}"),
            number(row["drift"] or None, "{:.3g}"), number(row["drift_expected"] or None, "{:.3g}"),
            number(row["drift_paper"] or None, "{:.3g}"), number(row["mean_age"], "{:.3f}"),
            str(row["max_age"]),
            f"{100 * row['extra_traffic']:.1f}%" if row["extra_traffic"] else "")


def as_markdown(rows):
    """A table for each section."""
    text = []
    for title in dict.fromkeys(row["section"] for row in rows):
        text += [f"**{title}**", "", "| " + " | ".join(HEADINGS) + " |",
                 "| --- " + "| ---: " * (len(HEADINGS) - 1) + "|"]
        text += ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |" for row in rows
                 if row["section"] == title]
        text.append("")
    return "\n".join(text)


def as_text(rows):
    """The table for the terminal, 79 columns wide: without the drift. "within" is the smallest margin, of 0.5
    and 1%, that the change is shown to be within ("-": neither)."""
    lines = []
    for title in dict.fromkeys(row["section"] for row in rows):
        lines += ["", title[:79], f"{'run':<33} {'seeds':>5} {'perplexity':>10} {'change':>8} "
                  f"{'±95%':>6} {'within':>6} {'tax':>5}"]
        for row in rows:
            if row["section"] == title:
                c = cells(row)
                change = c[5] + "%" if c[5] else ""
                within = c[9].replace("not shown", "-")
                lines.append(f"{c[0][:33]:<33} {c[2]:>5} {number(row['perplexity'], '{:.3f}'):>10} "
                             f"{change:>8} {c[6]:>6} {within:>6} {c[12]:>5}")
                if row["diverged"]:
                    lines.append(f"  {row['diverged']} of {c[2]} seeds diverged: perplexity and change are of the others")
                alone = len(row["seeds"]) - len(row["changes"]) - row["diverged"]
                if row["changes"] and alone > 0:
                    lines.append(f"  {alone} of {c[2]} seeds have no finished base: the change is without them")
    return "\n".join(lines + [""])


def write_csv(rows, path):
    names = ["section", "run", "seeds", "perplexity", "replica_perplexity", "changes", "mean",
             "interval", "low", "high", "within", "seeds_needed", "step_tax", "tax_interval", "dropped", "phases", "wire_dtype", "gradient_loss_rate",
             "parameter_loss_rate", "drift", "drift_expected", "drift_paper", "drift_ratio", "mean_age", "late_mean_age",
             "max_age", "extra_traffic", "diverged", "seconds"]
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for row in rows:
            writer.writerow([" ".join(f"{value:.6g}" if isinstance(value, float) else str(value)
                                      for value in row[name])
                             if isinstance(row[name], list) else row[name] for name in names])


# ---- plots ----------------------------------------------------------------------------------

COLOURS = ["#1b6ca8", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d", "#444444",
           "#c51b7d", "#35978f"]


def same_rates(run):
    return run.rates()[0] == run.rates()[1]


def place_of(group):
    """Where a group stands on the axis of lost packets, in %: what was measured, or what the settings drop if some
    of it was sent again. For two phases that lose differently it is the larger."""
    row = group["row"]
    rates = group["run"].dropped() if row["extra_traffic"] else \
        (row["gradient_loss_rate"] or 0, row["parameter_loss_rate"] or 0)
    return round(100 * max(rates), 1)


def dropped(group, groups):
    """What a group drops, in %: what the settings say, or, for tensors, links and traces, what groups that lose the
    same and send nothing again have lost."""
    asked = lambda run: [run.value(name, "none") for name in ("loss-at", "loss-model", "loss-rate")]
    run = group["run"]
    if asked(run)[0] == "none" and not asked(run)[1].startswith(("trace", "replay")):
        return float(f"{100 * max(run.rates()):.3g}")  # rates may be small: 0.01% is not 0
    return max([place_of(other) for other in groups if asked(other["run"]) == asked(run)
                and not other["row"]["extra_traffic"]], default=place_of(group))


def phases(run):
    """Which phases of a run lose packets: "both" alike, "gradient", "parameter", or both by "different" rates."""
    gradient, parameter = run.dropped()
    if gradient == parameter:
        return "both"
    return "gradient" if not parameter else "parameter" if not gradient else "different"


def is_plain(run):
    """Whether a run is plain `lossy` with the section's first value of every axis but the loss rate.
    Such runs form a curve."""
    if run.arm() or run.value("loss-at", "none") != "none":
        return False
    if run.value("algorithm", "lossy") not in ("lossy", "reliable") or not same_rates(run):
        return False
    first = run.section.runs[0].options
    return all(run.options[name] == first[name] for name in run.section.varying
               if name not in ("loss-rate", "seed", "algorithm"))


def save(figure, out, name):
    figure_files.save(figure, os.path.join(out, name))


def finish(axes, legend=True):
    axes.grid(alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)


def plot_arms(axes, arms, colours):
    """Plots arms with a name: a mark with its interval, and a small point for each seed. Arms at the same place
    stand beside each other; if all do, each has its name below."""
    name_of = lambda group: group["run"].arm() or group["label"]
    names = list(dict.fromkeys(name_of(group) for group in arms))
    chosen = {name: next(colours) for name in names}
    places = sorted({group["row"]["dropped"] for group in arms})
    alike = len(places) == 1 and not axes.has_data()
    gap = 1 if alike else 0.1 * max(places[-1:] + [b - a for a, b in zip(places, places[1:])], default=0)
    for i, group in enumerate(arms):
        row, name = group["row"], name_of(group)
        x = i if alike else row["dropped"] + gap * (names.index(name) - (len(names) - 1) / 2)
        axes.errorbar([x], [row["mean"]], yerr=row["interval"] or 0 if len(row["changes"]) > 2 else 0, fmt="D",
                      color=chosen[name], ms=7, capsize=4, label="" if alike else group["label"])
        axes.plot([x + gap / (8 if alike else 4)] * len(row["changes"]), row["changes"], ".", color=chosen[name],
                  alpha=0.6)
    axes.set_xlabel("packets dropped, %, mean over links" if arms else "packets lost, %")
    if alike:
        axes.set_xticks(range(len(arms)), [group["label"] for group in arms])
        axes.set(xlim=(-0.5, len(arms) - 0.5), xlabel=f"{places[0]:g}% of the packets dropped, mean over links")
    elif arms:
        axes.set_xlim(0, max(places[-1] + gap * (len(names) + 1) / 2, axes.get_xlim()[1]))


def plot_change(plt, groups, out):
    """Plots the change of perplexity against the loss rate: a line for each section that has plain
    `lossy`, or lossy with repair (dashed), at several rates, single marks for loss in one phase, and
    the paper's points. Intervals of two seeds are left out, because they would hide the rest."""
    figure, axes = plt.subplots(figsize=(8, 6.6))
    colours, arms, others, even = iter(COLOURS * 3), [], [], False
    for section in dict.fromkeys(group["section"] for group in groups):
        kinds = {}
        for group in groups:
            run, row = group["run"], group["row"]
            if group["section"] is not section or row["mean"] is None or run.lossless():
                continue
            gradient, parameter = run.rates()
            if run.arm():
                arms.append(group)
                continue
            kind = "o-" if is_plain(run) else "s--" if run.value("repair", "0") != "0" else None
            if run.value("algorithm", "lossy") == "lossy" and 0 in (gradient, parameter):
                kind = "^" if gradient else "v"
            if not kind:
                others.append(group)
            else:
                error = row["interval"] or 0 if len(row["changes"]) > 2 else 0
                kinds.setdefault(kind, []).append((place_of(group), row["mean"], error))
        kinds = {kind: points for kind, points in kinds.items()
                 if kind in "^v" or len(points) == len({x for x, _, _ in points}) > 1}
        colour = next(colours) if kinds else None
        for kind, points in kinds.items():
            if kind not in "^v":
                points.append((0, 0, 0))
            x, y, error = zip(*sorted(points))
            label = section.title + {"^": " (gradient)", "v": " (parameter)"}.get(kind, "")
            axes.errorbar(x, y, yerr=error, fmt=kind, color=colour, ms=5, lw=1.4, capsize=3,
                          mfc="white" if kind in "^v" else colour, label=label)
        even |= any(kind not in "^v" for kind in kinds)
    arms = arms if arms or axes.has_data() else others
    plot_arms(axes, arms, colours)
    if even:  # the paper loses as much in both phases and on all links
        axes.plot([100 * p for p, _ in PAPER], [change for _, change in PAPER], "*", color="black",
                  ms=11, label="the paper: 7B, 64 GPUs")
    axes.set(ylabel="change of perplexity, %",
             title="What loss costs, against the same seed without loss (mean, 95%)")
    axes.axhline(0, color="black", lw=0.6)
    if not arms:
        axes.set_yscale("symlog", linthresh=1)  # linear up to 1%, logarithmic beyond
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    finish(axes, legend=False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0, -0.12))
    save(figure, out, "change")


# PLAIN has the options that choose what is done about loss, as --plain sets them. RULES are the choices that plot_cost
# draws: a label, a colour, and the options that are not plain, by loss rate.
PLAIN = {"algorithm": "lossy", "wire-dtype": "float32", "estimator": "mean", "lead": "off", "carry": 0,
         "gradient-repair": 0, "parameter-repair": 0, "repair-budget": 0}


def default_at(rate):
    """What the program does without options if so many packets are lost (lossynet/options.c). The budget does not
    limit it up to 60%, so none is named."""
    rounds = [sent_again(rate, limits=limits)[1] for limits in (GRADIENTS, PARAMETERS)]
    return {"lead": "auto", "carry": 1, "wire-dtype": "int6", "gradient-repair": rounds[0], "parameter-repair": rounds[1]}


RULES = (("plain, as in the paper", "#888888", lambda rate: {}), ("ours", "#1b9e77", default_at))


def rule_of(key):
    """What a run does about loss, by its key (sweep_settings.py)."""
    both = key.get("repair", 0)
    default = {**PLAIN, **default_at(key.get("loss-rate", 0))}
    chosen = {**PLAIN, "gradient-repair": both, "parameter-repair": both}
    chosen.update({name: value for name, value in key.items() if name in PLAIN})
    return {name: default[name] if value == "auto" and name != "lead" else value for name, value in chosen.items()}


def follows(key, rule):
    """Whether a run, by its key, loses as much in both phases, follows this one of RULES, and does not look ahead."""
    rate = key.get("loss-rate", 0)
    return "gradient-loss-rate" not in key and "loss-at" not in key and "look-ahead" not in key and \
        rule_of(key) == {**PLAIN, **rule[2](rate)}


def cost_curves(groups):
    """Finds the first section that has each of RULES at two loss rates or more. Returns its title, its
    numbers of seeds, and per rule a list of points (loss rate in %, mean change in %, half its 95%
    interval, or 0 below three seeds, change per seed). Curves begin at 0."""
    for section in dict.fromkeys(group["section"] for group in groups):
        curves, seeds = [], set()
        for rule in RULES:
            rows = [(group["run"], group["row"]) for group in groups if group["section"] is section
                    and not group["run"].lossless() and follows(group["run"].key, rule)]
            curve = [(100 * run.rates()[0], row["mean"],
                      row["interval"] if len(row["changes"]) > 2 else 0, row["changes"])
                     for run, row in rows if row["mean"] is not None]
            curve.append((0, 0, 0, []))
            curves.append(sorted(curve))
            seeds.update(len(row["changes"]) for _, row in rows)
        if all(sum(point[0] > 0 for point in curve) > 1 for curve in curves):
            return section.title, sorted(seeds - {0}), curves
    return None


def plot_cost(plt, groups, out):
    """Plots at a glance what loss costs: the paper's points and our RULES. Small points are
    single seeds."""
    found = cost_curves(groups)
    if not found:
        return
    title, seeds, curves = found
    figure, axes = plt.subplots(figsize=(8, 4.8))
    last = max(curve[-1][0] for curve in curves)
    for (name, colour, _), curve in zip(RULES, curves):
        x, y, error, changes = zip(*curve)
        axes.errorbar(x, y, yerr=error, fmt="o-", color=colour, ms=7, lw=2, capsize=4)
        axes.plot([rate for rate, values in zip(x, changes) for _ in values],
                  [value for values in changes for value in values], ".", color=colour, ms=5, alpha=0.5)
        axes.annotate(name, (x[-1], y[-1]), xytext=(10, 0), textcoords="offset points", va="center",
                      color=colour)
    x, y = [0] + [100 * p for p, _ in PAPER], [0] + [change for _, change in PAPER]
    axes.plot(x, y, "*:", color="black", ms=9)
    axes.annotate("the paper's 7B model", (x[-1], y[-1]), xytext=(0, 9), textcoords="offset points",
                  ha="center", color="black", fontsize=8)
    axes.axhline(0, color="black", lw=0.8)
    axes.set(xlabel="packets lost, %", ylabel="change of perplexity, %", xlim=(0, 1.45 * last),
             xticks=range(0, int(last) + 1, 10))
    count = " to ".join(str(n) for n in dict.fromkeys((seeds[0], seeds[-1])))
    axes.set_title("What loss costs, against the same run without loss (lower is better)\n"
                   f"{title}; {count} seeds, 95%", fontsize=9)
    finish(axes, legend=False)
    save(figure, out, "cost")


def panel_each(plt, sections, labels=0):
    """Makes a figure in two columns, with room for so many labels below each panel. Returns it and its axes, one for each section."""
    columns = min(2, len(sections))
    rows = -(-len(sections) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(6.2 * columns, (3.9 + 0.17 * labels) * rows),
                                  squeeze=False)
    for panel in panels.flat[len(sections):]:
        panel.set_visible(False)
    return figure, panels.flat


def below(axes):
    """Puts the legend below the axes, where it covers no curve."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.16), borderaxespad=0)


def most_labels(groups, sections):
    return max(sum(group["section"] is section for group in groups) for section in sections)


def plot_curves(plt, groups, out):
    """Plots the training loss of the first seed, one panel for each section."""
    sections = list(dict.fromkeys(group["section"] for group in groups))[:6]
    figure, panels = panel_each(plt, sections, most_labels(groups, sections))
    for section, axes in zip(sections, panels):
        for group, colour in zip([g for g in groups if g["section"] is section], COLOURS * 3):
            curve = group["members"][0][1]["losses"]
            losses = [loss for _, loss in curve]
            if losses and None not in losses:
                axes.plot([step for step, _ in curve], smooth(losses, 2), color=colour, lw=1.2,
                          label=group["label"])
        axes.set(xlabel="step", ylabel="training loss")
        axes.set_title(textwrap.fill(section.title, 60), fontsize=10)
        lines = [line.get_ydata() for line in axes.get_lines()]
        if lines:  # the first tenth does not set the scale, since it would flatten the rest
            late = [y for line in lines for y in line[len(line) // 10:]]
            margin = 0.04 * (max(late) - min(late)) + 1e-6
            axes.set_ylim(min(late) - margin, max(late) + margin)
        finish(axes, legend=False)
        below(axes)
    save(figure, out, "curves")


def plot_drift(plt, groups, out):
    """Plots the drift by step for the first seeds: measured (line), our formula (dashes), the paper's
    formula (dots)."""
    sections = [s for s in dict.fromkeys(g["section"] for g in groups)
                if any(g["members"][0][1].get("drifts") for g in groups if g["section"] is s)][:6]
    if not sections:
        sections = [groups[0]["section"]]
    figure, panels = panel_each(plt, sections, most_labels(groups, sections))
    for section, axes in zip(sections, panels):
        colours = iter(COLOURS * 3)
        for group in (g for g in groups if g["section"] is section):
            drifts = group["members"][0][1].get("drifts")
            if not drifts:
                continue
            colour = next(colours)
            steps = [point[0] for point in drifts]
            axes.plot(steps, [point[1] for point in drifts], color=colour, lw=1.6, alpha=0.75,
                      label=group["label"])
            for place, style in ((2, "--"), (3, ":")):
                axes.plot(steps, [point[place] if point[place] else math.nan for point in drifts],
                          style, color=colour if place == 3 else "black", lw=1)
        axes.set(xlabel="step", ylabel=r"$\|\theta_i-\theta_j\|^2$", yscale="log")
        axes.set_title(textwrap.fill(section.title, 60) + "\ndashes: our formula, dots: the paper's", fontsize=10)
        finish(axes, legend=False)
        below(axes)
    save(figure, out, "drift")


def plot_ages(plt, groups, out):
    """Plots ages of packets: their shares beside (1-p) p^k, and their mean and largest against the loss
    rate p."""
    figure, (shares, left, right) = plt.subplots(1, 3, figsize=(16, 4.4))
    plot_shares(shares, groups)
    sections = list(dict.fromkeys(group["section"] for group in groups))
    most = 0.0
    for section, colour in zip(sections, COLOURS * 2):
        points = []
        for group in groups:
            row, run = group["row"], group["run"]
            if group["section"] is section and row["parameter_loss_rate"] and \
               run.value("algorithm", "lossy") == "lossy":
                points.append((100 * row["parameter_loss_rate"], row["late_mean_age"],
                               row["max_age"]))
                most = max(most, row["parameter_loss_rate"])
        if points:
            points = list(zip(*sorted(points)))
            left.plot(points[0], points[1], "o", color=colour, ms=5, mfc="white",
                      label=section.title)
            right.plot(points[0], points[2], "o", color=colour, ms=5, mfc="white",
                       label=section.title)
    rates = [most * 1.05 * i / 100 for i in range(1, 101)] if most else []
    left.plot([100 * p for p in rates], [p / (1 - p) for p in rates], color="black", lw=1,
              label="independent losses: p/(1-p)")
    left.set(xlabel="parameter packets lost, %", ylabel="steps",
             title="Mean age of the parameters a worker holds")
    right.set(xlabel="parameter packets lost, %", ylabel="steps", title="Oldest in the run")
    finish(left)
    finish(right)
    save(figure, out, "ages")


def plot_shares(axes, groups):
    """Plots the share of packets of each age, one line for each loss rate, beside the geometric
    distribution."""
    seen, colours = set(), iter(COLOURS * 3)
    for group in groups:
        ages, run = group["members"][0][1].get("ages"), group["run"]
        what = (f"{100 * run.rates()[1]:g}%", run.value("loss-model", "bernoulli"))
        if not ages or what in seen or run.value("algorithm", "lossy") != "lossy":
            continue
        seen.add(what)
        p, colour = group["row"]["parameter_loss_rate"], next(colours)
        last = len(ages) - 1  # the last entry counts this age and all greater ones
        axes.plot(range(len(ages)), [share or math.nan for share in ages], "o", color=colour, ms=5,
                  mfc="white", label=what[0] if what[1] == "bernoulli" else ", ".join(what))
        axes.plot(range(len(ages)), [(1 - p) * p**k if k < last else p**k
                                     for k in range(len(ages))], color=colour, lw=1)
    axes.set(xlabel="age, steps (the last: or more)", ylabel="share of packets", yscale="log",
             ylim=(1e-6, 1.5), title="Ages; lines: (1-p) p^k")
    finish(axes)


def report(settings, results, out, plots):
    """Writes the tables, and the plots if `plots` is set. Returns the rows."""
    groups = group_runs(settings, results)
    for group in groups:
        group["row"] = summarise(group)
    for group in groups:
        run = group["run"]
        group["row"] |= {"dropped": dropped(group, groups), "phases": phases(run), "wire_dtype": run.wire_dtype()}
    rows = [group["row"] for group in groups]
    os.makedirs(out, exist_ok=True)
    with open(os.path.join(out, "table.md"), "w", encoding="utf-8") as file:
        file.write(as_markdown(rows))
    write_csv(rows, os.path.join(out, "table.csv"))
    if plots and groups:
        for group in groups:
            group["label"] = figure_files.literal(group["label"])
        for section in settings.sections:
            section.title = figure_files.literal(section.title)
        plt = figure_files.pyplot()
        for plot in (plot_cost, plot_change, plot_curves, plot_drift, plot_ages):
            plot(plt, groups, out)
        plt.close("all")
    return rows
