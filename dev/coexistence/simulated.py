#!/usr/bin/env python3
"""Simulates figures 6 and 7 of the RPS paper at full size (make simulate; two cores for two hours).

Runs simulated.cpp over a grid and writes simulated.csv (every run) and simulated.png beside
this file, or into --out; prints tables. Results are kept in build/coexistence.jsonl, so a
stopped run continues, and nothing is simulated twice.

    figure 6  how much faster the web service becomes, by the share of training packets lost, at
              2,000, 5,000 and 10,000 messages per second
    figure 7  how many more messages per second the same network carries at a mean completion time
              of 2, 5 and 10 ms, and so what a message costs

Both compare with the same training traffic over TCP in a network that treats all packets alike
(reliable). Servers, links, loads and message size are the paper's. The paper does not say which
queues its switch had, nor how its loss rate was set. So two kinds of queues are simulated, which lose
training packets because of a limit, --training-limit:

    threshold  one queue; a training packet is dropped if this many packets are waiting
    priority   two queues, web first; a training packet is dropped if this many training packets are
               waiting

A third way, random, drops training packets at random, and shows that the loss itself does not help.
Training traffic is steady (sent evenly, overlapped with computing) or comes in bursts (four times as
fast for a quarter of each step of 50 ms).
"""
import argparse
import concurrent.futures
import csv
import json
import os
import pathlib
import signal
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
# pylint: disable=wrong-import-position
from python_packages import require

if __name__ == "__main__":
    require("numpy", "matplotlib", target="simulate")
import numpy as np

BUILD = pathlib.Path(os.environ.get("BUILD", "build"))
BUILD = BUILD if BUILD.is_absolute() else ROOT / BUILD
PROGRAM = BUILD / "dev/coexistence/simulated"
BUFFER = 512                      # packets; with a limit of this size, (nearly) nothing is lost
LIMITS = (BUFFER, 50, 20, 8, 3)
RATES = (2000, 5000, 10000, 7500, 12500, 14000)
FIGURE_6 = (2000, 5000, 10000)
TARGETS = (2, 5, 10)              # ms
LOSSES = (0, 0.01, 0.05, 0.1, 0.2)
SECONDS = {2000: 0.75, 5000: 0.3, 7500: 0.2, 10000: 0.2, 12500: 0.15, 14000: 0.15}  # whole steps
TRAFFIC = {1: "steady", 4: "bursts"}
RELIABLE, THRESHOLD, PRIORITY = "reliable", "threshold", "priority"
RANDOM, ALONE = "random", "no training"


def grid(seeds):
    """The settings of all runs. Those of figure 6 come first."""
    runs = []
    for seed in seeds:
        for burst in TRAFFIC:
            for rate in RATES:
                base = {"messages": rate, "burst": burst, "step-ms": 50, "seed": seed,
                        "buffer": BUFFER, "seconds": SECONDS[rate],
                        "warmup": 0.05 if rate <= 5000 else 0.1}
                runs.append({**base, "reliable": 1})
                for limit in LIMITS:
                    runs.append({**base, "order": "fifo", "training-limit": limit})
                    runs.append({**base, "order": "priority", "training-limit": limit})
                if rate in FIGURE_6 and burst == 1:
                    runs.append({**base, "order": "fifo", "random-loss": 0.1})
                    runs.append({**base, "training-gbps": 0})
    order = (20, 3, 8, *LIMITS)  # the limits that the figures need most come first
    return sorted(runs, key=lambda run: (run["seed"], run["messages"] not in FIGURE_6, run["burst"],
                                         order.index(run.get("training-limit", 20))))


def policy(run):
    if run.get("reliable"):
        return RELIABLE
    if run.get("training-gbps") == 0:
        return ALONE
    if run.get("random-loss"):
        return RANDOM
    return PRIORITY if run["order"] == "priority" else THRESHOLD


def simulate(settings, program=PROGRAM):
    """Simulates one run. Returns its settings and results."""
    done = subprocess.run([str(program), *(f"--{name}={value}" for name, value in settings.items())],
                          capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"simulated.py: {' '.join(map(str, done.args))} ended with exit code "
                 f"{done.returncode}: {done.stderr.strip()}")
    return {**settings, **json.loads(done.stdout)}


def run_all(runs, jobs, store):
    """Returns the results of runs. It simulates those that the file `store` does not have, and adds
    them to it."""
    key = lambda run: json.dumps({name: run.get(name) for name in sorted(
        {"messages", "burst", "step-ms", "seed", "buffer", "seconds", "warmup", "reliable", "order",
         "training-limit", "random-loss", "training-gbps"})})
    store.parent.mkdir(parents=True, exist_ok=True)
    known = {}
    if store.exists():
        for line in store.read_text().splitlines():
            result = json.loads(line)
            known[key(result["settings"])] = result["result"]
    missing = [run for run in runs if key(run) not in known]
    with open(store, "a", encoding="utf-8") as file, \
            concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        for number, (run, result) in enumerate(zip(missing, pool.map(simulate, missing)), 1):
            known[key(run)] = result
            file.write(json.dumps({"settings": run, "result": result}) + "\n")
            file.flush()
            print(f"{number}/{len(missing)} {TRAFFIC[run['burst']]} {run['messages']}/s "
                  f"{policy(run)}: {result['mean_ms']:.2f} ms, {result['training_loss']:.1%} lost",
                  file=sys.stderr)
    return [known[key(run)] for run in runs if key(run) in known]


def select(results, **wanted):
    return [run for run in results
            if all((policy(run) if name == "policy" else run.get(name)) == value
                   for name, value in wanted.items())]


def mean_time(results, **wanted):
    """The mean completion time in ms over seeds, weighted by messages; None without runs. There is no
    mean for runs in which some messages did not finish, because the network was overloaded."""
    runs = select(results, **wanted)
    if not runs or any(run["finished"] < run["messages_counted"] for run in runs):
        return None
    return float(np.average([run["mean_ms"] for run in runs],
                            weights=[run["finished"] for run in runs]))


def at_loss(results, loss, **wanted):
    """The mean completion time in ms at a loss rate, interpolated between the limits that were
    simulated. At the least loss simulated, if the rate is less than a twentieth below it; None if the
    rate is outside of what was simulated."""
    points = []
    for limit in LIMITS:
        runs = select(results, **{"training-limit": limit, **wanted})
        time = mean_time(runs)
        if time is not None:
            points.append((float(np.mean([run["training_loss"] for run in runs])), time))
    points.sort()
    if not points or not points[0][0] <= max(1.05 * loss, 1e-3) or loss > points[-1][0]:
        return None
    return float(np.interp(loss, *zip(*points)))


def capacity(times, target):
    """The messages per second at which the mean time reaches `target`. times: {rate: ms or None}.
    Returns None unless simulated rates lie on both sides."""
    points = [(rate, time) for rate, time in sorted(times.items()) if time is not None]
    for (rate, time), (next_rate, next_time) in zip(points, points[1:]):
        if time <= target <= next_time:
            # interpolated in 1/time, which falls about linearly with the load, as in every queue
            return rate + (next_rate - rate) * (1 / time - 1 / target) / (1 / time - 1 / next_time)
    return None


def cell(value, form):
    return "-" if value is None else format(value, form)


def markdown(header, rows):
    lines = ["| " + " | ".join(header) + " |", "|" + " ---: |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def figure_6(results):
    """Speed-ups by loss, as text."""
    rows = []
    for burst in TRAFFIC:
        for rate in FIGURE_6:
            at = {"burst": burst, "messages": rate}
            base = mean_time(results, policy=RELIABLE, **at)
            if base is None:
                continue
            for way in (THRESHOLD, PRIORITY):
                times = [at_loss(results, loss, policy=way, **at) for loss in LOSSES]
                if not any(times):
                    continue
                rows.append([TRAFFIC[burst], f"{rate:,}", f"{base:.2f}", way] +
                            [cell(time and base / time, ".2f") for time in times])
            for way in (RANDOM, ALONE):
                time = mean_time(results, policy=way, **at)
                if time is not None:
                    column = LOSSES.index(0.1) if way == RANDOM else 0
                    speedups = ["-"] * len(LOSSES)
                    speedups[column] = f"{base / time:.2f}"
                    rows.append([TRAFFIC[burst], f"{rate:,}", f"{base:.2f}", way] + speedups)
    return markdown(["training", "messages/s", "reliable, ms", "policy"] +
                    [f"{loss:.0%} lost" for loss in LOSSES], rows)


def figure_7(results):
    """Messages per second at a mean time, and the cost of a message, as text."""
    rows = []
    for burst in TRAFFIC:
        ways = {RELIABLE: {rate: mean_time(results, policy=RELIABLE, burst=burst, messages=rate)
                           for rate in RATES}}
        for way in (THRESHOLD, PRIORITY):
            ways[f"{way}, 10% lost"] = {
                rate: at_loss(results, 0.1, policy=way, burst=burst, messages=rate)
                for rate in RATES}
        for target in TARGETS:
            fits = {way: capacity(times, target) for way, times in ways.items()}
            base = fits[RELIABLE]
            if not any(fits.values()):
                continue
            row = [TRAFFIC[burst], str(target), cell(base, ",.0f")]
            for way, rate in fits.items():
                if way != RELIABLE:
                    both = base and rate
                    row += [cell(rate, ",.0f"), cell(both and rate / base, ".2f"),
                            cell(both and 1 - base / rate, ".0%")]
            rows.append(row)
    header = ["training", "mean, ms", "reliable, messages/s"]
    for way in (THRESHOLD, PRIORITY):
        header += [f"{way}, messages/s", "times as many", "cost saved"]
    return markdown(header, rows)


def plot(results, path):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import matplotlib.ticker
    bursts = [burst for burst in TRAFFIC if select(results, burst=burst, reliable=1)]
    figure, axes = plt.subplots(len(bursts), 2, figsize=(11, 4.3 * len(bursts)), squeeze=False)
    colors = dict(zip(FIGURE_6, ("tab:blue", "tab:orange", "tab:green")))
    for row, burst in zip(axes, bursts):
        for rate in FIGURE_6:
            base = mean_time(results, policy=RELIABLE, burst=burst, messages=rate)
            for way, style in ((THRESHOLD, "o-"), (PRIORITY, "s--")):
                points = []
                for limit in LIMITS:
                    runs = select(results, **{"policy": way, "burst": burst, "messages": rate,
                                              "training-limit": limit})
                    if runs and base and mean_time(runs):
                        points.append((100 * np.mean([run["training_loss"] for run in runs]),
                                       base / mean_time(runs)))
                if points:
                    row[0].plot(*zip(*sorted(points)), style, color=colors[rate], markersize=4,
                                label=f"{rate:,}/s, {way}")
        row[0].axhline(1.2, color="gray", linewidth=0.8, linestyle=":")
        row[0].plot([10], [1.2], "k^", label="paper: more than this")
        row[0].set(xlabel="training packets lost, %", ylabel="speed-up of the web service",
                   title=f"Figure 6, training traffic: {TRAFFIC[burst]}", xlim=(-0.5, 30))
        low, high = row[0].get_ylim()
        row[0].set_ylim(low, high + 0.3 * (high - low))  # leaves space for the legend
        row[0].legend(fontsize=7, loc="upper left", ncol=3)
        for way, style in ((RELIABLE, "k^-"), (THRESHOLD, "o-"), (PRIORITY, "s--")):
            points = []
            for rate in sorted(RATES):
                time = mean_time(results, policy=way, burst=burst, messages=rate) \
                    if way == RELIABLE else \
                    at_loss(results, 0.1, policy=way, burst=burst, messages=rate)
                if time:
                    points.append((rate / 1000, time))
            if points:
                row[1].plot(*zip(*points), style, markersize=4,
                            label=way if way == RELIABLE else f"{way}, 10% lost")
        for target in TARGETS:
            row[1].axhline(target, color="gray", linewidth=0.8, linestyle=":")
        row[1].set(xlabel="messages per second, thousands", ylabel="mean completion time, ms",
                   yscale="log", title=f"Figure 7, training traffic: {TRAFFIC[burst]}")
        row[1].yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
        row[1].set_yticks((1, *TARGETS, 20, 50), labels=(1, *TARGETS, 20, 50))
        row[1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


COLUMNS = ("traffic", "policy", "messages", "training-limit", "seed", "training_loss", "mean_ms",
           "median_ms", "p99_ms", "messages_counted", "finished", "slow", "web_dropped",
           "training_delay_us")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, one core each")
    parser.add_argument("--out", type=pathlib.Path, default=HERE)
    parser.add_argument("--report", action="store_true", help="only write what is known")
    args = parser.parse_args()
    if not PROGRAM.exists() and not args.report:
        sys.exit(f"simulated.py: no {PROGRAM}; make simulate builds it")
    store = BUILD / "coexistence.jsonl"
    runs = grid(range(1, args.seeds + 1))
    if args.report:
        known = [json.loads(line) for line in store.read_text().splitlines()]
        settings = [entry["settings"] for entry in known]
        results = [known[settings.index(run)]["result"] for run in runs if run in settings]
    else:
        results = run_all(runs, args.jobs, store)
    with open(args.out / "simulated.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        for run in results:
            writer.writerow({**run, "traffic": TRAFFIC[run["burst"]], "policy": policy(run)})
    text = ("# Training beside a web service, simulated\n\nWritten by simulated.py, which says what the words "
            f"mean. {len(results)} of {len(runs)} runs, {sum(run['finished'] for run in results):,} messages.\n\n"
            "## Figure 6: how much faster the web service gets\n\n" + figure_6(results) +
            "\n## Figure 7: messages that fit at a mean completion time\n\n" + figure_7(results))
    plot(results, args.out / "simulated.png")
    print(text)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program without a traceback
    main()
