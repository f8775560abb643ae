#!/usr/bin/env python3
"""gpt.py — trains a small GPT (not a Llama) on this repository's own text, in PyTorch over lossynet.

    pip install torch ./lossynet/python
    torchrun --nproc-per-node 4 dev/examples/gpt.py
    torchrun --nproc-per-node 4 dev/examples/gpt.py --loss-rate 0.1     # 10% of the packets are dropped

The three lines marked "lossynet" are all that differs from a script for one process.
"""
import argparse
import pathlib
import sys
import time

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "scripts"))
# pylint: disable=wrong-import-position
from python_packages import require

if __name__ == "__main__":
    require("torch", "lossynet")
import torch
from torch import nn
from torch.nn import functional as F

import lossynet.torch  # lossynet

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        split = (*x.shape[:2], self.heads, -1)
        q, k, v = (part.view(split).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=2))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width=128, layers=4, heads=4, seq=128, vocabulary=256):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(seq, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token.weight  # tied
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets):
        x = self.token(tokens) + self.position.weight[:tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def text():
    """The bytes of the repository's documents and C code."""
    paths = [path for kind in ("*.md", "*.c", "*.h") for path in sorted(ROOT.glob(f"[dlst]*/**/{kind}"))]
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in paths)), dtype=torch.uint8)


def batch(data, size, seq, generator):
    starts = torch.randint(len(data) - seq - 1, (size,), generator=generator)
    windows = torch.stack([data[start:start + seq + 1] for start in starts]).long()
    return windows[:, :-1], windows[:, 1:]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--loss-rate", type=float, default=0)
    options = parser.parse_args()
    data = text()
    train, held_out = data[:-len(data) // 10], data[-len(data) // 10:]
    model = GPT()
    optimizer = lossynet.torch.ShardedOptimizer(  # lossynet
        model, torch.optim.AdamW, lr=1e-3, clip=1.0, loss_rate=options.loss_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    rank = optimizer.comm.rank
    generator = torch.Generator().manual_seed(rank)  # each rank draws data of its own
    start = time.monotonic()
    for step in range(options.steps):
        loss = model(*batch(train, 8, 128, generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if rank == 0 and (step + 1) % 20 == 0:
            report = optimizer.report()
            print(f"step {step + 1}: loss {loss.item():.3f}, lost {report['lost'][0]:.1%}, drift "
                  f"{report['drift']:.2g}, {(time.monotonic() - start) / (step + 1) * 1e3:.0f} ms a step", flush=True)
    with optimizer.model(), torch.no_grad():  # lossynet: the owners' values instead of this rank's replica
        generator.manual_seed(1)
        losses = [model(*batch(held_out, 8, 128, generator)) for _ in range(10)]
    if rank == 0:
        print(f"held-out loss {torch.stack(losses).mean().item():.4f}")


if __name__ == "__main__":
    main()
