#!/usr/bin/env python3
"""One rank of a data-parallel training in PyTorch over Gloo whose compute times have a tail. bench_tail.py
compares train_llama2 with it, and starts it by mpirun. Rank 0 prints one JSON line: the seconds of each step
and the validation perplexity.

    tail_pytorch.py ADDRESS TRAIN VAL STEPS SEED MEDIAN P99      ADDRESS: address of rank 0
"""
import json
import math
import os
import pathlib
import sys
import time

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cpu"))
from bench_pytorch import Llama  # pylint: disable=wrong-import-position

# The preset 260K of train_llama2, as bench_tail.py trains it; grouped queries are left out.
SHAPE = {"dim": 64, "layers": 5, "heads": 8, "hidden": 172}
BATCH, LENGTH, PEAK, FINAL = 2, 128, 3e-3, 0.1


class Times:
    """Draws the same times as slow_products.c."""

    def __init__(self, rank, median, p99):
        self.state, self.median, self.p99 = rank << 32, median, p99

    def uniform(self):
        mask = (1 << 64) - 1
        x = self.state = (self.state + 0x9e3779b97f4a7c15) & mask
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9 & mask
        x = (x ^ x >> 27) * 0x94d049bb133111eb & mask
        return (((x ^ x >> 31) >> 11) + 0.5) / 2 ** 53

    def draw(self):
        u, v = self.uniform(), self.uniform()
        normal = math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v)
        return self.median * math.exp(normal * math.log(self.p99) / 2.3263)


def tokens_of(path):
    return torch.from_numpy(np.fromfile(path, dtype="<u2", offset=1024).astype(np.int64))


def rate(step, steps):
    """The learning rate: linear warm-up over a tenth of the steps, then a cosine, as in train_llama2."""
    warmup = steps // 10
    if step < warmup:
        return PEAK * (step + 1) / warmup
    turn = math.cos(math.pi * (step - warmup) / (steps - warmup))
    return PEAK * (FINAL + (1 - FINAL) * (1 + turn) / 2)


def perplexity(model, text):
    rows = text[:(len(text) - 1) // LENGTH * LENGTH + 1]
    starts = range(0, len(rows) - 1, LENGTH)
    with torch.no_grad():
        losses = [model(rows[None, i:i + LENGTH], rows[None, i + 1:i + LENGTH + 1]).item() for i in starts]
    return math.exp(sum(losses) / len(losses))


def main():
    address, train, val, steps, seed, median, p99 = sys.argv[1:]
    rank, ranks = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"tcp://{address}:29400", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    torch.manual_seed(int(seed))
    text, times, steps = tokens_of(train), Times(rank, float(median), float(p99)), int(steps)
    model = Llama(int(np.fromfile(train, dtype="<i4", count=4)[3]), LENGTH, **SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    choose = np.random.default_rng((int(seed), rank))
    seconds = []
    for step in range(steps):
        began = time.perf_counter()
        starts = choose.integers(0, len(text) - LENGTH - 1, BATCH)
        rows = torch.stack([text[i:i + LENGTH + 1] for i in starts])
        optimizer.param_groups[0]["lr"] = rate(step, steps)
        optimizer.zero_grad()
        time.sleep(times.draw())
        parallel(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1)
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        print(json.dumps({"seconds": seconds, "perplexity": perplexity(model, tokens_of(val))}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
