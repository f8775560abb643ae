#!/usr/bin/env python3
"""One rank of a data-parallel training in PyTorch over Gloo. bench_elastic.py starts and kills it. With
torchft the other ranks go on; under torchrun all ranks start again from the last checkpoint.

    elastic_pytorch.py torchft NAME LIGHTHOUSE LOG      NAME: name of this rank
    elastic_pytorch.py torchrun CHECKPOINT EVERY LOG    started by torchrun

It appends "TIME RANKS PID" to LOG for every step that all ranks agree on. With torchrun only rank 0 does
so. With torchft every rank does so, and puts the number of the step first.
"""
import datetime
import os
import pathlib
import sys
import time

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "cpu"))
from bench_pytorch import Llama  # pylint: disable=wrong-import-position

# The preset 1M of train_llama2, as bench_elastic.py trains it.
VOCABULARY, LENGTH, BATCH = 512, 256, 4
SHAPE = {"dim": 128, "layers": 4, "heads": 8, "hidden": 352}


def make():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Llama(VOCABULARY, LENGTH, **SHAPE)
    text = torch.randint(VOCABULARY, (BATCH, LENGTH + 1))
    return model, text[:, :-1].contiguous(), text[:, 1:].contiguous()


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)


def note(log, *what):
    print(*what, os.getpid(), file=log, flush=True)


def torchft(name, lighthouse, log):
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    model, tokens, targets = make()
    inner = optimizer_of(model)
    second = datetime.timedelta(seconds=1)

    def load(state):
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=2 * second), min_replica_size=1, load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=name, lighthouse_addr=lighthouse, rank=0, world_size=1, store_addr="localhost",
        store_port=store.port, timeout=5 * second, quorum_timeout=20 * second,
        connect_timeout=5 * second, hostname="localhost")
    parallel, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while True:
        optimizer.zero_grad()
        parallel(tokens, targets).backward()
        before = manager.current_step()
        optimizer.step()
        if manager.current_step() > before:
            note(log, before, time.time(), manager.num_participants())


def torchrun(checkpoint, every, log):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
    model, tokens, targets = make()
    optimizer = optimizer_of(model)
    step = 0
    if os.path.exists(checkpoint):
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    while True:
        optimizer.zero_grad()
        parallel(tokens, targets).backward()
        optimizer.step()
        if dist.get_rank() == 0:
            note(log, step, time.time(), dist.get_world_size())
        step += 1
        if step % every == 0 and dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "step": step}, checkpoint + ".part")
            os.replace(checkpoint + ".part", checkpoint)


def main():
    with open(sys.argv[4], "a", encoding="utf-8") as log:
        if sys.argv[1] == "torchft":
            torchft(sys.argv[2], sys.argv[3], log)
        else:
            torchrun(sys.argv[2], int(sys.argv[3]), log)


if __name__ == "__main__":
    main()
