"""Runs tasks with lossynet.torch for tests: `torch_tasks.py FOLDER` writes FOLDER/NAME.json for each task
below: a list with the result of each rank, or the text of its exception as a string.

It runs in the environment that huggingface.py makes. Importing PyTorch takes long, so it is imported once,
and the ranks of a task are forked from this process.
"""
import contextlib
import io
import json
import os
import pathlib
import runpy
import signal
import socket
import sys
import time

import numpy as np
import torch
from torch import nn
from transformers import LlamaForCausalLM

from lossynet import LossynetError
from lossynet.torch import ShardedOptimizer

torch.set_num_threads(1)
INPUTS = 50
FOLDER = pathlib.Path(sys.argv[1])
ROOT = pathlib.Path(__file__).resolve().parents[2]


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, 120), nn.Tanh(), nn.Linear(120, 120), nn.Tanh(), nn.Linear(120, 7))


def batch(step, rank):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, INPUTS, generator=generator)
    return inputs, (2 * inputs[:, :7]).sin()


def loss_of(model, step, rank):
    inputs, targets = batch(step, rank)
    return ((model(inputs) - targets) ** 2).mean()


def groups(model):
    named = list(model.named_parameters())
    return [{"params": [pair for pair in named if pair[1].dim() > 1]},
            {"params": [pair for pair in named if pair[1].dim() == 1], "weight_decay": 0.0}]


def adamw(parameters, **keywords):
    settings = {"lr": 1e-2, "weight_decay": 0.1, "bucket_mb": 0.04, **keywords}
    return ShardedOptimizer(parameters, torch.optim.AdamW, **{"wire_dtype": "float32", **settings})


def difference(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one, other))


def like_one_process(rank, ranks):
    """4 ranks against AdamW in one process on all data: two micro-batches, groups, clipping, a schedule."""
    model, alone = net(rank), net(0)  # all ranks take rank 0's values
    optimizer = adamw(groups(model), clip=0.5)
    reference = torch.optim.AdamW(groups(alone), lr=1e-2, weight_decay=0.1)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 4, 0.5) for each in (optimizer, reference)]
    for step in range(8):
        with optimizer.no_sync():
            loss_of(model, 2 * step, rank).backward()
        loss_of(model, 2 * step + 1, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()
        for number in (2 * step, 2 * step + 1):
            sum(loss_of(alone, number, other) / ranks for other in range(ranks)).backward()
        norm = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5).item()
        reference.step()
        for schedule in schedules:
            schedule.step()
        if step == 3:  # a forked process, such as a DataLoader's worker, cannot end the comm
            child = os.fork()
            if not child:
                optimizer.close()
                os._exit(0)
            os.waitpid(child, 0)
    optimizer.synchronize()
    ours, theirs = optimizer.gathered_state_dict(), reference.state_dict()
    for group in (*ours["param_groups"], *theirs["param_groups"]):
        group.pop("param_names", None)
    torch.optim.AdamW(groups(net(0))).load_state_dict(ours)  # it has the shape that others expect
    return {"difference": difference(model.parameters(), alone.parameters()), "buckets": len(optimizer.comm.buckets),
            "moments": difference(*([each["state"][k]["exp_avg"] for k in range(6)] for each in (ours, theirs))),
            "groups": ours["param_groups"] == theirs["param_groups"], "overlap": optimizer._overlaps,
            "norm": [optimizer.report()["norm"], norm], "lost": optimizer.report()["lost"]}


class Odd(nn.Module):
    """Tied and unused parameters, one that is read without its module's forward, and one that is frozen."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.unused = nn.Linear(INPUTS, 60), nn.Linear(60, INPUTS, bias=False), nn.Linear(9, 9)
        self.two.weight = nn.Parameter(self.one.weight.detach().T.clone())
        self.again, self.apart, self.frozen = nn.Linear(INPUTS, 60), nn.Linear(60, 7), nn.Linear(60, 60)
        self.again.weight = self.one.weight  # tied
        self.frozen.requires_grad_(False)

    def forward(self, inputs):
        hidden = torch.tanh(self.again(self.two(torch.tanh(self.one(inputs)))))
        return nn.functional.linear(self.frozen(hidden), self.apart.weight)


def odd_parameters(rank, ranks):
    torch.manual_seed(3)
    model, alone = Odd(), Odd()
    alone.load_state_dict(model.state_dict())
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9, bucket_mb=0.001,
                                 wire_dtype="float32")
    reference = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(6):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()
        sum(loss_of(alone, step, other) / ranks for other in range(ranks)).backward()
        reference.step()
    with optimizer.model():
        return {"difference": difference(model.parameters(), alone.parameters()), "overlap": optimizer._overlaps}


def lossy(rank, _ranks):
    """Training at 20% loss, with all parts of the rule. The replicas differ, the model does not."""
    model = net(0)
    optimizer = adamw(model.named_parameters(), loss_rate=0.2, packet_bytes=256, clip=1.0)
    losses, reports = [], []
    for step in range(60):
        loss = loss_of(model, step, rank)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reports.append(optimizer.report())
    optimizer.synchronize()
    replica = [p.detach().clone() for p in model.parameters()]
    with optimizer.model():
        fresh = [p.detach().clone() for p in model.parameters()]
    back = difference(replica, model.parameters())
    return {"losses": losses, "reports": reports[1:] + [optimizer.report()], "back": back,
            "behind": difference(replica, fresh), "sums": [float(p.double().sum()) for p in fresh],
            "matrix": optimizer.comm.lost_between().tolist()}


def muon(rank, _ranks):
    def losses(**given):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(INPUTS, 120, bias=False), nn.Tanh(), nn.Linear(120, 7, bias=False))
        optimizer = ShardedOptimizer(model, torch.optim.Muon, lr=0.02, shard="parameter", packet_bytes=256, **given)
        found = []
        for step in range(60):
            optimizer.zero_grad()
            loss = loss_of(model, step, rank)
            found.append(loss.item())
            loss.backward()
            optimizer.step()
        optimizer.synchronize()
        lost = optimizer.report()["lost"][1]
        optimizer.close()
        return found, lost

    clean, (lossy_losses, lost) = losses()[0], losses(loss_rate=0.2, wire_dtype="float32")
    return {"first": clean[:5], "clean": clean[-10:], "lossy": lossy_losses[-10:], "lost": lost}


def continue_run(rank, _ranks):
    """A run of 12 steps at 20% loss against 6 steps, a stop, and 6 steps."""
    def run(model, optimizer, steps):
        for step in steps:
            loss_of(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()

    options = {"loss_rate": 0.2, "packet_bytes": 256}
    whole = net(0)
    optimizer = adamw(whole.parameters(), **options)
    run(whole, optimizer, range(12))
    optimizer.synchronize()
    optimizer.close()
    first = net(0)
    optimizer = adamw(first.parameters(), **options)
    run(first, optimizer, range(6))
    state, gathered = optimizer.state_dict(), optimizer.gathered_state_dict()
    with optimizer.model():
        model_then = {name: value.clone() for name, value in first.state_dict().items()}
    replica = {name: value.clone() for name, value in first.state_dict().items()}
    optimizer.close()
    second = net(5)
    optimizer = adamw(second.parameters(), lr=0.5, **options)
    second.load_state_dict(replica)
    optimizer.load_state_dict(state)
    run(second, optimizer, range(6, 12))
    optimizer.synchronize()
    again = difference(whole.parameters(), second.parameters())
    optimizer.close()
    third = net(6)
    optimizer = adamw(third.parameters(), lr=0.5)
    third.load_state_dict(model_then)
    optimizer.load_state_dict(gathered)
    back = optimizer.gathered_state_dict()
    same = difference(*([each["state"][k]["exp_avg_sq"] for k in range(6)] for each in (gathered, back)))
    return {"again": again, "gathered": same, "lr": optimizer.param_groups[0]["lr"],
            "step": float(back["state"][0]["step"])}


def bf16_and_compile(rank, _ranks):
    """Parameters in bfloat16 have float32 masters; a compiled model waits for its parameters."""
    model = net(0).bfloat16()
    optimizer = adamw(model.parameters(), lr=1e-4, wire_dtype="bf16")
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(5):
        inputs, targets = batch(step, rank)
        ((model(inputs.bfloat16()).float() - targets) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    moved = difference([p.float() for p in model.parameters()], [p.float() for p in before])
    masters = max((piece.detach() - piece.detach().bfloat16().float()).abs().max().item()
                  for entry in optimizer._entries for _, piece, _ in entry.pieces)
    sums = [float(p.detach().double().sum()) for p in model.parameters()]
    optimizer.close()
    plain, compiled = net(0), net(0)
    results = []
    for each, run in ((plain, plain), (compiled, torch.compile(compiled, backend="eager"))):
        optimizer = adamw(each.parameters())
        for step in range(4):
            loss_of(run, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        results.append(optimizer._overlaps)
        optimizer.close()
    return {"moved": moved, "masters": masters, "sums": sums, "overlap": results,
            "difference": difference(plain.parameters(), compiled.parameters())}


def wrong_model(rank, _ranks):
    model = net(0) if rank != 2 else nn.Sequential(*net(0)[:4], nn.Linear(120, 8))
    try:
        adamw(model.named_parameters())
    except LossynetError as error:
        return str(error)
    return None


def wrong_use(_rank, _ranks):
    said = []
    for given in ({"colour": 1}, {"wire_dtype": "fp8"}, {"loss_rate": 2}):
        try:
            adamw(net(0).parameters(), **given)
        except (LossynetError, TypeError) as error:
            said.append(str(error))
    model = net(0)
    optimizer = adamw(model.parameters())
    try:
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    except RuntimeError as error:
        said.append(str(error))
    return said


def killed(rank, _ranks):
    model = net(0)
    optimizer = adamw(model.parameters(), peer_timeout=3)
    for step in range(1000):
        if step == 5 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            loss_of(model, step, rank).backward()
            optimizer.step()
            optimizer.zero_grad()
        except LossynetError as error:
            return {"said": str(error), "seconds": time.monotonic() - start, "step": step}
    return None


# ---- the same training in two programs ----

def window_of(seed, number, count):
    """The window and the shift of a sequence in train_llama2's order (llmc/data/dataloader.c)."""
    most = 2**64 - 1

    def mix(x):
        x = (x + 0x9e3779b97f4a7c15) & most
        x = ((x ^ x >> 30) * 0xbf58476d1ce4e5b9) & most
        x = ((x ^ x >> 27) * 0x94d049bb133111eb) & most
        return x ^ x >> 31

    key = mix(mix(seed) ^ number // count)
    half = 1
    while count > 1 << 2 * half:
        half += 1
    mask, index = (1 << half) - 1, number % count
    while True:
        left, right = index >> half, index & mask
        for turn in range(6):
            left, right = right, left ^ (mix(key ^ mix(right ^ turn << 32)) & mask)
        index = left << half | right
        if index < count:
            return index, mix(key)


def llama_buckets(model):
    """The parameters in the order of train_llama2's vector (llmc/model/param_layout.h)."""
    layers = []
    for layer in reversed(model.model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        layers.append([layer.input_layernorm.weight, attention.q_proj.weight, attention.k_proj.weight,
                       attention.v_proj.weight, attention.o_proj.weight, layer.post_attention_layernorm.weight,
                       mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight])
    layers[0].insert(0, model.model.norm.weight)
    return [[model.lm_head.weight], *layers, [model.model.embed_tokens.weight]]


def same_training(rank, ranks):
    given = json.loads((FOLDER / "same_training.in").read_text())
    return {name: train_as_the_trainer(rank, ranks, given, options) for name, options in given["options"].items()}


def train_as_the_trainer(rank, ranks, given, options):
    model = LlamaForCausalLM.from_pretrained(given["model"], dtype=torch.float32)
    tokens = torch.from_numpy(np.fromfile(given["tokens"], "<u2", offset=1024).astype(np.int64))
    size, seq = given["batch"], given["seq"]
    windows = (len(tokens) - 1) // seq
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    optimizer = ShardedOptimizer([{"params": matrices}, {"params": norms, "weight_decay": 0.0}],
                                 torch.optim.AdamW, lr=given["lr"], betas=(0.9, 0.95), eps=1e-8,
                                 weight_decay=0.1, clip=1.0, buckets=llama_buckets(model), **options)
    losses, reports = [], []
    for step in range(given["steps"]):
        rows = []
        for number in range(rank * size, (rank + 1) * size):
            window, shift = window_of(given["seed"], step * ranks * size + number, windows)
            start = min(window * seq + shift % seq, len(tokens) - seq - 1)
            rows.append(tokens[start:start + seq + 1])
        rows = torch.stack(rows)
        logits = model(rows[:, :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        reports.append(optimizer.report())
    optimizer.synchronize()
    reports.append(optimizer.report())
    optimizer.close()
    return {"losses": losses, "reports": reports[1:]}


def example(name, *arguments):
    """Runs a program of dev/examples as this rank. Returns what it printed."""
    sys.argv = [name, *map(str, arguments)]
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        runpy.run_path(str(ROOT / "dev" / "examples" / name), run_name="__main__")
    return shown.getvalue()


def example_gpt(_rank, _ranks):
    return example("gpt.py", "--steps", 4, "--loss-rate", 0.1)


def example_frameworks(rank, ranks):
    """What each framework prints. Place.take() changes the environment, and the framework's own: one at a time."""
    shown = {}
    for name in ("plain", "trainer", "accelerate", "lightning"):
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
        try:
            shown[name] = example("frameworks.py", name)
        except SystemExit as said:
            assert "lacks the Python package" in str(said), said
            shown[name] = "not installed"
    return shown


def example_llama(_rank, _ranks):
    given = json.loads((FOLDER / "same_training.in").read_text())
    return example("llama.py", "--model", given["model"], "--train", given["tokens"], "--out", FOLDER / "further",
                   "--steps", 20, "--batch", 2, "--seq", 32, "--lr", 3e-3, "--loss-rate", 0.1)


TASKS = {like_one_process: 4, odd_parameters: 3, lossy: 4, muon: 3, continue_run: 2, bf16_and_compile: 2,
         wrong_model: 3, wrong_use: 1, killed: 3, same_training: 4, example_gpt: 2, example_frameworks: 2,
         example_llama: 2}


def run_rank(task, rank, ranks, port, pipe):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", LOSSYNET_PORT=str(port))
    try:
        result = task(rank, ranks)
    except Exception as error:  # pylint: disable=broad-exception-caught
        result = f"{type(error).__name__}: {error}"
    with os.fdopen(pipe, "w") as out:
        json.dump(result, out)


def run(task, ranks):
    """Forks the ranks of a task. Returns their results; None: a rank was killed or returned nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(ranks):
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(reader)
            run_rank(task, rank, ranks, port, writer)
            os._exit(0)
        os.close(writer)
        children.append((pid, reader))
    results = []
    for pid, reader in children:
        with os.fdopen(reader) as pipe:
            text = pipe.read()
        os.waitpid(pid, 0)
        results.append(json.loads(text) if text else None)
    return results


if __name__ == "__main__":
    for work, count in TASKS.items():
        if len(sys.argv) > 2 and work.__name__ not in sys.argv[2:]:
            continue
        (FOLDER / f"{work.__name__}.json").write_text(json.dumps(run(work, count)))
