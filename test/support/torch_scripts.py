"""More of what scripts do, by what PyTorch offers: the rest of the table of torch_door.py (torch_habits.py)."""
import contextlib
import copy
import io
import os
import pickle
import time

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook
import torch.distributed.optim
import torch.utils.checkpoint
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_habits import (ADAMW, SGD, Noisy, Parts, alone, batch, built, in_loop, loop, loss_of, net, refused, result,
                          with_net, with_optimizer)


# ---- what writes in forward passes

class Words(nn.Module):
    """An embedding of rows that each rank's batch chooses."""

    def __init__(self, **settings):
        super().__init__()
        self.words, self.last = nn.Embedding(30, 6, **settings), nn.Linear(6, 5)

    def forward(self, x):
        return self.last(self.words(x[:, :4].abs().mul(10).long().clamp(0, 29)).mean(1))


def renormalized(inner, _optimizer, _step):
    with torch.no_grad():
        inner.words.weight.copy_(inner.words.weight.renorm(2, 0, 1.0))


class Rescales(nn.Module):
    """Writes into a weight what depends on the batch."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(20, 5)

    def forward(self, x):
        with torch.no_grad():
            self.inner.weight.mul_(1 - 0.01 * x.abs().mean())
        return self.inner(x)


def spectral():
    """Weights by power iteration, whose vectors are buffers; and an orthogonal one."""
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(20, 30)), nn.Tanh(), nn.utils.spectral_norm(
        nn.Linear(30, 20)), nn.Tanh(), parametrizations.orthogonal(nn.Linear(20, 20)), nn.Linear(20, 5))


class Observed(nn.Module):
    """A weight and activations as if quantized, by what an observer has seen in forward passes."""

    def __init__(self):
        super().__init__()
        from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
        self.inner, self.last = nn.Linear(20, 20), nn.Linear(20, 5)
        self.quantize = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)

    def forward(self, x):
        return self.last(self.quantize(self.inner(x)))


@refused
def statistics_of_no_group(make, rank):
    inner = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20)))
    there, torch.distributed.is_initialized = torch.distributed.is_initialized, lambda: False
    try:
        model, optimizer = make(inner, SGD, lr=0.1)
        loop(model, optimizer, rank)
    finally:
        torch.distributed.is_initialized = there


# ---- loops

@with_net(ADAMW, lr=1e-2)
def averaged_at_the_end(model, inner, optimizer, rank):
    """Stochastic weight averaging, and the plain schedules before."""
    averaged, swa = swa_utils.AveragedModel(inner), swa_utils.SWALR(optimizer, swa_lr=5e-3, anneal_epochs=2)
    plain = torch.optim.lr_scheduler.SequentialLR(optimizer, [
        torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2),
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)], [2])
    for step in range(7):
        loop(model, optimizer, rank, steps=1)
        if step > 3:
            averaged.update_parameters(inner)
            swa.step()
        else:
            plain.step()
    inner.load_state_dict(averaged.module.state_dict())


@with_net(ADAMW, lr=1e-2)
def by_closures(model, _inner, optimizer, rank):
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(4):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, step, rank)
            loss.backward()
            return loss
        optimizer.step(closure)
        schedule.step()


@with_net()
def penalized(model, inner, optimizer, rank):
    """By the gradients of inputs, and of parameters, of a first pass."""
    for step in range(4):
        optimizer.zero_grad()
        x, y = batch(step, rank)
        x.requires_grad_(True)
        loss = ((inner(x) - y) ** 2).mean()
        of_x, of_weight = torch.autograd.grad(loss, [x, inner[0].weight], create_graph=True)
        (((model(x) - y) ** 2).mean() + of_x.square().sum() + 0.1 * of_weight.square().sum()).backward()
        optimizer.step()


@with_net(ADAMW, lr=1e-2)
def functional(model, inner, optimizer, rank):
    """Parameters by name, in a call that is no module's; and the slopes of single examples."""
    for step in range(4):
        optimizer.zero_grad()
        x, y = batch(step, rank)
        named = dict(inner.named_parameters())
        slope = torch.func.grad(lambda p, row: torch.func.functional_call(inner, p, row).sum())
        slopes = torch.func.vmap(slope, (None, 0))({name: p.detach() for name, p in named.items()}, x)
        weights = 1 / (1 + slopes["0.weight"].flatten(1).norm(dim=1))
        (((model(x) - y) ** 2).mean(1) * weights).mean().backward()
        optimizer.step()
    with torch.inference_mode():
        torch.func.functional_call(inner, {name: 0.5 * p for name, p in named.items()}, x)


class Recomputed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(20, 20), net(), nn.Linear(5, 5)

    def forward(self, x):
        return self.last(torch.utils.checkpoint.checkpoint(self.inner, self.first(x), use_reentrant=True))


def recomputed(make, rank):
    torch.manual_seed(0)
    inner = Recomputed()
    model, optimizer = make(inner, ADAMW, lr=1e-2) if make.ours else (DDP(inner), ADAMW(inner.parameters(), lr=1e-2))
    loop(model, optimizer, rank)
    return result(inner)


def dropped_out():
    return nn.Sequential(nn.Linear(20, 30), nn.Dropout(0.3), nn.Linear(30, 5))


def saves_whole(inner, _optimizer, _step):
    torch.save(inner, io.BytesIO())
    inner.load_state_dict(pickle.loads(pickle.dumps(inner)).state_dict())


def tied_later(inner, _optimizer, step):
    if step == 1:
        inner[4].weight = inner[2].weight


def same_widths():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Tanh() if number % 2 else nn.Linear(20, 20) for number in range(5)), nn.Linear(20, 5))


@with_net()
def changed_by_hooks(model, inner, optimizer, rank):
    """Of the optimizer."""
    def clamp(*_given):
        with torch.no_grad():
            inner[0].weight.clamp_(-0.1, 0.1)

    def scale(*_given):
        inner[2].weight.grad.mul_(0.5)
    optimizer.register_step_post_hook(clamp)
    optimizer.register_step_pre_hook(scale)
    loop(model, optimizer, rank)


def parts(make, rank):
    """An optimizer for each part of a model."""
    inner = net()
    if make.ours:
        model, optimizers = inner, [make.optimizer(inner[:3].parameters(), ADAMW, lr=1e-2),
                                    make.optimizer(inner[4].parameters(), SGD, lr=0.1)]
    else:
        model = DDP(inner)
        optimizers = [ADAMW(inner[:3].parameters(), lr=1e-2), SGD(inner[4].parameters(), lr=0.1)]
    for step in range(4):
        inner.zero_grad()
        loss_of(model, step, rank).backward()
        for each in optimizers:
            each.step()
    return result(inner)


def made_again(make, rank):
    """Another optimizer in the middle, with a layer less."""
    inner = net()
    model, optimizer = make(inner, SGD, lr=0.1)
    loop(model, optimizer, rank)
    if make.ours:
        optimizer.close()
    inner[0].requires_grad_(False)
    model, optimizer = make(inner, ADAMW, lr=1e-2)
    loop(model, optimizer, rank)
    return result(inner)


class Rows(torch.utils.data.Dataset):
    def __init__(self, rank):
        self.rank = rank

    def __len__(self):
        return 8

    def __getitem__(self, index):
        x, y = batch(index, self.rank, 1)
        return x[0], y[0]


@with_net(width=300)
def loaded_by_workers(model, _inner, optimizer, rank):
    """Processes that are forked while parameters arrive."""
    for _ in range(2):
        for x, y in torch.utils.data.DataLoader(Rows(rank), 4, num_workers=1):
            optimizer.zero_grad()
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()


def interrupted(make, rank):
    """An exception of all ranks in the middle of backward(); what has been computed is dropped."""
    inner = net()
    model, optimizer = make(inner, ADAMW, lr=1e-2)

    def interrupt(_gradient):
        raise KeyboardInterrupt
    for step in range(5):
        optimizer.zero_grad()
        if step == 2 and not make.ours:
            continue
        loss = loss_of(model, step, rank)
        if step == 2:
            x, y = batch(step, rank)
            hidden = inner[:2](x)
            hidden.register_hook(interrupt)
            loss = ((inner[2:](hidden) - y) ** 2).mean()
        try:
            loss.backward()
        except KeyboardInterrupt:
            continue
        optimizer.step()
    return result(inner)


@with_net()
def of_many_sizes(model, _inner, optimizer, rank):
    compiled = torch.compile(model, backend="eager", dynamic=True)
    for step in range(4):
        optimizer.zero_grad()
        x, y = batch(step, rank, 3 + step)
        ((compiled(x) - y) ** 2).mean().backward()
        optimizer.step()


def groups_apart(make, rank):
    """A part that an lr of 0 freezes, though not its moments, until it is raised."""
    inner = net()
    groups = [{"params": inner[0].parameters(), "lr": 0.0}, {"params": inner[2:].parameters()}]
    if make.ours:
        model, optimizer = inner, make.optimizer(groups, ADAMW, lr=1e-2, model=inner)
    else:
        model, optimizer = DDP(inner), ADAMW(groups, lr=1e-2)
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 1e-2 * (step > 1)
        loop(model, optimizer, rank, steps=1)
    return result(inner)


@with_net(ADAMW, lr=1e-2)
def by_plateau(model, _inner, optimizer, rank):
    """By the mean loss of all ranks."""
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(5):
        loop(model, optimizer, rank, steps=1)
        schedule.step(np.mean([loss_of(model, 9, other).item() for other in range(2)]) + step)


def by_schedule(schedule_of, **settings):
    def case(make, rank):
        inner = net()
        model, optimizer = make(inner, SGD, **{"lr": 0.1, **settings})
        schedule = schedule_of(optimizer)
        loop(model, optimizer, rank, steps=7, after=lambda _: schedule.step())
        return result(inner)
    return case


@refused
def by_plateau_alone(make, rank):
    """Each rank by its own loss."""
    inner = net()
    model, optimizer = make(inner, ADAMW, lr=1e-2)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    for step in range(5):
        loop(model, optimizer, rank, steps=1)
        schedule.step(step if rank else -step)


@with_net()
def reduced_by_hand(model, inner, optimizer, rank):
    """Gradients and weights, which are the same on all ranks already."""
    def average(tensors):
        for tensor in tensors:
            torch.distributed.all_reduce(tensor)
            tensor.div_(2)
    loop(model, optimizer, rank, between=lambda _: average(p.grad for p in inner.parameters()),
         after=lambda _: average(p.data for p in inner.parameters()))


@with_net()
def hooked_later(model, inner, optimizer, rank):
    inner[2].weight.register_hook(lambda gradient: 0.5 * gradient)
    inner[0].register_full_backward_hook(lambda _module, _inputs, gradients: None)
    loop(model, optimizer, rank)


def statistics_again(inner, _optimizer, step):
    """Of the last batches, without gradients."""
    if step == 5:
        swa_utils.update_bn([batch(number, 0)[0] for number in range(3)], inner)


@refused
def loads_on_rank_0(make, rank):
    """After the optimizer is made."""
    inner = net()
    model, optimizer = make(inner, SGD, lr=0.1)
    if rank == 0:
        inner.load_state_dict(net(5).state_dict())
    loop(model, optimizer, rank)


@refused
def assigned(make, rank):
    """Parameters that are put in the place of the optimizer's."""
    inner = net()
    model, optimizer = make(inner, SGD, lr=0.1)
    loop(model, optimizer, rank, steps=1)
    inner.load_state_dict(net(5).state_dict(), assign=True)
    loop(model, optimizer, rank)


def in_parts(make, rank):
    """Modules that are called one after the other, of which the first has batch statistics."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Sequential(nn.Linear(20, 12), nn.BatchNorm1d(12), nn.Tanh()), nn.Linear(12, 5))
    model, optimizer = make(inner, SGD, lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        x, y = batch(step, rank)
        made = inner[1](inner[0](x)) if make.ours else model(x)
        ((made - y) ** 2).mean().backward()
        optimizer.step()
    return result(inner)


@refused
def tied_by_data(make, _rank):
    inner = same_widths()
    inner[2].weight.data = inner[0].weight.data
    make(inner, SGD, lr=0.1)


@refused
def swapped_later(make, rank):
    """Conversions put other tensors into the parameters, which have no hooks."""
    inner = net()
    model, optimizer = make(inner, SGD, lr=0.1)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        inner.half().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    loop(model, optimizer, rank)


class Zero(torch.distributed.optim.ZeroRedundancyOptimizer):
    """Ranks give each other what each has stepped."""

    def __init__(self, params, lr):
        super().__init__(params, SGD, lr=lr)


@refused
def another_head(make, rank):
    """A layer in the place of one that the optimizer has."""
    inner = net()
    model, optimizer = make(inner, SGD, lr=0.1)
    loop(model, optimizer, rank, steps=1)
    inner[4] = nn.Linear(40, 5)
    loop(model, optimizer, rank)


@refused
def replicated(make, rank):
    """DistributedDataParallel that is no module around the model."""
    from torch.distributed._composable.replicate import replicate
    inner = net()
    model, optimizer = make(inner, SGD, whole=True, lr=0.1)
    replicate(inner)
    loop(model, optimizer, rank)


# ---- memory that the script has

def views_from_before(take, write):
    """Of parameters, which the script reads and writes later."""
    def case(make, rank):
        inner = net()
        views = [take(p) for p in inner.parameters()]
        model, optimizer = make(inner, SGD, lr=0.1)
        loop(model, optimizer, rank, steps=5, after=lambda _: [write(view) for view in views])
        return {**result(inner), **{f"view {number}": view.clone() for number, view in enumerate(views)}}
    return case


class Aliases(nn.Module):
    """A weight whose memory is that of another one that is not trained, or of a buffer."""

    def __init__(self, buffer):
        super().__init__()
        self.one, self.two, self.last = nn.Linear(20, 20), nn.Linear(20, 20).requires_grad_(False), nn.Linear(20, 5)
        if buffer:
            self.register_buffer("weight", self.one.weight.data[2:])
        else:
            self.two.weight.data = self.one.weight.data

    def forward(self, x):
        return self.last(self.two(self.one(x).tanh()).tanh())


def flattened(inner):
    """Parameters become slices of a vector, which is returned."""
    vector = torch.cat([p.data.flatten() for p in inner.parameters()])
    for p, part in zip(inner.parameters(), vector.split([p.numel() for p in inner.parameters()])):
        p.data = part.view_as(p)
    return vector


@with_net()
def flattened_later(model, inner, optimizer, rank):
    loop(model, optimizer, rank)
    vector = flattened(inner)
    loop(model, optimizer, rank, after=lambda _: vector.mul_(0.9))


def in_shared_memory(make, rank):
    inner = net()
    inner.share_memory()
    model, optimizer = make(inner, SGD, lr=0.1)
    loop(model, optimizer, rank)
    return {"shared": torch.tensor([float(p.is_shared()) for p in inner.parameters()]), **result(inner)}


@refused
def saves_other_weights(make, rank):
    """While averages are in the place of the parameters, whose memory the script keeps."""
    inner = net()
    model, optimizer = make(inner, SGD, lr=0.1)
    loop(model, optimizer, rank)
    kept = [p.data for p in inner.parameters()]
    for p in inner.parameters():
        p.data = 0.5 * p.data
    optimizer.state_dict()
    assert kept


def gradients_of_the_script(flat):
    """Tensors that the script puts there before backward(), and uses by their names afterwards."""
    @refused
    def case(make, rank):
        inner = net()
        model, optimizer = make(inner, SGD, lr=0.1)
        vector = torch.zeros(sum(p.numel() for p in inner.parameters()))
        for p, part in zip(inner.parameters(), vector.split([p.numel() for p in inner.parameters()])):
            p.grad = part.view_as(p) if flat else part.view_as(p).clone()
        kept = [p.grad for p in inner.parameters()]
        loop(model, optimizer, rank, zero=False, between=lambda _: [gradient.mul_(0.1) for gradient in kept])
    return case


@refused
def gradients_with_graphs(make, rank):
    inner = net()
    model, _ = make(inner, SGD, lr=0.1)
    loss = loss_of(model, 0, rank)
    loss.backward(create_graph=True)
    (loss + sum(p.grad.square().sum() for p in inner.parameters())).backward()


@refused
def graph_of_an_earlier_step(make, rank):
    model, optimizer = make(net(), SGD, lr=0.1)
    losses = [loss_of(model, step, rank) for step in range(2)]
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@refused
def hook_of_all_optimizers(make, rank):
    inner = net()
    model, optimizer = make(inner, SGD, lr=0.1)
    handle = register_optimizer_step_post_hook(lambda *_: inner[0].weight.data.mul_(0.9))
    try:
        loop(model, optimizer, rank)
    finally:
        handle.remove()


def evaluates_in_a_child(make, rank):
    """Which is forked while parameters arrive, and is told so."""
    inner = net(width=300)
    model, optimizer = make(inner, SGD, lr=0.1)
    for step in range(5):
        loop(model, optimizer, rank, steps=1)
        child = os.fork()
        if not child:
            try:
                with torch.no_grad():
                    inner(batch(step, 0)[0])
            finally:
                os._exit(0)
        end = time.monotonic() + 60
        while not os.waitpid(child, os.WNOHANG)[0]:
            assert time.monotonic() < end
            time.sleep(0.01)
    return result(inner)


class Scaled(nn.Module):
    """Parameters of one number, and of none."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale, self.empty = net(), nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x):
        return self.inner(x) * self.scale + self.empty.sum()


def saved_and_loaded(optimizer_class):
    def case(make, rank):
        torch.manual_seed(0)
        inner = Scaled()
        model, optimizer = make(inner, optimizer_class, **({"bucket_mb": 1e-4} if make.ours else {}))
        loop(model, optimizer, rank)
        state = copy.deepcopy(optimizer.gathered_state_dict() if make.ours else optimizer.state_dict())
        optimizer.load_state_dict(state)
        plain = optimizer_class(copy.deepcopy(inner).parameters())
        plain.load_state_dict(state)
        loop(model, optimizer, rank)
        return {name: value for name, value in result(inner).items() if value.numel()}
    return case


@with_net()
def compiled_change(model, inner, optimizer, rank):
    @torch.compile(backend="eager")
    def change():
        for p in inner.parameters():
            p.grad.mul_(0.1)
    loop(model, optimizer, rank, between=lambda _: change())


class Clips(SGD):
    """By the norm of all gradients, where that is large."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 100.0)
        return super().step(closure)


def writes_in_model(inner, optimizer):
    with optimizer.model():
        inner.load_state_dict(net(5).state_dict())


# ---- what does not ask Python

@torch.jit.script
def affine(x, weight, bias):
    return torch.nn.functional.linear(x, weight, bias).tanh()


@torch.jit.script
def halve(gradient):
    return gradient.mul_(0.5)


def affine_unseen(x, weight, bias):
    """As a function in C++ reads them."""
    with torch._C.DisableTorchFunctionSubclass():
        return torch.nn.functional.linear(x, weight, bias)


class Reads(nn.Module):
    """Weights whose modules are not called."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in ((20, 99), (99, 99), (99, 5)))

    def forward(self, x):
        for layer in self.layers:
            x = self.function(x, layer.weight, layer.bias)
        return x


def reads(function):
    def case(make, rank):
        torch.manual_seed(0)
        inner = Reads(function)
        model, optimizer = make(inner, SGD, lr=0.1, **({"bucket_mb": 0.01} if make.ours else {}))
        loop(model, optimizer, rank, steps=6)
        return result(inner)
    return case


@with_net()
def compiled_with_backward(model, _inner, optimizer, rank):
    @torch.compile(backend="eager")
    def run(step):
        loss_of(model, step, rank).backward()
    for step in range(4):
        optimizer.zero_grad()
        run(step)
        optimizer.step()


class Cached(nn.Module):
    """A buffer as long as the longest batch so far."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.register_buffer("cache", torch.ones(2), persistent=False)

    def forward(self, x):
        if len(x) > len(self.cache):
            self.register_buffer("cache", torch.linspace(1, 2, len(x)), persistent=False)
        return self.inner(x) * self.cache[:len(x), None]


def cached(apart, passes=1):
    def case(make, rank):
        inner = Cached()
        model, optimizer = make(inner, SGD, lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            batches = [batch(step, rank, 4 + 2 * step + part + apart * rank) for part in range(passes)]
            sum(((model(x) - y) ** 2).mean() for x, y in batches).backward()
            optimizer.step()
        return result(inner)
    return case


# ---- parameters that a rank alone uses

def by_rank(passes=1, clip=False, none=True, apart=False):
    """Each rank another expert, in so many passes of a step. none: what zero_grad() leaves. apart: all passes but the
    last are within no_sync()."""
    def case(make, rank):
        inner = Parts()
        model, optimizer = make(inner, ADAMW, lr=1e-2, weight_decay=0.5)
        norms = []
        for step in range(6):
            optimizer.zero_grad(set_to_none=none)
            for part in range(passes):
                inner.chosen = (step // 2 + rank + part // 2) % 2
                no_sync = (optimizer if make.ours else model).no_sync
                with no_sync() if apart and part < passes - 1 else contextlib.nullcontext():
                    loss_of(model, passes * step + part, rank).backward()
            if clip:
                norms.append(sum(p.grad.norm() ** 2 for p in inner.parameters() if p.grad is not None))
                nn.utils.clip_grad_norm_(inner.parameters(), 0.05)
            optimizer.step()
        return {**result(inner), "norms": torch.tensor([1.0, *norms])}
    return case


def by_rank_dropped(make, rank):
    """Some passes are dropped, the first ones while gradients of the parameters leave early."""
    inner = Parts()
    model, optimizer = make(inner, ADAMW, lr=1e-2, weight_decay=0.1)
    for step in range(12):
        for part in range(1 + (step > 5)):
            inner.chosen = ((step + part) // 2 + rank) % 2
            loss_of(model, 2 * step + part, rank).backward()
            if step > 8 and part == 0:
                inner.zero_grad(set_to_none=step != 9)
        if step % 3 != 1:
            nn.utils.clip_grad_norm_(inner.parameters(), 0.05)
            optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return result(inner)


# ---- what is given

def given(*params, **settings):
    """What the line is told when it is made. params: in place of the model."""
    return refused(lambda make, _: make.optimizer(*(params or (net(), SGD)), **{"lr": 0.1, **settings}))


@refused
def clip_later(make, rank):
    model, optimizer = make(net(), SGD, lr=0.1)
    optimizer.clip = "1.0"
    loop(model, optimizer, rank)


def without_loss(make, _rank):
    """Nothing is rounded then."""
    if not make.ours:
        return {"float32": torch.ones(1)}
    optimizer = make.optimizer(net(), SGD, lr=0.1, loss_rate=(0, 0.0))
    return {"float32": torch.tensor([float(optimizer.comm.option("wire_dtype") == "float32")])}


def state_of(optimizer_class, **settings):
    """Loads what a plain optimizer has saved, into AdamW, and goes on."""
    def case(make, rank):
        inner = net()
        plain = optimizer_class(inner.parameters(), lr=1e-2, **settings)
        for step in range(2):
            plain.zero_grad()
            loss_of(inner, step, 0).backward()
            plain.step()
        plain.zero_grad()
        model, optimizer = make(inner, ADAMW, lr=1e-2)
        optimizer.load_state_dict(plain.state_dict())
        loop(model, optimizer, rank)
        return result(inner)
    return case


@refused
def taken_for_plain(make, rank):
    """By torch.distributed.checkpoint, too."""
    inner = net()
    model, optimizer = make(inner, ADAMW, lr=1e-2)
    loop(model, optimizer, rank, steps=1)
    state = io.BytesIO()
    torch.save(optimizer.state_dict(), state)
    state.seek(0)
    optimizer.load_state_dict(torch.load(state, weights_only=True))
    get_state_dict(inner, optimizer)


# ---- what is not the same on all ranks

def written(change, before=False, build=net):
    """change (model, rank) in step 4, when parameters arrive during forward passes; before: step()."""
    def case(make, rank):
        inner = build()
        model, optimizer = make(inner, SGD, lr=0.1)
        given = {"between" if before else "after": lambda step: step == 4 and change(inner, rank)}
        loop(model, optimizer, rank, steps=7, **given)
        return result(inner)
    return case


@torch.no_grad()
def clamp_on_0(inner, rank):
    if rank == 0:
        inner[0].weight.clamp_(-0.05, 0.05)


def clamp_data_on_0(inner, rank):
    if rank == 0:
        inner[0].weight.data.clamp_(-0.05, 0.05)


def clear_by_numpy(inner, rank):
    if rank == 0:
        inner[0].weight.detach().numpy()[:] = 0


@torch.no_grad()
def add_noise(inner, rank):
    for p in inner.parameters():
        p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(rank)))


@torch.no_grad()
def set_element(inner, rank):
    if rank == 1:
        inner[2].weight[3, 2] = 1


def set_element_by_data(inner, rank):
    if rank == 1:
        inner[2].weight.data[3, 2] = 1


@refused
def written_before_backward(make, rank):
    inner = net()
    model, optimizer = make(inner, SGD, lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        if step == 4:
            set_element_by_data(inner, rank)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def swap_to_evaluate(inner, rank):
    """On rank 0, and back."""
    if rank == 0:
        saved = [p.clone() for p in inner.parameters()]
        for p in inner.parameters():
            p.mul_(0.5)
        inner(batch(9, 0)[0])
        for p, before in zip(inner.parameters(), saved):
            p.copy_(before)


def clip_on_0(inner, rank):
    if rank == 0:
        nn.utils.clip_grad_norm_(inner.parameters(), 0.05)


def drop_on_1(inner, rank):
    if rank == 1:
        inner[2].weight.grad = None


def halve_mean_on(who):
    def change(inner, rank):
        if rank == who:
            inner.norm.running_mean.mul_(0.5)
    return change


def fill_data_on(ranks):
    def change(inner, rank):
        if rank in ranks:
            inner.norm.running_mean.data.fill_(0.5)
    return change


def clear_state_on(ranks):
    """Of the moments."""
    def case(make, rank):
        inner = net()
        model, optimizer = make(inner, ADAMW, lr=1e-2)
        for step in range(6):
            loop(model, optimizer, rank, steps=1)
            if step == 3 and rank in ranks:
                optimizer.state.clear()
            if step == 4 and rank in ranks:
                for state in optimizer.state.values():
                    state["exp_avg"].zero_()
        return result(inner)
    return case


@torch.no_grad()
def pass_of_training(inner, rank):
    inner(batch(50, rank)[0])


def without_backward(alike):
    """Gradients by torch.autograd.grad, which nobody averages."""
    def case(make, rank):
        inner = net()
        _, optimizer = make(inner, SGD, lr=0.1)
        for step in range(4):
            parameters = list(inner.parameters())
            slopes = torch.autograd.grad(loss_of(inner, step, 0 if alike else rank), parameters)
            for p, slope in zip(parameters, slopes):
                p.grad = slope
            optimizer.step()
        return result(inner)
    return case


@with_net()
def two_tasks(model, inner, optimizer, rank):
    """Gradients of two losses, which the script puts together."""
    for step in range(4):
        slopes = []
        for part in range(2):
            optimizer.zero_grad()
            loss_of(model, 2 * step + part, rank).backward()
            slopes.append([p.grad.clone() for p in inner.parameters()])
        for p, one, other in zip(inner.parameters(), *slopes):
            p.grad = one + 0.5 * other
        optimizer.step()


def two_models(used, given=True):
    """Both with batch statistics, in one optimizer. used: by step, whether a model is called, and how often."""
    def case(make, rank):
        inner = nn.ModuleList([Noisy(1), Noisy(2)])
        if make.ours:
            models, optimizer = inner, make.optimizer(inner if given else inner.parameters(), SGD, lr=0.1)
        else:
            models, optimizer = [DDP(each) for each in inner], SGD(inner.parameters(), lr=0.1)
        for step in range(6):
            optimizer.zero_grad()
            sum(loss_of(models[which], 10 * step + pass_, rank)
                for which, passes in enumerate(used(step)) for pass_ in range(passes)).backward()
            optimizer.step()
        return result(inner)
    return case


class Counts(torch.optim.Optimizer):
    """Keeps in its groups how many steps it has made, and its rate."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "made": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["made"] += 1
            for p in group["params"]:
                p.sub_(group["lr"] / group["made"] * p.grad)
            group["lr"] *= 0.9


def groups_with_names(make, rank):
    """Entries that the optimizer does not know, as scripts give them to choose a rate."""
    inner = net()
    groups = [{"params": inner[0].parameters(), "name": "first", "scale": 0.5},
              {"params": inner[2:].parameters(), "name": "rest", "scale": 1.0}]
    if make.ours:
        model, optimizer = inner, make.optimizer(groups, ADAMW, lr=1e-2)
    else:
        model, optimizer = DDP(inner), ADAMW(groups, lr=1e-2)
    for group in optimizer.param_groups:
        group["lr"] *= group["scale"]
    loop(model, optimizer, rank)
    return result(inner)


@refused
def groups_of_ranks(make, rank):
    """The same parameters in the same order, of which each rank decays others."""
    inner = net()
    every, count = list(inner.parameters()), 2 + 2 * rank
    optimizer = make.optimizer([{"params": every[:count], "weight_decay": 0.5}, {"params": every[count:]}], ADAMW)
    loop(inner, optimizer, rank)


def functional_first(make, rank):
    """The first pass is one with values that no parameter has."""
    inner = Noisy(seed=rank)
    model, optimizer = make(inner, SGD, lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        inner.eval()
        torch.func.functional_call(inner, {name: p.detach() for name, p in inner.named_parameters()}, batch(step, 0)[0])
        inner.train()
        loss_of(model, step, rank).backward()
        optimizer.step()
    return result(inner)


def state_of_another_model(width, groups):
    @refused
    def case(make, rank):
        other = net(width=width)
        plain = ADAMW(groups(other))
        loss_of(other, 0, 0).backward()
        plain.step()
        _, optimizer = make(net(), ADAMW)
        optimizer.load_state_dict(plain.state_dict())
    return case


@refused
def rates_in_tensors(make, rank):
    model, optimizer = make(net(), ADAMW, lr=torch.tensor(0.1 + rank))
    loop(model, optimizer, rank)


@refused
def shared_later(make, rank):
    inner = net()
    model, optimizer = make(inner, SGD, lr=0.1)
    loop(model, optimizer, rank, steps=1)
    optimizer.zero_grad()
    inner.share_memory()
    loop(model, optimizer, rank)


@refused
def other_order(make, rank):
    inner = same_widths()
    weights = [layer.weight for layer in (inner[0], inner[2])]
    make.optimizer(weights if rank else weights[::-1], SGD, lr=0.1)
    loss_of(inner, 0, rank)


def other_state(of):
    """Each rank loads what was saved at another time."""
    @refused
    def case(make, rank):
        model, optimizer = make(net(), torch.optim.Adagrad, lr=0.1)
        states = []
        for _ in range(2):
            states.append(of(optimizer))
            loop(model, optimizer, rank, steps=1)
        optimizer.load_state_dict(states[rank])
    return case


TABLE = {
    "max_norm": refused(lambda make, rank: built(lambda: Words(max_norm=1.0))(make, rank)),
    "renormalized after step()": built(Words, renormalized, lr=1.0),
    "rescaled in forward": refused(lambda make, rank: built(Rescales)(make, rank)),
    "spectral_norm": built(spectral), "observers": built(Observed), "SyncBatchNorm": statistics_of_no_group,
    "SWA": averaged_at_the_end, "closures": by_closures, "gradient penalty": penalized, "torch.func": functional,
    "reentrant checkpoint": recomputed, "dropout": built(dropped_out), "whole model saved": built(net, saves_whole),
    "tied later": built(same_widths, tied_later), "optimizer's hooks": changed_by_hooks, "two parts": parts,
    "made again": made_again, "DataLoader": loaded_by_workers, "interrupted": interrupted, "many sizes": of_many_sizes,
    "lr 0": groups_apart, "foreach": built(net, None, ADAMW, lr=1e-2, foreach=True, amsgrad=True),
    "plateau": by_plateau, "plateau alone": by_plateau_alone, "all_reduce": reduced_by_hand,
    "hooks later": hooked_later, "update_bn": built(lambda: Noisy(0), statistics_again),
    "loads on rank 0": loads_on_rank_0, "assign=True": assigned,
    "another head": another_head, "swapped later": swapped_later, "ZeRO": with_optimizer(Zero, lr=0.1),
    "replicate": replicated, "called in parts": in_parts, "tied by .data": tied_by_data,
    "pulse() alone": alone(lambda optimizer: optimizer.comm.pulse(np.zeros(1))),
    "load_state_dict() alone": alone(lambda optimizer: optimizer.load_state_dict({})),
    "clamped on rank 0": written(clamp_on_0), ".data on rank 0": written(clamp_data_on_0),
    "noise of ranks": written(add_noise), "an element": written(set_element),
    "numpy() on rank 0": written(clear_by_numpy),
    "between on rank 0": written(clamp_data_on_0, True), "clip on rank 0": written(clip_on_0, True),
    "grad = None on rank 1": written(drop_on_1, True), "evaluates other weights": written(swap_to_evaluate),
    "buffer on rank 0": written(halve_mean_on(0), build=lambda: Noisy(0)),
    "buffer on rank 1": written(halve_mean_on(1), build=lambda: Noisy(0)),
    "buffer's .data on rank 0": written(fill_data_on({0}), build=lambda: Noisy(0)),
    "buffer's .data": written(fill_data_on({0, 1}), build=lambda: Noisy(0)),
    "element by .data": written(set_element_by_data, True), "element before backward": written_before_backward,
    "state": clear_state_on({0, 1}), "state on rank 0": clear_state_on({0}), "state on rank 1": clear_state_on({1}),
    "passes without gradients": written(pass_of_training, True, lambda: Noisy(0)),
    "statistics reset": written(lambda inner, _: inner.norm.reset_running_stats(), build=lambda: Noisy(0)),
    "autograd.grad": without_backward(False), "autograd.grad alike": without_backward(True), "two tasks": two_tasks,
    "two models": two_models(lambda _: (1, 1), False), "two models, twice": two_models(lambda _: (1, 2)),
    "two models in turn": two_models(lambda step: (step % 2, 1 - step % 2)),
    "two models, one late": two_models(lambda step: (1, step > 2), False),
    "tensor lr": rates_in_tensors, "share_memory later": shared_later, "other order": other_order,
    "lazy": refused(lambda make, _: make(nn.LazyLinear(5), SGD)),
    "state of another step": other_state(lambda o: o.state_dict()),
    "state of another file": other_state(lambda o: o.gathered_state_dict()),
    "OneCycle": by_schedule(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.5, total_steps=10), momentum=0.9),
    "views": views_from_before(lambda p: p.data.view(-1), lambda view: view.mul_(0.9)),
    "rows": views_from_before(lambda p: p.detach()[0], lambda view: view.mul_(0.9)),
    "views, numpy": views_from_before(lambda p: torch.from_numpy(p.detach().numpy()), lambda view: view),
    "frozen, tied by .data": built(lambda: Aliases(False)), "buffer of a weight": refused(
        lambda make, rank: built(lambda: Aliases(True))(make, rank)),
    "flattened later": flattened_later, "shared memory": in_shared_memory, "saves other weights": saves_other_weights,
    "gradients kept": gradients_of_the_script(False), "gradients in a vector": gradients_of_the_script(True),
    "create_graph": gradients_with_graphs, "earlier graph": graph_of_an_earlier_step,
    "hook of all optimizers": hook_of_all_optimizers, "evaluates in a child": evaluates_in_a_child,
    "scalars, AdamW": saved_and_loaded(ADAMW), "scalars, NAdam": saved_and_loaded(torch.optim.NAdam),
    "scalars, ASGD": saved_and_loaded(torch.optim.ASGD), "compiled change": compiled_change,
    "clips": with_optimizer(Clips, lr=0.1), "overlap": refused(lambda make, _: make.optimizer(
        [nn.Parameter(part) for part in torch.ones(10).unfold(0, 6, 4)], SGD)),
    "optimizer copied": in_loop(lambda _inner, optimizer: copy.deepcopy(optimizer)),
    "hook of state_dict": in_loop(lambda _inner, optimizer: optimizer.register_state_dict_post_hook(print)),
    "written in model()": in_loop(writes_in_model),
    "counts in groups": built(net, None, Counts), "groups with names": groups_with_names,
    "functional_call first": functional_first, "groups of ranks": groups_of_ranks,
    "clip of ranks": refused(lambda make, rank: loop(*make(net(), SGD, lr=0.1, clip=0.01 + 0.01 * rank), rank)),
    "state of other groups": state_of_another_model(40, lambda model: [
        {"params": model[0].parameters()}, {"params": model[2:].parameters()}]),
    "state of another width": state_of_another_model(50, lambda model: model.parameters()),
    "jit.script": reads(affine), "read unseen": refused(lambda make, rank: reads(affine_unseen)(make, rank)),
    "jit.script, p.grad": with_net()(lambda model, inner, optimizer, rank: loop(
        model, optimizer, rank, between=lambda _: [halve(p.grad) for p in inner.parameters()])),
    "compiled with backward": compiled_with_backward, "cache": cached(0), "cache of ranks": refused(cached(1)),
    "cache of ranks, passes": refused(cached(1, 2)),
    "by rank, clipped": by_rank(clip=True), "by rank, zeroed": by_rank(none=False), "by rank, passes": by_rank(3),
    "by rank, all": by_rank(3, True, False), "by rank, no_sync": by_rank(3, True, True, True),
    "by rank, dropped": by_rank_dropped, "without loss": without_loss, "clip later": clip_later,
    "frozen": given(net().requires_grad_(False), SGD), "an optimizer": given(net(), SGD(net().parameters())),
    "of an optimizer": given(SGD(net().parameters()), SGD), "a model twice": given(model=net()),
    "clip a string": given(clip="1.0"), "clip negative": given(clip=-1), "clip not a number": given(clip=True),
    "overlap a string": given(overlap="no"), "buckets negative": given(bucket_mb=-1),
    "buckets flat": given(buckets=[1]),
    "amsgrad's state": state_of(ADAMW, amsgrad=True), "SGD's state": refused(state_of(SGD, momentum=0.9)),
    "Adamax's state": refused(state_of(torch.optim.Adamax)), "taken for plain": taken_for_plain,
    "model's state": refused(lambda make, _: make.optimizer(net(), SGD, lr=0.1).load_state_dict(net().state_dict())),
    "ASGD": built(net, None, torch.optim.ASGD, lr=1e-2, t0=2), "Rprop": built(net, None, torch.optim.Rprop, lr=1e-2),
    "Adagrad": built(net, None, torch.optim.Adagrad, lr_decay=0.1), "NAdam": built(net, None, torch.optim.NAdam),
}
