#!/usr/bin/env python3
"""Prints a table of what late ranks cost the others, with a deadline and without. The numbers come from a
simulation in virtual time (dev/simulation/late_ranks.c), so every machine prints the same.

    bench_late.py [RANKS ...]      4 and 16 ranks; 64 take half a minute of a core each
"""
import argparse
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[3]
PROGRAM = ROOT / os.environ.get("BUILD", "build") / "late_ranks"
COLUMNS = ("mean", "p50", "p99", "lost", "delay", "idle", "left_out", "pace", "throughput")
WAYS = (("off", []), ("auto", []), ("auto", ["1", "carry"]), ("auto", ["1", "carry", "lost=0.1"]),
        ("auto", ["1", "carry", "repair"]))


def measure(ranks, what, deadline, more):
    done = subprocess.run([str(PROGRAM), str(ranks), what, deadline, *more], check=True, text=True,
                          stdout=subprocess.PIPE)
    words = done.stdout.split()
    return {name: float(value) for name, value in zip(words[::2], words[1::2])}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int, nargs="*", default=(4, 16))
    arguments = parser.parse_args()
    if not PROGRAM.exists():
        sys.exit(f"bench_late: {PROGRAM} is not built: make build/late_ranks")
    print("| ranks | disturbed by | `--deadline` | " + " | ".join(COLUMNS) + " |")
    print("| ---: | --- | --- |" + " ---: |" * len(COLUMNS))
    for ranks in arguments.ranks:
        for what in ("tail", "stop", "slow", "spread"):
            for deadline, more in WAYS:
                got = measure(ranks, what, deadline, more)
                print(f"| {ranks} | {what} | {', '.join([deadline, *more[1:]])} | "
                      + " | ".join(f"{got[name] + 0.0:.3f}" for name in COLUMNS) + " |", flush=True)


if __name__ == "__main__":
    main()
