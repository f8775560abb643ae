#!/usr/bin/env python3
"""Measures what training pays where the kernel drops packets: four hosts of namespaces (dev/testbed/hosts.py) with a
worker each, and no option of the network. It needs root.

    bench_real_loss.py --train FILE --val FILE [--seeds 81-88] [--lost 20] [--ways default,plain]

For each seed it makes the same steps from scratch: over the hosts, in each of the ways, and in one process without
loss, in float32 and in the type on the wire that the default has. Each result is added to --results at once, and is
not measured again: real_loss.jsonl, here, has those of seeds 81 to 88. The last lines are a table in Markdown: the
change of perplexity against both bases with its 95% interval, the shares of gradients and parameters that are lost in
the end, and the bytes beside those of bf16 sent once.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
BUILD = ROOT / os.environ.get("BUILD", "build")
sys.path[:0] = [str(ROOT / "dev" / "testbed"), str(ROOT / "scripts"), str(ROOT / "scripts" / "sweeps")]
import hosts as testbed  # pylint: disable=wrong-import-position
import sweep_statistics  # pylint: disable=wrong-import-position
from python_packages import require  # pylint: disable=wrong-import-position

HOSTS = 4
TRAINING = ["--model=260K", f"--workers={HOSTS}", "--batch=4", "--seq=128", "--lr=3e-3", "--device=cpu", "--threads=1",
            "--eval-every=0"]
BASES = {"float32": ["--wire-dtype=float32"], "same type": []}
WAYS = {"default": [], "plain": ["--plain"]}
REPORTED = ("val_perplexity", "gradient_loss_rate", "parameter_loss_rate", "bytes_of_bf16")


def train(plan, kind, seed):
    """Trains once. Returns the numbers in REPORTED, of the whole run."""
    with tempfile.TemporaryDirectory() as folder:
        words = [BUILD / "train_llama2", *TRAINING, f"--train={plan.train.resolve()}", f"--val={plan.val.resolve()}",
                 f"--steps={plan.steps}", f"--warmup={plan.steps // 10}", f"--seed={seed}", f"--out={folder}",
                 f"--log={folder}/log.jsonl", *BASES.get(kind, []), *WAYS.get(kind, [])]
        if kind in BASES:
            done = subprocess.run(words, capture_output=True, text=True, check=False)
        else:
            with testbed.Hosts(HOSTS) as hosts:
                hosts.lose(plan.lost)
                done = hosts.mpirun(*words, "--link=udp", "--interface=eth0", "--peer-timeout=60", timeout=3600)
        if done.returncode:
            sys.exit(f"bench_real_loss: {kind}, seed {seed}:\n{done.stdout}{done.stderr}")
        with open(f"{folder}/log.jsonl", encoding="utf-8") as file:
            last = json.loads(file.readlines()[-1])
        return {name: last[name] for name in REPORTED}


def table(plan, results):
    lines = [f"| {plan.lost:g}% dropped | against float32, % | against the same type, % | lost in the end | bytes |",
             "| --- | ---: | ---: | ---: | ---: |"]
    for way in plan.ways:
        mean = {name: sum(results[way, seed][name] for seed in plan.seeds) / len(plan.seeds) for name in REPORTED}
        changes = []
        for base in BASES:
            values = [100 * (results[way, seed]["val_perplexity"] / results[base, seed]["val_perplexity"] - 1)
                      for seed in plan.seeds]
            half = sweep_statistics.interval(values)
            changes.append(f"{sum(values) / len(values):+.2f}" + (f" ± {half:.2f}" if half is not None else ""))
        lines.append(f"| {way} (n = {len(plan.seeds)}) | {changes[0]} | {changes[1]} | "
                     f"{100 * mean['gradient_loss_rate']:.2f}%, {100 * mean['parameter_loss_rate']:.2f}% | "
                     f"{mean['bytes_of_bf16']:.2f} |")
    return "\n".join(lines)


def seeds(text):
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--train", type=pathlib.Path, required=True)
    parser.add_argument("--val", type=pathlib.Path, required=True)
    parser.add_argument("--seeds", type=seeds, default="81-88", help="a range such as 81-88")
    parser.add_argument("--steps", type=int, default=560)
    parser.add_argument("--lost", type=float, default=20, help="percent of the packets that the kernel drops")
    parser.add_argument("--ways", type=lambda text: text.split(","), default="default,plain")
    parser.add_argument("--results", type=pathlib.Path, default=BUILD / "real_loss.jsonl")
    plan = parser.parse_args()
    require("scipy", target="sweep")  # for the table, at the end
    missing = testbed.unavailable()
    if missing:
        sys.exit(f"bench_real_loss: {missing}")
    if wrong := set(plan.ways) - set(WAYS):
        parser.error(f"--ways takes {', '.join(WAYS)}, got {', '.join(sorted(wrong))}")
    results = {}
    if plan.results.exists():
        for row in map(json.loads, plan.results.read_text(encoding="utf-8").splitlines()):
            if (row["lost"], row["steps"]) == (plan.lost, plan.steps):
                results[row["kind"], row["seed"]] = row
    for seed in plan.seeds:
        for kind in (*BASES, *plan.ways):
            if (kind, seed) not in results:
                row = {"kind": kind, "seed": seed, "lost": plan.lost, "steps": plan.steps, **train(plan, kind, seed)}
                results[kind, seed] = row
                with open(plan.results, "a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")
    print(table(plan, results))


if __name__ == "__main__":
    main()
