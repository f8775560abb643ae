#!/usr/bin/env python3
"""The PyTorch side of `make bench`: seconds per Llama training step on the CPU.

A step is what `train_llama2` times: forward, mean cross-entropy, backward, AdamW, in float32 or,
with --dtype bf16, with bfloat16 where torch.autocast uses it (master weights stay float32). To be a
fair competitor, the model is written as a PyTorch user would write it, with fused attention and
fused AdamW.

A block of --steps steps gives one JSON line. With --wait, a block starts only when a line arrives on
stdin, and the process ends at end of file. So a driver can alternate it with other programs, and
warm-up and compilation happen only once. Without --wait it runs --blocks blocks.

    taskset -c 0,1 bench_pytorch.py --model 15M --mode compile --steps 5 --blocks 5
"""

import argparse
import json
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

# The sizes of train_llama2's presets of the same names.
PRESETS = {
    "15M": dict(dim=288, layers=6, heads=6, hidden=768),
    "42M": dict(dim=512, layers=8, heads=8, hidden=1376),
}


def rope_tables(length, head_dim, theta=10000.0):
    """Returns cos and sin, each (T, head_dim). Both halves of a head have the same angles, as in Hugging
    Face's implementation."""
    frequency = theta ** (-torch.arange(0, head_dim, 2).float() / head_dim)
    angle = torch.outer(torch.arange(length).float(), frequency)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """x (B, H, T, head_dim) rotated by position."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(dim, dim, bias=False) for _ in range(4)
        )

    def forward(self, x, cos, sin):
        B, T, C = x.shape
        q, k, v = (
            projection(x).view(B, T, self.heads, C // self.heads).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True
        )
        return self.o_proj(y.transpose(1, 2).reshape(B, T, C))


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.attention = Attention(dim, heads)
        self.feed_forward_norm = nn.RMSNorm(dim, eps=1e-5)
        self.feed_forward = FeedForward(dim, hidden)

    def forward(self, x, cos, sin):
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    def __init__(self, vocab_size, length, dim, layers, heads, hidden):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.blocks = nn.ModuleList(Block(dim, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.head.weight = self.embedding.weight  # tied, as the presets are
        cos, sin = rope_tables(length, dim // heads)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", choices=PRESETS, default="15M")
    parser.add_argument("--mode", choices=["eager", "compile"], default="eager")
    parser.add_argument("--dtype", choices=["float32", "bf16"], default="float32")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="steps per block")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--wait", action="store_true", help="a block per line on stdin")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    model = Llama(arguments.vocab_size, arguments.seq, **PRESETS[arguments.model])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    text = torch.randint(arguments.vocab_size, (arguments.batch, arguments.seq + 1))
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    loss_of = torch.compile(model) if arguments.mode == "compile" else model

    def step():
        with torch.autocast("cpu", torch.bfloat16, enabled=arguments.dtype == "bf16"):
            loss = loss_of(tokens, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    for _ in range(3):  # compilation, optimizer state, caches
        step()

    for _ in iter(sys.stdin.readline, "") if arguments.wait else range(arguments.blocks):
        start, start_cpu = time.perf_counter(), time.process_time()
        for _ in range(arguments.steps):
            loss = step()
        seconds = (time.perf_counter() - start) / arguments.steps
        print(
            json.dumps(
                {
                    "program": "pytorch " + arguments.mode,
                    "version": torch.__version__,
                    "model": arguments.model,
                    "dtype": arguments.dtype,
                    "steps": arguments.steps,
                    "seconds_per_step": seconds,
                    "tokens_per_second": tokens.numel() / seconds,
                    "cpu_seconds": time.process_time() - start_cpu,
                    "loss": loss,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
