"""Tests that this program and transformers read each other's models, and find the same losses.

dev/goldens/make_models.py stored models of transformers and the losses that it found. What this program
writes is compared with them, bit for bit. Where transformers is installed (see support/huggingface.py), it
also reads what this program has trained.
"""
import json

import numpy as np
import pytest

from huggingface import ask, environment
from program import ROOT, events, run, succeed, tensors

pytestmark = pytest.mark.xdist_group("transformers")

MODELS = ROOT / "test" / "goldens" / "models"
TEXT = ROOT / "test" / "goldens" / "perplexity" / "text.bin"
SEQ = 48
LOSSES = json.loads((MODELS / "expected.json").read_text(encoding="utf-8"))
# Features that this program does not have, and the field that its error must name.
UNSUPPORTED = json.loads((MODELS / "unsupported.json").read_text(encoding="utf-8"))
# This program trains these models and saves them in shards.
IN_SHARDS = ("llama2", "tied-bfloat16")


def our_loss(model, folder):
    log = folder / "eval.jsonl"
    succeed("--eval", "--model", model, "--val", TEXT, "--seq", SEQ, "--log", log, "--overwrite")
    return events(log, "eval")[0]["val_loss"]


def train(name, out, *more):
    succeed("--model", MODELS / name, "--train", TEXT, "--seq", SEQ, "--batch", 2, "--workers", 2,
            "--shard-size", 1.5e-5 if name in IN_SHARDS else 1, "--out", out, *more)
    (checkpoint,) = out.glob("checkpoint-*")
    return checkpoint


def trained(name, out):
    return train(name, out, "--steps", 20, "--lr", 3e-3, "--loss-rate", 0.1, "--packet-bytes", 512)


def weights(folder):
    """{name: (shape, float32)} of a model in one file or in shards"""
    kinds, found = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}, {}
    for path in folder.glob("model*.safetensors"):
        raw = path.read_bytes()
        header = json.loads(raw[8:8 + int.from_bytes(raw[:8], "little")])
        for name, data in tensors(path).items():
            values = np.frombuffer(data, kinds[header[name]["dtype"]])
            if header[name]["dtype"] == "BF16":  # the upper half of a float32
                values = (values.astype("<u4") << 16).view("<f4")
            found[name] = (header[name]["shape"], values.astype("<f4").tobytes())
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_is_that_of_transformers(name, tmp_path):
    ours = our_loss(MODELS / name, tmp_path)
    assert ours == pytest.approx(LOSSES[name], abs=1e-5)
    assert our_loss(trained(name, tmp_path / name), tmp_path) < ours - 0.1


@pytest.mark.parametrize("name", LOSSES)
def test_what_it_writes_is_what_transformers_wrote(name, tmp_path):
    """A step with learning rate 0 changes nothing. So a model that is read and written has the same tensors,
    bit for bit, in as many shards as asked for, and a config.json that says the same."""
    checkpoint = train(name, tmp_path / name, "--steps", 1, "--lr", 0)
    assert weights(checkpoint) == weights(MODELS / name)
    ours, theirs = (json.loads((folder / "config.json").read_text(encoding="utf-8"))
                    for folder in (checkpoint, MODELS / name))
    # The names before transformers 5, which reads both. Weights are written in float32.
    rope = dict(theirs["rope_parameters"])
    theirs = {**theirs, "torch_dtype": "float32", "rope_theta": rope.pop("rope_theta"),
              "rope_scaling": None if rope["rope_type"] == "default" else rope}
    assert ours == {field: theirs[field] for field in ours}
    assert set(theirs) - set(ours) == {"dtype", "model_type", "pad_token_id", "pretraining_tp",
                                       "rope_parameters", "transformers_version"} - set(ours)
    if name in IN_SHARDS:
        index = json.loads((checkpoint / "model.safetensors.index.json").read_text(encoding="utf-8"))
        size = 0
        for tensor, (_, data) in weights(MODELS / name).items():
            assert tensor in tensors(checkpoint / index["weight_map"].pop(tensor))
            size += len(data)
        assert not index["weight_map"] and index["metadata"] == {"total_size": size}
        assert len(list(checkpoint.glob("model-*.safetensors"))) > 2


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_features_are_refused_by_name(name, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(UNSUPPORTED[name]), encoding="utf-8")
    done = run("--eval", "--model", tmp_path, "--val", TEXT)
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert (name in line or name.startswith("rope")) and "config.json" in line, line
    assert any(field in line for field in UNSUPPORTED[name]), line


@pytest.mark.parametrize("name", LOSSES)
def test_transformers_reads_what_was_trained(name, tmp_path):
    """transformers finds the same loss for a model that this program trained, and saves it as it was."""
    environment()
    checkpoint = trained(name, tmp_path / name)
    theirs, _ = ask({"do": "loss", "directory": checkpoint, "tokens": TEXT, "seq": SEQ},
                    {"do": "resave", "directory": checkpoint, "to": tmp_path / "again",
                     "max_shard_size": "15KB"})
    ours = our_loss(checkpoint, tmp_path)
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert our_loss(tmp_path / "again", tmp_path) == ours
    if name in IN_SHARDS:  # also with shards as transformers writes them
        index, again = (json.loads((folder / "model.safetensors.index.json").read_text())
                        for folder in (checkpoint, tmp_path / "again"))
        assert index["weight_map"].keys() == again["weight_map"].keys()
        assert index["metadata"]["total_size"] == again["metadata"]["total_size"]
