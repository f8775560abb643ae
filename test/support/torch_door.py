"""Runs each training loop of a table twice, with DistributedDataParallel over Gloo and with ShardedOptimizer:
`torch_door.py FILE` writes {case: {"difference": d} or {"said": text of the exception}} of all ranks as JSON.

torch_habits.py and torch_scripts.py have the table. difference: the largest one between both, on any rank, as a
share of the tensor's largest value. All cases of one kind run in one launch of the ranks, since importing PyTorch
takes longer than the cases.
"""
import json
import os
import socket
import sys

import torch
import torch._dynamo  # pylint: disable=unused-import # optimizers import it; once is enough
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

from lossynet.torch import ShardedOptimizer
import torch_habits
import torch_scripts
from torch_habits import PEER_TIMEOUT, RANKS

TABLE = torch_habits.TABLE | torch_scripts.TABLE
torch.set_num_threads(1)


class Make:
    """The line that differs between the two kinds of launch."""

    def __init__(self, ours, port):
        self.ours, self.port, self.made = ours, port, []

    def optimizer(self, params, optimizer_class, **settings):
        optimizer = ShardedOptimizer(params, optimizer_class, address=f"127.0.0.1:{self.port}",
                                     peer_timeout=PEER_TIMEOUT, **settings)
        self.made.append(optimizer)
        return optimizer

    def __call__(self, model, optimizer_class, whole=False, **settings):
        if self.ours:
            return model, self.optimizer(model if whole else model.parameters(), optimizer_class, **settings)
        return DDP(model, find_unused_parameters=True), optimizer_class(model.parameters(), **settings)


def run_rank(ours, names, rank, ports, path):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    results = {}
    for name in names:
        make = Make(ours, ports[1])
        try:
            results[name] = TABLE[name](make, rank)
        except Exception as error:  # pylint: disable=broad-exception-caught
            results[name] = f"{type(error).__name__}: {error}"
        for optimizer in make.made:
            try:
                optimizer.close()
            except RuntimeError:
                pass
        dist.barrier()
    torch.save(results, path)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def launch(ours, names, folder):
    """Forks the ranks. Returns the results of each."""
    ports, children = (free_port(), free_port()), []
    for rank in range(RANKS):
        pid = os.fork()
        if not pid:
            try:
                run_rank(ours, names, rank, ports, f"{folder}.{rank}")
            finally:
                os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    return [torch.load(f"{folder}.{rank}") for rank in range(RANKS)]


def compare(theirs, ours):
    if isinstance(ours, str) or isinstance(theirs, str):
        return {"said": ours if isinstance(ours, str) else f"DDP: {theirs}"}
    if ours.keys() != theirs.keys():
        return {"said": f"nothing: {', '.join(ours)}"}
    worst = 0.0
    for name, value in theirs.items():
        off = (value.double() - ours[name].double()).abs().max() / value.double().abs().max().clamp_min(1e-12)
        worst = max(worst, off.item() if off == off else float("inf"))
    return {"difference": worst}


if __name__ == "__main__":
    chosen = sys.argv[2:] or list(TABLE)
    both = [launch(kind, chosen, sys.argv[1]) for kind in (False, True)]
    with open(sys.argv[1], "w", encoding="utf-8") as out:
        json.dump({name: [compare(a[name], b[name]) for a, b in zip(*both)] for name in chosen}, out, indent=1)
