#!/usr/bin/env python3
"""The CPU part of `make bench`: compares train_llama2 with PyTorch, bare GEMM, and many workers with one.

    dev/bench/cpu/bench_cpu.py            5 rounds, about a quarter of an hour
    dev/bench/cpu/bench_cpu.py --quick    1 round, to see that everything runs; its numbers mean little

It answers three questions. Each has a bar, and the exit code is 1 if a bar is missed.

    pytorch   How many times faster is a training step than the better of eager and torch.compile?
    gemm      What share of the best GEMM rate this machine reaches does a whole step keep?
    workers   What do 64 workers cost against 1 that trains on the same number of sequences?

Everything runs on the same two cores with two threads, in float32 and, if the processor has
instructions for it (AMX, AVX512_BF16), in bf16. PyTorch then runs under torch.autocast. The
candidates take turns (one block of each per round), and medians are compared, because the machine's
speed drifts by more than the differences that we look for. A block is measured again if other
programs used our cores meanwhile. PyTorch is installed into build/venv-bench from
dev/bench/cpu/requirements-bench.txt.
"""

import argparse
import array
import json
import os
import platform
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "build" / "train_llama2"
VENV = ROOT / "build" / "venv-bench"
PYTHON = VENV / "bin" / "python"
REQUIREMENTS = ROOT / "dev" / "bench" / "cpu" / "requirements-bench.txt"

BAR_PYTORCH = {"float32": 1.5, "bf16": 2.0}  # times the speed of the better PyTorch
BAR_BF16 = 3.5  # times the speed of our float32
BAR_GEMM, BAR_GEMM_AVX512 = 0.75, 0.93  # share of the best GEMM rate
BAR_WORKERS = 1.2  # times the step of one worker

# PyTorch allocates its activations anew in every step, and glibc gives large blocks back to the
# kernel, which has to clear them again. With --tuned-pytorch, PyTorch is also measured without that
# cost, and the better of all its results counts.
KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_TOP_PAD_": "1000000000",
}

THREADS, BATCH, SEQ, VOCABULARY = 2, 8, 256, 32000
MANY = 64  # workers
# Steps per block: a block takes some ten seconds, long enough to average out short disturbances.
MODELS = {
    "15M": dict(dim=288, layers=6, hidden=768, steps=5),
    "42M": dict(dim=512, layers=8, hidden=1376, steps=3),
}
# Library, core type and the CPU flag it needs: OpenBLAS would crash with a core type that the CPU lacks.
GEMMS = [
    ("openblas", {"OPENBLAS_CORETYPE": "Haswell"}, "x86_64_v3"),
    ("openblas", {"OPENBLAS_CORETYPE": "Zen"}, "x86_64_v3"),
    ("openblas", {"OPENBLAS_CORETYPE": "SkylakeX"}, "x86_64_v4"),
    ("openblas", {}, ""),
    ("onednn", {}, ""),
    ("torch", {}, ""),
]


def program_command(model, dtype, train, workers, batch, steps, log):
    """The command line of train_llama2 for a measurement."""
    return [
        str(PROGRAM), "--model", model, "--vocab-size", str(VOCABULARY), "--train", str(train),
        "--workers", str(workers), "--batch", str(batch), "--seq", str(SEQ),
        "--steps", str(steps), "--lr", "1e-4", "--device", "cpu", "--dtype", dtype, "--threads", str(THREADS),
        "--log", str(log), "--quiet",
    ]  # fmt: skip


# ---- what a step computes -------------------------------------------------------------------


def gemm_shapes(model):
    """Returns {"M,N,K,OP": number of calls} for the GEMMs of one step, as train_llama2 calls them.

    Each matrix (out, in) is used three times: forward, gradient of the input, gradient of the
    weight. q, k, v are one matrix, gate and up another.
    """
    dim, hidden, layers = model["dim"], model["hidden"], model["layers"]
    matrices = [(3 * dim, dim), (dim, dim), (2 * hidden, dim), (dim, hidden)]
    rows, shapes = BATCH * SEQ, {}
    for out, width, count in [(*m, layers) for m in matrices] + [(VOCABULARY, dim, 1)]:
        shapes[f"{rows},{out},{width},NT"] = count
        shapes[f"{rows},{width},{out},NN"] = count
        shapes[f"{out},{width},{rows},TN"] = count
    return shapes


def gemm_flops(shapes):
    total = 0
    for shape, count in shapes.items():
        M, N, K = map(int, shape.split(",")[:3])
        total += 2 * M * N * K * count
    return total


def step_flops(model, tokens):
    """Operations of a step: per token 6 M, where M = L (4 C^2 + 3 C F) + V C counts matrix elements.

    (2 M forward and 4 M backward. The tied table counts once, as classifier: a look-up is no
    arithmetic.) Attention adds 6 L T C per token: scores and weighted values are 2 * 2 T C forward,
    half of this is masked and never needed, and backward costs twice the forward. Recomputation does
    not count, and norms, softmax, AdamW and so on count as nothing.
    """
    dim, hidden, layers = model["dim"], model["hidden"], model["layers"]
    matrices = layers * (4 * dim * dim + 3 * dim * hidden) + VOCABULARY * dim
    return tokens * (6 * matrices + 6 * layers * SEQ * dim)


# ---- running things -------------------------------------------------------------------------


class Cores:
    """The cores that we measure on, and how much other programs use them."""

    TOLERATED, TRIES = 0.05, 4

    def __init__(self):
        self.cpus = two_cores()
        self.blocks = self.disturbed = 0
        os.sched_setaffinity(0, self.cpus)  # children inherit the affinity

    def busy_seconds(self):
        total = 0
        for line in Path("/proc/stat").read_text().splitlines():
            name, *jiffies = line.split()
            if name in {f"cpu{cpu}" for cpu in self.cpus}:
                user, nice, system, _, _, irq, softirq, steal = map(int, jiffies[:8])
                total += user + nice + system + irq + softirq + steal
        return total / os.sysconf("SC_CLK_TCK")

    def measure(self, block):
        """Calls block() and returns its least disturbed result, which contains its own CPU time."""
        results = []
        while len(results) < self.TRIES:
            busy, start = self.busy_seconds(), time.monotonic()
            result = block()
            others = self.busy_seconds() - busy - result["cpu_seconds"]
            share = others / (len(self.cpus) * (time.monotonic() - start))
            results.append((share, len(results), result))
            if share <= self.TOLERATED:
                break
        self.blocks += 1
        self.disturbed += share > self.TOLERATED
        return min(results)[2]


class Worker:
    """A process that runs one timed block for each line on its stdin and answers with a line of JSON."""

    def __init__(self, name, script, arguments, environment=None):
        self.name = name
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [PYTHON, ROOT / "dev" / "bench" / "cpu" / script, "--wait", *arguments], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            env={**os.environ, **(environment or {})},
        )  # fmt: skip

    def block(self):
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the process has ended; the readline below notices it
        line = self.process.stdout.readline()
        if not line:
            self.errors.seek(0)
            raise RuntimeError(f"{self.name}: {self.errors.read().strip()[-2000:] or 'ended'}")
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def run_program(model, dtype, train, workers, batch, steps):
    """Returns the log events of `steps` steps after a warm-up step, and the peak memory in bytes."""
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory) / "log.jsonl"
        command = program_command(model, dtype, train, workers, batch, steps + 1, log)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            sys.exit(f"bench_cpu: exit code {process.returncode} from: {' '.join(command)}")
        events = [json.loads(line) for line in log.read_text().splitlines()]
    timed = [e for e in events if e["event"] == "step"][1:]
    return {
        "backend": events[0].get("backend", "?"),
        "seconds_per_step": statistics.mean(e["step_ms"] for e in timed) / 1e3,
        "communication_seconds": statistics.mean(e["communication_ms"] for e in timed) / 1e3,
        "peak_bytes": usage.ru_maxrss * 1024,
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
    }


def write_tokens(path, count):
    """Writes llm.c's format: 256 int32 (magic, version, tokens, vocabulary), then uint16 tokens."""
    generator = random.Random(0)
    header = array.array("i", [20240520, 1, count, VOCABULARY] + [0] * 252)
    tokens = array.array("H", (generator.randrange(VOCABULARY) for _ in range(count)))
    path.write_bytes(header.tobytes() + tokens.tobytes())


def set_up_pytorch():
    wanted = REQUIREMENTS.read_text()
    stamp = VENV / "requirements.txt"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(
        f"PyTorch, which we compare with, is not in {VENV.relative_to(ROOT)} yet (or in another\n"
        f"version). Installing {REQUIREMENTS.relative_to(ROOT)} there from PyPI: 2.6 GB to\n"
        "download, 4.4 GB on disk; `make clean` removes it."
    )  # fmt: skip
    shutil.rmtree(VENV, ignore_errors=True)
    try:
        venv.create(VENV, with_pip=True)
        subprocess.run(
            [PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check",
             "--no-deps", "-r", REQUIREMENTS], check=True,
        )  # fmt: skip
    except subprocess.CalledProcessError as error:
        sys.exit(
            f"bench_cpu: cannot install PyTorch: {error}\n"
            "---> HINT: it needs a network, 7 GB of disk, and Python 3.11 or newer"
        )
    stamp.write_text(wanted)


def two_cores():
    """Two CPUs that we may use; if possible, they are not two hyperthreads of one core."""
    allowed = sorted(os.sched_getaffinity(0))
    for other in allowed[1:]:
        siblings = Path(f"/sys/devices/system/cpu/cpu{allowed[0]}/topology/thread_siblings_list")
        if not siblings.exists() or str(other) not in re.findall(r"\d+", siblings.read_text()):
            return {allowed[0], other}
    return set(allowed[:2])


def cpu_model():
    model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    return model[1] if model else platform.machine()


def instruction_sets():
    """Names of the processor's instruction sets that the program may use, best first."""
    text = subprocess.run([PROGRAM, "--version"], check=True, capture_output=True, text=True).stdout
    return re.search(r"^instruction sets: ([^(]*?) \(", text, re.M)[1].split(", ")


# ---- the three questions ----------------------------------------------------------------------


class Bars:
    def __init__(self):
        self.missed = []

    def check(self, what, value, bar, at_least):
        ok = value >= bar if at_least else value <= bar
        print(f"  {what}: {value:.2f}, bar {'at least' if at_least else 'at most'} {bar:.2f}: "
              f"{'met' if ok else 'MISSED'}")  # fmt: skip
        if not ok:
            self.missed.append(what)


def start_gemms(shapes, sets):
    """Starts the GEMM workers that run on this machine, and prints which do not."""
    workers = []
    for library, environment, needs in GEMMS:
        label = " ".join([library, *environment.values()])
        if needs and needs not in sets:
            continue
        worker = Worker(label, "bench_gemm.py", ["--library", library, *shapes], environment)
        try:
            worker.block()
        except RuntimeError as error:
            print(f"  not measured: {error}")
            continue
        workers.append(worker)
    return workers


def start_pytorch(name, dtype, tuned):
    """Starts and warms up PyTorch, eager and compiled; if `tuned`, both also with KEEP_MEMORY."""
    variants = [("", {})] + [(", keeps memory", KEEP_MEMORY)] * tuned
    workers = [
        Worker(f"pytorch {mode} {dtype}{label}", "bench_pytorch.py",
               ["--model", name, "--mode", mode, "--dtype", dtype, "--steps", str(MODELS[name]["steps"]),
                "--batch", str(BATCH), "--seq", str(SEQ), "--vocab-size", str(VOCABULARY),
                "--threads", str(THREADS)], environment)
        for label, environment in variants
        for mode in ("eager", "compile")
    ]  # fmt: skip
    for worker in workers:
        version = worker.block()["version"]
    return workers, version


def bf16_instructions(sets):
    """The best instructions that this processor has to multiply bfloat16; empty if it has none."""
    names = {"x86_64_amx": "AMX", "x86_64_avx512bf16": "AVX512_BF16"}
    return next((names[name] for name in sets if name in names), "")


def compare_speed(name, train, rounds, tuned, sets, cores, bars):
    """Answers questions 1 and 2 for one preset, in the same rounds, for every type that is fast here."""
    model, tokens = MODELS[name], BATCH * SEQ
    shapes = gemm_shapes(model)
    print(f"\n{name}, {BATCH} x {SEQ} tokens per step, {model['steps']} steps per block, "
          f"{rounds} round(s)")  # fmt: skip
    dtypes = ["float32", "bf16"] if bf16_instructions(sets) else ["float32"]
    torches, gemms = [], start_gemms(shapes, sets)
    for dtype in dtypes:
        some, version = start_pytorch(name, dtype, tuned)
        torches += some

    seconds, rates, detail = {}, {}, {w.name: f"torch {version}" for w in torches}
    for _ in range(rounds):
        for dtype in dtypes:
            ours = cores.measure(lambda: run_program(name, dtype, train, 1, BATCH, model["steps"]))  # pylint: disable=cell-var-from-loop
            seconds.setdefault(f"train_llama2 {dtype}", []).append(ours["seconds_per_step"])
            detail[f"train_llama2 {dtype}"] = ours["backend"]
        for worker in torches:
            answer = cores.measure(worker.block)
            seconds.setdefault(worker.name, []).append(answer["seconds_per_step"])
        for worker in gemms:
            answer = cores.measure(worker.block)
            total = sum(count * answer["seconds"][shape] for shape, count in shapes.items())
            rates.setdefault(worker.name, []).append(gemm_flops(shapes) / total / 1e9)
            detail[worker.name] = f"{answer['version']} {answer['kernel']}".strip()
    for worker in torches + gemms:
        worker.close()

    median = {key: statistics.median(values) for key, values in seconds.items()}
    print(f"  {'':30} {'tokens/s':>9} {'ms/step':>8} {'spread':>7} {'times':>6}")
    for key, value in median.items():
        spread = (max(seconds[key]) - min(seconds[key])) / value
        ours = median["train_llama2 bf16" if " bf16" in key else "train_llama2 float32"]
        print(f"  {key:30} {tokens / value:9.0f} {1e3 * value:8.0f} {spread:6.0%} "
              f"{value / ours:6.2f}  {detail[key]}")  # fmt: skip

    flops = step_flops(model, tokens)
    print(
        f"  model FLOPs {flops / 1e9:.1f} G per step, GEMM {gemm_flops(shapes) / 1e9:.1f} G of it"
    )
    print(f"  {'':30} {'GFLOP/s':>9}")
    for dtype in dtypes:
        print(f"  {f'train_llama2 {dtype}, step':30} "
              f"{flops / median[f'train_llama2 {dtype}'] / 1e9:9.1f}")  # fmt: skip
    for key, values in rates.items():
        print(f"  {'GEMM float32 ' + key:30} {statistics.median(values):9.1f}  {detail[key]}")

    for dtype in dtypes:
        theirs = min(v for k, v in median.items() if k.startswith("pytorch") and f" {dtype}" in k)
        bars.check(f"{name} {dtype} against the better PyTorch",
                   theirs / median[f"train_llama2 {dtype}"], BAR_PYTORCH[dtype],
                   at_least=True)  # fmt: skip
    if "bf16" in dtypes:
        bars.check(f"{name} bf16 against float32",
                   median["train_llama2 float32"] / median["train_llama2 bf16"], BAR_BF16,
                   at_least=True)  # fmt: skip
    best = max(statistics.median(values) for values in rates.values())
    bars.check(f"{name} float32 share of the best GEMM rate",
               flops / median["train_llama2 float32"] / 1e9 / best,
               BAR_GEMM_AVX512 if "x86_64_v4" in sets else BAR_GEMM, at_least=True)  # fmt: skip


def compare_workers(dtype, train, rounds, cores, bars):
    """Answers question 3."""
    many, one = [], []
    for _ in range(rounds):
        many.append(cores.measure(lambda: run_program("15M", dtype, train, MANY, 1, 1)))
        one.append(cores.measure(lambda: run_program("15M", dtype, train, 1, MANY, 1)))

    def median(runs, key):
        return statistics.median(run[key] for run in runs)

    print(f"\n15M, {dtype}, {MANY} sequences of {SEQ} tokens per step, 1 step per block, "
          f"{rounds} round(s)")  # fmt: skip
    for name, runs in (f"{MANY} workers, batch 1", many), (f"1 worker, batch {MANY}", one):
        print(f"  {name:30} {median(runs, 'seconds_per_step'):8.2f} s/step, of which phases "
              f"{median(runs, 'communication_seconds'):.2f} s; "
              f"peak memory {median(runs, 'peak_bytes') / 1e9:.2f} GB")  # fmt: skip

    model = MODELS["15M"]
    matrices = model["layers"] * (4 * model["dim"] ** 2 + 3 * model["dim"] * model["hidden"])
    norms = (2 * model["layers"] + 1) * model["dim"]
    vector = 4 * (matrices + VOCABULARY * model["dim"] + norms) / 1e9
    print(f"  where the bytes go: {MANY} replicas and {MANY} gradients of {vector:.3f} GB are "
          f"{2 * MANY * vector:.1f} GB of memory,\n"
          f"  optimizer state is held once ({2 * vector:.2f} GB); per step each gradient is "
          "written and, for the average, read once,\n"
          f"  and each replica read and overwritten once: {4 * MANY * vector:.1f} GB, against "
          f"{4 * vector:.2f} GB for one worker")  # fmt: skip
    ratio = median(many, "seconds_per_step") / median(one, "seconds_per_step")
    bars.check(f"{dtype}: time of {MANY} workers against one", ratio, BAR_WORKERS, at_least=False)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round, to see that it runs")
    parser.add_argument(
        "--tuned-pytorch", action="store_true", help="also PyTorch that keeps memory"
    )
    parser.add_argument("--only", choices=[*MODELS, "workers"], help="one part")
    arguments = parser.parse_args()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # from here on a pipe that breaks is reported
    sys.stdout.reconfigure(line_buffering=True)
    rounds = 1 if arguments.quick else 5
    if not PROGRAM.exists():
        sys.exit(f"bench_cpu: {PROGRAM} is missing\n---> HINT: make")
    set_up_pytorch()

    cores = Cores()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = str(THREADS)
    cpu, sets = cpu_model(), instruction_sets()
    print(f"{cpu}, cores {sorted(cores.cpus)} of {os.cpu_count()}, {platform.system()} "
          f"{platform.release()}, Python {platform.python_version()}")  # fmt: skip
    print(f"bf16: {bf16_instructions(sets) or 'not measured: no AMX and no AVX512_BF16 here'}")

    bars = Bars()
    with tempfile.TemporaryDirectory() as directory:
        train = Path(directory) / "train.bin"
        write_tokens(train, 4 * MANY * SEQ)
        for name in MODELS:
            if arguments.only in (None, name):
                compare_speed(name, train, rounds, arguments.tuned_pytorch, sets, cores, bars)
        if arguments.only in (None, "workers"):
            for dtype in ["float32", "bf16"] if bf16_instructions(sets) else ["float32"]:
                compare_workers(dtype, train, rounds, cores, bars)
    print(f"\n{cores.disturbed} of {cores.blocks} blocks were disturbed by other programs")
    if bars.missed:
        print("bars missed: " + "; ".join(bars.missed))
    return 1 if bars.missed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends this program without a traceback
    try:
        sys.exit(main())
    except RuntimeError as error:
        sys.exit(f"bench_cpu: {error}")
