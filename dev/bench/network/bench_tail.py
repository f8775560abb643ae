#!/usr/bin/env python3
"""Compares training for the same time if compute times have a tail: with --deadline, without it, and PyTorch's
DistributedDataParallel over Gloo. It needs root: four hosts of namespaces have a rank each and 1 Gbit/s links.

    bench_tail.py --train FILE --val FILE [--seconds 120] [--seeds 3] [--median 0.1] [--p99 3] [--torch PYTHON]

A rank sleeps before it computes, for a lognormal time with a median of --median seconds (slow_products.c,
tail_pytorch.py). First, each way is timed for 40 steps, after the steps in which it learns a deadline. Then it
trains as many steps as fit into --seconds, with warm-up and cosine over these steps. For each seed the ways
take turns. The table has the time of a step and the validation perplexity that each way reached.
"""
import argparse
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[3]
BUILD = ROOT / os.environ.get("BUILD", "build")
sys.path.insert(0, str(ROOT / "dev"))
from testbed import hosts as testbed  # pylint: disable=wrong-import-position

HOSTS, RATE = 4, "1gbit"
LEARNT = 20  # steps in which a deadline is learnt
TRAINING = ["--model=260K", "--batch=2", "--seq=128", "--lr=3e-3", "--device=cpu", "--threads=1", "--overwrite",
            "--eval-every=1000000"]
WAYS = {"off": ["--deadline=off"], "auto": ["--deadline=auto"], "auto, carry": ["--deadline=auto", "--carry=1"]}


def check(done, what):
    if done.returncode:
        sys.exit(f"bench_tail: {what} failed with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


class Bench:
    def __init__(self, plan, folder, hosts):
        self.plan, self.folder, self.hosts = plan, pathlib.Path(folder), hosts
        self.shim = self.folder / "slow_products.so"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", self.shim,
                        pathlib.Path(__file__).with_name("slow_products.c"), "-ldl", "-lm"], check=True)
        made = [self.count(steps) for steps in (2, 3)]
        self.products = made[1] - made[0]

    def count(self, steps):
        """The number of matrix products in this many steps of one worker."""
        done = subprocess.run([BUILD / "train_llama2", *TRAINING, f"--train={self.plan.train}", "--workers=1",
                               f"--steps={steps}", f"--out={self.folder}/count"], check=False, text=True,
                              capture_output=True, env={**os.environ, "LD_PRELOAD": str(self.shim)})
        return int(re.search(r"^products (\d+)", check(done, "counting products"), re.M)[1])

    def train(self, way, steps, seed, val=True):
        """Trains. Returns the seconds of each step, and the perplexity at the end."""
        plan = self.plan
        if way == "DDP":
            done = self.hosts.mpirun(plan.torch, pathlib.Path(__file__).with_name("tail_pytorch.py"),
                                     self.hosts.address(0), plan.train, plan.val, steps, seed, plan.median,
                                     plan.p99, flags=("-x", "GLOO_SOCKET_IFNAME=eth0"), timeout=3000)
            found = json.loads(check(done, way).splitlines()[-1])
            return found["seconds"], found["perplexity"]
        log = self.folder / "log.jsonl"
        done = self.hosts.mpirun(
            BUILD / "train_llama2", *TRAINING, f"--train={plan.train}", *([f"--val={plan.val}"] if val else []),
            f"--steps={steps}", f"--warmup={steps // 10}", f"--seed={seed}", "--link=udp", "--interface=eth0",
            f"--out={self.folder}/out", f"--log={log}", "--quiet", *WAYS[way], timeout=3000,
            flags=("-x", f"LD_PRELOAD={self.shim}", "-x", f"SLOW={self.products},{plan.median},{plan.p99}"))
        check(done, way)
        told = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
        perplexities = [event["val_perplexity"] for event in told if event["event"] == "eval"]
        return [event["step_ms"] / 1e3 for event in told if event["event"] == "step"], (perplexities or [None])[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--train", required=True)
    parser.add_argument("--val", required=True)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--median", type=float, default=0.1, help="seconds that a rank computes for")
    parser.add_argument("--p99", type=float, default=3, help="in medians")
    parser.add_argument("--torch", help="a Python with torch and NumPy")
    plan = parser.parse_args()
    missing = testbed.unavailable()
    if missing:
        sys.exit(f"bench_tail: {missing}")
    with tempfile.TemporaryDirectory() as folder, testbed.Hosts(HOSTS, rate=RATE) as hosts:
        bench = Bench(plan, folder, hosts)
        ways = [*WAYS, *(["DDP"] if plan.torch else [])]
        steps = {way: round(plan.seconds / statistics.fmean(bench.train(way, LEARNT + 40, 0, False)[0][LEARNT:]))
                 for way in ways}
        print(f"{plan.seconds:g} s, {bench.products} products a step; steps: {steps}", flush=True)
        seconds, reached = {way: [] for way in ways}, {way: [] for way in ways}
        for seed in range(1, plan.seeds + 1):
            for way in ways:
                took, perplexity = bench.train(way, steps[way], seed)
                seconds[way] += took[2:]
                reached[way].append(perplexity)
    print("| way | steps | mean, ms | p50 | p99 | seconds | perplexity, by seed |\n| --- |" + " ---: |" * 6)
    for way in ways:
        took = sorted(seconds[way])
        print(f"| {way} | {steps[way]} | {1e3 * statistics.fmean(took):.0f} | {1e3 * took[len(took) // 2]:.0f} | "
              f"{1e3 * took[len(took) * 99 // 100]:.0f} | {steps[way] * statistics.fmean(took):.0f} | "
              f"{', '.join(f'{perplexity:.2f}' for perplexity in reached[way])} |")


if __name__ == "__main__":
    main()
