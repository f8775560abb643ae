#!/usr/bin/env python3
"""Measures what deaths cost: 4 ranks train, and every 20 seconds one is killed (SIGKILL) and started again.
Counts the sequences that were trained and compares them with a run without deaths, for these ways:

    meet         train_llama2 --meet: the others go on, the new rank joins (scripts/elastic.sh)
    checkpoint   train_llama2 --meet, but all ranks are killed and start again from the last checkpoint,
                 as under a launcher that ends all ranks if one dies
    torchft      PyTorch with torchft over Gloo: the others go on, the new rank joins
    torchrun     PyTorch DDP over Gloo under torchrun --max-restarts: all start again from a checkpoint

    bench_elastic.py [--seconds 120] [--rounds 5] [--period 20] [--every 50] [--torch PYTHON] [WAY ...]
    bench_elastic.py [--seconds 120] [--tiny] join    what it costs that a fifth rank joins, every 10 seconds
    bench_elastic.py [--rounds 5] calm       steps under mpirun and with --meet without deaths, in turns

Every way is compared with itself without deaths. In each round all ways train for --seconds with deaths and
without, in turns, so that the ratio is fair even if others use the machine. The report has the median of the
rounds' ratios, and their range. Steps that are repeated after a checkpoint count once. PYTHON has torch and
torchft (pip install torchft); without it these two ways are left out. Ranks have one thread each.
"""
import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "test" / "support"), str(ROOT / "dev" / "bench" / "cpu")]
from etcd import Etcd, free_port  # pylint: disable=wrong-import-position
from program import MPI, write_tokens  # pylint: disable=wrong-import-position

PROGRAM = ROOT / os.environ.get("BUILD", "build") / "train_llama2"
RANKS = 4
WARM, START_LIMIT = 5, 300  # seconds of warm-up, which do not count; time limit for the first steps
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


class Way:
    """Ranks that can be killed. trained() returns {step: number of ranks that made it} so far."""

    def __init__(self, folder, options):
        self.folder, self.options, self.process = folder, options, {}
        self.starts, self.steps, self.ranks, self.read = 0, {}, RANKS, {}

    def lines(self, path):
        """Reads the whole lines that were added since the last call. A log that was replaced is read from
        its beginning."""
        with open(path, encoding="utf-8") as file:
            number = os.fstat(file.fileno()).st_ino
            known, at = self.read.get(path, (number, 0))
            file.seek(at if known == number else 0)
            text = file.read()
            whole = text.rfind("\n") + 1
            self.read[path] = (number, file.tell() - len(text) + whole)
            return text[:whole].splitlines()

    def start(self, rank):
        with open(self.folder / f"said.{rank}", "a", encoding="utf-8") as said:
            self.process[rank] = subprocess.Popen(self.command(rank), env=ENVIRONMENT, stdout=said,
                                                  stderr=said, cwd=ROOT, start_new_session=True)

    def begin(self):
        for rank in range(RANKS):
            self.start(rank)

    def kill(self, rank):
        os.killpg(self.process[rank].pid, signal.SIGKILL)
        self.process[rank].wait()

    def die(self, rank):
        self.kill(rank)
        self.start(rank)

    def end(self):
        for rank in self.process:
            if self.process[rank].poll() is None:
                self.kill(rank)


class Meet(Way):
    def __init__(self, folder, options):
        super().__init__(folder, options)
        self.etcd = Etcd(folder)
        write_tokens(folder / "train.bin", [random.randrange(512) for _ in range(200_000)], 512)

    def command(self, rank):
        shape = ["260K", 1, 32] if self.options.tiny else ["1M", 4, 256]
        return [PROGRAM, *map("--{}={}".format, ("model", "batch", "seq"), shape),
                f"--train={self.folder}/train.bin", "--steps=1000000", "--lr=1e-3", f"--out={self.folder}/out", "--quiet",
                f"--meet={self.etcd.url(self.run())}", f"--meet-ranks={RANKS}",
                *self.more()]

    def run(self):
        return f"run{self.starts}"

    def more(self):
        return []

    def trained(self):
        for line in self.lines(self.folder / "out" / "log.jsonl"):
            event = json.loads(line)
            if event["event"] == "view":
                self.ranks, self.at, self.pause = event["ranks"], event["step"], event["seconds"]
            if event["event"] == "step":
                self.steps.setdefault(event["step"], self.ranks)
        return self.steps

    def end(self):
        super().end()
        self.etcd.stop()


class Join(Meet):
    """One more rank joins, and is killed later."""
    def come(self):
        """Starts the rank. Returns the seconds until it is in a view, the steps of the others between its
        registration and that view, and `pause`, their longest step at the change."""
        begun, known = time.monotonic(), len(self.etcd.leases(self.run()))
        self.start(RANKS)
        while len(self.etcd.leases(self.run())) == known:
            time.sleep(0.005)
        waits = len(self.trained())
        while self.ranks == RANKS:
            time.sleep(0.005)
            self.trained()
        return time.monotonic() - begun, self.at - waits, self.pause

    def go(self):
        self.kill(RANKS)
        while self.ranks > RANKS:
            time.sleep(0.005)
            self.trained()


class Checkpoint(Meet):
    def more(self):
        return [f"--save-every={self.options.every}", "--keep=1", "--resume=auto"]

    def die(self, rank):
        for other in range(RANKS):
            self.kill(other)
        self.starts += 1
        self.begin()


class Torchft(Way):
    def __init__(self, folder, options):
        super().__init__(folder, options)
        port = free_port()
        self.address = f"http://localhost:{port}"
        self.lighthouse = subprocess.Popen(
            [pathlib.Path(options.torch).parent / "torchft_lighthouse", "--min_replicas", "1",
             "--bind", f"[::]:{port}", "--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "1000",
             "--quorum_tick_ms", "50"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def command(self, rank):
        return [self.options.torch, pathlib.Path(__file__).with_name("elastic_pytorch.py"), "torchft",
                f"rank{rank}", self.address, self.folder / f"steps.{rank}"]

    def trained(self):
        for path in self.folder.glob("steps.*"):
            for line in self.lines(path):
                step, _, ranks, _ = line.split()
                self.steps[int(step)] = max(self.steps.get(int(step), 0), int(ranks))
        return self.steps

    def end(self):
        super().end()
        self.lighthouse.kill()
        self.lighthouse.wait()


class Torchrun(Torchft):
    def __init__(self, folder, options):  # pylint: disable=super-init-not-called
        Way.__init__(self, folder, options)

    def begin(self):
        self.start(0)

    def command(self, rank):
        return [self.options.torch, "-m", "torch.distributed.run", "--nnodes=1",
                f"--nproc_per_node={RANKS}", "--max-restarts=1000", "--monitor-interval=0.1",
                f"--rdzv-endpoint=localhost:{free_port()}",
                pathlib.Path(__file__).with_name("elastic_pytorch.py"), "torchrun",
                self.folder / "checkpoint", str(self.options.every), self.folder / "steps.0"]

    def die(self, rank):
        """Kills a rank, which is a child of torchrun."""
        children = subprocess.run(["pgrep", "-P", str(self.process[0].pid)], text=True,
                                  stdout=subprocess.PIPE, check=False).stdout.split()
        os.kill(int(random.choice(children)), signal.SIGKILL)

    def end(self):
        Way.end(self)
        subprocess.run(["pkill", "-9", "-f", str(self.folder / "checkpoint")], check=False)


WAYS = {"meet": Meet, "checkpoint": Checkpoint, "torchft": Torchft, "torchrun": Torchrun}


def count(way):
    try:
        return sum(way.trained().values()), len(way.trained())
    except FileNotFoundError:
        return 0, 0


def measure(kind, options, deaths):
    """Returns (batches that ranks trained per second, all ranks together; longest time without a step)."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="elastic"))
    way = WAYS[kind](folder, options)
    try:
        way.begin()
        wait_for_steps(way)
        begun, before = time.monotonic(), count(way)[0]
        due, longest, seen, since = begun + options.period / 2, 0.0, before, begun
        while time.monotonic() < begun + options.seconds:
            if deaths and time.monotonic() > due:
                way.die(random.randrange(RANKS))
                due += options.period
            now = count(way)[0]
            if now > seen:
                seen, since = now, time.monotonic()
            longest = max(longest, time.monotonic() - since)
            time.sleep(0.05 if kind in ("meet", "torchft") else 0.2)
        return (count(way)[0] - before) / (time.monotonic() - begun), longest
    finally:
        way.end()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_steps(way):
    end = time.monotonic() + START_LIMIT
    while count(way)[1] < 20:
        if time.monotonic() > end:
            raise TimeoutError(f"no 20 steps in {START_LIMIT} s")
        time.sleep(0.2)
    time.sleep(WARM)


def joins(options):
    folder = pathlib.Path(tempfile.mkdtemp(prefix="elastic"))
    way, seen = Join(folder, options), []
    try:
        way.begin()
        wait_for_steps(way)
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            seen.append(way.come())
            time.sleep(5)
            way.go()
            time.sleep(5)
    finally:
        way.end()
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{len(seen)} ranks came, median (most):")
    for what, unit, values in zip(("from its start until it is an owner", "steps of the others from its "
                                   "registration on", "pause of the others"), (" s", "", " s"), zip(*seen)):
        print(f"  {what}: {statistics.median(values):.2f}{unit} ({max(values):.2f}{unit})")


def step_ms(folder, command, environment):
    """The median time of a step in a short run."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    running = [subprocess.Popen(words, env=environment, cwd=ROOT, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL) for words in command]
    for process in running:
        if process.wait() != 0:
            sys.exit(f"failed: {' '.join(map(str, process.args))}")
    steps = [json.loads(line) for line in (folder / "out" / "log.jsonl").read_text().splitlines()]
    return statistics.median(s["step_ms"] for s in steps if s["event"] == "step" and s["step"] >= 20)


def calm_steps(options):
    folder = pathlib.Path(tempfile.mkdtemp(prefix="elastic"))
    way, times = Meet(folder, options), ([], [])
    environment = {**ENVIRONMENT, **MPI}
    try:
        for _ in range(options.rounds):
            way.starts += 1
            words = [w for w in map(str, way.command(0)) if not w.startswith("--steps")]
            words += ["--steps=100", "--batch=1"]
            plain = [w for w in words if not w.startswith("--meet")] + ["--link=udp", "--peer-timeout=1"]
            times[0].append(step_ms(folder, [["mpirun", "-np", str(RANKS), *plain]], environment))
            times[1].append(step_ms(folder, [words] * RANKS, environment))
    finally:
        way.end()
        shutil.rmtree(folder, ignore_errors=True)
    more = sorted(100 * (meet / plain - 1) for plain, meet in zip(*times))
    print("median step of %d runs: %.2f ms under mpirun, %.2f ms with --meet; in pairs %+.1f%% (%+.1f to %+.1f)"
          % (options.rounds, *map(statistics.median, times), statistics.median(more), more[0], more[-1]))


def compare(options):
    ways = [kind for kind in options.ways or WAYS if options.torch or not kind.startswith("torch")]
    seen = {kind: [] for kind in ways}
    for number in range(options.rounds):
        for kind in ways:
            order = (False, True) if number % 2 == 0 else (True, False)
            try:
                result = {deaths: measure(kind, options, deaths) for deaths in order}
            except TimeoutError as error:
                print(f"round {number + 1}, {kind}: left out, {error}", file=sys.stderr, flush=True)
                continue
            (calm, _), (rate, pause) = result[False], result[True]
            seen[kind].append((calm, rate, 100 * rate / calm, pause))
            print("round %d, %s: %.1f/s undisturbed, %.1f/s with deaths: %.0f%%, longest pause %.1f s"
                  % (number + 1, kind, *seen[kind][-1]), file=sys.stderr, flush=True)
    print(f"| way | undisturbed | a death every {options.period:g} s | work done (range) | longest pause (most) |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for kind in filter(seen.get, ways):
        calm, rate, ratio, pause = zip(*seen[kind])
        print(f"| {kind} | {statistics.median(calm):.1f}/s | {statistics.median(rate):.1f}/s | "
              f"{statistics.median(ratio):.0f}% ({min(ratio):.0f} to {max(ratio):.0f}) | "
              f"{statistics.median(pause):.1f} s ({max(pause):.1f} s) |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120, help="of a window")
    parser.add_argument("--period", type=float, default=20)
    parser.add_argument("--every", type=int, default=50, help="steps between checkpoints")
    parser.add_argument("--torch", help="a Python with torch and torchft")
    parser.add_argument("--tiny", action="store_true", help="join: steps of some 10 ms, not 150")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("ways", nargs="*", metavar="WAY", help=", ".join([*WAYS, "join, calm"]))
    options = parser.parse_args()
    if options.ways in (["join"], ["calm"]):
        return {"join": joins, "calm": calm_steps}[options.ways[0]](options)
    return compare(options)


if __name__ == "__main__":
    main()
