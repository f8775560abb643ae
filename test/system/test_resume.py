"""Tests checkpoints of a training run: runs resume bit for bit, and errors are handled."""
import hashlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import time

import numpy as np
import pytest

import program
from program import (BUILD, ROOT, SANITIZED, TIMEOUT, events, markov_tokens, one_line, read_log, run, steps_done,
                     succeed, tensors, wait_for, write_tokens)

pytestmark = [pytest.mark.spread, pytest.mark.takes(150)]

VOCABULARY = 64
PAUSE = "TRAIN_LLAMA2_TEST_SAVE_PAUSE_MS"  # a pause between the stages of a save


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_tokens(folder / "train.bin", markov_tokens(20_000, VOCABULARY, 1), VOCABULARY)
    write_tokens(folder / "val.bin", markov_tokens(1_000, VOCABULARY, 2), VOCABULARY)
    (folder / "trace").write_text("0000100000000100010\n")
    (folder / "tokenizer.model").write_bytes(b"copied, not read")
    return folder


def settings(data, out, **changes):
    options = {"model": "260K", "train": data / "train.bin", "val": data / "val.bin",
               "workers": 4, "batch": 1, "seq": 32, "steps": 12, "lr": 3e-3, "warmup": 3,
               "seed": 5, "packet-bytes": 512, "loss-rate": 0.1, "save-every": 6, "keep": 0,
               "drift-samples": 256, "out": out}
    options.update({key.replace("_", "-"): value for key, value in changes.items()})
    return [f"--{key}" if value is True else f"--{key}={value}"
            for key, value in options.items() if value is not None]


def checkpoint(out, step):
    return out / f"checkpoint-{step:08d}"


def checkpoints(out):
    return sorted(int(path.name[11:]) for path in out.glob("checkpoint-*") if path.suffix == "")


def state(folder):
    """All tensors of a checkpoint, from all its files."""
    found = {}
    for path in folder.glob("*.safetensors"):
        found.update(tensors(path))
    return found


def numbers(path, step=0):
    """The values of a log from a step on, without times."""
    timing = {"tokens_per_second", "step_ms", "communication_ms", "training_seconds", "checkpoint"}
    return [{k: v for k, v in event.items() if k not in timing} for event in read_log(path)
            if event["event"] in ("eval", "end") or
            (event["event"] == "step" and event["step"] >= step)]


# ---- bit for bit ----

@pytest.mark.parametrize("ranks, then, changes", [
    (0, 0, {}),
    (0, 0, {"workers": 1}),
    (0, 0, {"algorithm": "reliable"}),
    (0, 0, {"algorithm": "rps"}),
    (0, 0, {"algorithm": "naive"}),
    (0, 0, {"estimator": "zero", "loss_rate": 0.3, "loss_model": "burst:5", "micro_batches": 2}),
    (0, 0, {"loss_model": "trace:{data}/trace", "estimator": "balanced"}),
    (2, 4, {"estimator": "zero"}),
    (4, 4, {"loss_model": "burst:3", "repair": 1}),
    (2, 4, {"carry": 1}),
    (0, 2, {"loss_model": "outage:3", "loss_at": "3=0.5,2-1=1", "estimator": "zero"}),
    (0, 2, {"data_split": "contiguous", "batch": 2, "micro_batches": 2}),
    (2, 4, {"loss_rate": 0.4, "wire_dtype": "int8"}),
    (0, 0, {"wire_dtype": "bf16"}),
    (0, 0, {"wire_dtype": "bf16", "algorithm": "reliable"}),
    (4, 2, {"wire_dtype": "bf16", "carry": 1, "loss_rate": 0.3}),
    (0, 2, {"wire_dtype": "int8", "loss_rate": 0.3}),
    (4, 2, {"wire_dtype": "int4", "carry": 1, "loss_rate": 0.3}),
    (4, 0, {"algorithm": "rps"}),
    (0, 2, {"algorithm": "naive"}),
], ids=lambda c: "-".join(map(str, c.values())).replace("/", "") if isinstance(c, dict) else str(c))
def test_resumed_run_is_the_same(data, tmp_path, ranks, then, changes):
    changes = {k: v.format(data=data) if isinstance(v, str) else v for k, v in changes.items()}
    whole, half = tmp_path / "whole", tmp_path / "half"
    succeed(*settings(data, whole, **changes), ranks=ranks)
    done = succeed(*settings(data, half, resume=checkpoint(whole, 6), **changes), ranks=then)
    assert "after 6 steps, bit for bit" in done.stdout
    (event,) = events(half / "log.jsonl", "resume")
    assert event["identical"] is True and event["differences"] == [] and event["step"] == 6
    assert numbers(half / "log.jsonl") == numbers(whole / "log.jsonl", 6)
    assert state(checkpoint(half, 12)) == state(checkpoint(whole, 12))


def test_what_is_saved(data, tmp_path):
    """A checkpoint has only what is needed: each moment once, and of each replica only the stale packets,
    which differ from the model."""
    succeed(*settings(data, tmp_path, val=None, repair=0))
    folder = checkpoint(tmp_path, 12)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "model.safetensors", "optimizer-00001-of-00001.safetensors",
        "tokenizer.model", "trainer.json"]
    assert (folder / "tokenizer.model").read_bytes() == b"copied, not read"
    saved = state(folder)
    model = sum(len(v) for v in tensors(folder / "model.safetensors").values())
    assert sum(len(saved[f"worker.{w}.m"]) for w in range(4)) == model
    stale = sum(len(saved[f"worker.{w}.replica"]) for w in range(4))
    assert 0.02 * 3 * model < stale < 0.2 * 3 * model  # about 10% of the elements that a worker does not own
    trainer = json.loads((folder / "trainer.json").read_text())
    assert trainer["step"] == 12 and trainer["sequence"] == 48
    assert {name: entry["bytes"] for name, entry in trainer["files"].items()} == {
        path.name: path.stat().st_size for path in folder.iterdir() if path.name != "trainer.json"}


def test_checksums_are_what_xxhsum_prints(data, tmp_path):
    if not shutil.which("xxhsum"):
        pytest.skip("no xxhsum here: that it prints the checksums of trainer.json was not checked")
    succeed(*settings(data, tmp_path, steps=1, val=None))
    files = json.loads((checkpoint(tmp_path, 1) / "trainer.json").read_text())["files"]
    for name, entry in files.items():
        done = subprocess.run(["xxhsum", "-H2", name], cwd=checkpoint(tmp_path, 1), text=True,
                              capture_output=True, check=True)
        assert done.stdout.split()[0] == entry["xxh128"]


def test_resumed_where_it_stood(data, tmp_path):
    """--resume auto takes the newest checkpoint. The log is cut after its step and written again."""
    whole, out = tmp_path / "whole", tmp_path / "out"
    succeed(*settings(data, whole))
    done = succeed(*settings(data, out, resume="auto"))  # there is no checkpoint yet
    assert f"no checkpoint in {out} yet: training starts at the first step" in done.stdout
    shutil.rmtree(checkpoint(out, 12))
    with open(out / "log.jsonl", "a", encoding="utf-8") as log:
        log.write('{"event":"step","st')  # as a killed run leaves it
    done = succeed(*settings(data, out, resume="auto"))
    assert "checkpoint-00000006 after 6 steps, bit for bit" in done.stdout
    assert numbers(out / "log.jsonl") == numbers(whole / "log.jsonl")
    assert [e["event"] for e in read_log(out / "log.jsonl")] == (
        ["run"] + 6 * ["step"] + ["run", "resume"] + 6 * ["step"] + ["eval", "links", "end"])
    assert state(checkpoint(out, 12)) == state(checkpoint(whole, 12))
    done = succeed(*settings(data, out, resume="auto"))  # the run is complete already
    assert "after 12 steps" in done.stdout
    assert checkpoints(out) == [6, 12]


def test_all_ranks_resume_from_the_checkpoint_of_rank_0(data, tmp_path):
    """Rank 1 sees a folder of its own. A checkpoint that only it has, as if another run had saved it
    between, does not count; one that it lacks is named."""
    each = ("sh", "-c", f'cd {tmp_path}/$OMPI_COMM_WORLD_RANK && exec "$@"', "sh")
    succeed(*settings(data, tmp_path / "0" / "out"))
    shutil.copytree(tmp_path / "0", tmp_path / "1")
    shutil.rmtree(checkpoint(tmp_path / "0" / "out", 12))
    line = settings(data, "out", resume="auto", steps=6)
    done = succeed(*line, ranks=2, shell=each)
    assert "resumed from out/checkpoint-00000006 after 6 steps" in done.stdout
    shutil.rmtree(checkpoint(tmp_path / "1" / "out", 6))
    done = run(*line, ranks=2, shell=each)
    assert done.returncode == 1
    assert [said for said in done.stderr.splitlines() if said.startswith("train_llama2")] == [
        "train_llama2: rank 1: --resume auto: rank 0 goes on from 'out/checkpoint-00000006', which is not "
        "there on this rank: expected a folder --out that all ranks share"]


def test_tokenizer_stays_with_the_model(data, tmp_path):
    """A checkpoint has the tokenizer, even if the data has none and the checkpoint that the run started from
    was removed."""
    plain = tmp_path / "train.bin"
    shutil.copy(data / "train.bin", plain)
    common = dict(steps=8, save_every=2, val=None)
    succeed(*settings(data, tmp_path / "a", **{**common, "steps": 2}))
    for resume in (None, "auto"):
        shutil.rmtree(tmp_path / "b", ignore_errors=True)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        succeed(*settings(data, tmp_path / "b", train=plain, keep=1, resume=resume,
                          overwrite=None if resume else True,
                          model=checkpoint(tmp_path / "a", 2), **common))
        last = checkpoint(tmp_path / "b", 8)
        assert (last / "tokenizer.model").read_bytes() == b"copied, not read"


# ---- in shards ----

SHARDS = {"shard_size": 1e-4}  # 100 KB; the model has 0.93 MB


def model_files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()
            if not path.name.startswith(("optimizer", "trainer"))}


@pytest.fixture(scope="session")
def sharded(data, tmp_path_factory):
    """Makes the same run in one process with one file, in one with shards, and in 4 with shards."""
    folder = tmp_path_factory.mktemp("sharded")
    for name, ranks, changes in (("file", 0, {}), ("one", 0, SHARDS), ("four", 4, SHARDS)):
        succeed(*settings(data, folder / name, **changes), ranks=ranks)
    return folder


def test_shards_do_not_depend_on_the_ranks(sharded):
    one, four = (model_files(checkpoint(sharded / name, 12)) for name in ("one", "four"))
    assert one == four
    names = [f"model-{i + 1:05d}-of-00011.safetensors" for i in range(11)]
    assert sorted(one) == ["config.json", *names, "model.safetensors.index.json", "tokenizer.model"]
    index = json.loads(one["model.safetensors.index.json"])
    whole, parts = tensors(checkpoint(sharded / "file", 12) / "model.safetensors"), {}
    for name in names:
        part = tensors(checkpoint(sharded / "one", 12) / name)
        assert sum(map(len, part.values())) <= 100_000
        assert {index["weight_map"][tensor] for tensor in part} == {name}
        parts.update(part)
    assert parts == whole and index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(map(len, whole.values()))


def test_every_file_is_listed(sharded):
    """trainer.json lists every file, including those that other ranks wrote. Their own lists are removed."""
    folder = checkpoint(sharded / "four", 12)
    files = json.loads((folder / "trainer.json").read_text())["files"]
    assert {name: entry["bytes"] for name, entry in files.items()} == {
        path.name: path.stat().st_size for path in folder.iterdir() if path.name != "trainer.json"}


@pytest.mark.parametrize("name, ranks", [("one", 2), ("four", 0), ("four", 2)])
def test_resumed_from_shards(data, sharded, tmp_path, name, ranks):
    """A run resumes from shards as from one file, bit for bit, even if it writes another number of files."""
    done = succeed(*settings(data, tmp_path, resume=checkpoint(sharded / name, 6),
                             shard_size=3e-4), ranks=ranks)
    assert "after 6 steps, bit for bit" in done.stdout
    assert state(checkpoint(tmp_path, 12)) == state(checkpoint(sharded / "file", 12))
    assert len(list(checkpoint(tmp_path, 12).glob("model-*-of-00004.safetensors"))) == 4


def test_shards_are_a_model(data, sharded, tmp_path):
    """A run can evaluate shards and start from them. (test_generate.py generates text with them.)"""
    lost, made = [], []
    for name, ranks in (("file", 0), ("four", 0), ("four", 2)):
        out, model = tmp_path / f"{name}{ranks}", checkpoint(sharded / name, 12)
        succeed("--eval", f"--model={model}", f"--val={data}/val.bin", "--seq=32",
                f"--log={out}.jsonl", f"--workers={ranks or 1}", ranks=ranks)
        lost.append(events(f"{out}.jsonl", "eval")[0]["val_loss"])
        succeed(*settings(data, out, model=model, steps=2), ranks=ranks)
        made.append(state(checkpoint(out, 2)))
    assert lost[1:] == lost[:1] * 2 and made[1:] == made[:1] * 2


@pytest.mark.parametrize("ranks", [0, 2])
@pytest.mark.parametrize("damage, said", [
    ("remove", "trainer.json lists it: the checkpoint is incomplete"),
    ("truncate", "the checkpoint is damaged"),
    ("flip", "is damaged: its checksum is")])
def test_a_damaged_shard_is_named(data, sharded, tmp_path, damage, said, ranks):
    folder, name = tmp_path / "checkpoint", "model-00007-of-00011.safetensors"
    shutil.copytree(checkpoint(sharded / "four", 6), folder)
    raw = bytearray((folder / name).read_bytes())
    raw[-3] ^= 1
    (folder / name).unlink()
    if damage != "remove":
        (folder / name).write_bytes(raw[:-1] if damage == "truncate" else raw)
    done = run(*settings(data, tmp_path / "out", resume=folder), ranks=ranks)
    lines = [line for line in done.stderr.splitlines() if line.startswith("train_llama2: ")]
    assert done.returncode == 1 and len(lines) == 1, done.stderr
    assert f"{folder}/{name}'" in lines[0] and said in lines[0]
    evaluation = ["--eval", f"--model={folder}", f"--val={data}/val.bin"]
    line = one_line(run(*evaluation), 1)
    assert name in line and (damage != "flip" or "is not what the run wrote: its checksum is" in line)
    (folder / "trainer.json").unlink()  # models that no training run wrote have no checksums
    assert run(*evaluation).returncode == (0 if damage == "flip" else 1)


def test_settings_that_the_run_did_not_write_are_named(data, sharded, tmp_path):
    """They would make another model of the same parameters."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint(sharded / "four", 6), folder)
    evaluation, config = ["--eval", f"--model={folder}", f"--val={data}/val.bin"], folder / "config.json"
    config.write_text(config.read_text(encoding="utf-8").replace("10000", "20000"), encoding="utf-8")
    assert f"'{config}' is not what the run wrote" in one_line(run(*evaluation), 1)
    os.truncate(folder / "trainer.json", 50)
    assert f"'{folder}/trainer.json' is damaged" in one_line(run(*evaluation), 1)


def test_wrong_shard_sizes(data):
    for size in ("0", "-1", "1GB", "nan"):
        assert "--shard-size: expected a number from 1e-06 to 1000000, got" in one_line(
            run(*settings(data, None, save_every=None, shard_size=size)), 2)


# ---- with other settings ----

def test_other_numbers_of_workers(data, tmp_path):
    """Without loss, 4 workers with 2 sequences give the same as 2 with 4 and 8 with 1, up to rounding. The
    test would show wrongly distributed moments, and data that does not continue."""
    whole = tmp_path / "whole"
    common = dict(algorithm="reliable", loss_rate=0, lr=1e-2, wire_dtype="float32")
    succeed(*settings(data, whole, batch=2, **common))
    expected = state(checkpoint(whole, 12))
    start = state(checkpoint(whole, 6))
    for workers, batch, ranks in ((2, 4, 0), (8, 1, 2), (1, 8, 0)):
        out = tmp_path / str(workers)
        succeed(*settings(data, out, workers=workers, batch=batch, resume=checkpoint(whole, 6),
                          **common), ranks=ranks)
        (event,) = events(out / "log.jsonl", "resume")
        assert event["identical"] is False
        assert any(f"{workers} workers were 4" in d for d in event["differences"])
        assert any(d == f"batch was 2, is {batch}" for d in event["differences"])
        found = state(checkpoint(out, 12))
        for name in tensors(checkpoint(out, 12) / "model.safetensors"):
            x, y, z = (np.frombuffer(s[name], "<f4") for s in (found, expected, start))
            assert np.abs(x - y).max() < 2e-3 * np.abs(y - z).max(), name


@pytest.mark.parametrize("first, then", [("lossy", "rps"), ("rps", "lossy"), ("naive", "reliable"),
                                         ("lossy", "reliable")])
def test_other_algorithms(data, tmp_path, first, then):
    whole, out = tmp_path / "whole", tmp_path / "out"
    succeed(*settings(data, whole, algorithm=first, steps=40, save_every=20))
    succeed(*settings(data, out, algorithm=then, workers=2, steps=40, save_every=20,
                      resume=checkpoint(whole, 20)))
    (event,) = events(out / "log.jsonl", "resume")
    assert f'algorithm was "{first}", is "{then}"' in event["differences"]
    before = [e["loss"] for e in events(whole / "log.jsonl", "step")]
    after = [e["loss"] for e in events(out / "log.jsonl", "step")]
    assert after[0] == pytest.approx(before[19], abs=0.4) and after[-1] < before[0] - 0.3


def test_other_options_are_named(data, tmp_path):
    succeed(*settings(data, tmp_path / "a", wire_dtype="float32"))
    done = succeed(*settings(data, tmp_path / "b", resume=checkpoint(tmp_path / "a", 6), lr=1e-3,
                             wire_dtype="float32", packet_bytes=1024, drift_samples=100, eval_every=1, group=2))
    (event,) = events(tmp_path / "b" / "log.jsonl", "resume")
    assert event["differences"] == [
        "packet_bytes was 512, is 1024", "lr was 0.003, is 0.001", 'group was "1", is "2"', "drift-samples was 256, is 100",
        "every replica starts as the model, ages at 0",
        "the history of the drift sample starts again"]
    readme = (ROOT / "llmc" / "log" / "README.md").read_text(encoding="utf-8")
    assert all(f"`{field}`" in readme for field in event)
    assert "cannot be identical:\n  packet_bytes was 512, is 1024\n" in done.stdout


def rewrite(path, saved, again):
    """Writes trainer.json with the checksum that `again`, which resumes from it, expects."""
    path.write_text(json.dumps(saved))
    saved["xxh128"] = re.search(r"its checksum is (\w+)", one_line(run(*again), 1))[1]
    path.write_text(json.dumps(saved))


def test_wsd_goes_on_beyond_its_steps(data, tmp_path):
    """A run of 12 steps decays from step 9 on. Its checkpoint of step 6 goes on for 20 steps, with the bits of
    a run that was asked for 20 at once. That of step 12 has decayed, which is said."""
    common = dict(schedule="wsd", decay=0.25, val=None)
    succeed(*settings(data, tmp_path / "short", **common))
    succeed(*settings(data, tmp_path / "long", **common, steps=20))
    for step, differences in ((6, []), (12, ["steps was 12, is 20"])):
        out = tmp_path / f"from{step}"
        succeed(*settings(data, out, **common, steps=20, resume=checkpoint(tmp_path / "short", step)))
        (event,) = events(out / "log.jsonl", "resume")
        assert event["differences"] == differences and event["identical"] == (not differences)
        assert (state(checkpoint(out, 20)) == state(checkpoint(tmp_path / "long", 20))) == (not differences)
    rates = {e["step"]: e["lr"] for e in events(tmp_path / "long" / "log.jsonl", "step")}
    assert rates[14] == 3e-3 and rates[19] == pytest.approx(3e-4, rel=1e-9)
    assert rates[16] == pytest.approx(3e-3 * (0.1 + 0.9 * (1 - (2 / 5) ** 0.5)), rel=1e-8)


def test_a_network_that_loses_is_named(data, tmp_path):
    common = dict(link="udp", save_every=6, interface="lo")
    succeed(*settings(data, tmp_path / "a", **common), ranks=2)
    succeed(*settings(data, tmp_path / "b", resume=checkpoint(tmp_path / "a", 6), **common),
            ranks=2)
    (event,) = events(tmp_path / "b" / "log.jsonl", "resume")
    assert event["identical"] is False
    assert event["differences"] == ["over --link udp the network decides what else is lost"]


def test_fewer_steps_than_are_done(data, good):
    """Nothing is trained, which is no error where a finished run is started again, but is told."""
    fewer = run(*settings(data, None, resume=good, steps=3, save_every=0, quiet=True))
    assert "--steps 3: " in one_line(fewer, 0) and "has done 6 already, so no step is made" in fewer.stderr
    assert not succeed(*settings(data, None, resume=good, steps=6, save_every=0)).stderr


# ---- kept, and written while training goes on ----

def test_the_newest_are_kept(data, tmp_path):
    other = checkpoint(tmp_path, 99)  # it does not belong to this run
    other.mkdir()
    succeed(*settings(data, tmp_path, save_every=1, keep=2, steps=5, overwrite=True))
    assert checkpoints(tmp_path) == [4, 5, 99]
    succeed(*settings(data, tmp_path, save_every=1, keep=2, steps=7,
                      resume=checkpoint(tmp_path, 5)))
    assert checkpoints(tmp_path) == [6, 7, 99]
    assert not list(tmp_path.glob("*.partial"))


def start(*arguments, ranks=0, pause=0):
    return program.start(*arguments, ranks=ranks, environment={PAUSE: str(pause)} if pause else {})



def test_training_does_not_wait_for_the_disk(data, tmp_path):
    """The save of step 5 takes minutes. Steps go on until the next save, which waits for it."""
    process = start(*settings(data, tmp_path, steps=40, save_every=5, val=None), pause=60_000)
    try:
        wait_for(lambda: steps_done(tmp_path) == 10, process, "step 10")
        time.sleep(0.2)
        assert steps_done(tmp_path) == 10
        assert [path.name for path in tmp_path.glob("checkpoint*")] == [
            "checkpoint-00000005.partial"]
    finally:
        process.kill()
        process.communicate()


# ---- kills ----

def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(child) for child in file.read().split()]


def kill_ranks(process):
    """Kills mpirun and its ranks, or the process, and waits until all have let go of what they held."""
    os.kill(process.pid, signal.SIGSTOP)  # it starts none meanwhile
    ranks = children(process.pid)
    for pid in ranks + [process.pid]:
        os.kill(pid, signal.SIGKILL)
    process.communicate()
    for pid in ranks:
        stat = pathlib.Path(f"/proc/{pid}/stat")
        try:
            while stat.read_text(encoding="ascii").rpartition(")")[2].split()[0] not in "ZX":
                time.sleep(0.002)
        except (FileNotFoundError, ProcessLookupError):
            pass


def runs_begun(out):
    log = out / "log.jsonl"
    return log.read_bytes().count(b'{"event":"run"') if log.exists() else 0


def wait_while(condition, process):
    while process.poll() is None and condition():
        time.sleep(0.002)


def digest(folder):
    return {name: hashlib.sha256(value).hexdigest() for name, value in state(folder).items()}


@pytest.mark.parametrize("ranks, kills", [(0, 100), (2, 8)])
def test_killed_at_any_moment(data, tmp_path, ranks, kills):
    """After a SIGKILL at any time, every folder with a checkpoint's name has that step's checkpoint, bit for
    bit."""
    common = dict(workers=2, seq=16, steps=30, save_every=1, keep=2, val=None, loss_rate=0.2)
    whole, out = tmp_path / "whole", tmp_path / "out"
    succeed(*settings(data, whole, **{**common, "keep": 0}))
    if ranks:
        common["shard_size"] = 2e-4
    expected = {step: digest(checkpoint(whole, step)) for step in checkpoints(whole)}
    chance, killed, seen, half_done = random.Random(1), 0, set(), 0
    while killed < kills:
        before = runs_begun(out)
        process = start(*settings(data, out, resume="auto", **common), ranks=ranks, pause=3)
        if chance.random() < 0.8:  # otherwise the kill may come while the program starts
            wait_while(lambda: runs_begun(out) == before, process)
            goal = steps_done(out) + chance.randint(0, 3)
            wait_while(lambda: steps_done(out) < goal, process)
        try:
            errors = process.communicate(timeout=chance.uniform(0, 0.1))[1]
        except subprocess.TimeoutExpired:
            kill_ranks(process)
            killed += 1
        else:
            assert process.returncode == 0, errors
        for step in checkpoints(out):
            assert digest(checkpoint(out, step)) == expected[step]
            seen.add(step)
        half_done += bool(list(out.glob("*.partial")))
        if checkpoint(out, 30).exists():
            shutil.rmtree(out)
    succeed(*settings(data, out, resume="auto", **common))
    assert digest(checkpoint(out, 30)) == expected[30]
    assert numbers(out / "log.jsonl") == numbers(whole / "log.jsonl")
    if not ranks:
        assert half_done > 10 and len(seen) > 10, "too few kills hit a save"


# ---- which checkpoint is the newest ----

def test_clocks_do_not_say_what_is_newest(data, tmp_path):
    """The clock is two hours ahead in the first start, and right in the others. A start from an older
    checkpoint is newer than what an earlier one has saved of later steps."""
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "shift.so", ROOT / "dev/chaos/another_clock.c"],
                   check=True)
    out = tmp_path / "out"
    common = {"val": None, "save_every": None}
    succeed(*settings(data, out, steps=2, **common),
            environment={"LD_PRELOAD": str(tmp_path / "shift.so"), "SHIFT": "7200"})
    succeed(*settings(data, out, steps=4, resume="auto", keep=2, **common))
    succeed(*settings(data, out, steps=6, resume="auto", keep=2, **common))
    assert [e["step"] for e in events(out / "log.jsonl", "step")] == list(range(6))  # no step twice
    assert checkpoints(out) == [4, 6]
    succeed(*settings(data, out, steps=5, resume=checkpoint(out, 4), **common))
    succeed(*settings(data, out, steps=7, resume="auto", **common))
    assert [e["checkpoint"] for e in events(out / "log.jsonl", "resume")][-1] == str(checkpoint(out, 5))


# ---- directories that fail ----

@pytest.fixture
def small_disk(tmp_path):
    """A function that mounts a file system of the given size, in kilobytes, at tmp_path/disk."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(kilobytes):
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", disk],
                              text=True, capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot mount a small file system here: {done.stderr.strip()}")
        return disk
    yield mount
    subprocess.run(["umount", disk], capture_output=True, check=False)


def test_full_disk_from_the_start(data, tmp_path, small_disk):
    disk = small_disk(1000)  # a checkpoint has 3 MB
    log = tmp_path / "log.jsonl"
    done = run(*settings(data, disk, log=log, val=None))
    assert done.returncode == 1
    assert len(events(log, "step")) == 12 and events(log, "end")[0]["checkpoint"] is None
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 3 and all("No space left" in line for line in lines[:2]), done.stderr
    assert f"no checkpoint could be written to '{disk}'" in lines[2]
    assert list(disk.iterdir()) == []  # nothing is left behind on a full disk


@pytest.mark.parametrize("ranks", [0, 2])
def test_disk_that_fills_up(data, tmp_path, small_disk, ranks):
    disk = small_disk(9_000)  # large enough for one checkpoint
    done = run(*settings(data, disk, save_every=3, **SHARDS if ranks else {}), ranks=ranks)
    assert done.returncode == 1, done.stderr
    assert (f"step 12 could not be saved, see above: the newest checkpoint is '{checkpoint(disk, 3)}'\n"
            in done.stderr)
    assert events(disk / "log.jsonl", "end")[0]["status"] == "not saved"
    assert checkpoints(disk) == [3] and "No space left" in done.stderr
    assert not list(disk.glob("*.partial"))
    assert events(disk / "log.jsonl", "end")[0]["checkpoint"] == str(checkpoint(disk, 3))
    succeed(*settings(data, tmp_path / "out", resume=checkpoint(disk, 3)), ranks=ranks)


def test_full_disk_that_gets_room_again(data, tmp_path, small_disk):
    disk = small_disk(20_000)  # large enough for two checkpoints
    (disk / "filler").write_bytes(bytes(19_500_000))
    process = start(*settings(data, disk, log=tmp_path / "log", save_every=2, keep=1, steps=60,
                              val=None), pause=50)
    assert "No space left" in process.stderr.readline()
    (disk / "filler").unlink()
    process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0
    assert checkpoints(disk) == [60]


def test_full_disk_and_the_log(data, tmp_path, small_disk):
    """If the log's disk is full, whole lines are missing, and one message says so."""
    disk = small_disk(8)
    done = succeed(*settings(data, None, log=disk / "log.jsonl", steps=60, val=None,
                             save_every=None))
    assert "lines are missing" in one_line(done, 0)
    assert read_log(disk / "log.jsonl")[0]["event"] == "run"


def test_read_only_disk(data, tmp_path, small_disk):
    disk, log = small_disk(20_000), tmp_path / "log.jsonl"
    process = start(*settings(data, disk, log=log, save_every=10, steps=60, val=None), pause=100)
    wait_for(lambda: 10 in checkpoints(disk), process, "checkpoint")
    # A file system with open files cannot be made read-only, so a read-only view of it takes its place.
    view = tmp_path / "view"
    view.mkdir()
    for words in (("--bind", disk, view), ("-o", "remount,bind,ro", view), ("--bind", view, disk)):
        subprocess.run(["mount", *words], check=True)
    try:
        errors = process.communicate(timeout=TIMEOUT)[1]
    finally:
        for mounted in (disk, view):
            subprocess.run(["umount", mounted], check=True)
    assert process.returncode == 1 and len(events(log, "step")) == 60
    assert "the newest checkpoint is" in errors.splitlines()[-1]
    assert "Read-only file system" in errors


@pytest.mark.parametrize("ranks", [0, 2])
def test_vanished_directory(data, tmp_path, ranks):
    out, log = tmp_path / "out", tmp_path / "log.jsonl"
    process = start(*settings(data, out, log=log, save_every=5, steps=60, val=None), ranks=ranks,
                    pause=100)
    wait_for(lambda: 5 in checkpoints(out), process, "checkpoint")
    out.rename(tmp_path / "elsewhere")
    errors = process.communicate(timeout=TIMEOUT)[1]
    # Only rank 0 ends with an error. It still meets the others, so that mpirun need not end them.
    assert process.returncode == 1 and len(events(log, "step")) == 60, errors
    assert "MPI_ABORT" not in errors
    assert "No such file or directory" in errors
    assert f"no checkpoint could be written to '{out}'" in errors
    assert not out.exists()  # the run does not make the folder again: a mount may come back there


# ---- damaged checkpoints ----

@pytest.fixture(scope="session")
def good(data, tmp_path_factory):
    out = tmp_path_factory.mktemp("good")
    succeed(*settings(data, out, val=None), ranks=2)
    return checkpoint(out, 6)


FILES = ["config.json", "model.safetensors", "optimizer-00001-of-00002.safetensors",
         "optimizer-00002-of-00002.safetensors", "tokenizer.model", "trainer.json"]


@pytest.mark.parametrize("ranks, damage", [(0, "flip"), (0, "truncate"), (0, "remove"),
                                           (2, "flip")])
@pytest.mark.parametrize("name", FILES)
def test_damaged_files_are_refused(data, good, tmp_path, name, damage, ranks):
    folder = tmp_path / "checkpoint"
    shutil.copytree(good, folder)
    path = folder / name
    raw = bytearray(path.read_bytes())
    if damage == "remove":
        path.unlink()
    elif damage == "truncate":
        path.write_bytes(raw[:-1])
    else:
        at = len(raw) - 3 if name != "trainer.json" else raw.index(b'"step": 6') + 8
        raw[at] ^= 1  # changes a space to !, a 6 to a 7, or a float to another one
        path.write_bytes(raw)
    done = run(*settings(data, tmp_path / "out", resume=folder), ranks=ranks)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("train_llama2: ")]
    assert len(lines) == 1 and name in lines[0], done.stderr
    assert not list(tmp_path.glob("out/checkpoint*"))


def test_auto_looks_for_a_whole_one(data, good, tmp_path):
    for step in (6, 12):
        shutil.copytree(good.parent / f"checkpoint-{step:08d}", checkpoint(tmp_path, step))
    (checkpoint(tmp_path, 12) / FILES[2]).write_bytes(b"cut off")
    partial = tmp_path / "checkpoint-00000018.partial"
    shutil.copytree(good, partial)
    done = succeed(*settings(data, tmp_path, resume="auto", val=None))
    assert "checkpoint-00000006 after 6 steps" in done.stdout and FILES[2] in one_line(done, 0)
    assert not partial.exists()  # files that killed runs left are removed
    for step in (6, 12):
        (checkpoint(tmp_path, step) / "model.safetensors").unlink()
    done = run(*settings(data, tmp_path, resume="auto", val=None))
    assert done.returncode == 1 and "no checkpoint under" in done.stderr


def test_names_with_brackets_are_no_patterns(data, good, tmp_path):
    """Neither the data nor the unfinished checkpoint of the run "a1" belong to the run "a[1]"."""
    for name in "a1", "a[1]":
        shutil.copytree(good, tmp_path / name / "checkpoint-00000018.partial")
    shutil.copy(data / "train.bin", tmp_path / "a[1]" / "t.bin")
    (tmp_path / "a1" / "t.bin").write_bytes(b"no token file")
    succeed(*settings(data, tmp_path / "a[1]", train=tmp_path / "a[1]" / "t.bin", steps=1, save_every=0))
    assert checkpoints(tmp_path / "a[1]") == [1] and (tmp_path / "a1" / "checkpoint-00000018.partial").exists()
    assert not list((tmp_path / "a[1]").glob("*.partial"))


def edit(folder, **changes):
    path = folder / "trainer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("changes, said", [
    ({"format": 2}, "format 2, expected 1"), ({"step": 7}, "damaged"), ({"files": {}}, "damaged"),
    ({"xxh128": 5}, "it says none"),
])
def test_edited_trainer_json(data, good, tmp_path, changes, said):
    folder = tmp_path / "checkpoint"
    shutil.copytree(good, folder)
    edit(folder, **changes)
    assert said in one_line(run(*settings(data, None, resume=folder)), 1)
    (folder / "trainer.json").write_text("{")
    assert "trainer.json" in one_line(run(*settings(data, None, resume=folder)), 1)


def test_wrong_use(data, good, tmp_path):
    for arguments, code, said in (
            (settings(data, None, resume="auto"), 2, "--resume auto: expected --out DIR"),
            (settings(data, None, resume=tmp_path / "none"), 1, "is no directory"),
            (settings(data, None, resume=tmp_path), 1, "has no trainer.json"),
            (["--eval", *settings(data, None, resume=good)], 2, "--resume: expected without"),
            (settings(data, None, resume=good, keep=-1), 2, "--keep")):
        assert said in one_line(run(*arguments), code)


def test_measuring_how_fast_a_model_is_read(tmp_path):
    """The program runs and finds every kind of model. Its times are not tested, since they depend on what
    else the machine does."""
    done = run(tmp_path / "model", 0, program=BUILD / "bench_load")
    assert done.returncode in (0, 1) and done.stderr == ""
    found = re.findall(r"^(F32|BF16) +(1 file|4 shards) .* ([0-9]+)%$", done.stdout, re.MULTILINE)
    assert len(found) == 4 and all(int(share) > 0 for _, _, share in found), done.stdout
    assert not list((tmp_path / "model").iterdir())


def test_sanitized_resume(data, good, tmp_path):
    for i, changes in enumerate(({}, {"workers": 2, "algorithm": "rps"},
                                 {"workers": 8, "packet_bytes": 256, "shard_size": 1e-4})):
        done = run(*settings(data, tmp_path / str(i), resume=good, save_every=2, keep=1,
                             **changes), program=SANITIZED)
        assert done.returncode == 0 and done.stderr == "", done.stderr[-3000:]


def poison(folder, name, at, value, again):
    """Writes a float into a tensor of the optimizer's file, and the file's new checksum."""
    path = folder / "optimizer-00001-of-00001.safetensors"
    raw, values = bytearray(path.read_bytes()), tensors(path)[name]
    start = raw.find(values)
    at = at % len(values) // 4 * 4
    raw[start + at:start + at + 4] = np.float32(value).tobytes()
    path.write_bytes(raw)
    saved = json.loads((folder / "trainer.json").read_text())
    saved["files"][path.name]["xxh128"] = re.search(r"its checksum is (\w+)", one_line(run(*again), 1))[1]
    rewrite(folder / "trainer.json", saved, again)


@pytest.mark.parametrize("name, at", [("worker.0.m", 40), ("worker.1.v", 400), ("worker.2.ahead", 0), ("worker.1.replica", 8),
                                      ("network", -4), ("network", 80), ("worker.3.network", -4),
                                      ("worker.2.network", -400000)])
def test_state_that_is_not_finite(data, tmp_path, name, at):
    """NaN in any part of a checkpoint's state, with a checksum that fits, ends the run with a line; the network's state
    begins anew, and a line says so."""
    succeed(*settings(data, tmp_path / "a", workers=4, steps=4, loss_rate=0.2))
    folder = checkpoint(tmp_path / "a", 4)
    again = settings(data, tmp_path / "b", workers=4, steps=8, loss_rate=0.2, resume=folder, overwrite=True)
    poison(folder, name, at, np.nan, again)
    done = run(*again)
    if name.endswith("network"):
        said = "the history of the drift sample starts again" if name == "network" else \
            f"replica {name.split('.')[1]} starts as the model, ages at 0: its state is damaged"
        assert done.returncode == 0 and f"cannot be identical:\n  {said}\n" in done.stdout, done.stdout
        done = run(*again, ranks=2, flags=()) if name != "network" else done
        assert said in done.stdout, done.stdout  # on whatever rank the worker is
        return
    assert f"tensor '{name}'" in one_line(done, 1), done.stdout
    if name.endswith((".m", ".v")):  # a rank reads what its own workers need
        done = run(*again, ranks=2, flags=())
        assert done.returncode == 1 and done.stderr.count(f"tensor '{name}'") == 1, done.stderr
