"""Tests scripts/sweeps/sweep.py with real runs that take seconds: which runs it makes and repeats, and its
arithmetic."""
import csv
import gzip
import hashlib
import importlib
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import types
import unittest.mock
import zlib

import numpy as np
import pytest

from program import BUILD, ROOT, TIMEOUT, environment_of, events, markov_files, planned_memory, succeed

sys.path.insert(0, str(ROOT / "scripts" / "sweeps"))
sweep_report = importlib.import_module("sweep_report")
sweep_results = importlib.import_module("sweep_results")
sweep_rules = importlib.import_module("sweep_rules")
sweep_rounds = importlib.import_module("sweep_rounds")
sweep_settings = importlib.import_module("sweep_settings")
sweep_statistics = importlib.import_module("sweep_statistics")

pytestmark = pytest.mark.takes(40)

SETTINGS = """
# a tiny sweep
train = {data}/train.bin
val = {data}/val.bin
device = cpu
model = 260K
workers = 2
batch = 1
seq = 16
steps = 6
lr = 5e-3
eval-sequences = 8
packet-bytes = 128

[steep]
title = From scratch
seed = 1 2 3
loss-rate = 0 0.25

[one phase]
seed = 1
loss-rate = 0,0 0.5,0

[continued]
start = steep
seed = 11
lr = 1e-3
loss-rate = 0 0.25
estimator = mean balanced
repair = 1
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return markov_files(tmp_path_factory.mktemp("data"), 64, 4000, 600)


def command(*arguments, plots=False):
    """Plots take most of the time of a short sweep, so only sweeps whose plots are tested make them."""
    return [sys.executable, str(ROOT / "scripts" / "sweeps" / "sweep.py"), *map(str, arguments),
            *([] if plots else ["--no-plots"])]


def environment(**more):
    return environment_of({"TRAIN_LLAMA2": str(BUILD / "train_llama2"), **more})


def sweep(*arguments, plots=False, **more):
    return subprocess.run(command(*arguments, plots=plots), cwd=ROOT, env=environment(**more), text=True,
                          capture_output=True, timeout=TIMEOUT, check=False)


def write(path, text, data):
    path.write_text(text.format(data=data))
    return path


def results(path):
    return {entry["id"]: entry for entry in map(json.loads, path.read_text().splitlines())}


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """A finished sweep: its settings, output folder, and printed text."""
    folder = tmp_path_factory.mktemp("sweep")
    settings = write(folder / "tiny", SETTINGS, data)
    done = sweep(settings, "--out", folder / "out", "--jobs", "2", plots=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return settings, folder / "out", done


def rows_of(out):
    with open(out / "table.csv", encoding="utf-8", newline="") as file:
        return {(row["section"], row["run"]): row for row in csv.DictReader(file)}


# ---- what is run ----------------------------------------------------------------------------

def test_runs_every_combination_once(finished):
    _, out, done = finished
    entries = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    # 3 seeds x 2 rates; [one phase] adds one; in [continued] both estimators share the run without loss
    assert len(entries) == 6 + 1 + 3 == len({entry["id"] for entry in entries})
    assert all(entry["status"] == "complete" and entry["revision"] for entry in entries)
    assert str(out) not in (out / "results.jsonl").read_text()
    assert all(len(line) <= 79 for line in done.stdout.splitlines() if str(out) not in line)
    assert len(re.findall(r"^\d+/10 ", done.stdout, re.MULTILINE)) == 10
    # Only the model that others start from is kept.
    kept = [path.parent.name for path in out.glob("runs/*/checkpoint-*")]
    assert len(kept) == 1


def test_a_finished_run_is_not_repeated(finished, data, tmp_path):
    settings, out, _ = finished
    before = (out / "results.jsonl").read_text()
    done = sweep(settings, "--out", out)
    assert done.returncode == 0 and (out / "results.jsonl").read_text() == before
    # Results kept from elsewhere count too, also for other settings that ask for the same runs.
    other = write(tmp_path / "other", SETTINGS.split("[one phase]")[0]
                  .replace("lr = 5e-3", "lr = 0.005").replace("steps = 6", "steps = 6\nthreads = 1")
                  .replace("loss-rate = 0 0.25", "loss-rate = 0 0.250"), data)
    done = sweep(other, "--out", tmp_path / "out", "--results", out / "results.jsonl")
    assert done.returncode == 0 and not (tmp_path / "out" / "results.jsonl").exists()
    assert rows_of(tmp_path / "out")["From scratch", "25%"]["seeds"] == "1 2 3"


def test_rules_tell_runs_apart(data, tmp_path):
    """Results from before --plain existed have the ids of --plain, in whatever words it is said. Without loss,
    only the type on the wire and a look-ahead make another run."""
    def ids(lead):
        text = SETTINGS.split("[one phase]")[0].replace("seed = 1 2 3", "seed = 1")
        listed = sweep(write(tmp_path / "lead", text.replace("steps = 6", f"steps = 6\n{lead}"), data),
                       "--list")
        assert listed.returncode == 0, listed.stderr
        return [line.split()[0] for line in listed.stdout.splitlines()]
    off, auto, both = ids("plain = yes"), ids(""), ids("plain = yes\nlook-ahead = 0 1")
    assert off == ids("wire-dtype = float32\nlead = off\ncarry = 0\nrepair = 0\nrepair-budget = 0")
    assert auto == ids("lead = auto\ncarry = auto\nrepair = auto") and len(off) == len(auto) == 2
    assert len({*off, *auto}) == 4 and auto == ids("wire-dtype = int6")
    assert off[0] == ids("wire-dtype = float32\nrepair = 0")[0]
    assert len(both) == 4 and set(off) < set(both) and auto[1] not in both


def test_a_sweep_can_compute_in_bf16(finished, data, tmp_path):
    """Settings can choose --dtype. Runs in bf16 are different from those in float32, and learn as well. With
    --no-plots there are tables alone."""
    text = SETTINGS.split("[one phase]")[0].replace("seed = 1 2 3", "seed = 1")
    settings = write(tmp_path / "half", text.replace("device = cpu", "device = cpu\ndtype = bf16"), data)
    done = sweep(settings, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    half, whole = (results(out / "results.jsonl") for out in (tmp_path / "out", finished[1]))
    assert len(half) == 2 and not set(half) & set(whole)
    assert (tmp_path / "out" / "table.md").exists() and not list((tmp_path / "out").glob("*.png"))
    assert "plots" not in done.stdout
    logs = list((tmp_path / "out").glob("runs/*/log.jsonl"))
    assert {events(log, "run")[0]["options"]["dtype"] for log in logs} == {"bf16"}


def test_runs_are_compared_with_what_against_names(data, tmp_path):
    """The baseline has the values that `against` names, and the same loss. A run with --carry and rounding
    differs without loss, too."""
    text = SETTINGS.split("[steep]")[0].replace("packet-bytes = 128\n", "") + """
against = wire-dtype=float32 packet-bytes=256 carry=0
wire-dtype/packet-bytes/carry = float32/256/0 int8/68/0 int4/68/1
[rounded]
loss-rate = 0 0.25
"""
    settings = write(tmp_path / "rounded", text, data)
    done = sweep(settings, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {run: row for (_, run), row in rows_of(tmp_path / "out").items()}
    assert len(rows) == 6
    for lost, base in (("no loss", "no loss, wire-dtype float32, packet-bytes 256"),
                       ("25%", "25%, wire-dtype float32, packet-bytes 256, carry 0")):
        against = float(rows[base]["perplexity"])
        assert rows[base]["changes"] == ""
        for run, row in rows.items():
            if run != base and run.replace("0%", "no loss").startswith(lost):
                change = 100 * (float(row["perplexity"]) / against - 1)
                assert float(row["changes"]) == pytest.approx(change, abs=0.02)
    # With two bases, the change is against their geometric mean; a second base is compared with the first.
    both = text.replace("[rounded]", "[rounded]\nagainst = carry=0 and wire-dtype=int8 packet-bytes=68")
    done = sweep(write(tmp_path / "both", both, data), "--out", tmp_path / "out")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {run: row for (_, run), row in rows_of(tmp_path / "out").items()}
    first, second = (rows[f"no loss, wire-dtype {kind}"] for kind in ("float32, packet-bytes 256", "int8, packet-bytes 68"))
    perplexity = [float(row["perplexity"]) for row in (first, second)]
    assert first["changes"] == "" and float(second["changes"]) == pytest.approx(100 * (perplexity[1] / perplexity[0] - 1), abs=0.02)
    third = next(row for run, row in rows.items() if run.startswith("0%") and "int4" in run)
    assert float(third["changes"]) == pytest.approx(
        100 * (float(third["perplexity"]) / math.sqrt(perplexity[0] * perplexity[1]) - 1), abs=0.02)
    lost = write(tmp_path / "lost", text.replace("float32/256/0 ", ""), data)
    done = sweep(lost, "--list")
    assert done.returncode == 2 and "no run with wire-dtype float32, packet-bytes 256" in done.stderr


def test_links_with_rates_of_their_own_lose(data, tmp_path):
    """A run with loss on one link only is no baseline. "none" is the default of --loss-at, and equal loss
    models for both phases are the default, too."""
    settings = write(tmp_path / "uneven", SETTINGS.split("[steep]")[0] + """
data-split = contiguous
[uneven]
loss-rate/loss-at = 0/none 0/0=0.5 0.2/none 0.2/0-1=1
loss-model = bernoulli outage:2
""", data)
    done = sweep(settings, "--out", tmp_path / "out", "--list")
    lines = [line.split("uneven, ")[1] for line in done.stdout.splitlines()]
    assert lines == ["no loss, seed 1"] + [
        f"{rate}, loss-at {at}, loss-model {model}, seed 1"
        for rate, at in (("0%", "0=0.5"), ("20%", "none"), ("20%", "0-1=1"))
        for model in ("bernoulli", "outage:2")]
    plain = write(tmp_path / "plain", SETTINGS.split("[steep]")[0] +
                  "\n[uneven]\nloss-rate = 0 0.2\n", data)
    ids = {name: [line.split()[0] for line in sweep(
        file, "--out", tmp_path / "out", "--list").stdout.splitlines()]
        for name, file in (("uneven", settings), ("plain", plain))}
    assert len(set(ids["uneven"])) == 7 and not set(ids["plain"]) & set(ids["uneven"])


def test_naive_without_loss_is_the_baseline_itself(data, tmp_path):
    """The sweep does not run naive without loss, because its result must equal the baseline's to the last
    digit."""
    perplexities = set()
    for algorithm in ("reliable", "lossy", "naive"):
        log = tmp_path / f"{algorithm}.jsonl"
        subprocess.run([str(BUILD / "train_llama2"), "--model", "260K", "--workers", "2", "--batch",
                        "1", "--seq", "16", "--steps", "5", "--lr", "5e-3", "--train",
                        str(data / "train.bin"), "--val", str(data / "val.bin"), "--quiet",
                        "--wire-dtype", "float32", "--algorithm", algorithm, "--log", str(log)], cwd=ROOT,
                       env=environment(OMP_NUM_THREADS="2"), check=True, timeout=TIMEOUT)
        perplexities.add(events(log, "end")[0]["val_perplexity"])
    assert len(perplexities) == 1


def test_goes_on_after_kill_and_interrupt(data, tmp_path):
    """After SIGINT the runs save, also where the sweep alone is killed. Where they are, too, unsaved steps are lost. The
    final result is the same, bit for bit."""
    text = SETTINGS.split("[one phase]")[0].replace("steps = 6", "steps = 300\nsave-every = 10")
    text = text.replace("seed = 1 2 3", "seed = 1").replace("eval-sequences = 8",
                                                            "eval-sequences = 2")
    settings = write(tmp_path / "long", text, data)
    whole = sweep(settings, "--out", tmp_path / "whole", "--jobs", "2")
    assert whole.returncode == 0, whole.stderr
    out = tmp_path / "cut"
    for parts, (number, alone) in enumerate(((signal.SIGINT, False), (signal.SIGKILL, True), (signal.SIGKILL, False))):
        # The sweep has its own process group. The whole group gets the signal, as from a terminal.
        process = subprocess.Popen(command(settings, "--out", out, "--jobs", "2"), cwd=ROOT,
                                   env=environment(), stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL, start_new_session=True)
        deadline = time.monotonic() + TIMEOUT
        while not any(len(events(log, "resume")) >= parts for log in out.glob("runs/*/log.jsonl")
                      if list(log.parent.glob("checkpoint-*/trainer.json"))):
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.01)
        (os.kill if alone else os.killpg)(process.pid, number)
        process.wait(timeout=TIMEOUT)
        with pytest.raises(ProcessLookupError):  # none of its runs is left
            while time.monotonic() < deadline:
                os.killpg(process.pid, 0)
                time.sleep(0.1)
        ends = [end["status"] for path in out.glob("runs/*/log.jsonl") for end in events(path, "end")[-1:]]
        assert not alone or set(ends) - {"complete"}, ends
    last = sweep(settings, "--out", out, "--jobs", "2")
    assert last.returncode == 0, last.stderr
    assert list(out.glob("runs/*/log.jsonl"))
    logs = [events(path, "resume") for path in out.glob("runs/*/log.jsonl")]
    assert any(logs), "no run was resumed"
    first, second = results(tmp_path / "whole" / "results.jsonl"), results(out / "results.jsonl")
    assert first.keys() == second.keys()
    for name, entry in first.items():
        assert entry["perplexity"] == second[name]["perplexity"]
        assert entry["losses"] == second[name]["losses"]


def test_two_sweeps_do_not_share_a_folder(finished):
    import fcntl
    settings, out, _ = finished
    with open(out / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = sweep(settings, "--out", out)
    assert done.returncode == 1 and "another sweep is at work" in done.stderr


def test_a_run_that_fails_does_not_stop_the_others(data, tmp_path):
    """If a run fails, the others go on. Options are checked by --dry-run before, so only errors that it cannot
    foresee make a run fail."""
    text = SETTINGS.split("[one phase]")[0].replace("seed = 1 2 3", "seed = 1")
    settings = write(tmp_path / "broken", text, data)
    fake = tmp_path / "program"
    fake.write_text("#!/bin/sh\ncase \"$*\" in *dry-run*) ;; *'--loss-rate 0.25'*) "
                    "echo 'no luck today' >&2; exit 3 ;; esac\n"
                    f"exec {BUILD / 'train_llama2'} \"$@\"\n")
    fake.chmod(0o755)
    done = sweep(settings, "--out", tmp_path / "out", TRAIN_LLAMA2=str(fake))
    assert done.returncode == 1
    assert "exit code 3: no luck today" in done.stderr and "1 of 2 runs are left" in done.stderr
    assert len(results(tmp_path / "out" / "results.jsonl")) == 1


def test_launcher_stands_before_every_command(data, tmp_path):
    """Two ranks under mpirun give what one process gives."""
    text = SETTINGS.split("[one phase]")[0].replace("seed = 1 2 3", "seed = 1")
    alone = write(tmp_path / "alone", text, data)
    many = write(tmp_path / "many", "launch = mpirun -np 2\nlink = mpi\n" + text, data)
    assert sweep(alone, "--out", tmp_path / "a").returncode == 0
    done = sweep(many, "--out", tmp_path / "b")
    assert done.returncode == 0, done.stderr
    first, second = (results(tmp_path / part / "results.jsonl") for part in "ab")
    assert sorted(entry["perplexity"] for entry in first.values()) == \
           sorted(entry["perplexity"] for entry in second.values())


GPU = """
train = {data}/train.bin
val = {data}/val.bin
device = cuda
model = 260K
workers = 2
batch = 1
seq = 16
steps = 2
eval-sequences = 2
[one]
loss-rate = 0 0.25
"""


def tools_that_say(folder, free):
    """A folder with an nvidia-smi that says how many MiB are free."""
    folder.mkdir()
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\necho {free}\n")
    (folder / "nvidia-smi").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "TRAIN_LLAMA2": str(BUILD / "emulated" / "train_llama2")}


@pytest.mark.parametrize("free, jobs", [(1_000_000, 2), (1_500, 1), ("no devices", 1)])
def test_runs_share_a_gpu_if_its_memory_holds_them(data, tmp_path, free, jobs):
    """As many as fit by what --dry-run plans, here of two; one where nobody says what is free."""
    settings = write(tmp_path / "gpu", GPU, data)
    code = ("import sys; sys.path.insert(0, 'scripts/sweeps'); import sweep, sweep_settings as s; import os, types; "
            "program = os.environ['TRAIN_LLAMA2']; settings = s.Settings(sys.argv[1], program); settings.expand(); "
            "made = sweep.Sweep(settings, types.SimpleNamespace(out='x', jobs=None, gpus=None, threads=1), program); "
            "print(len(made.slots()))")
    done = subprocess.run([sys.executable, "-c", code, settings], cwd=ROOT, text=True, capture_output=True,
                          env=environment(**tools_that_say(tmp_path / "bin", free)), check=False)
    assert done.stdout == f"{jobs}\n", done.stderr


def test_a_sweep_that_is_carried(data, tmp_path):
    """What is packed runs elsewhere, goes on after a stop, and says which runs are complete."""
    settings = write(tmp_path / "gpu", "prepare = false\n" + GPU, data)
    carry = str(ROOT / "scripts" / "sweeps" / "carry.py")
    more = environment(**tools_that_say(tmp_path / "bin", 1_000_000))
    packed = tmp_path / "packed"

    def call(*words):
        return subprocess.run([sys.executable, *map(str, words)], cwd=tmp_path, env=more, text=True,
                              capture_output=True, timeout=TIMEOUT, check=False)
    small, more["TRAIN_LLAMA2"] = more["TRAIN_LLAMA2"], "/bin/true"
    done = call(carry, "pack", settings, packed)
    assert done.returncode == 1 and "does not train here and write a log" in done.stderr and not packed.exists()
    more["TRAIN_LLAMA2"] = str(BUILD / "train_llama2")
    done = call(carry, "pack", settings, tmp_path / "none")
    assert done.returncode in (0, 2) and ("built without CUDA" in done.stderr) == (done.returncode == 2)
    more["TRAIN_LLAMA2"] = small
    done = call(carry, "pack", settings, packed, "--most", 0.1)
    assert done.returncode == 1 and "expected at most 0.1; the largest is " in done.stderr
    done = call(carry, "pack", settings, packed)
    assert done.returncode == 2 and "is not empty" in done.stderr
    done = call(carry, "pack", settings, tmp_path / "again", "--most", 500)
    assert done.returncode == 0, done.stderr
    os.rename(tmp_path / "again", tmp_path / "elsewhere")
    there = tmp_path / "elsewhere" / "scripts" / "sweeps" / "carry.py"
    del more["TRAIN_LLAMA2"]
    stopped = call(there, "run", 0.001)
    assert stopped.returncode == 0 and " done " not in stopped.stdout, stopped.stdout + stopped.stderr
    done = call(there, "run", 200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^\w+ +done  one", done.stdout, re.MULTILINE)) == 2, done.stdout
    carried = results(tmp_path / "elsewhere" / "out" / "results.jsonl")
    more["TRAIN_LLAMA2"] = small
    write(tmp_path / "gpu", GPU, data)
    assert call(ROOT / "scripts/sweeps/sweep.py", settings, "--out", tmp_path / "home", "--runs-only").returncode == 0
    at_home = results(tmp_path / "home" / "results.jsonl")
    assert len(carried) == 2 and set(at_home) == set(carried)


def test_kernel_makes_text_and_tokens(tmp_path):
    """Whole C files, in an order that does not depend on the archive's; every 50th is held out. Files that are no
    text, or have long lines, are left out."""
    names = [f"linux/{'abc'[i % 3]}/file{i}.c" for i in range(200)]
    with tarfile.open(tmp_path / "archive", "w:xz") as archive:
        for name in reversed(names + ["linux/Makefile", "linux/bad.c", "linux/long.c"]):
            text = {"linux/bad.c": b"\xff\xfe", "linux/long.c": b"x" * 5000}.get(name) or "".join(
                f"int f{zlib.crc32(name.encode()) >> j:x}_{j}(void)\n{{\n\treturn shard({j}, {name});\n}}\n"
                for j in range(30)).encode() + f"/* {name} */".encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
    done = subprocess.run(["data/kernel.sh", str(tmp_path / "data"), "400"], cwd=ROOT, text=True,
                          env={**os.environ, "KERNEL": str(tmp_path / "archive"), "MEGABYTES": "0.2",
                               "TOKENIZE": str(BUILD / "tokenize")}, capture_output=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    order = sorted([*names, "linux/bad.c", "linux/long.c"], key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    text = (tmp_path / "data" / "train.txt").read_text()
    taken = re.findall(r"/\* (\S+) \*/", text)
    expected = [name for number, name in enumerate(order) if number % 50 != 49 and name in names]
    assert taken == expected[:len(taken)] and 0.2e6 < len(text) < 0.21e6
    assert (tmp_path / "data" / "val.txt").read_text().count("/* linux/") >= 1
    for part in ("train", "val"):
        assert (tmp_path / "data" / f"kernel_{part}.bin").stat().st_size > 1024


@pytest.mark.parametrize("most", ["abc", "1.2.3", ""])
def test_kernel_wants_a_number(tmp_path, most):
    done = subprocess.run(["data/kernel.sh", str(tmp_path / "data")], cwd=ROOT, text=True, capture_output=True, check=False,
                          env={**os.environ, "MEGABYTES": most})
    assert (done.returncode, done.stderr) == (2, f"kernel.sh: MEGABYTES is '{most}', expected a number\n")


def test_gcide_makes_text_and_tokens(tmp_path):
    """Each entry is one line, without pronunciation and source. Every 50th is held out."""
    random = np.random.default_rng(1)
    words = ["".join(random.choice(list("abcdefghijklmnopqrstuvwxyz"), 7)) for _ in range(300)]
    words[9], words[4] = "owner", "packet"
    entries = [f"Word{i} \\Wo*rd{i}\\, n.\n   A {words[i % 10]} of\n   {words[i % 300 // 10]}s. "
               "[1913 Webster]\n\n" for i in range(100_001)]
    with gzip.open(tmp_path / "dictionary", "wt", compresslevel=1) as file:
        file.writelines(entries)
    done = subprocess.run(["data/gcide.sh", str(tmp_path / "data"), "400"], cwd=ROOT, text=True,
                          env={**os.environ, "GCIDE": str(tmp_path / "dictionary"),
                               "TOKENIZE": str(BUILD / "tokenize")}, capture_output=True,
                          timeout=TIMEOUT, check=False)
    assert done.returncode == 0, done.stderr
    held = (tmp_path / "data" / "val.txt").read_text().splitlines()
    kept = (tmp_path / "data" / "train.txt").read_text().splitlines()
    assert held[0] == "Word49, n. A owner of packets." and len(held) == 2000
    assert kept[0].startswith("Word40, n. A ") and len(kept) == 100_001 - 40 - 2000
    for part in ("train", "val"):
        assert (tmp_path / "data" / f"gcide_{part}.bin").stat().st_size > 1024


# ---- arithmetic -----------------------------------------------------------------------------

def test_table_is_what_the_logs_say(finished):
    """Computes every number of one row again, from the runs' logs."""
    _, out, _ = finished
    pairs, lost, drift = {}, [], []
    for path in out.glob("runs/*/log.jsonl"):
        head, end = events(path, "run")[0], events(path, "end")[0]
        options = head["options"]
        if options["lr"] != 0.005 or options["loss-rate"] == [0.5, 0.0]:
            continue
        lossy = options["loss-rate"] == 0.25
        pairs.setdefault(options["seed"], {})[lossy] = end["val_perplexity"]
        if lossy:
            steps = events(path, "step")
            lost.append(sum(step["gradient_loss_rate"] for step in steps) / len(steps))
            drift.append(sum(step["drift"] for step in steps) / len(steps))
    changes = [100 * (pairs[seed][True] / pairs[seed][False] - 1) for seed in (1, 2, 3)]
    mean = sum(changes) / 3
    deviation = math.sqrt(sum((change - mean) ** 2 for change in changes) / 2)
    row = rows_of(out)["From scratch", "25%"]
    assert [float(text) for text in row["changes"].split()] == pytest.approx(changes, abs=1e-3)
    assert float(row["mean"]) == pytest.approx(mean, abs=1e-3)
    # 4.303: Student's t, two degrees of freedom, 97.5%, from the printed tables
    assert float(row["interval"]) == pytest.approx(4.303 * deviation / math.sqrt(3), rel=1e-3,
                                                   abs=1e-3)
    assert float(row["gradient_loss_rate"]) == pytest.approx(sum(lost) / 3, rel=1e-4)
    assert float(row["drift"]) == pytest.approx(sum(drift) / 3, rel=1e-4)
    assert ("From scratch", "no loss") in rows_of(out)
    assert float(rows_of(out)["one phase", "50% gradient phase"]["parameter_loss_rate"]) == 0
    for entry in results(out / "results.jsonl").values():
        if entry["key"].get("loss-rate"):
            assert sum(entry["ages"]) == pytest.approx(1, abs=2e-3)
    markdown = (out / "table.md").read_text()
    assert f"{mean:+.2f}" in markdown and "**From scratch**" in markdown
    again = {run: float(row["extra_traffic"]) for (_, run), row in rows_of(out).items()}
    # gradients 0.25 and 0.25^2, parameters 0.25
    assert again["25%"] == pytest.approx(0.28, abs=0.02) and again["25%, estimator mean"] == pytest.approx(0.28, abs=0.08)
    assert f"| {100 * again['25%, estimator mean']:.1f}% |" in markdown


@pytest.mark.parametrize("freedom, quantile", [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776),
                                               (9, 2.262), (29, 2.045)])
def test_interval_is_students(freedom, quantile):
    """Compares the interval with printed tables. Half of the values are 1 above their mean and half 1 below.
    If their number is odd, one more is the mean."""
    values = [(-1.0) ** i for i in range((freedom + 1) // 2 * 2)] + [0.0] * ((freedom + 1) % 2)
    error = math.sqrt((freedom + 1) // 2 * 2 / freedom / (freedom + 1))
    assert sweep_statistics.interval(values) == pytest.approx(quantile * error, abs=6e-4)


def test_interval_of_few_values():
    assert sweep_statistics.interval([]) is None and sweep_report.interval([1.0]) is None
    # mean 2, deviation 1: 4.303 / sqrt(3)
    assert sweep_statistics.interval([1.0, 2.0, 3.0]) == pytest.approx(2.484, abs=1e-3)


def test_step_tax_reads_the_curve_backwards():
    base = {"evaluations": [[10, 100.0], [20, 50.0], [30, 60.0], [40, 40.0]]}
    tax = lambda perplexity: sweep_report.step_tax(base, perplexity)
    assert tax(40.0) == tax(39.0) == 0
    assert tax(50.0) == pytest.approx(1 - 35 / 40)  # halfway from 30 to 40, not at 20
    assert tax(80.0) == pytest.approx(1 - 14 / 40)
    assert tax(200.0) == 1
    assert sweep_report.step_tax({"evaluations": [[40, 40.0]]}, 50.0) is None
    base["evaluations"].insert(1, [15, None])  # that validation was not finite
    assert tax(80.0) == pytest.approx(1 - 14 / 40)


def test_the_step_tax_has_an_interval_over_seeds():
    """Three runs lose 10, 20 and 30% of the steps; a fourth has no curve to compare with."""
    base = {"perplexity": 20.0, "evaluations": [[0, 120.0], [100, 20.0]]}
    without = {"perplexity": 20.0}
    run = types.SimpleNamespace(id="lossy", baseline="lossless")
    members = [(str(seed), {"perplexity": p, "max_age": 0, "status": "complete"}, b, run)
               for seed, p, b in ((1, 30.0, base), (2, 40.0, base), (3, 50.0, base), (4, 60.0, without))]
    row = sweep_report.summarise({"section": types.SimpleNamespace(title="t"), "label": "l",
                                  "members": members})
    assert row["step_tax"] == pytest.approx(0.2)
    assert row["tax_interval"] == pytest.approx(0.2484, abs=1e-4)  # as in test_interval_of_few_values
    assert "| 20% | 25% |" in sweep_report.as_markdown([row | {
        "gradient_loss_rate": None, "drift": None, "drift_expected": None, "drift_paper": None}])


@pytest.mark.parametrize("rate", [0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
def test_the_default_of_the_tables_is_the_default_of_the_program(rate):
    """sweep_rounds.py says again in Python what lossynet/algorithm/rounds.c and lossynet/options.c say in C."""
    shown = succeed("--dry-run", "--model=7B", "--workers=8", "--device=cpu", f"--loss-rate={rate}").stdout
    sent = planned_memory(shown)
    assert f"Sent per worker and step, as {sweep_report.default_at(rate).get('wire-dtype', 'float32')};" in shown
    again = sum(sent[phase] * sweep_rounds.sent_again(rate, limits=limits)[0] for phase, limits in
                (("gradient phase", sweep_rounds.GRADIENTS), ("parameter phase", sweep_rounds.PARAMETERS)))
    assert sent.get("sent again", 0) == pytest.approx(again, abs=0.002)


def test_cost_curves_are_those_of_the_rules(data, tmp_path):
    """The curves begin at 0. Rows with only some of the seeds count, too, and a default counts as what it does."""
    path = write(tmp_path / "rules", SETTINGS.split("[steep]")[0] + """
[other]
title = No rules
loss-rate = 0 0.1 0.2
[rules]
title = All rules
seed = 1 2
against = loss-rate=0 wire-dtype=float32 plain=no lead=off carry=0 repair=0,0 repair-budget=0
loss-rate/wire-dtype/plain/lead/carry/repair/repair-budget = 0/float32/no/off/0/0,0/0 """ +
                 " ".join(f"{rate}/{rule}" for rate, wire, rounds in ((0.1, "int6", "1,0"), (0.3, "int6", "3,1"))
                          for rule in
                          ("float32/no/off/0/0,0/0", "float32/no/auto/0/0,0/0", f"{wire}/no/auto/1/{rounds}/0",
                           "float32/no/auto/1/0,0/0")) +
                 " 0.2/auto/no/auto/auto/auto/auto 0.2/auto/yes/off/0/0,0/0\n", data)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))  # as some editors do
    settings = sweep_settings.Settings(path, str(BUILD / "train_llama2"))
    settings.expand()
    results = {}
    for run in settings.runs:
        if run.value("seed") == "2" and run.rates() == (0.3, 0.3):
            continue
        rise = {("off", "0"): 20, ("auto", "0"): 10}.get((run.value("lead"), run.value("carry")), 5)
        spread = {"1": 0, "2": 1}[run.value("seed", "1")] * (not run.lossless())
        results[run.id] = {"perplexity": 100 + rise * run.rates()[0] + spread, "max_age": 0,
                           "status": "complete", "losses": []}
    groups = sweep_report.group_runs(settings, results)
    for group in groups:
        group["row"] = sweep_report.summarise(group)
    title, seeds, (plain, ours) = sweep_report.cost_curves(groups)
    assert (title, seeds) == ("All rules", [1, 2])
    assert [point[:2] for point in plain] == [(0, 0), (10, pytest.approx(2.5)), (20, pytest.approx(4.5)),
                                              (30, pytest.approx(6))]
    assert [point[:2] for point in ours] == [(0, 0), (10, pytest.approx(1)), (20, pytest.approx(1.5)),
                                             (30, pytest.approx(1.5))]
    assert [len(point[3]) for point in plain] == [0, 2, 2, 1]
    assert not any(point[2] for point in plain)  # intervals of two seeds are too wide to draw
    sweep_report.report(settings, results, tmp_path, plots=True)
    assert (tmp_path / "cost.png").stat().st_size > 5000


def test_arms_that_lose_the_same_stand_side_by_side(data, tmp_path):
    """What an arm sends again does not move it: loss of tensors is known from the arms that send nothing again."""
    path = write(tmp_path / "arms", SETTINGS.split("[steep]")[0] + """
[arms]
against = name=none loss-at=none plain=no
name/loss-at/plain = none/none/no the_paper/layers.0=0.3/yes $\\ours$|/layers.0=0.3/no
""", data)
    settings = sweep_settings.Settings(path, str(BUILD / "train_llama2"))
    settings.expand()
    lost = {"none": (0, None), "the paper": (0.25, None), "$\\ours$|": (0.01, 0.2)}  # no formula, and no column
    results = {run.id: {"perplexity": 100, "max_age": 0, "status": "complete", "losses": [],
                        "gradient_loss_rate": lost[run.arm()][0], "parameter_loss_rate": lost[run.arm()][0],
                        "extra_traffic": lost[run.arm()][1]} for run in settings.runs}
    sweep_report.report(settings, results, tmp_path, plots=True)
    said = (tmp_path / "change.svg").read_text()
    with open(tmp_path / "table.csv", encoding="utf-8", newline="") as file:
        assert {(row["run"], row["dropped"], row["wire_dtype"]) for row in csv.DictReader(file)} == {
            ("no loss", "0.0", "int6"), ("the paper", "25.0", "float32"), ("$\\ours$|", "25.0", "int6")}
    assert "25% of the packets dropped" in said and "the paper" in said and ">$\\ours$|<" in said
    assert "| $\\ours$\\| |" in (tmp_path / "table.md").read_text()


def test_rows_without_a_name_are_drawn_where_there_are_no_others(data, tmp_path):
    path = write(tmp_path / "rows", SETTINGS.split("[steep]")[0] + """
plain = yes
[rows]
against = loss-rate=0 estimator=mean
loss-rate/estimator = 0/mean 0.2/zero 0.2/balanced
""", data)
    settings = sweep_settings.Settings(path, str(BUILD / "train_llama2"))
    settings.expand()
    results = {run.id: {"perplexity": 100, "max_age": 0, "status": "complete", "losses": [],
                        "gradient_loss_rate": 0.2, "parameter_loss_rate": 0.2} for run in settings.runs}
    sweep_report.report(settings, results, tmp_path, plots=True)
    said = (tmp_path / "change.svg").read_text()
    assert "20% of the packets dropped" in said and "estimator zero" in said and "estimator balanced" in said


def test_plots_are_there(finished):
    _, out, _ = finished
    for name in ("change", "curves", "drift", "ages"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (out / f"{name}.png").stat().st_size > 5000
        svg = (out / f"{name}.svg").read_text()
        assert svg.rstrip().endswith("</svg>") and len(svg) > 5000


# ---- bad input ------------------------------------------------------------------------------

@pytest.mark.parametrize("change, said", [
    (("loss-rate = 0 0.25\n\n[one", "los-rate = 0 0.25\n\n[one"), "no option '--los-rate'; 'loss-rate'"),
    (("loss-rate = 0 0.25\n\n[one", "loss-rate = 0 1.5\n\n[one"), "expected a number from 0 to 1"),
    (("seed = 1\nloss-rate = 0,0", "seed = 4\nloss-rate = 0,0.5"), "no run without loss"),
    (("[steep]", "[steep"), "section's name in brackets"),
    (("[one phase]", "[steep]"), "a section [steep] already"),
    (("loss-rate = 0,0 0.5,0", "loss-rate/batch = 0/1 0.5"), "1 values for 2 options"),
    (("loss-rate = 0,0 0.5,0", "loss-rate/loss-model = 0/trace:/tmp/a"), "expected a file without a folder"),
    (("start = steep", "start = flat"), "earlier section"),
    (("steps = 6", "steps = 6\nout = here"), "sweep's own"),
    (("steps = 6", "steps 6"), "expected 'option = value value ...'"),
    (("steps = 6\n", ""), "has no 'steps'"),
    (("seed = 11", "seed = 11\nseed = 12"), "set already"),
    (("seed = 11", "seed = 11\nagainst = float32"), "expected OPTION=VALUE"),
    (("seed = 11", "seed = 11\nagainst = loss-rate=0 and"), "against has '', expected OPTION=VALUE"),
    (("seed = 11", "seed = 11\nagainst = loss-rate=0\nagainst = carry=0"), "a second 'against'"),
    (("{data}/val.bin", "{data}/none.bin"), "there is no file"),
    (("# a tiny", "prepare = false\n# a tiny"), "'false' failed"),
    (("# a tiny", "prepare = /no/such/program\n# a tiny"), "prepare:"),
    (("# a tiny", "prepare = 'echo\n# a tiny"), "'prepare': no closing quotation"),
    (("steps = 6", "steps = 6\nno-overlap = perhaps"), "expected yes or no"),
    (("loss-rate = 0 0.25\n\n[one", "loss-rate = 0 a\n\n[one"), "loss-rate 'a': expected a number from 0 to 1"),
    (("repair = 1", "repair = 1,2,3"), "--repair: "),
    (("estimator = mean balanced\nrepair = 1", "name/repair = ours/1 ours/2"), "two runs of one name, 'ours', and seed: repair 1 and 2"),
    (("loss-rate = 0 0.25\n\n[one", "loss-rate = 0 0.2 0.2000001\n\n[one"), "two runs of one name, '20%', and seed: loss-rate"),
])
def test_bad_settings_get_one_line(data, tmp_path, change, said):
    assert change[0] in SETTINGS
    settings = write(tmp_path / "bad", SETTINGS.replace(*change), data)
    done = sweep(settings, "--out", tmp_path / "out")
    assert done.returncode == 2 and said in done.stderr
    assert len(done.stderr.splitlines()) == 1 and not (tmp_path / "out").exists()


def test_a_table_of_nothing_is_no_success(data, tmp_path):
    settings = write(tmp_path / "tiny", SETTINGS, data)
    done = sweep(settings, "--out", tmp_path / "out", "--table", plots=True)
    assert done.returncode == 1 and "plots" not in done.stdout
    assert done.stderr == "sweep: 10 of 10 runs are left; the same command without --table makes them\n"


def test_bad_calls_get_one_line(tmp_path):
    done = sweep(tmp_path / "none")
    assert done.returncode == 2 and "No such file" in done.stderr and "expected a file, or one of ablation " in done.stderr
    done = sweep("quick", TRAIN_LLAMA2="/no/such/program")
    assert done.returncode == 2 and "build it with make" in done.stderr
    for words, said in ((("--jobs", "0"), "expected 1 or more"), (("--minutes", "0"), "expected more than 0")):
        done = sweep("quick", *words)
        assert done.returncode == 2 and said in done.stderr


@pytest.mark.parametrize("name", sorted(
    path.name for path in (ROOT / "scripts" / "sweeps" / "settings").iterdir() if not path.suffix))
def test_ready_made_settings_are_well_formed(name, data, tmp_path):
    """The program accepts every run of the settings, with other data and without their launcher."""
    text = (ROOT / "scripts" / "sweeps" / "settings" / name).read_text()
    text = re.sub(r"^(prepare|launch) = .*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^train = .*$", f"train = {data}/train.bin", text, flags=re.MULTILINE)
    text = re.sub(r"^val = .*$", f"val = {data}/val.bin", text, flags=re.MULTILINE)
    text = text.replace("models/Llama-2-7b-hf", "7B")
    text = text.replace("{", "{{").replace("}", "}}")
    done = sweep(write(tmp_path / name, text, data), "--list")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 10


def test_a_folder_is_no_settings(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "scripts" / "sweeps" / "carry.py", "pack", tmp_path, tmp_path / "to"],
                          text=True, capture_output=True, check=False, env={**os.environ, "TRAIN_LLAMA2": sys.executable})
    assert (done.returncode, done.stderr) == (1, f"carry: {tmp_path}: Is a directory\n")


def test_lines_that_are_no_results(tmp_path):
    path = tmp_path / "results.jsonl"
    good = {"id": "a", "key": {}, "perplexity": 2.5}
    path.write_bytes(b'{"id":"b"}\n3\n{"id":"e","perplexity":1}\n\xff\n{"id":"c","perpl\n' + json.dumps(good).encode()
                     + b'\n{"id":"d"')
    assert sweep_results.read_results(path) == {"a": good}
    done = sweep("quick", "--results", ROOT / "README.md")
    assert done.returncode == 2 and "has no results: expected a results.jsonl" in done.stderr


def test_files_stand_by_what_they_have(data, tmp_path):
    """Two files of one name are two arms, a changed file is another run, and one in another folder is the same run."""
    text = SETTINGS.split("[steep]", maxsplit=1)[0]

    def ids(folder):
        lines = f"loss-rate = 0 1\nrule = none {folder}/1/r.c {folder}/2/r.c\nloss-model = trace:{folder}/1/t trace:{folder}/2/t\n"
        listed = sweep(write(tmp_path / "files", text.replace("model = 260K", f"model = {folder}/1/m.json {folder}/2/m.json")
                             + "[a]\n" + lines, data), "--list")
        assert listed.returncode == 0, listed.stderr
        return [line.split()[0] for line in listed.stdout.splitlines()]

    for folder in (tmp_path / "here", tmp_path / "there"):
        for number in "12":
            (folder / number).mkdir(parents=True)
            for name in ("r.c", "t", "m.json"):
                (folder / number / name).write_text(number)
    here = ids(tmp_path / "here")
    assert len(set(here)) == 2 + 2 * 2 * 3 and here == ids(tmp_path / "there")
    objects = {sweep_rules.object_of(f"{tmp_path}/here/{number}/r.c") for number in "12"}
    assert len(objects | {sweep_rules.object_of("r")}) == 3
    for name in ("r.c", "t", "m.json"):
        (tmp_path / "there" / "1" / name).write_text("3")
        changed = ids(tmp_path / "there")
        assert changed != here
        here = changed


def test_a_replay_is_no_base():
    """It loses what its record says, also with a loss rate of 0."""
    run = lambda **options: sweep_settings.Run(None, {name.replace("_", "-"): value for name, value in options.items()}, None)
    assert not run(loss_model="replay:late").lossless() and run(loss_model="replay:late", algorithm="reliable").lossless()
    assert run(loss_model="trace:t", loss_rate="0").lossless() and not run(loss_model="trace:t", loss_rate="1").lossless()


def test_results_that_cannot_be_written(data, tmp_path):
    """One line says so, and no run goes on."""
    text = SETTINGS.split("[one phase]", maxsplit=1)[0].replace("seed = 1 2 3", "seed = 1")
    fake = tmp_path / "program"
    fake.write_text(f"#!/bin/sh\ncase \"$*\" in *dry-run*|*help*) ;; *) mkdir -p {tmp_path}/out/results.jsonl ;; esac\n"
                    f"exec {BUILD / 'train_llama2'} \"$@\"\n")
    fake.chmod(0o755)
    done = sweep(write(tmp_path / "tiny", text, data), "--out", tmp_path / "out", TRAIN_LLAMA2=str(fake))
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"sweep: {tmp_path}/out/results.jsonl: Is a directory" and "Traceback" not in done.stderr


def test_other_data_and_another_program(data, tmp_path):
    """Data that changed behind its first MiB is refused, and runs of two versions of the program are named."""
    text = SETTINGS.split("[one phase]", maxsplit=1)[0].replace("seed = 1 2 3", "seed = 1")
    own = shutil.copytree(data, tmp_path / "data")
    settings = write(tmp_path / "tiny", text, own)
    done = sweep(settings, "--out", tmp_path / "out")
    assert done.returncode == 0 and "versions" not in done.stderr, done.stderr
    path = tmp_path / "out" / "results.jsonl"
    path.write_text(path.read_text().replace('"revision":"', '"revision":"of-old-', 1))
    done = sweep(settings, "--out", tmp_path / "out")
    assert done.returncode == 0 and "are of 2 versions of the program: " in done.stderr, done.stderr
    path.write_text(path.read_text().replace('"status":"complete","data":["', '"status":"complete","data":["0', 1))
    done = sweep(settings, "--out", tmp_path / "out")
    assert done.returncode == 2 and f"its runs had other contents of '{own}/train.bin'" in done.stderr, done.stderr
    assert sweep(settings, "--out", tmp_path / "out", "--table").returncode == 0
    (tmp_path / "more").write_bytes(bytes(300_000))
    before = sweep_settings.samples(str(tmp_path / "more"))
    with open(tmp_path / "more", "r+b") as file:
        file.seek(200_000)
        file.write(bytes([1]) * 60_000)
    sweep_settings.samples.cache_clear()
    assert sweep_settings.samples(str(tmp_path / "more")) != before


def test_bases_of_another_processor(tmp_path, monkeypatch, capsys):
    """Of a run that several kept files have, that of the settings counts; pairs of two kinds of processor are told."""
    module = importlib.import_module("sweep")
    line = lambda name, backend: json.dumps({"id": name, "key": {}, "perplexity": 2.0, "backend": backend}) + "\n"
    (tmp_path / "mine.jsonl").write_text(line("base", "AVX2, none") + line("a", "AVX2, none") + line("b", "AVX2, none"))
    (tmp_path / "others.jsonl").write_text(line("base", "AVX-512, none") + line("base of b", "AVX-512, none"))
    monkeypatch.setattr(module, "kept_files", lambda: [str(tmp_path / "mine.jsonl"), str(tmp_path / "others.jsonl")])
    run = lambda name, base: types.SimpleNamespace(id=name, baseline=base)
    made = types.SimpleNamespace(kept_file=str(tmp_path / "mine.jsonl"), file=str(tmp_path / "none"), results={},
                                 arguments=types.SimpleNamespace(results=[]), out="",
                                 settings=types.SimpleNamespace(runs=[run("base", "base"), run("a", "base"),
                                                                      run("b", "base of b")]))
    module.Sweep.load(made)
    assert made.results["base"]["backend"] == "AVX2, none"
    module.Sweep.tell_versions(made)
    said = capsys.readouterr().err
    assert "1 of 2 runs are compared with one of another kind of processor (AVX-512 and AVX2)" in said


def test_phases_that_lose():
    section = sweep_settings.Section("x", 1)
    lost = lambda **options: sweep_report.phases(sweep_settings.Run(section, {**options, "workers": "4"}, None))
    assert [lost(**{"loss-rate": rate}) for rate in ("0.2", "0.2,0", "0,0.2", "0.2,0.1")] == [
        "both", "gradient", "parameter", "different"]
    assert lost(**{"loss-rate": "0", "loss-at": "3-*=0.5:0"}) == "gradient"


def test_nobody_reads_what_it_says(data, tmp_path):
    """`| head` does not stop the runs."""
    text = SETTINGS.split("[one phase]", maxsplit=1)[0].replace("seed = 1 2 3", "seed = 1 2")
    process = subprocess.Popen(command(write(tmp_path / "tiny", text, data), "--out", tmp_path / "out", "--jobs=1"), cwd=ROOT,
                               env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(timeout=TIMEOUT) in (0, 1) and "Traceback" not in said, said
    assert len(results(tmp_path / "out" / "results.jsonl")) == 4


def test_a_run_whose_last_evaluation_was_stopped_has_no_result(tmp_path):
    """The evaluation before it is of an earlier step."""
    run = types.SimpleNamespace(id="a", key={}, data=lambda: [])
    events = [{"event": "run", "options": {}}, {"event": "step", "step": 0, "step_ms": 1.0, "loss": 2.0},
              {"event": "eval", "step": 504, "val_perplexity": 113.9}, {"event": "end", "step": 560, "status": "complete"}]
    log = tmp_path / "log.jsonl"
    for step, there in ((504, False), (560, True)):
        events[2]["step"] = step
        log.write_text("".join(json.dumps(event) + "\n" for event in events))
        assert (sweep_results.result_of(run, str(log)) is not None) == there


def test_a_seed_that_diverged_is_named():
    section = sweep_settings.Section("x", 1)
    run = sweep_settings.Run(section, {"loss-rate": "0.2"}, None)
    run.id, run.baseline = "a", "b"
    result = {"perplexity": 11.0, "status": "complete", "max_age": 1}
    lost = {**result, "perplexity": None}  # the last update spoilt the model: its training loss is finite
    group = {"section": section, "label": "20%", "run": run,
             "members": [(seed, one, {"perplexity": 10.0}, run) for seed, one in enumerate((result, lost, result))]}
    text = sweep_report.as_text([sweep_report.summarise(group)])
    assert "  1 of 3 seeds diverged: perplexity and change are of the others\n" in text


def test_a_row_says_of_how_many_pairs_it_is():
    """Three seeds, of which one has no base yet: two changes, whose interval is too wide to draw."""
    section = sweep_settings.Section("x", 1)
    run = sweep_settings.Run(section, {"loss-rate": "0.0001", "name": "ours"}, None)
    run.id, run.baseline = "a", "b"
    result = {"perplexity": 11.0, "status": "complete", "max_age": 1}
    group = {"section": section, "label": "ours", "run": run,
             "members": [(seed, result, base, run) for seed, base in enumerate(({"perplexity": 10.0}, {"perplexity": 9.0}, None))]}
    group["row"] = sweep_report.summarise(group)
    assert "  1 of 3 seeds have no finished base: the change is without them\n" in sweep_report.as_text([group["row"]])
    group["row"]["dropped"] = sweep_report.dropped(group, [group])
    assert group["row"]["dropped"] == 0.01
    axes = unittest.mock.MagicMock()
    axes.has_data.return_value = False
    sweep_report.plot_arms(axes, [group], iter(["black"]))
    assert axes.errorbar.call_args.kwargs["yerr"] == 0


# ---- a comparison whose arms have names -----------------------------------------------------

def test_two_of_eight(data, tmp_path):
    """The kept settings file, made small: three named arms, which the terminal, tables and pictures show."""
    text = (ROOT / "scripts/sweeps/settings/two-of-eight").read_text(encoding="utf-8")
    for name, value in (("prepare", "true"), ("train", f"{data}/train.bin"), ("val", f"{data}/val.bin"), ("steps", 4),
                        ("seq", 16), ("batch", 1), ("warmup", 1), ("eval-sequences", 8), ("seed", "1 2")):
        text, count = re.subn(rf"^{name} = .*$", f"{name} = {value}", text, flags=re.MULTILINE)
        assert count == 1, name
    (tmp_path / "two-of-eight").write_text(text, encoding="utf-8")
    done = sweep(tmp_path / "two-of-eight", "--out", tmp_path / "out", "--jobs", "2", plots=True)
    assert done.returncode == 0, done.stdout + done.stderr
    named = [line.split("  ")[0] for line in done.stdout.splitlines() if re.match(r"(ours|the paper|zero-fill)  ", line)]
    assert named == ["ours", "the paper", "zero-fill"]
    assert all(len(line) <= 79 for line in done.stdout.splitlines() if str(tmp_path) not in line)
    assert {run for _, run in rows_of(tmp_path / "out")} == {"no loss", *named}
    for picture in ("change", "curves"):
        drawn = (tmp_path / "out" / f"{picture}.svg").read_text(encoding="utf-8")
        assert all(f">{name}</text>" in drawn for name in named) and "7B" not in drawn
    lost = [float(row["gradient_loss_rate"]) for row in rows_of(tmp_path / "out").values() if row["run"] == "the paper"]
    assert 0 < lost[0] < 0.15


def test_shares_that_links_drop():
    section = sweep_settings.Section("x", 1)
    run = lambda **options: sweep_settings.Run(section, {"workers": "8", **options}, None).dropped()
    assert run(**{"loss-rate": "0.2,0.1"}) == (0.2, 0.1)
    assert run(**{"loss-rate": "0", "loss-at": "6-*=0.15:0,7-*=0.15:0"}) == (pytest.approx(0.0375), 0)
    assert run(**{"loss-rate": "0.1", "loss-at": "3=0.5,layers.0-1=1"})[0] == pytest.approx((14 * 0.5 + 42 * 0.1) / 56)
    assert run(**{"loss-rate": "0", "loss-at": "*-1=0:0.4,2-1=1"}) == (pytest.approx(1 / 56), pytest.approx((6 * 0.4 + 1) / 56))


def test_no_base_says_why(data, tmp_path):
    text = SETTINGS.split("[steep]", maxsplit=1)[0]
    settings = write(tmp_path / "at", text + "[a]\nloss-rate = 0 0.1\nloss-at = 0-*=0.5\n", data)
    done = sweep(settings, "--list")
    assert done.returncode == 2 and "'loss-rate/loss-at = 0/none 0/0-*=0.5' has both" in done.stderr, done.stderr
    settings = write(tmp_path / "rates", text + "[a]\nloss-rate = 0.1\n", data)
    assert "add 0 to its loss rates" in sweep(settings, "--list").stderr
