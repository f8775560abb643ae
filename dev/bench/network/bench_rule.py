#!/usr/bin/env python3
"""Prints what a rule of one's own about loss costs, beside a training step of 260K parameters.

    bench_rule.py [STEPS]          of each run, 100 if not given

lossynet.Rule: two processes exchange as many gradients and parameters over UDP and lose 20%, with the rules of
dev/examples/rules.py and with the library's mean, in turns. What a rule adds is set against the median step of
train_llama2 with two workers of 2 x 128 tokens. --rule: the same steps of train_llama2 with a rule from
scripts/sweeps/others. The first ten steps do not count.
"""
import argparse
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile

from bench_network import BUILD, ROOT, Bars, write_tokens

BAR, ROUNDS, SKIPPED = 1.3, 3, 10
PLAIN = ("--carry=0", "--repair=0", "--lead=off", "--wire-dtype=float32", "--loss-rate=0.2")
EXCHANGES = """
import sys, time, numpy, lossynet
sys.path.insert(0, "dev/examples")
import rules
elements, steps, name = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
given = dict(rule=getattr(rules, name)()) if name != "none" else dict(estimator="mean")
vector, times = numpy.ones(elements, numpy.float32), []
with lossynet.Comm(elements, loss_rate=0.2, carry=0, repair=0, lead="off", **given) as comm:
    for step in range(steps):
        comm.all_gather(numpy.zeros(1))
        start = time.perf_counter()
        comm.step_begin(step)
        comm.reduce(vector)
        comm.broadcast(vector)
        times.append(1e3 * (time.perf_counter() - start))
print(*times)
"""


def trained(folder, steps, *more):
    """The parameters, and the milliseconds of steps."""
    log = folder / "log.jsonl"
    subprocess.run([BUILD / "train_llama2", "--model=260K", f"--train={folder / 'train.bin'}", "--workers=2", "--batch=2",
                    "--seq=128", f"--steps={steps}", "--quiet", f"--log={log}", "--overwrite", *PLAIN, *more], check=True)
    events = [json.loads(line) for line in log.read_text().splitlines()]
    return events[0]["parameters"], [event["step_ms"] for event in events if event["event"] == "step"]


def exchanged(elements, steps, name):
    """The milliseconds of exchanges of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"PYTHONPATH": ROOT / "lossynet" / "python", "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "LOSSYNET_PORT": port,
              "LOSSYNET_LIBRARY": BUILD / "liblossynet" / "liblossynet.so", "OMP_NUM_THREADS": 1}
    ranks = [subprocess.Popen([sys.executable, "-c", EXCHANGES, str(elements), str(steps), name], cwd=ROOT, text=True,
                              stdout=subprocess.PIPE, env={**os.environ, **{key: str(common[key]) for key in common},
                                                           "RANK": str(rank)}) for rank in range(2)]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        sys.exit(f"bench_rule: {name} failed")
    return list(map(float, outputs[0].split()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", type=int, nargs="?", default=100)
    steps = parser.parse_args().steps
    bars = Bars()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_tokens(folder / "train.bin", 512, 200_000)
        files = [folder / f"{rule}.so" for rule in ("hadamard", "dblp")]
        for file in files:
            subprocess.run(["cc", "-O3", "-shared", "-fPIC", "-I.", "-Ilossynet", f"scripts/sweeps/others/{file.stem}.c", "-o",
                            file, "-lm"], cwd=ROOT, check=True)
        times = {}
        for _ in range(ROUNDS):
            for file in (None, *files):
                parameters, took = trained(folder, steps, *([f"--rule={file}"] if file else []))
                times.setdefault(file, []).extend(took[SKIPPED:])
            for rule in ("none", "Mean", "ZeroFill", "Hadamard", "Phases"):
                times.setdefault(rule, []).extend(exchanged(parameters, steps, rule)[SKIPPED:])
    middle = {key: statistics.median(values) for key, values in times.items()}
    step = middle[None]
    print(f"A step of {parameters} parameters: {step:.2f} ms, an exchange alone {middle['none']:.2f} ms. Steps with a rule, "
          "in steps without:\n")
    for rule in ("Mean", "ZeroFill", "Hadamard", "Phases"):
        bars.check(f"rules.{rule} in Python", 1 + (middle[rule] - middle["none"]) / step, BAR, at_least=False)
    for file in files:
        bars.check(f"--rule {file.name}", middle[file] / step, BAR, at_least=False)
    print("\n".join(bars.lines))


if __name__ == "__main__":
    main()
