"""Tests --optimizer muon: its owners have whole matrices, and the bits of a run depend on the workers alone."""
import hashlib
import json
import re

import numpy as np
import pytest

from program import BUILD, markov_tokens, run, small_model, succeed, tensors, write_tokens

pytestmark = [pytest.mark.spread, pytest.mark.takes(60)]

VOCABULARY = 64
EMULATED = BUILD / "emulated" / "train_llama2"


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_tokens(folder / "train.bin", markov_tokens(20_000, VOCABULARY, 1), VOCABULARY)
    write_tokens(folder / "val.bin", markov_tokens(1_000, VOCABULARY, 2), VOCABULARY)
    return folder


def settings(data, out, **changes):
    options = {"optimizer": "muon", "model": "260K", "train": data / "train.bin", "val": data / "val.bin",
               "workers": 8, "batch": 1, "seq": 32, "steps": 6, "lr": 6e-3, "warmup": 2, "seed": 5,
               "packet-bytes": 512, "loss-rate": 0.2, "out": out}
    options.update({key.replace("_", "-"): value for key, value in changes.items()})
    return [f"--{key}" if value is True else f"--{key}={value}" for key, value in options.items()]


def digest(out, step):
    return hashlib.sha256((out / f"checkpoint-{step:08d}" / "model.safetensors").read_bytes()).hexdigest()


def values(out, step):
    """All parameters."""
    found = tensors(out / f"checkpoint-{step:08d}" / "model.safetensors")
    return np.concatenate([np.frombuffer(found[name], "<f4") for name in sorted(found)])


@pytest.mark.parametrize("changes", [
    {}, {"plain": True}, {"algorithm": "reliable"}, {"wire_dtype": "bf16"}, {"wire_dtype": "int4"},
    {"dtype": "bf16", "micro_batches": 2}, {"group": 2},
], ids=lambda c: "-".join(map(str, c.values())) or "default")
def test_bits_do_not_depend_on_the_processes(data, tmp_path, changes):
    for ranks in 0, 2, 8:
        succeed(*settings(data, tmp_path / str(ranks), **changes), ranks=ranks)
    assert digest(tmp_path / "2", 6) == digest(tmp_path / "0", 6)
    assert digest(tmp_path / "8", 6) == digest(tmp_path / "0", 6)


@pytest.mark.skipif(not EMULATED.exists(), reason="make tests builds the emulated device")
@pytest.mark.parametrize("changes", [
    {"dtype": "bf16"}, {"dtype": "bf16", "group": 2}, {"dtype": "float32", "plain": True},
], ids=lambda c: "-".join(map(str, c.values())))
def test_bits_on_a_device_do_not_depend_on_the_processes(data, tmp_path, changes):
    small = small_model(tmp_path / "small", VOCABULARY)
    for ranks in 0, 2, 4:
        succeed(*settings(data, tmp_path / str(ranks), model=small, workers=4, steps=2, seq=8, device="cuda", **changes),
                ranks=ranks, program=EMULATED)
    assert digest(tmp_path / "2", 2) == digest(tmp_path / "0", 2)
    assert digest(tmp_path / "4", 2) == digest(tmp_path / "0", 2)


def test_resumed_in_other_processes_and_with_other_workers(data, tmp_path):
    whole, half = tmp_path / "whole", tmp_path / "half"
    succeed(*settings(data, whole, save_every=3), ranks=2)
    first = whole / "checkpoint-00000003"
    done = succeed(*settings(data, half, resume=first), ranks=4)
    assert "after 3 steps, bit for bit" in done.stdout
    assert digest(half, 6) == digest(whole, 6)
    done = succeed(*settings(data, tmp_path / "three", resume=first, workers=3, steps=12))
    assert "3 workers were 8: moments are distributed again" in done.stdout


def has_squares(config):
    """Of each element of the parameter vector (llmc/model/param_layout.h), whether AdamW updates it."""
    width, hidden, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    layer = [(width, True), (2 * (heads + keys) * width, False), (width, True), (3 * hidden * width, False)]
    parts = [(width, True), *config["num_hidden_layers"] * layer, (config["vocab_size"] * width, True)]
    return np.concatenate([np.full(count, value) for count, value in parts])


def test_matrices_have_no_second_moments(data, tmp_path):
    """A checkpoint has none, and one of before, which has zeros there, is resumed to the same bits."""
    succeed(*settings(data, tmp_path / "whole", save_every=3, workers=2))
    folder = tmp_path / "whole" / "checkpoint-00000003"
    path, = folder.glob("optimizer-*")
    saved, squares = tensors(path), has_squares(json.loads((folder / "config.json").read_text()))
    assert len(saved["worker.0.m"]) + len(saved["worker.1.m"]) == 4 * len(squares)
    assert len(saved["worker.0.v"]) + len(saved["worker.1.v"]) == 4 * squares.sum()
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header, body = json.loads(raw[8:8 + length]), b""
    for name, values in saved.items():
        if name.endswith(".v"):
            owned = np.frombuffer(saved[name[:-1] + "owned"], "<i8").reshape(-1, 2)
            mask = np.concatenate([squares[start:start + count] for start, count in owned])
            whole = np.zeros(len(mask), "<f4")
            whole[mask] = np.frombuffer(values, "<f4")
            values = whole.tobytes()
            header[name]["shape"] = [len(whole)]
        header[name]["data_offsets"] = [len(body), len(body) + len(values)]
        body += values
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    trainer = json.loads((folder / "trainer.json").read_text())
    entry = trainer["files"][path.name]
    again = settings(data, tmp_path / "half", workers=2, resume=folder, overwrite=True)
    entry["bytes"] = path.stat().st_size
    for holder in trainer, entry, trainer:  # each checksum is in the message that misses it
        (folder / "trainer.json").write_text(json.dumps(trainer))
        holder["xxh128"] = re.search(r"its checksum is (\w+)", run(*again).stderr)[1]
    (folder / "trainer.json").write_text(json.dumps(trainer))
    assert "bit for bit" in succeed(*again, ranks=2).stdout
    assert digest(tmp_path / "half", 6) == digest(tmp_path / "whole", 6)


def test_workers_share_the_work_of_one(data, tmp_path):
    """Whole matrices are orthogonalised, whoever owns them: 8 workers make the steps of one with their batch."""
    for workers in 1, 8:
        succeed(*settings(data, tmp_path / str(workers), workers=workers, batch=8 // workers, algorithm="reliable",
                          wire_dtype="float32"))
    one, eight = (values(tmp_path / str(workers), 6) for workers in (1, 8))
    assert np.abs(one - eight).max() < 1e-4 * np.abs(one).max()


@pytest.mark.parametrize("changes, said", [
    ({"algorithm": "rps"}, "--optimizer muon: expected --algorithm lossy or reliable"),
    ({"algorithm": "naive"}, "--optimizer muon: expected --algorithm lossy or reliable"),
    ({"optimizer": "sgd"}, "--optimizer: expected one of adamw muon"),
])
def test_what_it_cannot_do_is_refused(data, tmp_path, changes, said):
    done = run(*settings(data, tmp_path / "out", **changes))
    assert done.returncode == 2 and said in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("first, then", [("muon", "adamw"), ("adamw", "muon")])
def test_the_state_of_another_optimizer_is_refused(data, tmp_path, first, then):
    succeed(*settings(data, tmp_path / "first", optimizer=first, steps=2))
    saved = tmp_path / "first" / "checkpoint-00000002"
    done = run(*settings(data, tmp_path / "then", optimizer=then, resume=saved))
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert f"has the state of --optimizer {first}: expected the same, got {then}" in done.stderr


def test_the_plan_names_the_largest_owner():
    done = succeed("--dry-run", "--optimizer=muon", "--model=7B", "--workers=64", "--device=cuda")
    assert "the largest owns 1.023 times the mean" in done.stdout
    assert re.search(r"optimizer state +0.466 GB +moments of what it owns, of matrices one", done.stdout)
