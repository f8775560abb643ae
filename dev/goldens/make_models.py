#!/usr/bin/env python3
"""Writes test/goldens/models/: models as transformers saves them, and the losses that it finds for them.

    pip install --no-deps -r dev/bench/cpu/requirements-bench.txt -r dev/goldens/requirements-goldens.txt
    python dev/goldens/make_models.py [DIRECTORY]

    NAME/              a model directory with random weights, in one file or in shards
    expected.json      {NAME: the mean loss (natural logarithm) on test/goldens/perplexity/text.bin, in
                       windows of SEQ tokens}
    unsupported.json   {FEATURE: the config.json of a model with a feature that the program lacks}

test/system/test_huggingface.py reads them, and says what each is for.
"""
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[2]
TEXT = ROOT / "test" / "goldens" / "perplexity" / "text.bin"
SEQ = 48
SHAPE = {"vocab_size": 97, "max_position_embeddings": 64, "hidden_size": 24, "intermediate_size": 40,
         "num_hidden_layers": 2, "num_attention_heads": 6}

# Options that change the mathematics, in all combinations that matter.
MODELS = {
    "llama2": {"num_key_value_heads": 6, "tie_word_embeddings": False},
    "shards": {"num_key_value_heads": 6, "tie_word_embeddings": False, "max_shard_size": "15KB",
               "rms_norm_eps": 1e-4},
    "tied-bfloat16": {"num_key_value_heads": 2, "tie_word_embeddings": True, "dtype": "bfloat16",
                      "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "head-dim-float16": {"num_key_value_heads": 3, "tie_word_embeddings": False, "head_dim": 12,
                         "dtype": "float16", "max_shard_size": "15KB", "rms_norm_eps": 1e-5},
    "llama3": {"num_key_value_heads": 2, "tie_word_embeddings": True, "head_dim": 12, "dtype": "bfloat16",
               "rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4, "low_freq_factor": 1.0,
                                   "high_freq_factor": 4.0, "original_max_position_embeddings": 32}},
}

UNSUPPORTED = {
    "rope_scaling": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "attention_bias": {"attention_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "hidden_act": {"hidden_act": "gelu"},
    "attention_dropout": {"attention_dropout": 0.1},
}


def make(directory, seed, dtype="float32", max_shard_size="1GB", **config):
    """Makes a model with random weights and saves it with transformers."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**config)).to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15).add_(1.0 if parameter.dim() == 1 else 0.0)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    (Path(directory) / "generation_config.json").unlink(missing_ok=True)


def config(**fields):
    """The config.json that transformers writes."""
    with tempfile.TemporaryDirectory() as directory:
        LlamaConfig(**fields).save_pretrained(directory)
        return json.loads((Path(directory) / "config.json").read_text(encoding="utf-8"))


def load(directory):
    model, report = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32,
                                                     output_loading_info=True)
    for problem, names in report.items():
        assert not names, f"{directory}: {problem}: {names}"
    return model


@torch.no_grad()
def loss(directory, tokens, seq):
    """The mean loss. Every token but the first is predicted once, in windows of seq."""
    model = load(directory).eval()
    width = "<u4" if np.fromfile(tokens, "<i4", 1)[0] == 20240801 else "<u2"
    text = torch.from_numpy(np.fromfile(tokens, width, offset=1024).astype(np.int64))
    total = 0.0
    for start in range(0, len(text) - 1, seq):
        targets = text[start + 1:start + seq + 1]
        logits = model(text[start:start + len(targets)][None]).logits[0]
        total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    return total / (len(text) - 1)


def main(folder):
    losses = {}
    for seed, (name, model) in enumerate(MODELS.items()):
        make(folder / name, seed, **SHAPE, **model)
        losses[name] = loss(folder / name, TEXT, SEQ)
    unsupported = {name: config(**SHAPE, **fields) for name, fields in UNSUPPORTED.items()}
    for name, content in (("expected", losses), ("unsupported", unsupported)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "test" / "goldens" / "models")
