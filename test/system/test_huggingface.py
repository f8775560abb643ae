"""Tests that this program and transformers read each other's models, and find the same losses.

dev/goldens/make_models.py stored models of transformers and the losses that it found. What this program
writes is compared with them, bit for bit. Where transformers is installed (see support/huggingface.py), it
also reads what this program has trained.
"""
import json

import numpy as np
import pytest

from huggingface import ask, environment
from program import ROOT, events, markov_tokens, run, succeed, tensors, write_tokens

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


# ---- the Llama 3 family: 32-bit tokens, 128,256 of them, scaled rotary embedding ----

VOCABULARY = 128_256
SCALING = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 16}


def write_llama3(folder, tied):
    """Writes a small model with random weights, and token files, as nobody has stored them: they are large."""
    width, hidden, heads, kv_heads, size = 8, 24, 4, 1, 6
    (folder / "config.json").write_text(json.dumps({
        "model_type": "llama", "hidden_size": width, "num_hidden_layers": 1, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": size, "intermediate_size": hidden, "vocab_size": VOCABULARY,
        "tie_word_embeddings": tied, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
        "rope_scaling": SCALING}), encoding="utf-8")
    layer = {"self_attn.q_proj": (heads * size, width), "self_attn.k_proj": (kv_heads * size, width),
             "self_attn.v_proj": (kv_heads * size, width), "self_attn.o_proj": (width, heads * size),
             "mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width), "mlp.down_proj": (width, hidden),
             "input_layernorm": (width,), "post_attention_layernorm": (width,)}
    shapes = {"model.embed_tokens": (VOCABULARY, width), "model.norm": (width,),
              **{f"model.layers.0.{name}": shape for name, shape in layer.items()},
              **({} if tied else {"lm_head": (VOCABULARY, width)})}
    random, header, data, at = np.random.default_rng(3), {}, [], 0
    for name, shape in shapes.items():
        values = (random.normal(0, 0.15, shape) + (len(shape) == 1)).astype("<f4").tobytes()
        header[f"{name}.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + len(values)]}
        data.append(values)
        at += len(values)
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))
    for name, count, seed in (("train", 2000, 1), ("val", 200, 2)):
        tokens = VOCABULARY - 1 - markov_tokens(count, 500, seed)
        write_tokens(folder / f"{name}.bin", tokens, VOCABULARY, magic=20240801, version=7)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(name="llama3", params=[True, False], ids=["tied", "untied"], scope="module")
def fixture_llama3(request, tmp_path_factory):
    """The model, and its checkpoint after a few steps."""
    folder = write_llama3(tmp_path_factory.mktemp("llama3"), request.param)
    succeed("--model", folder, "--train", folder / "train.bin", "--val", folder / "val.bin", "--seq", SEQ, "--workers",
            2, "--batch", 2, "--steps", 4, "--lr", 3e-2, "--loss-rate", 0.1, "--threads", 1, "--out", folder / "run")
    return folder, folder / "run" / "checkpoint-00000004"


def test_training_with_the_vocabulary_of_llama_3(llama3):
    folder, checkpoint = llama3
    losses = [event["loss"] for event in events(folder / "run" / "log.jsonl", "step")]
    assert losses[0] == pytest.approx(np.log(VOCABULARY), abs=0.5) and losses[-1] < losses[0] - 0.05
    ours, given = (json.loads((path / "config.json").read_text()) for path in (checkpoint, folder))
    assert all(ours[name] == given[name] for name in ("vocab_size", "tie_word_embeddings", "rope_scaling"))
    assert (checkpoint / "tokenizer.json").read_text() == "{}"
    done = run("--generate", "in", "--model", checkpoint)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1
    assert "tokenizer.json' is a tokenizer.json, which this program does not read: expected SentencePiece's" in \
        done.stderr


def test_the_loss_of_llama_3_is_that_of_transformers(llama3, tmp_path):
    environment()
    folder, checkpoint = llama3
    for model in folder, checkpoint:
        theirs, = ask({"do": "loss", "directory": model, "tokens": folder / "val.bin", "seq": SEQ})
        succeed("--eval", "--model", model, "--val", folder / "val.bin", "--seq", SEQ, "--log",
                tmp_path / "eval.jsonl", "--overwrite")
        assert events(tmp_path / "eval.jsonl", "eval")[0]["val_loss"] == pytest.approx(theirs, abs=1e-5)
