"""Runs tasks with transformers for tests: each line of stdin is a JSON list of tasks, and the answer is a
line of stdout with the list of their results.

It runs in the environment that huggingface.py makes. From this project it uses only the perplexity
of dev/goldens.
"""
import json
import pathlib
import sys

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "dev" / "goldens"))
import perplexity_reference  # pylint: disable=wrong-import-position


def make(directory, seed, dtype="float32", max_shard_size="1GB", **config):
    """Makes a model with random weights and saves it with transformers."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**config)).to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15).add_(1.0 if parameter.dim() == 1 else 0.0)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    return sum(p.numel() for p in model.parameters())


def config(directory, **fields):
    LlamaConfig(**fields).save_pretrained(directory)


def load(directory):
    model, report = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32,
                                                     output_loading_info=True)
    for problem, names in report.items():
        assert not names, f"{directory}: {problem}: {names}"
    return model


def loss(directory, tokens, seq):
    """The mean loss (natural logarithm). Every token but the first is predicted once, in windows of seq."""
    model = load(directory).eval()
    text = torch.from_numpy(np.fromfile(tokens, "<u2", offset=1024).astype(np.int64))
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(text) - 1, seq):
            targets = text[start + 1:start + seq + 1]
            logits = model(text[start:start + len(targets)][None]).logits[0]
            total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
    return total / (len(text) - 1)


def perplexity(directory, tokens, cases):
    """The perplexity for each case (context, stride)."""
    model, text = load(directory), perplexity_reference.read_tokens(tokens)
    return [perplexity_reference.perplexity(model, text, *case) for case in cases]


def resave(directory, to, **settings):
    load(directory).save_pretrained(to, **settings)


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout, sys.stderr  # output of libraries must not mix with answers
    for line in sys.stdin:
        print(json.dumps([globals()[task.pop("do")](**task) for task in json.loads(line)]),
              file=answers, flush=True)
