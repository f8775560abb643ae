"""Tests the memory of a run on CPUs: a run takes as much as --dry-run counts. A run that needs more than
there is does not begin, because the kernel would kill it without a message."""
import os
import pathlib
import re
import signal
import subprocess
import time

import pytest

from priority import ahead
from program import (TIMEOUT, environment_of, events, launch, markov_files, planned_memory, run, succeed,
                     write_tokens)

pytestmark = pytest.mark.takes(35)

VOCABULARY = 2048
# Saves are slowed down, so that peaks() sees their copies.
ENVIRONMENT = {"OMP_NUM_THREADS": "2", "TRAIN_LLAMA2_TEST_SAVE_PAUSE_MS": "30"}
SMALL = ("--model=15M", "--batch=1", "--seq=128", "--steps=2")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return markov_files(tmp_path_factory.mktemp("data"), VOCABULARY, 20_000, 2_000)


def resident(process):
    """The resident bytes of a process, without mapped files, which the kernel can drop at any time."""
    try:
        status = pathlib.Path(f"/proc/{process}/status").read_text(encoding="ascii")
    except OSError:
        return 0
    return sum(1024 * int(kilobytes) for kilobytes in re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+)",
                                                                status, re.MULTILINE))


def peaks(command, ranks):
    """Runs a command. Returns the peak memory of each rank."""
    running = subprocess.Popen(command, env=environment_of(ENVIRONMENT), stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    most = {}
    end = time.monotonic() + TIMEOUT
    with ahead():
        while running.poll() is None:
            assert time.monotonic() < end
            processes = [running.pid] if not ranks else pathlib.Path(
                f"/proc/{running.pid}/task/{running.pid}/children").read_text(encoding="ascii").split()
            for process in processes:
                most[process] = max(most.get(process, 0), resident(process))
            time.sleep(0.002)
    assert running.returncode == 0, running.stdout.read()
    return list(most.values())


def planned(options, ranks=0):
    """The bytes that --dry-run counts for the run, including the program of each rank."""
    done = succeed("--dry-run", f"--vocab-size={VOCABULARY}", *options, ranks=ranks, environment=ENVIRONMENT)
    (needed,) = re.findall(r"^  needed +([\d.]+) GB  (?:1 rank|2 ranks) on ", done.stdout, re.MULTILINE)
    (program,) = re.findall(r"^  program +([\d.]+) GB", done.stdout, re.MULTILINE)
    return 1e9 * (float(needed) + max(ranks, 1) * float(program))


@pytest.mark.measures
@pytest.mark.parametrize("ranks, options", [
    (0, ["--model=42M", "--batch=1", "--seq=256"]),
    (0, ["--workers=4", "--batch=2", "--loss-rate=0.1"]),
    (0, ["--workers=4", "--batch=2", "--loss-rate=0.1", "{val}", "{out}"]),
    (0, ["--workers=4", "--carry=1", "--loss-rate=0.1", "{val}", "{out}"]),
    (0, ["--model=42M", "--batch=2", "--dtype=bf16", "{out}"]),
    (0, ["--workers=2", "--algorithm=naive", "--recompute=block", "{out}"]),
    (2, ["--workers=4", "--link=udp", "--loss-rate=0.1", "{val}", "{out}"]),
    (2, ["--workers=2", "--link=udp", "--loss-rate=0.1", "--shard-size=0.01", "{out}"]),
], ids=lambda value: "_".join(value).replace("--", "") if isinstance(value, list) else str(value))
def test_a_run_takes_what_dry_run_says(data, tmp_path, ranks, options):
    names = {"val": f"--val={data}/val.bin", "out": f"--out={tmp_path}/out"}
    options = [*SMALL, f"--train={data}/train.bin", "--eval-sequences=8", "--device=cpu",
               *(option.format(**names) for option in options)]
    each, said = peaks(launch(*options, ranks=ranks), ranks), planned(options, ranks)
    taken = sum(each)
    if "--shard-size=0.01" in options:  # the copy of the model is divided among the ranks
        assert max(each) < 1.1 * min(each)
    assert taken == pytest.approx(said, rel=0.05), f"{taken / 1e6:.0f} MB, not {said / 1e6:.0f} MB"


def table(*options):
    return planned_memory(succeed("--dry-run", *options).stdout)


def test_nobody_needs_the_whole_model_to_save_it():
    """To save 7B on 64 GPUs, rank 0 needs a copy of one file of at most 1 GB, not of the whole model."""
    options = ["--model=7B", "--workers=64", "--group=8", "--dtype=bf16", "--wire-dtype=bf16",
               "--device=cuda", "--batch=2", "--seq=4096"]
    shards, one = table(*options), table(*options, "--shard-size=27")
    whole, shard = 4e-9 * 6738415616, 1e-9 * 4 * (32000 * 4096 + 4096 + 4 * 4096**2 + 4096 +
                                                  11008 * 4096)
    state = one["copy to save"] - whole
    assert state == pytest.approx(1.263, abs=0.002)  # moments, and what is broadcast ahead
    assert shards["copy to save"] == pytest.approx(shard + state, abs=0.002)
    assert one["host's total"] - shards["host's total"] == pytest.approx(whole - shard, abs=0.002)
    assert shards["a checkpoint"] == one["a checkpoint"]


def test_a_checkpoint_holds_what_workers_carry(tmp_path):
    """--dry-run counts the lost gradients that a checkpoint of the default holds; a real one has this size."""
    options = ["--model=1M", "--workers=16", "--device=cpu", "--loss-rate=0.1", "--batch=1", "--seq=16"]
    data = markov_files(tmp_path, 96, 4_000, 100)
    succeed(*options, f"--train={data / 'train.bin'}", "--steps=2", f"--out={tmp_path / 'out'}")
    (folder,) = (tmp_path / "out").glob("checkpoint-*")
    measured = sum(file.stat().st_size for file in folder.iterdir()) / 1e9
    carried, plain = (table(*options, "--vocab-size=96", *more)["a checkpoint"] for more in ([], ["--carry=0"]))
    assert carried == pytest.approx(measured, rel=0.12), (carried, plain, measured)
    assert carried > 2 * plain


@pytest.mark.parametrize("wire, gradients", [("bf16", 2), ("int8", 33 / 32), ("int6", 25 / 32),
                                             ("int4", 17 / 32)])
def test_few_bytes_leave_a_gpu(wire, gradients):
    """With 7B on 64 GPUs in groups of 8, each GPU sends 7/64 of a vector in a phase."""
    needed = table("--model=7B", "--workers=64", "--group=8", "--device=cuda", "--batch=2", "--seq=4096",
                   f"--wire-dtype={wire}")
    sent = 1e-9 * 6738415616 * 7 / 64
    parameters = 2 if wire == "bf16" else 33 / 32
    assert needed["gradient phase"] == pytest.approx(gradients * sent, abs=1e-3)
    assert needed["parameter phase"] == pytest.approx(parameters * sent, abs=1e-3)
    assert wire == "bf16" or needed["parameter phase"] < 0.9
    assert needed["host's total"] < 12 and needed["total"] < 57.1


# ---- a run that is too large ----

def refused(done, *texts):
    assert done.returncode == 1, done.stdout + done.stderr
    told = [line for line in done.stderr.splitlines() if line.startswith("train_llama2: ")]
    assert len(told) == 1, done.stderr
    for text in ("of memory, and ", "a smaller --batch or --seq", *texts):
        assert text in told[0], told[0]


def test_a_run_that_nobody_has_memory_for(data, tmp_path):
    """No host has memory for 64 replicas of 13B, 6 TB. The test sets no limits of its own."""
    options = ["--model=13B", f"--train={data}/train.bin", "--seq=64", "--batch=1", "--workers=64",
               "--device=cpu", f"--out={tmp_path}/out"]
    done = run(*options)
    refused(done, "its 1 rank needs ", "--memory GB says that there is more")
    assert re.search(r"^  total +\d{4,}\.\d+ GB", done.stdout, re.MULTILINE)
    assert "copy to save" in done.stdout and not (tmp_path / "out").exists()
    refused(run("--quiet", *options))
    done = run("--dry-run", *options)
    assert done.returncode == 0 and ": the run would be refused" in done.stdout


def test_an_earlier_run_survives_the_refusal(data, tmp_path):
    options = [*SMALL, f"--train={data}/train.bin", f"--out={tmp_path}"]
    succeed(*options)
    before = (tmp_path / "log.jsonl").read_bytes()
    refused(run(*options, "--overwrite", "--memory=0.05"))
    assert (tmp_path / "log.jsonl").read_bytes() == before
    assert (tmp_path / "checkpoint-00000002" / "trainer.json").exists()


def test_ranks_of_a_host_add_up(data):
    options = [*SMALL, f"--train={data}/train.bin", "--device=cpu"]
    memory = f"--memory={1.3 * planned([*options, '--workers=2'], ranks=2) / 2e9}"
    succeed(*options, memory)
    refused(run(*options, memory, ranks=2), "its 2 ranks need ", "the host, by --memory, has ")


def test_evaluation_and_text(data, tmp_path):
    succeed(*SMALL, f"--train={data}/train.bin", f"--out={tmp_path}")
    model = f"--model={tmp_path}/checkpoint-00000002"
    succeed("--eval", model, f"--val={data}/val.bin", "--memory=0.1", "--batch=1", "--seq=128")
    refused(run("--eval", model, f"--val={data}/val.bin", "--memory=0.02"))


# ---- control groups ----

@pytest.fixture(name="group")
def control_group():
    """A function that makes a control group with a limit, of version 2 or 1, and returns the words before a command
    that runs in it."""
    made = []

    def make(controller, limits):
        """limits: by version, {file: text}."""
        root = pathlib.Path("/sys/fs/cgroup")
        unified = (root / "cgroup.controllers").exists()
        if unified and controller not in (root / "cgroup.subtree_control").read_text(encoding="ascii").split():
            pytest.skip(f"groups of this machine have no controller {controller}: a real limit was not tried")
        above = root if unified else root / controller
        folder = above / f"train_llama2-{os.getpid()}-{len(made)}"
        try:
            folder.mkdir()
            made.append(folder)
            for name, text in limits[2 if unified else 1].items():
                (folder / name).write_text(text, encoding="ascii")
            (folder / "cgroup.procs").open("a", encoding="ascii").close()
        except OSError as error:
            pytest.skip(f"no control group can be made here ({error}): a real limit was not tried")
        return ["sh", "-c", f'echo $$ >{folder}/cgroup.procs && exec "$@"', "sh"]

    yield make
    for folder in made:
        folder.rmdir()


def run_in(group, *arguments, **keywords):
    done = run(*arguments, shell=group, **keywords)
    if "cgroup.procs" in done.stderr:
        pytest.skip(f"nothing may enter a control group here: {done.stderr.strip()}")
    return done


def test_a_control_group_decides(data, group):
    """If a control group has less memory than the run needs, the run is refused; if it is forced to go on,
    it is killed. With a little more than it needs, it ends well."""
    options = [*SMALL, "--model=42M", f"--train={data}/train.bin", "--device=cpu"]
    limits = [str(int(share * planned(options))) for share in (0.9, 1.1)]
    little, enough = (group("memory", {2: {"memory.max": text}, 1: {"memory.limit_in_bytes": text}}) for text in limits)
    done = run_in(little, *options, environment=ENVIRONMENT)
    refused(done, "its 1 rank needs ")
    assert re.search(r"and control group /train_llama2-\S+ \(at most 0\.\d+ GB\) has 0\.\d+ GB", done.stderr), done
    assert run_in(little, *options, "--memory=1000", environment=ENVIRONMENT).returncode == -signal.SIGKILL
    done = run_in(enough, *options, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


def test_a_group_that_may_use_one_processor(group, tmp_path):
    words = group("cpu", {2: {"cpu.max": "100000 100000"},
                          1: {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "100000"}})
    write_tokens(tmp_path / "train.bin", [1, 2, 3, 4] * 100, 512)
    done = run_in(words, "--model=260K", f"--train={tmp_path}/train.bin", "--steps=1", "--seq=16", "--batch=1",
                  f"--out={tmp_path}/out", environment={"OMP_NUM_THREADS": None})
    assert done.returncode == 0, done.stderr
    assert events(tmp_path / "out" / "log.jsonl", "run")[0]["threads"] == 1
