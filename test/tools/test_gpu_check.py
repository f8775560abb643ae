"""Tests all of dev/bench/gpu/gpu_check.py on the emulated device with tiny shapes: everything runs, no result
is lost if it is ended, a later call continues, and the report's arithmetic is right. Speeds are not tested."""
import argparse
import importlib.util
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from cudnn import fake_cudnn
from program import BUILD, ROOT, TIMEOUT, environment_of

FOLDER = ROOT / "dev" / "bench" / "gpu"
SCRIPT = FOLDER / "gpu_check.py"
sys.path.insert(0, str(FOLDER))
import gpu_build  # pylint: disable=wrong-import-position
import gpu_check  # pylint: disable=wrong-import-position
import gpu_report  # pylint: disable=wrong-import-position

pytestmark = pytest.mark.takes(60)


def start(out, *more, libraries="", broken=None):
    environment = environment_of({
        "BUILD": str(BUILD), "LD_LIBRARY_PATH": str(libraries), "EMULATED_BROKEN": broken,
        "EMULATED_MEMORY": "4000000000"})  # otherwise it would be this machine's free memory
    return subprocess.Popen([sys.executable, SCRIPT, "--emulated", f"--out={out}", *more], cwd=ROOT,
                            env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)


def check(out, *more, **how):
    process = start(out, *more, **how)
    return process.communicate(timeout=TIMEOUT)[0], process.returncode


def kept(out):
    try:
        return json.loads((out / "results.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Returns (results, report) of all parts, which two calls make. The first is ended from outside after its
    second check. The other makes the rest, and repeats nothing."""
    out, libraries = tmp_path_factory.mktemp("check"), fake_cudnn(tmp_path_factory.mktemp("libraries"))
    first = start(out, "--limit=3000", libraries=libraries)
    while first.poll() is None and len(kept(out)) < 2:
        time.sleep(0.02)
    first.send_signal(signal.SIGTERM)
    said = first.communicate(timeout=TIMEOUT)[0]
    before = kept(out)
    assert first.returncode == 3 and before["operators"]["state"] == "done", said
    said, status = check(out, "--limit=3000", libraries=libraries)
    assert status == 0, said
    for key in before:
        assert f": {key}" not in said.splitlines(), "was made again"
    assert (out / "right.log").read_text(encoding="utf-8").count("== operators") == 1
    return kept(out), (out / "report.md").read_text(encoding="utf-8")


def test_a_process_that_starts_while_the_check_is_ended_does_not_run_on(tmp_path, monkeypatch):
    """It would write its results among those of the next call."""
    check_here = gpu_check.Check(argparse.Namespace(out=tmp_path, limit=60, emulated=True))
    started = []

    def popen(*arguments, **how):
        started.append(starts(*arguments, **how))
        os.kill(os.getpid(), signal.SIGTERM)
        return started[0]

    starts = subprocess.Popen
    monkeypatch.setattr(gpu_check.subprocess, "Popen", popen)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
    try:
        with open(tmp_path / "log", "w", encoding="utf-8") as log, pytest.raises(SystemExit, match="3"):
            check_here.wait_for(["sleep", "60"], {}, log, 60)
        assert started[0].returncode == -signal.SIGKILL
    finally:
        signal.signal(signal.SIGTERM, before)
        started[0].kill()
        started[0].wait()


def rows(report, section):
    """The rows of a section's table, as dicts whose keys are the header."""
    lines = report.split(f"## {section}\n")[1].split("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")]
             for line in lines if line.startswith("|")]
    return [dict(zip(cells[0], row)) for row in cells[2:]]


def near(text, value, digits=3):
    number = float(re.match(r"[-+]?[\d.]+(e[-+]?\d+)?", text).group())
    assert number == pytest.approx(value, rel=10 ** -digits, abs=0.051), (text, value)


def test_everything_is_right(measured):
    results, report = measured
    assert {x["part"] for x in results.values()} == set(gpu_check.PARTS) - {"build"}
    for key, x in results.items():
        assert x["state"] == "done" or x["part"] in ("pytorch", "races", "sanitizer"), (key, x)
    assert len(rows(report, "Checks")) == len(results)
    (bits,) = [x for key, x in results.items() if key.startswith("bits ")]
    assert len(bits["lines"]) == 17 and all(line["good"] and line["times"] == 3 for line in bits["lines"])
    for key, several, _ in gpu_check.RANKS:
        ranks = results[key]
        assert ranks["ranks"] == several and ranks["steps"] == 2 and ranks["good"], key


def test_steps_and_their_arithmetic(measured):
    results, report = measured
    (row,) = rows(report, "Training steps")
    x = results["step 260K 1x32"]
    C, L, H, K, D, F, V, T = 64, 2, 8, 4, 8, 172, 500, 32
    layer = (H + 2 * K) * D * C + H * D * C + 3 * C * F + 2 * C
    N = L * layer + C + V * C  # embedding and classifier share one table
    assert x["parameters"] == N
    assert x["flops_6n"] == pytest.approx(6 * N * T, rel=1e-6)
    assert x["flops"] == pytest.approx(6 * N * T + 6 * L * H * D * T * T, rel=1e-6)
    assert 5 < x["last_loss"] < 7 and x["last_loss"] < x["first_loss"]
    peak = results["peak"]["flops"] / results["peak"]["seconds"]
    assert results["peak"]["flops"] == 2 * 48**3
    near(row["tokens/s"], T / x["seconds"])
    near(row["6N"], 100 * x["flops_6n"] / x["seconds"] / peak)
    near(row["6N + attention"], 100 * x["flops"] / x["seconds"] / peak)
    (row,) = rows(report, "Memory")
    assert x["used_bytes"] > 18 * N  # weights in use, master weights, gradients, two moments
    near(row["off by"], 100 * (x["estimated_bytes"] / x["used_bytes"] - 1))


def step_plan(*options):
    """What --dry-run says of a step: {row: [H100, H200, A100, 4090]}, in milliseconds."""
    said = subprocess.run([BUILD / "train_llama2", "--dry-run", "--dtype=bf16", *options], cwd=ROOT, text=True,
                          capture_output=True, check=True).stdout
    table = said.split("Expected milliseconds of a step")[1]
    return {row[1]: [float(x) for x in row[2].replace("%", "").split()]
            for row in re.finditer(r"^  (\S.*?) +((?:[\d.]+%? *){4})$", table, re.MULTILINE)}


def test_the_model_of_a_step_is_what_an_h100_took(tmp_path):
    """Kernel times of 1.1B, traced, and whole steps (dev/bench/gpu/notes.md)."""
    big = ["--model=1.1B", "--batch=8", "--seq=2048"]
    for attention, traced in (("own", 57.2), ("cudnn", 43.0)):
        said = step_plan(*big, f"--attention={attention}")
        assert said["attention"][0] == pytest.approx(traced, rel=0.03)
        for part, took in (("products of layers", 128.6), ("norms, rope, SwiGLU", 22.6), ("classifier", 9.8),
                           ("optimizer and norm", 12.4)):
            assert said[part][0] == pytest.approx(took, rel=0.05), part
    layers = {}
    for count in (4, 14):
        layers[count] = tmp_path / f"{count}.json"
        layers[count].write_text(json.dumps({
            "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": count,
            "num_attention_heads": 32, "vocab_size": 32000, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096}))
    for ms, attention, *options in ((236.3, "own", *big), (222.8, "cudnn", *big),
                                    (30.1, "own", "--model=110M", "--batch=16", "--seq=1024"),
                                    (99.4, "own", f"--model={layers[4]}", "--batch=2", "--seq=4096"),
                                    (91.7, "cudnn", f"--model={layers[4]}", "--batch=2", "--seq=4096"),
                                    (330.7, "own", f"--model={layers[14]}", "--batch=2", "--seq=4096")):
        said = step_plan(*options, f"--attention={attention}")
        assert said["step"][0] == pytest.approx(ms, rel=0.05), options
        tokens = {"--batch=8": 16384, "--batch=16": 16384, "--batch=2": 8192}[options[-2]]
        assert said["tokens per second"][0] == pytest.approx(1e3 * tokens / said["step"][0], rel=1e-3)
    levels = [step_plan("--model=7B", "--batch=2", "--seq=4096", f"--recompute={level}")["step"]
              for level in ("none", "norms", "attention", "block")]
    assert levels == sorted(levels) and levels[1][0] < 1.03 * levels[0][0]


def test_a_step_stands_beside_the_model(measured):
    """Where the device is one that --dry-run knows; the emulated one is not."""
    (row,) = rows(measured[1], "Training steps")
    assert row["by --dry-run"] == "-"
    done = bench("step", "260K", "5", "1", "32", "1", EMULATED_DEVICE="NVIDIA H100 80GB HBM3 (sm_90)")
    said = step_plan("--model=260K", "--vocab-size=500", "--batch=1", "--seq=32", "--attention=own")
    assert 1e3 * json.loads(done.stdout)["expected_seconds"] == pytest.approx(said["step"][0], abs=0.051)


def test_what_computing_hides():
    """7B on 64 GPUs, 8 of which share a node."""
    options = ["--model=7B", "--workers=64", "--seq=4096", "--wire-dtype=bf16", "--link-gbps=400", "--batch=1"]
    options += ["--link-threads=64"]
    said = step_plan(*options, "--group=8", "--micro-batches=16")
    assert said["exchange, not hidden"][0] <= 60
    alone, apart, thread = (step_plan(*options, *more)["exchange, not hidden"][0]
                            for more in (["--group=1"], ["--group=8", "--no-overlap"], ["--group=8", "--link-threads=1"]))
    assert alone > 250 and apart > 250  # one micro-batch: PCIe carries more than backward hides
    # Two phases of 7/8 of an eighth: 1.4 ns for an element, 0.58 for a byte (memory_plan.c), less what computing hides.
    assert 0.85 < thread / (2e3 * 6.74e9 * 7 / 64 * (1.4e-9 + 2 * 0.58e-9)) < 1


def test_attention(measured):
    results, report = measured
    own, cudnn = rows(report, "Attention")
    for row, key in ((own, "attention 1x33x2x1x64"), (cudnn, "attention 1x33x2x1x64 by cuDNN")):
        x = results[key]
        assert x["forward_flops"] == 2 * 2 * 33 * 33 * 64 and x["backward_flops"] == 5 * 2 * 33 * 33 * 64
        near(row["forward us"], 1e6 * x["forward_seconds"])
        near(row["backward us"], 1e6 * x["backward_seconds"])


def test_kernels_count_their_bytes(measured):
    results, report = measured
    (N, C, F, H, K, D, V), P = (9, 64, 40, 2, 1, 32, 72), 72 * 64
    expected = {
        "rmsnorm_forward": 2 * N * C * 2 + 4 * N, "residual_rmsnorm_forward": 4 * N * C * 2 + 4 * N,
        "rmsnorm_backward": 4 * N * C * 2 + 4 * N,
        "rope": 2 * N * (H + K) * D * 2 + 2 * 4 * N * D / 2,
        "swiglu_forward": 3 * N * F * 2, "swiglu_backward": 5 * N * F * 2,
        "embedding_forward": 2 * N * C * 2 + 4 * N, "embedding_backward": N * C * 2 + 4 * P + 4 * N,
        "classifier less its products": 2 * N * V * 2 + 8 * N, "adamw": 28 * P, "convert": 6 * P,
        "sum_of_squares": 4 * P, "weighted_sum of 4": 20 * P + 16 * math.ceil(P / 1024),
        "weighted_sum of 4, from the host": 16 * P,
        "exchange_copy": 8 * P + math.ceil(P / 1024)}
    lines = {x["name"]: x for x in results["kernels 9x64x40x2x1x32x72"]["lines"]}
    assert {name: x["bytes"] for name, x in lines.items()} == expected
    copy = results["peak"]["copy_bytes"] / results["peak"]["copy_seconds"]
    for row in rows(report, "What memory bounds"):
        x = lines[row["operation"]]
        near(row["GB/s"], x["bytes"] / x["seconds"] / 1e9)
        near(row["of copy"], 100 * x["bytes"] / x["seconds"] / copy)


def test_runs_with_loss(measured):
    results, report = measured
    table = rows(report, "Workers that lose packets")
    assert [(row["workers"], row["loss"], row["rule"]) for row in table] == [
        (workers, loss, rule) for workers in "23" for loss in ("0.0%", "40.0%") for rule in ("plain", "default")]
    for row in table:
        x = results[f"lossy {row['workers']} workers {float(row['loss'][:-1]) / 100:g}, {row['rule']}"]
        base = results[f"lossy {row['workers']} workers 0, plain"]
        near(row["perplexity"], math.exp(x["val_loss"]))
        near(row["change"], 100 * (math.exp(x["val_loss"] - base["val_loss"]) - 1))
        assert x["tokens"] == 2 * 16 * int(row["workers"])
        sent_again = row["rule"] == "default" and x["loss_rate"] > 0
        low, high = (0, 0.1) if sent_again else (0.3, 0.5) if x["loss_rate"] > 0 else (0, 0)
        assert low <= x["gradient_lost"] <= high


def test_steps_by_cudnn(measured):
    results, report = measured
    base, x = results["step 260K 1x32"], results["cudnn 260K 1x32"]
    (row,) = rows(report, "With --attention cudnn")
    assert base["cudnn"] == 0 and x["cudnn"] == 91900
    near(row["tokens/s"], 32 / x["seconds"])
    near(row["ratio"], base["seconds"] / x["seconds"], 1)
    assert row["change"] == f"{100 * (x['last_loss'] - base['last_loss']) / base['first_loss']:+.3f}%"


def bench(*words, **environment):
    return subprocess.run([BUILD / "emulated" / "gpu_bench", *words], text=True, check=False,
                          capture_output=True, env={**os.environ, **environment})


@pytest.mark.parametrize("words", (("step", "260K", "2", "1", "32", "1", "cudnn", "6"),
                                   ("attention", "1", "33", "2", "1", "64", "cudnn")))
def test_cudnn_needs_cudnn(tmp_path, words):
    (tmp_path / "libcudnn.so.9").write_text("not a library")
    done = bench(*words, LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == gpu_check.SKIPPED and done.stdout == ""
    assert "cuDNN is not installed" in done.stderr


def test_another_loss_is_wrong(measured, tmp_path):
    loss, libraries = measured[0]["step 260K 1x32"]["last_loss"], str(fake_cudnn(tmp_path))
    for factor, status in ((1, 0), (1.005, 0), (1.03, 1)):
        done = bench("step", "260K", "2", "1", "32", "1", "cudnn", str(loss * factor), LD_LIBRARY_PATH=libraries)
        assert done.returncode == status and json.loads(done.stdout)["what"] == "step"
        assert ("of the first loss" in done.stderr) == (status == 1)


def test_files_that_a_lent_machine_returns():
    """The output has only few files: report.md, results.json and the logs."""
    assert len({gpu_check.LOGS.get(part, part) for part in gpu_check.PARTS}) + 2 == 8


def test_says_what_is_missing(measured):
    results, report = measured
    states = {row["what"]: (row["state"], row["why"]) for row in rows(report, "Checks")}
    if importlib.util.find_spec("torch"):
        assert results["pytorch"]["state"] == "done"
    else:
        why = "exit code 1: ModuleNotFoundError: No module named 'torch'"
        assert states["pytorch"] == ("not possible", why)
        assert states["step 260K 1x32, PyTorch bf16"] == ("not possible", "no PyTorch here")


class Options:
    """Options as the command line gives them."""
    emulated, parts, tokens, only, most = True, "right", None, "", 600

    def __init__(self, out, limit):
        self.out, self.limit = out, limit


def task(key, command, seconds=1000, ours=True):
    return gpu_check.Task("right", key, seconds, lambda: command, ours=ours)


def test_out_of_time_is_not_wrong(tmp_path):
    """A check that hangs is ended. Its output so far is kept, the other checks run, and it comes last in the
    next call."""
    hangs = task("hangs", ["sh", "-c", "echo '{\"a\": 1}'; echo '{\"a\": '; sleep 1000 & sleep 1000"], 0.2)
    fails = task("fails", ["sh", "-c", "echo '{\"a\": 2}'; echo an error; echo more; exit 1"])
    absent = task("absent", ["sh", "-c", "echo no such device; exit 77"])
    theirs = task("theirs", ["sh", "-c", "echo broken; exit 1"], ours=False)
    good = task("good", ["sh", "-c", "echo '{\"a\": 3}'"])
    tasks = [hangs, fails, absent, theirs, good]
    one = gpu_check.Check(Options(tmp_path, 1000))
    for each in gpu_check.in_order(tasks, one.results):
        one.run(each)
    states = {key: (x["state"], x["why"], x.get("a")) for key, x in kept(tmp_path).items()}
    assert states == {"hangs": ("out of time", "ended after 4 s; with CUDA_LAUNCH_BLOCKING=1: ended after 4 s, "
                                               "last launched: nothing", 1),
                      "fails": ("wrong", "exit code 1: an error", 2),
                      "absent": ("not possible", "exit code 77: no such device", None),
                      "theirs": ("not possible", "exit code 1: broken", None),
                      "good": ("done", "", 3)}
    assert one.status(tasks) == 1 and one.status([hangs, good]) == 3 and one.status([good, absent]) == 0
    assert gpu_check.in_order(tasks, one.results) == [fails, absent, theirs, hangs]
    two = gpu_check.Check(Options(tmp_path, 0))  # there is no time at all; known results stay
    for each in gpu_check.in_order([*tasks, task("late", ["true"])], two.results):
        two.run(each)
    states = {key: x["state"] for key, x in kept(tmp_path).items()}
    assert states == {"hangs": "out of time", "fails": "wrong", "absent": "not possible",
                      "theirs": "not possible", "good": "done", "late": "not reached"}


@pytest.mark.parametrize("mode", ["peak 8 64", "host 8 64", 
                                  "step 260K 0 1 24 1", "attention 1 33 2 1 64",
                                  "kernels 9 64 40 2 1 32 72"])
def test_no_device_is_told_from_a_failure(mode):
    done = subprocess.run([BUILD / "emulated" / "gpu_bench", *mode.split()], text=True, check=False,
                          capture_output=True, env=dict(os.environ, EMULATED_DEVICE="none"))
    assert done.returncode == gpu_check.SKIPPED and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "no NVIDIA driver" in done.stderr


def test_functions_that_stand_in_for_libraries():
    """dev/bare must have all functions of Jansson and xxHash that the program calls, or it could not be linked
    without these libraries. (A macro declares json_is_...)"""
    sources = [ROOT / "train_llama2.cu", *ROOT.glob("llmc/**/*.[ch]")]
    used = {name for source in sources
            for name in re.findall(r"\b(json_(?!is_)\w+|XXH\w+)\(", source.read_text(encoding="utf-8"))}
    bare = "".join((ROOT / "dev" / "bare" / name).read_text(encoding="utf-8")
                   for name in ("jansson.h", "xxhash.h"))
    assert len(used) > 20 and not [name for name in sorted(used) if f"{name}(" not in bare]


LOG = r"""
#include "llmc/log/jsonl.h"
int main(int count, char **words) {
    struct jsonl *log;
    if (count < 2 || jsonl_open_of_run(words[1], NULL, 0, 0, NULL, NULL, &log)) return 1;
    return jsonl_write(log, json_pack("{s:s}", "event", "run")) ? 1 : 0;
}"""


@pytest.mark.parametrize("static, status, said", [([], 0, '{"event":"run"}\n'), (["STATIC="], 1, "without Jansson")])
def test_a_log_without_shared_libraries(tmp_path, static, status, said):
    """make BARE=1 puts Jansson into the program where it is installed; elsewhere a log is refused before a run."""
    made = subprocess.run(["make", "-Bn", "BARE=1", *static, "MPI=0", "SECURE=0", "VERBS=0", "BLAS=none", "CUDA=0",
                           f"BUILD={tmp_path}", f"{tmp_path}/train_llama2"], cwd=ROOT, text=True, check=True,
                          capture_output=True, env={**os.environ, "MAKEFLAGS": ""}).stdout
    compiled = next(line for line in made.splitlines() if f"-o {tmp_path}/llmc/log/jsonl.o" in line)
    places = re.findall(r"(?:-I|-idirafter) ?\S+", compiled)
    linked = next(line for line in made.splitlines() if f"-o {tmp_path}/train_llama2.new" in line)
    inside = re.findall(r"-l:\S+", linked)
    if not static and not inside:
        pytest.skip("no libjansson.a and libxxhash.a here")
    (tmp_path / "log.c").write_text(LOG, encoding="utf-8")
    subprocess.run(["gcc", "-D_GNU_SOURCE", *" ".join(places).split(), str(tmp_path / "log.c"), "llmc/log/jsonl.c",
                    "llmc/log/error.c", "llmc/log/terminal.c", "llmc/util/file.c", *inside, "-lm", "-o",
                    str(tmp_path / "log")], cwd=ROOT, check=True)
    done = subprocess.run([tmp_path / "log", tmp_path / "log.jsonl"], text=True, capture_output=True, check=False)
    assert done.returncode == status, done.stderr
    assert said in ((tmp_path / "log.jsonl").read_text(encoding="utf-8") if not static else done.stderr)
    assert "libjansson" not in subprocess.run(["ldd", tmp_path / "log"], text=True, capture_output=True,
                                              check=True).stdout


def words(command):
    """The set of a command's words, without those that only make needs: for headers, a library, a faster linker."""
    return frozenset(command) - {"-MMD", "-MP", "-fPIC", "-fvisibility=hidden", "-fno-semantic-interposition",
                                 "-fuse-ld=gold"}


def test_builds_without_make_as_with_make(tmp_path):
    nvcc = gpu_build.find_nvcc()
    if not pathlib.Path(nvcc).exists():
        pytest.skip("no nvcc here: the commands that build without make were not compared")
    compiled, linked = gpu_build.commands(tmp_path, nvcc)
    done = subprocess.run(["make", "-Bn", *gpu_build.OPTIONS, f"NVCC={nvcc}", f"BUILD={tmp_path}", "CC=gcc",
                           "CXX=g++", *linked], cwd=ROOT, text=True, capture_output=True, check=True,
                          env={**os.environ, "MAKEFLAGS": ""})
    # make also has nvcc report the registers of kernels, for test_nvcc.py.
    # And it replaces a program at once when it is linked.
    told = [line.partition(" 2>")[0].partition(".new && mv ")[0].replace(" -Xptxas -v", "").split()
            for line in done.stdout.replace("\\\n", " ").splitlines()
            if line.startswith(("gcc ", "g++ ", f"{nvcc} "))]
    assert {words(command) for command in told} == {
        words(command) for command in [*compiled.values(), *linked.values()]}


def test_stands_beside_the_faster_pytorch(measured, tmp_path):
    """The report compares with the fastest measurement of PyTorch. The test writes these measurements."""
    results = dict(measured[0])
    seconds = results["step 260K 1x32"]["seconds"]
    done = {"part": "pytorch", "state": "done", "why": "", "took": 0}
    for mode, factor in (("slow", 3), ("fast", 1.5)):
        results[f"step 260K 1x32, PyTorch {mode}"] = {**done, "seconds": factor * seconds,
                                                      "recompute": "none"}
    results["peak of PyTorch"] = {**done, "flops": 8.0, "seconds": results["peak"]["seconds"] * 8
                                  / results["peak"]["flops"] / 2}
    said, status = check(tmp_path, "--parts=")
    assert status == 2 and "--parts: expected" in said
    gpu_report.write_report(tmp_path / "report.md", results, gpu_check.TINY)
    (row,) = rows((tmp_path / "report.md").read_text(encoding="utf-8"), "Training steps")
    assert row["ratio"] == "1.50x" and row["its mode"] == "PyTorch fast, none"
    near(row["6N"], 50 * results["step 260K 1x32"]["flops_6n"] / seconds
         * results["peak"]["seconds"] / results["peak"]["flops"])


# ---- rehearsals: what the first minute says of a GPU with a fault ----

def rehearse(out, broken, only, *more):
    said, status = check(out, "--parts=right", f"--only={only}", "--limit=300", *more, broken=broken)
    return kept(out), status, said, (out / "report.md").read_text(encoding="utf-8")


def test_says_what_is_wrong_only_at_a_large_shape(tmp_path):
    """Attention that leaves out a part of long sequences: shapes of the operator tests are right."""
    broken = "wrong:attention_forward_kernel:17"
    done = subprocess.run([BUILD / "test/cuda/test_operators_emulated"], cwd=ROOT, capture_output=True, check=False,
                          env={**os.environ, "OPERATORS_ONLY": "test_attention", "OPERATORS_MOST_WORK": "300",
                               "EMULATED_BROKEN": broken})
    assert done.returncode == 0, done.stdout.decode()
    results, status, said, report = rehearse(tmp_path, broken, "values")
    long, other = results["values 1x300x6x2x16"], results["values 33x64x40x2x1x32x72"]
    assert status == 1 and long["state"] == "wrong" and other["state"] == "done", said
    assert [line["good"] for line in long["lines"]] == [False, False]
    assert "attention of 1 x 300 x 6 x 2 x 16: row " in long["why"] and long["why"] in report


def test_goes_on_after_an_operator_that_fails(tmp_path):
    """An error of CUDA ends the process: each operator is then tested by itself, and the kernel is named."""
    results, status, said, report = rehearse(tmp_path, "error:gather_kernel", "operators")
    assert status == 1 and set(results) == {"operators", *(f"operators: {name}" for name in gpu_check.operator_tests())}
    assert "CUDA: cudaStreamSynchronize" in results["operators"]["why"]
    wrong = {key for key, x in results.items() if x["state"] == "wrong"}
    assert {"operators", "operators: test_gather"} <= wrong, said
    assert results["operators: test_rope"]["state"] == results["operators: test_attention"]["state"] == "done"
    for key in wrong:
        assert "with CUDA_LAUNCH_BLOCKING=1: " in results[key]["why"] and "gather_kernel" in results[key]["why"]
        assert "illegal memory access" in results[key]["why"].split("BLOCKING=1: ")[1] and results[key]["why"] in report


def test_names_a_kernel_that_hangs(tmp_path):
    results, status, said, report = rehearse(tmp_path, "hang:convert_kernel", "values 33", "--most=6")
    x = results["values 33x64x40x2x1x32x72"]
    assert status == 3 and x["state"] == "out of time", said
    assert re.search(r"ended after 6 s, last launched: convert_kernel<", x["why"]) and x["why"] in report


def test_names_the_rank_of_a_process_that_dies(tmp_path):
    results, status, said, report = rehearse(tmp_path, "die:adamw_parts_kernel:0:1", "a worker in each process, bf16")
    x = results["a worker in each process, bf16"]
    assert status == 1 and x["state"] == "wrong", said
    assert "rank 1 of 2 was ended by signal 9 (Killed)" in x["why"], x["why"]
    assert "rank 1: adamw_parts_kernel<" in x["why"], x["why"]
    assert x["why"].replace("|", "/") in report


def test_finds_nvcc_and_cudnn_where_they_are(tmp_path, monkeypatch):
    monkeypatch.delenv("NVCC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for version in ("12.9", "13.0", "9.2"):
        (tmp_path / f"cuda-{version}" / "bin").mkdir(parents=True)
        (tmp_path / f"cuda-{version}" / "bin" / "nvcc").touch()
    assert gpu_build.find_nvcc(tmp_path) == str(tmp_path / "cuda-13.0/bin/nvcc")
    folder = tmp_path / "nvidia"
    (folder / "cudnn" / "lib").mkdir(parents=True)
    (folder / "cudnn" / "lib" / "libcudnn.so.9").touch()
    monkeypatch.setattr(gpu_build, "python_packages", lambda: [folder])
    assert gpu_build.library_folders() == [str(folder / "cudnn" / "lib")]
