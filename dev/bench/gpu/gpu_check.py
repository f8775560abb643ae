#!/usr/bin/env python3
"""Tests the program on a GPU in one call of 570 seconds: whether results are right, and how fast it is.
The speed is compared with PyTorch and with the rates of the GPU.

    dev/bench/gpu/gpu_check.py                      all parts; report.md, results.json and a log per part in
                                                    build/gpu_report
    dev/bench/gpu/gpu_check.py --out DIR            the same; continues where the last call with DIR stopped
    dev/bench/gpu/gpu_check.py --parts right,speed  some of the parts
    dev/bench/gpu/gpu_check.py --only TEXT          the checks whose names contain TEXT
    dev/bench/gpu/gpu_check.py --most S             no check takes more than S seconds
    dev/bench/gpu/gpu_check.py --tokens DIR         real text for the runs with loss: DIR/train.bin, val.bin
    dev/bench/gpu/gpu_check.py --emulated           tiny shapes on the emulated device, for tests

It needs a machine with an NVIDIA GPU, its driver, CUDA's toolkit, a C compiler and python3. It does not need
make, and needs PyTorch only for the comparison. Nothing is downloaded. The parts, the most useful first:

    build      the programs
    right      operators against float64, whole models against the CPU, bf16 at real shapes against float32 on
               the same GPU, the same bits in three runs, and the same bits in one process and in several
    speed      a large product and a large copy, copies from and to the host, training steps, attention,
               every kernel
    races      compute-sanitizer's racecheck on attention, whose kernels share most memory
    pytorch    the same in PyTorch; then further shapes of our steps
    lossy      8 and 16 workers on the GPU at 0, 20 and 40% loss, with --plain and by default
    cudnn      the first of the training steps with --attention cudnn, and attention by cuDNN
    sanitizer  compute-sanitizer on the operator tests

Each check and each measurement is a process with a time limit. Its output is kept, even if it is ended. One that
fails with an error of CUDA, dies or hangs is repeated once with CUDA_LAUNCH_BLOCKING=1, and the report says in
which kernel of which rank. If the operator tests end before their end, each operator is tested by itself.
States: done; wrong; out of time, which is not wrong; not reached; not possible here. A later call with the same
--out does what is not done yet, and at last what was out of time. Exit codes: 1 if something is wrong, 3 if
nothing is wrong but time ran out, else 0.
"""
import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from typing import Callable

import gpu_build
from gpu_report import good, write_report

ROOT = pathlib.Path(__file__).resolve().parents[3]
PARTS = ("build", "right", "speed", "races", "pytorch", "lossy", "cudnn", "sanitizer")
# These parts share a log, since a lent machine may return only eight files.
LOGS = {"cudnn": "speed", "races": "sanitizer"}
DONE, WRONG, OUT_OF_TIME = "done", "wrong", "out of time"
NOT_REACHED, NOT_POSSIBLE = "not reached", "not possible"
SKIPPED = 77  # exit code of a check that cannot be made here
LEAST_SECONDS = 5  # no task begins if less time is left

FULL = dict(
    parity=[("260K", 3, 65), ("15M", 2, 200)],
    # B, T, H, K, D of attention; N, C, F, H, K, D, V
    values=[(1, 4096, 32, 32, 128), (1, 2048, 32, 4, 64), (4096, 4096, 11008, 32, 32, 128, 32000)],
    bits=[(16384, 2048, 5632, 32, 4, 64, 32000), (8192, 4096, 11008, 32, 32, 128, 32000)],
    ranks=["--model=15M", "--batch=4", "--seq=256", "--steps=5"],
    most_work=None,
    peak=(8192, 1 << 32), host=(8192, 1 << 30),
    # model, layers (0: as many as fit), batch, sequence, steps; then modes of PyTorch
    # (7B with 14 layers: nothing is computed again)
    steps=[("1.1B", 22, 8, 2048, 8), ("15M", 6, 64, 256, 40), ("7B", 0, 1, 4096, 4), ("7B", 14, 2, 4096, 4)],
    more_steps=[("110M", 12, 16, 1024, 20), ("7B", 0, 1, 2048, 4)],
    modes=["compile-bf16", "compile-autocast"],
    # B, T, H, K, D: of 110M, 1.1B, 7B, and one long sequence
    attention=[(16, 1024, 12, 12, 64), (8, 2048, 32, 4, 64), (1, 4096, 32, 32, 128),
               (1, 16384, 32, 8, 128)],
    backends=["flash", "cudnn"],
    # N, C, F, H, K, D, V
    kernels=[(16384, 2048, 5632, 32, 4, 64, 32000), (8192, 4096, 11008, 32, 32, 128, 32000)],
    lossy=dict(model="42M", batch=4, seq=512, lr=1e-3, steps=200, eval_sequences=64),
    workers=[8, 16], losses=[0, 0.2, 0.4], device="cuda", seconds="0.2")
TINY = dict(
    parity=[("260K", 1, 17)],
    values=[(1, 300, 6, 2, 16), (33, 64, 40, 2, 1, 32, 72)],
    bits=[(33, 64, 40, 2, 1, 32, 72)],
    ranks=["--model=260K", "--batch=1", "--seq=16", "--steps=2"],
    most_work="300",
    peak=(48, 1 << 12), host=(48, 1 << 12),
    steps=[("260K", 2, 1, 32, 1)],
    more_steps=[],
    modes=["bf16"],
    attention=[(1, 33, 2, 1, 64)],
    backends=["math"],
    kernels=[(9, 64, 40, 2, 1, 32, 72)],
    lossy=dict(model="260K", batch=1, seq=16, lr=1e-3, steps=2, eval_sequences=2),
    workers=[2, 3], losses=[0, 0.4], device="cpu", seconds="0")
# The same bits in one process and in several. With a worker in each, a GPU keeps float32 only of what its worker
# owns; the members of a group read each other's gradients.
RANKS = [
    ("one process and two", 2, ["--workers=4"]),
    ("a worker in each process", 2, ["--workers=2"]),
    ("a worker in each process, bf16", 2, ["--workers=2", "--wire-dtype=bf16"]),
    ("a worker in each process, int8", 2, ["--workers=2", "--wire-dtype=int8"]),
    ("a worker in each process, micro-batches", 2, ["--workers=2", "--wire-dtype=bf16", "--micro-batches=2"]),
    ("groups of two processes, bf16", 4, ["--workers=4", "--group=2", "--wire-dtype=bf16"]),
]


@dataclasses.dataclass
class Task:
    """A check or a measurement: a command that prints JSON lines, or none at all."""
    part: str
    key: str
    seconds: int  # time limit
    command: Callable  # called when its turn comes; returns None if it is not possible, because of `why`
    why: str = ""
    environment: dict = dataclasses.field(default_factory=dict)
    more: dict = dataclasses.field(default_factory=dict)  # further members of its entry in the results
    ours: bool = True  # whether a failure means that our program is wrong


def joined(shape):
    return "x".join(map(str, shape))


class Tasks:
    """The tasks for this machine, in order."""

    def __init__(self, options, results):
        self.options, self.results = options, results
        self.shapes = TINY if options.emulated else FULL
        self.made = ROOT / os.environ.get("BUILD", "build")
        self.programs = self.made / ("emulated" if options.emulated else "gpu")
        self.data = self.made / "gpu_data"
        self.data.mkdir(parents=True, exist_ok=True)
        # Options of all runs that train.
        self.train = ["--device=cuda", "--quiet"]

    def all(self):
        for part in PARTS:
            if part in self.options.parts.split(","):
                yield from getattr(self, part)()

    def each_operator(self):
        """The operator tests as checks of their own, for a GPU on which they do not come to their end."""
        for name in operator_tests():
            yield Task("right", f"operators: {name}", 30, lambda: [self.operators()],
                       environment={**self.smaller(), "OPERATORS_ONLY": name})

    def smaller(self):
        most = self.shapes["most_work"]
        return {"OPERATORS_MOST_WORK": most} if most else {}

    def operators(self):
        return (self.made / "test/cuda/test_operators_emulated" if self.options.emulated
                else self.programs / "test/cuda/test_operators_device")

    def ours(self, part, key, seconds, name, *arguments, **more):
        return Task(part, key, seconds, lambda: [self.programs / name, *arguments], more=more)

    def theirs(self, part, key, seconds, arguments):
        """A task of PyTorch. `arguments` is called when its turn comes, after our task of the same shape."""
        def command():
            if key != "pytorch" and not good(self.results.get("pytorch")):
                return None
            return [sys.executable, ROOT / "dev/bench/gpu/gpu_bench_pytorch.py",
                    f"--device={self.shapes['device']}", f"--seconds={self.shapes['seconds']}",
                    *arguments()]
        return Task(part, key, seconds, command, why="no PyTorch here", ours=False)

    # ---- the parts ----

    def build(self):
        if not self.options.emulated:
            yield Task("build", "build", 240,
                       lambda: [sys.executable, gpu_build.__file__])

    def right(self):
        s = self.shapes
        yield Task("right", "operators", 120, lambda: [self.operators()], environment=self.smaller())
        for shape in s["parity"]:
            yield self.ours("right", f"parity {joined(shape)}", 60, "gpu_check", "parity", *shape)
        for shape in s["values"]:
            yield self.ours("right", f"values {joined(shape)}", 60, "gpu_check", "values", *shape)
        for shape in s["bits"]:
            yield self.ours("right", f"bits {joined(shape)}", 60, "gpu_check", "bits", *shape)
        train, _, _ = self.tokens()
        for i, (key, ranks, more) in enumerate(RANKS):  # ports below those that Linux gives to any program
            yield self.ours("right", key, 60, "gpu_check", "ranks", ranks,
                            f"127.0.0.1:{20000 + (os.getpid() + i) % 12000}", *self.train, *s["ranks"],
                            f"--train={train}", "--link=udp", "--loss-rate=0.1", "--packet-bytes=1024", *more)

    def step(self, part, model, layers, batch, seq, steps):
        return self.ours(part, f"step {model} {batch}x{seq}", 90, "gpu_bench", "step", model, layers,
                         batch, seq, steps)

    def speed(self):
        s = self.shapes
        yield self.ours("speed", "peak", 60, "gpu_bench", "peak", *s["peak"])
        for shape in s["steps"]:
            yield self.step("speed", *shape)
        for shape in s["attention"]:
            yield self.ours("speed", f"attention {joined(shape)}", 40, "gpu_bench", "attention", *shape)
        for shape in s["kernels"]:
            yield self.ours("speed", f"kernels {joined(shape)}", 60, "gpu_bench", "kernels", *shape)
        yield self.ours("speed", "host", 40, "gpu_bench", "host", *s["host"])

    def torch_step(self, mode, model, layers, batch, seq, steps):
        key = f"step {model} {batch}x{seq}"
        def arguments():
            same = self.results.get(key, {}).get("layers", layers)
            return ["step", model, same, batch, seq, steps, mode]
        return self.theirs("pytorch", f"{key}, PyTorch {mode}", 120, arguments)

    def pytorch(self):
        s = self.shapes
        yield self.theirs("pytorch", "pytorch", 90, lambda: ["probe"])
        yield self.theirs("pytorch", "peak of PyTorch", 60, lambda: ["gemm", s["peak"][0]])
        for mode in s["modes"]:
            for shape in s["steps"]:
                yield self.torch_step(mode, *shape)
            for shape in s["attention"] if mode == s["modes"][0] else []:
                for backend in s["backends"]:
                    yield self.theirs("pytorch", f"attention {joined(shape)}, {backend}", 40,
                                      lambda x=shape, b=backend: ["attention", *x, b])
        for shape in s["more_steps"]:
            yield self.step("pytorch", *shape)
            yield self.torch_step(s["modes"][0], *shape)

    def lossy(self):
        """All runs with the same number of workers train the same steps on the same text: as in the paper, and by
        default."""
        train, val, text = self.tokens()
        s = self.shapes["lossy"]
        for workers in self.shapes["workers"]:
            for loss, rule in [(loss, rule) for loss in self.shapes["losses"] for rule in ("plain", "default")]:
                yield self.ours(
                    "lossy", f"lossy {workers} workers {loss:g}, {rule}", 90, "gpu_bench", "train", *self.train,
                    f"--model={s['model']}", f"--workers={workers}", f"--batch={s['batch']}",
                    f"--seq={s['seq']}", f"--lr={s['lr']}", f"--warmup={max(1, s['steps'] // 20)}",
                    f"--train={train}", f"--val={val}", f"--steps={s['steps']}", f"--loss-rate={loss}",
                    *(["--plain"] if rule == "plain" else []),
                    "--eval-every=0", f"--eval-sequences={s['eval_sequences']}",
                    text=text, model=s["model"], rule=rule)

    def cudnn(self):
        """The steps are compared with the same steps of `speed`: their last losses must be close."""
        model, _, batch, seq, steps = self.shapes["steps"][0]
        base = f"step {model} {batch}x{seq}"
        def command():
            plain = self.results.get(base)
            return good(plain) and [self.programs / "gpu_bench", "step", model, plain["layers"], batch, seq, steps,
                                    "cudnn", plain["last_loss"]]
        yield Task("cudnn", f"cudnn {model} {batch}x{seq}", 90, command, why=f"no '{base}' to stand beside",
                   more={"base": base})
        for shape in self.shapes["attention"]:
            yield self.ours("cudnn", f"attention {joined(shape)} by cuDNN", 40, "gpu_bench", "attention",
                            *shape, "cudnn")

    def races(self):
        yield self.sanitized("racecheck of attention", ["racecheck"], 60,
                             {"OPERATORS_MOST_WORK": "10000", "OPERATORS_ONLY": "test_attention"})

    def sanitizer(self):
        # The tests ask for more memory than there is, which is no error.
        for tool in (["memcheck", "--report-api-errors", "no"], ["racecheck"], ["synccheck"]):
            yield self.sanitized(tool[0], tool, 150, {"OPERATORS_MOST_WORK": "10000"})

    def sanitized(self, key, tool, seconds, environment):
        nvcc = pathlib.Path(gpu_build.find_nvcc())
        places = [nvcc.parent, nvcc.parent.parent / "compute-sanitizer"]
        program = shutil.which("compute-sanitizer", path=os.pathsep.join(
            [os.environ.get("PATH", ""), *map(str, places)]))
        return Task("races" if seconds == 60 else "sanitizer", f"compute-sanitizer {key}", seconds,
                    lambda: program and not self.options.emulated and [
                        program, "--tool", *tool, "--error-exitcode", 3, self.operators()],
                    why="not installed", environment=environment)

    def tokens(self):
        folder = self.options.tokens
        if folder:
            return folder / "train.bin", folder / "val.bin", str(folder.name)
        for name, count, seed in (("train.bin", 400_000, 1), ("val.bin", 40_000, 2)):
            if not (self.data / name).exists():
                write_markov(self.data / name, count if not self.options.emulated else 4000, 500, seed)
        return self.data / "train.bin", self.data / "val.bin", "made-up text"


def operator_tests():
    """The names of the tests in test_operators_device."""
    text = "".join((ROOT / "test" / name).read_text(encoding="utf-8")
                   for name in ("llmc/operators_list.h", "cuda/test_operators_device.c"))
    return re.findall(r"^(?:OPERATOR_TEST|\s+cmocka_unit_test_setup)\((test_\w+)", text, re.MULTILINE)


def where_it_was(folder):
    """What processes had launched last, from the files of CUDA_LAUNCHED (llmc/backend/cuda/streams.h)."""
    said = [path.read_bytes().rstrip(b"\0").decode(errors="replace") for path in sorted(folder.glob("launched.*"))]
    if said and shutil.which("c++filt"):
        said = subprocess.run(["c++filt"], input="\n".join(said), text=True, capture_output=True,
                              check=False).stdout.splitlines()
    names = [re.sub(r"\(.*", "", line.replace("void ", "")) for line in said if line]
    return "; ".join(sorted(set(names)))


def json_lines(output):
    lines = []
    for line in output.splitlines():
        try:
            lines += [json.loads(line)] if line.startswith("{") else []
        except ValueError:
            pass  # a line that is cut short because its process was ended
    return lines


@contextlib.contextmanager
def signals_held():
    """SIGTERM and SIGINT that come in the block are handled when it ends."""
    came = []
    before = {number: signal.signal(number, lambda number, _: came.append(number))
              for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


def in_order(tasks, results):
    """The tasks that are not done. Those that ran out of time before come last, since they may again."""
    waiting = [task for task in tasks if not good(results.get(task.key))]
    return sorted(waiting, key=lambda task: results.get(task.key, {}).get("state") == OUT_OF_TIME)


def reason_of(output, status):
    """The line of a failed check's output that most likely says the reason."""
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith(("{", "#"))]
    telling = [line for line in lines if re.search("error|fail|wrong|off by|other bits", line, re.I)]
    telling.sort(key=lambda line: "CUDA: " not in line and "cuBLASLt: " not in line)  # these say most
    if status < 0:
        return f"ended by {signal.Signals(-status).name}: {(lines[-1:] + ['nothing said'])[0].strip()[:200]}"
    return f"exit code {status}: {(telling + lines[-1:] + ['nothing said'])[0].strip()[:200]}"


class Check:
    """Runs one task after another and stores the results."""

    def __init__(self, options):
        self.options = options
        self.out = options.out
        self.out.mkdir(parents=True, exist_ok=True)
        self.kept = self.out / "results.json"
        self.results = json.loads(self.kept.read_text()) if self.kept.exists() else {}
        self.end = time.monotonic() + options.limit
        own = os.environ.get("LD_LIBRARY_PATH")
        self.libraries = os.pathsep.join([*([own] if own else []), *gpu_build.library_folders()])
        self.shapes = TINY if options.emulated else FULL

    def left(self):
        return self.end - time.monotonic()

    def keep(self, task, state, why="", took=0.0, lines=()):
        self.results[task.key] = {**(lines[0] if lines else {}), **task.more, "lines": list(lines),
                                  "part": task.part, "state": state, "why": why, "took": took}
        new = self.kept.with_suffix(".new")
        new.write_text(json.dumps(self.results, indent=1))
        new.replace(self.kept)
        write_report(self.out / "report.md", self.results, self.shapes)
        print(f"{state:12} {took:4.0f} s  {task.part}: {task.key}{': ' if why else ''}{why}", flush=True)

    def run(self, task):
        if self.left() < LEAST_SECONDS:
            if task.key not in self.results:
                self.keep(task, NOT_REACHED)
            return
        command = task.command()
        if not command:
            self.keep(task, NOT_POSSIBLE, task.why)
            return
        # A processor that emulates a GPU may have much else to do.
        limit = min(task.seconds * (20 if self.options.emulated else 1), self.options.most, self.left())
        status, output, took = self.attempt(task, command, limit)
        why = ""
        if task.ours and task.part != "build" and self.tells_more(task, status, output):
            with tempfile.TemporaryDirectory() as folder:
                blocking = {"CUDA_LAUNCH_BLOCKING": "1", "CUDA_LAUNCHED": f"{folder}/launched"}
                again, said, more = self.attempt(task, command, min(limit, self.left()), blocking)
                where = where_it_was(pathlib.Path(folder))
            took += more
            why = f"; with CUDA_LAUNCH_BLOCKING=1: {self.told(again, said, limit)}, last launched: {where or 'nothing'}"
        lines = json_lines(output)
        state = (OUT_OF_TIME if status is None else DONE if status == 0
                 else NOT_POSSIBLE if status == SKIPPED or not task.ours else WRONG)
        self.keep(task, state, self.told(status, output, limit) + why, took, lines)

    def tells_more(self, task, status, output):
        """Whether a repetition with launches that block may say where it was: after an error of CUDA, a signal, or
        a hang. A measurement that takes too long only needs more time."""
        if self.left() < LEAST_SECONDS or status in (0, SKIPPED):
            return False
        hangs = status is None and task.part == "right"
        died = status is not None and (status < 0 or "was ended by signal" in output)
        return hangs or died or (status is not None and re.search(r"CUDA: |cuBLASLt: ", output) is not None)

    @staticmethod
    def told(status, output, limit):
        if status is None:
            return f"ended after {limit:.0f} s"
        return reason_of(output, status) if status else ""

    def attempt(self, task, command, limit, more=None):
        """Runs a command. Returns its status (None: time ran out), its output, and the seconds that it took."""
        start, words = time.monotonic(), list(map(str, command))
        with open(self.out / f"{LOGS.get(task.part, task.part)}.log", "a+", encoding="utf-8", errors="replace") as log:
            print(f"\n== {task.key}: {' '.join([*map('='.join, (more or {}).items()), *words])}", file=log, flush=True)
            began = log.seek(0, os.SEEK_END)
            status = self.wait_for(words, {**task.environment, **(more or {})}, log, limit)
            log.seek(began)
            return status, log.read(), time.monotonic() - start

    def wait_for(self, words, more, log, limit):
        """Returns the exit status, or None if time ran out. Ends all processes that the command started."""
        environment = {**os.environ, "GPU_BENCH_SECONDS": self.shapes["seconds"], "LD_LIBRARY_PATH": self.libraries,
                       **more}
        process = None
        try:
            with signals_held():  # one that came while the process starts would leave it to run on
                process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                           env=environment, start_new_session=True)
            return process.wait(limit)
        except OSError as error:
            print(f"error: {error}", file=log, flush=True)
            return 127
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process:
                try:
                    os.killpg(process.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                process.wait()

    def status(self, tasks):
        states = {self.results[task.key]["state"] for task in tasks}
        return 1 if WRONG in states else 3 if states & {OUT_OF_TIME, NOT_REACHED} else 0


def write_markov(path, count, vocabulary, seed):
    """Writes tokens of which each has four likely successors, in llm.c's format."""
    chain, choose = random.Random(7), random.Random(seed)
    successors = [[chain.randrange(vocabulary) for _ in range(4)] for _ in range(vocabulary)]
    tokens = [0]
    while len(tokens) < count:
        noise = choose.random() < 0.1
        tokens.append(choose.randrange(vocabulary) if noise
                      else choose.choice(successors[tokens[-1]]))
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", 20240520, 1, count, vocabulary, *[0] * 252))
        file.write(struct.pack(f"<{count}H", *tokens))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "gpu_report")
    parser.add_argument("--limit", type=float, default=570, help="seconds in all (570)")
    parser.add_argument("--most", type=float, default=600, help="seconds of a check, at most (its own limit)")
    parser.add_argument("--parts", default=",".join(PARTS), help=",".join(PARTS))
    parser.add_argument("--only", default="", help="checks whose names contain this")
    parser.add_argument("--tokens", type=pathlib.Path, help="folder with train.bin and val.bin")
    parser.add_argument("--emulated", action="store_true", help="tiny shapes, for tests")
    options = parser.parse_args()
    options.out = options.out.resolve()
    wrong = set(options.parts.split(",")) - set(PARTS)
    if wrong:
        parser.error(f"--parts: expected {','.join(PARTS)}, got '{','.join(sorted(wrong))}'")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))  # results so far are on the disk
    check = Check(options)
    source = Tasks(options, check.results)
    tasks = [task for task in source.all() if options.only in task.key]
    for task in in_order(tasks, check.results):
        check.run(task)
        ended = task.key == "operators" and check.results[task.key]["state"] in (WRONG, OUT_OF_TIME)
        if ended:
            each = list(source.each_operator())
            tasks += each
            for operator in in_order(each, check.results):
                check.run(operator)
        if task.key == "build" and not good(check.results["build"]):
            break
    write_report(check.out / "report.md", check.results, check.shapes)
    print(check.out / "report.md")
    return check.status([task for task in tasks if task.key in check.results])


if __name__ == "__main__":
    sys.exit(main())
