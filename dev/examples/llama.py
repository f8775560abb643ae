#!/usr/bin/env python3
"""llama.py — trains transformers' Llama further, from a checkpoint of train_llama2 or of Hugging Face.

    pip install torch transformers ./lossynet/python
    torchrun --nproc-per-node 4 dev/examples/llama.py --model out/run/checkpoint-00002000 \\
        --train train.bin --loss-rate 0.1 --out out/further

--train is a token file that build/tokenize has written. The model in --out can be trained on, evaluated
and used to write text by train_llama2 as well.
"""
import argparse
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
# pylint: disable=wrong-import-position
from python_packages import require

if __name__ == "__main__":
    require("numpy", "torch", "transformers", "lossynet")
import numpy as np
import torch
from transformers import AutoModelForCausalLM

import lossynet.torch

HEADER_BYTES = 1024  # of a token file


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--loss-rate", type=float, default=0)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).train()
    tokens = np.memmap(options.train, "<u2", mode="r", offset=HEADER_BYTES)
    decay = [p for p in model.named_parameters() if p[1].dim() > 1]
    norms = [p for p in model.named_parameters() if p[1].dim() == 1]
    optimizer = lossynet.torch.ShardedOptimizer(
        [{"params": decay}, {"params": norms, "weight_decay": 0.0}], torch.optim.AdamW, lr=options.lr,
        betas=(0.9, 0.95), weight_decay=0.1, clip=1.0, loss_rate=options.loss_rate)
    rank = optimizer.comm.rank
    random = np.random.default_rng(rank)  # each rank draws data of its own
    for step in range(options.steps):
        starts = random.integers(0, len(tokens) - options.seq, options.batch)
        rows = torch.from_numpy(np.stack([tokens[s:s + options.seq] for s in starts]).astype(np.int64))
        loss = model(rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and (step + 1) % 10 == 0:
            lost = optimizer.report()["lost"]
            print(f"step {step + 1}: loss {loss.item():.3f}, lost {lost[0]:.1%} and {lost[1]:.1%}", flush=True)
    with optimizer.model():  # the model is what owners hold; replicas are partly stale
        if rank == 0:
            model.save_pretrained(options.out)


if __name__ == "__main__":
    main()
