#!/usr/bin/env python3
"""Hours until a loss is reached: a sweep's steps times their time on a network.

    scripts/sweeps/sweep.py others --table  # writes the table
    scripts/time_to_accuracy.py out/sweeps/others/table.csv --section Long \\
        --links 1,10,100 --workers 8,64 --loss 0,0.01,0.2 --model 7B

It prints tables, and draws hours.svg and .png beside TABLE.csv.

Assumed:

* A row of the table with a step tax t has after all steps what the run without
  loss has after the share 1 - t. So it needs 1 / (1 - t) times the steps, in
  the large as in the sweep; its interval is that of t, to first order. What
  loses nothing and is compared with nothing has t = 0. Rows whose tax is not
  known or is everything, of which a seed diverged, or whose phases do not lose
  the same, are left out and named. At rates of --loss that no row has,
  opponents stand alone.
* A step computes 6 P T / (N FLOPS), with P parameters (--parameters), T tokens
  a step (--tokens), N workers (--workers) and the FLOPS that a worker does
  (--tflops), and then exchanges; nothing overlaps. Steps are --per-parameter
  P / T.
* Exchanges are those of dev/scaling/scaling.py, which says how each is modelled
  and was measured: ours, of a row with an integer type on the wire, as int8
  with its rounds; of other rows as bf16, with rounds if the row sent again.
  Opponents lose no step and repeat every packet: a ring or tree over TCP (BBR),
  RoCE (go-back-N), MRC as its makers published it, and ideal selective repeat.
  They send bf16.
"""
import argparse
import csv
import math
import os
import pathlib
import signal
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "dev" / "scaling")]
# pylint: disable=wrong-import-position
from figure import literal, pyplot, save
from python_packages import require

if __name__ == "__main__":
    require("numpy", "matplotlib", target="simulate")
import scaling

BF16 = 2  # bytes of an element
MODELS = {"1.1B": 1.1e9, "7B": 6.74e9, "13B": 13.02e9, "70B": 68.98e9}  # parameters
OPPONENTS = ("tcp", "roce", "mrc", "select")


def numbers(text):
    return [float(word) for word in text.split(",")]


def fail(text):
    print(f"time_to_accuracy.py: {text}", file=sys.stderr)
    sys.exit(2)


def rows_of(path, section, losses):
    """[(label, dropped, tax, half of its interval, our exchange)] of the section that lose as much; None: any loss."""
    with open(path, encoding="utf-8-sig", newline="") as file:
        table = list(csv.DictReader(file))
    if not table or not {"step_tax", "dropped", "phases", "wire_dtype"} <= set(table[0]):
        fail(f"{path}: expected a table.csv of scripts/sweeps/sweep.py NAME --table")
    rows, left_out, uneven, found = [], [], [], set()
    several = len({row["section"] for row in table if row["section"].startswith(section)}) > 1
    for row in table:
        dropped, alike = float(row["dropped"]) / 100, row["phases"] == "both"
        if dropped and alike:
            found.add(row["section"])
        wanted = dropped if losses is None else any(math.isclose(dropped, loss) for loss in losses)
        if not row["section"].startswith(section) or not wanted:
            continue
        name = f"{row['section']}: {row['run']}" if several else row["run"]  # sections may have rows of one name
        if not alike:
            uneven.append(name)
            continue
        tax = float(row["step_tax"] or ("nan" if dropped or row.get("changes") else 0))
        if not 0 <= tax < 1 or int(row.get("diverged") or 0):
            left_out.append(name)
            continue
        small = row["wire_dtype"].startswith("int")
        again = float(row["extra_traffic"] or 0) > 0
        rows.append((name, dropped, tax, float(row["tax_interval"] or 0),
                     "int8" if small else "rule" if again else "lossy"))
    if uneven:
        print(f"time_to_accuracy.py: left out, since phases lose differently: {'; '.join(uneven)}", file=sys.stderr)
    if left_out:
        print(f"time_to_accuracy.py: left out, without a known step tax: {'; '.join(left_out)}", file=sys.stderr)
    if left_out and not rows:
        fail(f"{path}: no row of section '{section}...' has a step tax")
    if not rows and losses is not None:
        fail(f"{path}: no row of a section '{section}...' loses as much: expected --loss of " +
             ", ".join(sorted({f"{float(row['dropped']) / 100:g}" for row in table
                               if row["section"].startswith(section)})))
    if not rows:
        fail(f"{path}: no row of a section '{section}...' loses packets of both phases: expected " +
             ("one of: " + "; ".join(sorted(found)) if found else "a sweep that loses some"))
    for loss in losses or ():
        if not any(math.isclose(row[1], loss) for row in rows):
            print(f"time_to_accuracy.py: no row loses {100 * loss:g}%: opponents stand alone there", file=sys.stderr)
    return rows


def hours(seconds, compute, steps, tax=0.0):
    return steps / (1 - tax) * (compute + seconds) / 3600


def table_of(a, rows):
    """[(workers, Gbit/s, dropped, name, hours, half of their interval)]"""
    steps, size = a.per_parameter * a.parameters / a.tokens, a.parameters * BF16
    out = []
    for workers in map(int, a.workers):
        compute = 6 * a.parameters * a.tokens / (workers * a.tflops * 1e12)
        for gbps in a.links:
            for dropped in a.loss or sorted({row[1] for row in rows}):
                net = scaling.Network(gbps, a.rtt_us * 1e-6, dropped)
                for label, rate, tax, spread, exchange in rows:
                    if math.isclose(rate, dropped):
                        seconds = scaling.exchange(exchange, net, workers, size)
                        out.append((workers, gbps, dropped, label, hours(seconds, compute, steps, tax),
                                    hours(seconds, compute, steps) * spread / (1 - tax) ** 2))
                for name in OPPONENTS:
                    seconds = scaling.reliable(name, net, workers, size)
                    out.append((workers, gbps, dropped, scaling.TITLES[name], hours(seconds, compute, steps), 0.0))
    return out


def draw(path, table):
    plt = pyplot()
    panels = sorted({(row[0], row[2]) for row in table})
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 4), squeeze=False)
    for axis, (workers, dropped) in zip(axes[0], panels):
        for name in dict.fromkeys(row[3] for row in table if (row[0], row[2]) == (workers, dropped)):
            points = [row for row in table if (row[0], row[2], row[3]) == (workers, dropped, name)]
            axis.errorbar([row[1] for row in points], [row[4] for row in points], [row[5] for row in points],
                          label=literal(name), marker="o", markersize=3, capsize=3)
        axis.set(title=f"{workers} workers, {100 * dropped:.3g}% lost", xlabel="Gbit/s", ylabel="hours", xscale="log",
                 yscale="log")
        axis.legend(fontsize=6)
    figure.tight_layout()
    print(save(figure, path))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", metavar="TABLE.csv")
    parser.add_argument("--section", default="", metavar="TEXT", help="how the section's title begins")
    parser.add_argument("--links", type=numbers, default=[1, 10, 100], metavar="GBIT,...")
    parser.add_argument("--workers", type=numbers, default=[8, 64], metavar="N,...")
    parser.add_argument("--loss", type=numbers, metavar="P,...", help="default: the rates of the table")
    parser.add_argument("--rtt-us", type=float, default=10, metavar="US")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--model", choices=MODELS, default="7B", help="default: 7B")
    size.add_argument("--parameters", type=float, metavar="P", help="of another model")
    parser.add_argument("--tokens", type=float, default=4e6, metavar="T", help="of a step, default: %(default)g")
    parser.add_argument("--per-parameter", type=float, default=20, metavar="N", help="tokens per parameter of the run")
    parser.add_argument("--tflops", type=float, default=450, metavar="F", help="of a worker, as it computes")
    parser.add_argument("--svg", metavar="FILE", help="where the picture goes")
    a = parser.parse_args()
    a.parameters = MODELS[a.model] if a.parameters is None else a.parameters
    if os.path.isdir(a.table):
        a.table = os.path.join(a.table, "table.csv")
    sizes = (*a.workers, *a.links, a.parameters, a.tokens, a.tflops, a.rtt_us, a.per_parameter)
    if not all(0 < size < math.inf for size in sizes) or not all(n >= 2 and n % 1 == 0 for n in a.workers):
        fail("expected whole numbers of at least 2 workers, and numbers above 0")
    if not all(0 <= loss < 1 for loss in a.loss or []):
        fail("--loss: expected numbers from 0 to below 1")
    try:
        table = table_of(a, rows_of(a.table, a.section, a.loss))
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
    except (csv.Error, AttributeError, KeyError, TypeError, ValueError) as error:
        fail(f"{a.table}: not as scripts/sweeps/sweep.py writes it: {error}")
    print(f"{a.parameters:.3g} parameters, {a.tokens:.3g} tokens a step, {a.per_parameter:g} tokens a parameter, "
          f"{a.tflops:g} TFLOP/s a worker, {a.rtt_us:g} us; nothing overlaps\n")
    header = ["", *(f"{gbps:g} Gbit/s" for gbps in a.links)]
    for workers, dropped in sorted({(row[0], row[2]) for row in table}):
        names = dict.fromkeys(row[3] for row in table if (row[0], row[2]) == (workers, dropped))
        cells = {(row[3], row[1]): f"{row[4]:.4g}" + (f" ± {row[5]:.2g}" if row[5] else "")
                 for row in table if (row[0], row[2]) == (workers, dropped)}
        print(f"hours, {workers} workers, {100 * dropped:.3g}% lost\n")
        print(scaling.markdown(header, [[name, *(cells[name, gbps] for gbps in a.links)] for name in names]))
    print("Assumed:" + __doc__.partition("Assumed:")[2])
    draw(a.svg or os.path.join(os.path.dirname(a.table), "hours.svg"), table)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    main()
