"""Tests that this program and transformers read each other's models, and find the same losses."""
import json

import pytest

from huggingface import ask, environment
from program import events, markov_files, run, succeed, tensors

VOCABULARY, SEQ = 96, 48
SHAPE = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "hidden_size": 48,
         "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6}

# Options that change the mathematics, in all combinations that matter, as transformers writes them.
MODELS = {
    "llama2": {"num_key_value_heads": 6, "tie_word_embeddings": False},
    "shards": {"num_key_value_heads": 6, "tie_word_embeddings": False, "max_shard_size": "40KB",
               "rms_norm_eps": 1e-4},
    "tied-bfloat16": {"num_key_value_heads": 2, "tie_word_embeddings": True, "dtype": "bfloat16",
                      "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "head-dim-float16": {"num_key_value_heads": 3, "tie_word_embeddings": False, "head_dim": 12,
                         "dtype": "float16", "max_shard_size": "100KB", "rms_norm_eps": 1e-5},
}

# This program trains these models and saves them in shards, which transformers reads.
IN_SHARDS = ("llama2", "tied-bfloat16")

# Features that this program does not have, and the field that its error must name.
UNSUPPORTED = {
    "rope_scaling": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "rope": {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4,
                                 "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                 "original_max_position_embeddings": 32}},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "hidden_act": {"hidden_act": "gelu"},
    "attention_dropout": {"attention_dropout": 0.1},
}


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    environment()
    return markov_files(tmp_path_factory.mktemp("data"), VOCABULARY, 20_000, 2_000)


@pytest.fixture(scope="session")
def models(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    ask(*[{"do": "make", "directory": folder / name, "seed": seed, **SHAPE, **model}
          for seed, (name, model) in enumerate(MODELS.items())],
        *[{"do": "config", "directory": folder / name, **SHAPE, **fields}
          for name, fields in UNSUPPORTED.items()])
    return folder


def our_loss(model, data, folder):
    log = folder / "eval.jsonl"
    succeed("--eval", "--model", model, "--val", data / "val.bin", "--seq", SEQ, "--log", log,
            "--overwrite")
    return events(log, "eval")[0]["val_loss"]


def train(model, data, out, *more):
    succeed("--model", model, "--train", data / "train.bin", "--seq", SEQ, "--batch", 2,
            "--workers", 2, "--out", out, *more)
    (checkpoint,) = out.glob("checkpoint-*")
    return checkpoint


def weights(folder):
    found = {}
    for path in folder.glob("model*.safetensors"):
        found.update(tensors(path))
    return found


def test_round_trip(data, models, tmp_path):
    """For each model transformers and this program find the same loss: for a model of transformers, after
    this program trained it, and after transformers saved it again."""
    ours, trained = {}, {}
    for name in MODELS:
        ours[name] = our_loss(models / name, data, tmp_path)
        trained[name] = train(models / name, data, tmp_path / name, "--steps", 20, "--lr", 3e-3,
                              "--loss-rate", 0.1, "--packet-bytes", 512, "--shard-size",
                              6e-5 if name in IN_SHARDS else 1)
        ours[name, "trained"] = our_loss(trained[name], data, tmp_path)
        assert ours[name, "trained"] < ours[name] - 0.1
    measure = {"do": "loss", "tokens": data / "val.bin", "seq": SEQ}
    theirs = ask(*[{**measure, "directory": models / name} for name in MODELS],
                 *[{**measure, "directory": trained[name]} for name in MODELS],
                 *[{"do": "resave", "directory": trained[name], "to": tmp_path / f"{name}-again",
                    "max_shard_size": "60KB"} for name in MODELS])
    for i, name in enumerate(MODELS):
        assert ours[name] == pytest.approx(theirs[i], abs=1e-5), name
        assert ours[name, "trained"] == pytest.approx(theirs[len(MODELS) + i], abs=1e-5), name
        assert our_loss(tmp_path / f"{name}-again", data, tmp_path) == ours[name, "trained"]
    assert len(list((models / "shards").glob("model-*.safetensors"))) > 3
    for name in IN_SHARDS:  # also with shards as transformers writes them
        index, again = (json.loads((folder / "model.safetensors.index.json").read_text())
                        for folder in (trained[name], tmp_path / f"{name}-again"))
        assert index["weight_map"].keys() == again["weight_map"].keys()
        assert index["metadata"]["total_size"] == again["metadata"]["total_size"]


def test_weights_come_back_bit_for_bit(data, models, tmp_path):
    """A step with learning rate 0 changes nothing, so a model that is read and written has the same bits."""
    for name in ("llama2", "shards"):
        checkpoint = train(models / name, data, tmp_path / name, "--steps", 1, "--lr", 0)
        assert weights(checkpoint) == weights(models / name)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_features_are_refused_by_name(data, models, name):
    done = run("--eval", "--model", models / name, "--val", data / "val.bin")
    assert done.returncode == 1
    (line,) = done.stderr.strip().splitlines()
    assert (name in line or name.startswith("rope")) and "config.json" in line, line
    written = json.loads((models / name / "config.json").read_text())
    assert any(field in line for field in written), line
