"""What scripts do: the table of cases of torch_door.py.

A case is a function (make, rank). make(model, optimizer class, ...) returns the model to call and the optimizer:
it is the line that changes. The case returns tensors.
"""
import copy
import os
import time

import torch
from torch import nn
import torch.nn.utils.prune  # pylint: disable=unused-import
import torch.utils.checkpoint
from torch.nn.parallel import DistributedDataParallel as DDP

import lossynet.torch

RANKS = 2
SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
PEER_TIMEOUT = 2


def net(seed=0, width=40):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 5))


def batch(step, rank, size=8):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(size, 20, generator=generator)
    return x, (2 * x[:, :5]).sin()


def loss_of(model, step, rank):
    x, y = batch(step, rank)
    return ((model(x) - y) ** 2).mean()


def loop(model, optimizer, rank, steps=4, between=None, after=None, zero=True):
    for step in range(steps):
        if zero:
            optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        if between:
            between(step)
        optimizer.step()
        if after:
            after(step)


def result(module):
    """What a script saves: parameters and buffers, without a word to the optimizer."""
    return {name: value.clone() for name, value in module.state_dict().items()}


def with_net(optimizer_class=SGD, seed=0, width=40, **settings):
    """A case from a function (model, optimizer, rank) on a small network."""
    def decorate(body):
        def case(make, rank):
            inner = net(seed, width)
            model, optimizer = make(inner, optimizer_class, **{"lr": 0.1, **settings})
            body(model, inner, optimizer, rank)
            return result(inner)
        return case
    return decorate


def changes_gradients(change):
    """A case in which the script changes gradients between backward() and step()."""
    def case(make, rank):
        inner = net()
        model, optimizer = make(inner, SGD, lr=0.1)
        loop(model, optimizer, rank, between=lambda step: change(inner, step))
        return result(inner)
    return case


def scale(inner, _step):
    for p in inner.parameters():
        p.grad.mul_(0.1)


def scale_data(inner, _step):
    for p in inner.parameters():
        p.grad.data.clamp_(-0.003, 0.003)


def replace(inner, _step):
    for p in inner.parameters():
        p.grad = 0.1 * p.grad


def replace_unseen(inner, _step):
    for p in inner.parameters():
        p.grad = torch.ones_like(p)


def drop_some(inner, step):
    if step % 2:
        inner[2].weight.grad = None


def write_through_numpy(inner, _step):
    inner[0].weight.grad.numpy()[:] *= 0.1


def on_rank_0(inner, _step):
    if dist_rank() == 0:
        inner[0].weight.grad.norm().item()  # it is looked at on one rank alone


def dist_rank():
    return int(os.environ["RANK"])


@with_net(width=300)
def plain(model, _inner, optimizer, rank):
    loop(model, optimizer, rank)


@with_net(ADAMW, weight_decay=0.1)
def never_zeroed(model, inner, optimizer, rank):
    loop(model, optimizer, rank, after=lambda _step: inner.zero_grad(), zero=False)


@with_net()
def scaled_by_grad_scaler(model, inner, optimizer, rank):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        scaler.scale(loss_of(model, step, rank)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(inner.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()


@with_net()
def scaled_and_infinite(model, _inner, optimizer, rank):
    """One element of one rank's gradient, which the other owns: all ranks leave the step out."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        inner = model.module if isinstance(model, DDP) else model
        for layer, owner in ((inner[0], 1), (inner[4], 0)):
            if step == 1 + owner and rank == owner:
                loss = loss + float("inf") * layer.weight[0, 0]
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@with_net()
def sharpness_aware(model, inner, optimizer, rank):
    for step in range(4):
        loss_of(model, step, rank).backward()
        with torch.no_grad():
            moves = [0.1 * p.grad for p in inner.parameters()]
            for p, move in zip(inner.parameters(), moves):
                p.add_(move)
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        with torch.no_grad():
            for p, move in zip(inner.parameters(), moves):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


@with_net(ADAMW, lr=1e-2)
def skipped_batches(model, _inner, optimizer, rank):
    for step in range(6):
        loss = loss_of(model, step, rank)
        loss.backward()
        if step in (1, 4):
            optimizer.zero_grad()
            continue
        optimizer.step()
        optimizer.zero_grad()


@with_net()
def added_up(model, _inner, optimizer, rank):
    for step in range(4):
        optimizer.zero_grad()
        for part in range(3):
            (loss_of(model, 3 * step + part, rank) / 3).backward()  # without no_sync
        optimizer.step()


@with_net(ADAMW, lr=1e-2, weight_decay=0.1)
def stepped_twice(model, _inner, optimizer, rank):
    loop(model, optimizer, rank)
    optimizer.zero_grad()
    optimizer.step()


def average_of_weights(make, rank):
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
    inner = net(width=300)
    model, optimizer = make(inner, ADAMW, lr=1e-2)
    ema, copies = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.5)), []
    def after(_step):
        ema.update_parameters(inner)
        copies.append(copy.deepcopy(inner))
    loop(model, optimizer, rank, after=after)
    return {**result(ema.module), **{"copy." + name: value for name, value in result(copies[1]).items()}}


def views_that_were_kept(make, rank):
    inner = net(width=300)
    model, optimizer = make(inner, SGD, lr=0.1)
    views, sums = inner.state_dict(), {}
    def after(_step):
        for name, view in views.items():
            sums[name] = sums.get(name, 0) + view
    loop(model, optimizer, rank, after=after)
    return sums


@with_net(width=300)
def clamped_weights(model, inner, optimizer, rank):
    def clamp(_step):
        for p in inner.parameters():
            p.data.clamp_(-0.05, 0.05)
    loop(model, optimizer, rank, after=clamp)


@with_net()
def weights_from_a_vector(model, inner, optimizer, rank):
    def after(_step):
        vector = nn.utils.parameters_to_vector(inner.parameters())
        nn.utils.vector_to_parameters(0.9 * vector, inner.parameters())
    loop(model, optimizer, rank, after=after)


@with_net(ADAMW, lr=1e-2, weight_decay=0.5)
def frozen_later(model, inner, optimizer, rank):
    loop(model, optimizer, rank, after=lambda step: inner[0].requires_grad_(step < 1))


class Parts(nn.Module):
    """Two of three experts in turn; one is never used."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.experts, self.chosen = nn.ModuleList(nn.Linear(20, 5) for _ in range(3)), 0

    def forward(self, x):
        return self.experts[self.chosen](x)


def unused_experts(make, rank):
    inner = Parts()
    model, optimizer = make(inner, ADAMW, lr=1e-2, weight_decay=0.5)
    def after(step):
        inner.chosen = (step + 1) % 2 if step < 2 else 0
    loop(model, optimizer, rank, steps=6, after=after)
    return result(inner)


class Noisy(nn.Module):
    """A frozen layer, a constant buffer and batch statistics, of each rank's own seed."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.frozen, self.last = nn.Linear(20, 20).requires_grad_(False), nn.Linear(20, 5)
        self.norm = nn.BatchNorm1d(20)
        self.register_buffer("waves", torch.randn(20))

    def forward(self, x):
        return self.last(self.norm((self.frozen(x) * self.waves).sin()))


def all_from_rank_0(make, rank):
    inner = Noisy(seed=rank)
    model, optimizer = make(inner, ADAMW, whole=True, lr=1e-2)
    loop(model, optimizer, rank)
    return result(inner)


def statistics_of_batches(make, rank):
    inner = Noisy(seed=0)
    model, optimizer = make(inner, SGD, lr=0.1)
    loop(model, optimizer, rank)
    return result(inner)


def head_alone(make, rank):
    """The optimizer is not given the model; layers and buffers of each rank's own come from rank 0 nevertheless."""
    inner = Noisy(seed=rank)
    if make.ours:
        model, optimizer = inner, make.optimizer([{"params": inner.last.parameters()}], SGD, lr=0.1)
    else:
        model, optimizer = DDP(inner, find_unused_parameters=True), SGD(inner.last.parameters(), lr=0.1)
    for step in range(4):
        inner.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    return result(inner)


def passes_of_a_step(make, rank):
    """Two forward passes of a step, after which a rank's statistics are not those of rank 0."""
    inner = Noisy(seed=0)
    model, optimizer = make(inner, SGD, lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        (loss_of(model, 2 * step, rank) + loss_of(model, 2 * step + 1, rank)).backward()
        optimizer.step()
    return result(inner)


class Centred(nn.Module):
    """Its buffer is another tensor after each forward pass, and one is written through .data."""

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("book", torch.ones(5))

    def forward(self, x):
        y = self.inner(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        self.book.data.mul_(0.9).add_(0.1 * y.detach().mean(0))
        return y - self.mean - self.book.clone()


def buffers_replaced(make, rank):
    inner = Centred()
    model, optimizer = make(inner, SGD, lr=0.1)
    loop(model, optimizer, rank)
    return result(inner)


def kept_apart(make, rank):
    """Micro-batches within no_sync(), more of them on one rank than on the other."""
    inner = net()
    model, optimizer = make(inner, ADAMW, lr=1e-2)
    no_sync = (optimizer if make.ours else model).no_sync
    for step in range(4):
        optimizer.zero_grad()
        with no_sync():
            for part in range(rank + 1):
                loss_of(model, 9 * step + part, rank).backward()
        loss_of(model, 9 * step + 8, rank).backward()
        optimizer.step()
    return result(inner)


class Shrinks(nn.Linear):
    """Writes its weight in each forward pass from a step on."""
    first = 0

    def forward(self, x):
        if self.first <= 0:
            with torch.no_grad():
                self.weight.mul_(0.9)
        return super().forward(x)


def shrinks(first):
    def case(make, rank):
        torch.manual_seed(0)
        inner = nn.Sequential(Shrinks(20, 400), nn.Tanh(), Shrinks(400, 400), nn.Tanh(), Shrinks(400, 5))
        model, optimizer = make(inner, SGD, lr=0.1, **({"bucket_mb": 0.1} if make.ours else {}))
        for step in range(7):
            inner[0].first = inner[2].first = inner[4].first = first - step
            loop(model, optimizer, rank, steps=1)
        return result(inner)
    return case


def frozen_in_turn(make, rank):
    inner = net()
    model, optimizer = make(inner, SGD, lr=0.1)
    for step in range(6):
        inner[0].requires_grad_(step % 2 == 0)
        loop(model, optimizer, rank, steps=1)
    return result(inner)


def zero_as_of_old(inner, _step):
    for p in inner.parameters():
        p.grad.detach_()
    torch._foreach_zero_([p.grad for p in inner.parameters()])


def other_defaults(make, rank):
    inner = net()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            model, optimizer = make(inner, ADAMW, lr=1e-2)
    finally:
        torch.set_default_dtype(torch.float32)
    loop(model, optimizer, rank)
    return result(inner)


def compiled_step(make, rank):
    inner = net()
    model, optimizer = make(inner, SGD, lr=0.1)
    step = torch.compile(lambda: optimizer.step(), backend="eager") if make.ours else optimizer.step
    for number in range(3):
        optimizer.zero_grad()
        loss_of(model, number, rank).backward()
        step()
    return result(inner)


def whole_parameters(optimizer_class, bias=True, **settings):
    """Owners of whole parameters, which are not equally many; clipping, and a state that is loaded again."""
    def case(make, rank):
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(20, 44, bias=bias), nn.Tanh(), nn.Linear(44, 28, bias=bias), nn.Tanh(),
                              nn.Linear(28, 5, bias=bias))
        model, optimizer = make(inner, optimizer_class, **settings, **({"shard": "parameter"} if make.ours else {}))
        loop(model, optimizer, rank, between=lambda _step: nn.utils.clip_grad_norm_(inner.parameters(), 0.05))
        if make.ours:
            every = [optimizer.comm.owned(other)[0] for other in range(RANKS)]
            sizes = [p.numel() for p in inner.parameters()]
            assert {part.stop - part.start for part in every} != {sum(sizes) // RANKS}
        if make.ours and not bias:
            gathered = optimizer.gathered_state_dict()
            optimizer.load_state_dict(gathered)
            optimizer_class(inner.parameters(), **settings).load_state_dict(gathered)
        loop(model, optimizer, rank)
        return result(inner)
    return case


def apart(dtype):
    """Masters that are not the memory that is sent, as on a GPU: here copies on the same device."""
    def case(make, rank):
        before, lossynet.torch.there = lossynet.torch.there, lambda tensor, _device: tensor.clone()
        try:
            inner = net(width=300).to(dtype)
            settings = {"wire_dtype": "float32", "loss_rate": 0.1, "look_ahead": 0.5, "carry": 0, "repair": 0}
            model, optimizer = make(inner, ADAMW, lr=1e-2, weight_decay=0.1,
                                    **(settings if make.ours and dtype != torch.float32 else {}))
        finally:
            lossynet.torch.there = before
        if not make.ours and dtype != torch.float32:
            return {"masters": torch.ones(1)}
        for step in range(4):
            optimizer.zero_grad()
            (model(batch(step, rank)[0].to(dtype)).float() ** 2).mean().backward()
            optimizer.step()
        if dtype == torch.float32:
            return result(inner)
        optimizer.load_state_dict(optimizer.gathered_state_dict())
        optimizer.synchronize()
        same = all(torch.equal(values, optimizer._values[shard]) for shard, values, _ in optimizer._masters)
        apart = all(values.data_ptr() != optimizer._values[shard].data_ptr() for shard, values, _ in optimizer._masters)
        return {"masters": torch.tensor([float(same and apart)])}
    return case


def built(build, after=None, optimizer_class=SGD, **settings):
    """A loop with a model of another kind, after each step of which the script does something."""
    def case(make, rank):
        torch.manual_seed(0)
        inner = build()
        model, optimizer = make(inner, optimizer_class, **{"lr": 0.1, **settings})
        loop(model, optimizer, rank, steps=6, after=lambda step: after and after(inner, optimizer, step))
        return result(inner)
    return case


def reparametrized():
    """A weight that is made of others, and one with a mask."""
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(20, 30)), nn.Tanh(), nn.Linear(30, 5))
    nn.utils.prune.l1_unstructured(model[2], "weight", amount=0.3)
    return model


class Attends(nn.Module):
    """Reads a weight without its module, which is tied, and computes a part again in backward()."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(20, 20)
        self.layer, self.last = nn.TransformerEncoderLayer(20, 2, 32, 0.0, batch_first=True), nn.Linear(20, 20)
        self.last.weight = self.first.weight

    def forward(self, x):
        y = torch.utils.checkpoint.checkpoint(self.layer, self.first(x)[:, None], use_reentrant=False)
        return self.last(y[:, 0])[:, :5]


def loads_others(inner, _optimizer, step):
    """Weights and buffers, in the middle."""
    if step == 2:
        inner.load_state_dict(type(inner)(3).state_dict())


def goes_back():
    """To what was saved two steps before."""
    saved = []

    def after(inner, optimizer, step):
        state = getattr(optimizer, "gathered_state_dict", optimizer.state_dict)
        if step == 1:
            saved.extend(copy.deepcopy((inner.state_dict(), state())))
        if step == 3:
            inner.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
    return after


def drops_other_parts(make, rank):
    """A batch is dropped after backward(), and the next one does not use the same parameters."""
    inner = Parts()
    model, optimizer = make(inner, ADAMW, lr=1e-2, weight_decay=0.1, **({"clip": 0.05} if make.ours else {}))
    for step in range(5):
        for chosen in (0, 1) if step % 2 else (0,):
            optimizer.zero_grad()
            inner.chosen = chosen
            loss_of(model, step, rank).backward()
        if not make.ours:
            nn.utils.clip_grad_norm_(inner.parameters(), 0.05)
        optimizer.step()
    return result(inner)


def adversaries(make, rank):
    torch.manual_seed(0)
    maker, judge = nn.Linear(8, 20), nn.Linear(20, 1)
    g, of_maker = make(maker, torch.optim.Adam, lr=1e-2)
    d, of_judge = make(judge, torch.optim.Adam, lr=1e-2)
    softplus = nn.functional.softplus
    for step in range(4):
        x, _ = batch(step, rank)
        of_judge.zero_grad()
        (softplus(-d(x)).mean() + softplus(judge(g(x[:, :8]).detach())).mean()).backward()
        of_judge.step()
        of_maker.zero_grad()
        softplus(-judge(g(x[:, :8]))).mean().backward()
        of_maker.step()
    return {**result(maker), **{"judge." + name: value for name, value in result(judge).items()}}


def goes_on_after_nan(make, rank):
    """One rank's gradient is not finite; all ranks catch that, and the next steps count, as if it had not been."""
    inner = net()
    model, optimizer = make(inner, SGD, lr=0.1)
    caught = 0
    for step in range(5):
        if step == 2 and not make.ours:
            continue
        (loss_of(model, step, rank) * (float("nan") if step == 2 and rank == 1 else 1)).backward()
        try:
            optimizer.step()
        except FloatingPointError:
            caught += 1
        optimizer.zero_grad()
    return {"caught": torch.tensor(float(caught if make.ours else 1)), **result(inner)}


@with_net()
def drops_nan(model, inner, optimizer, rank):
    for step in range(5):
        optimizer.zero_grad()
        (loss_of(model, step, rank) * (float("nan") if step == 2 else 1)).backward()
        if step == 2:
            inner.zero_grad()
        optimizer.step()


# ---- what is refused

def refused(body):
    """A case for ShardedOptimizer alone, whose exception counts."""
    def case(make, rank):
        if not make.ours:
            return {}
        body(make, rank)
        return {"nothing was refused": torch.ones(1)}
    return case


def in_loop(after=None, **given):
    """A loop in which the script does what is refused."""
    @refused
    def case(make, rank):
        inner = net()
        model, optimizer = make(inner, SGD, lr=0.1)
        loop(model, optimizer, rank, after=lambda _step: after and after(inner, optimizer), **given)
    return case


@refused
def beside_another_optimizer(make, rank):
    """Of one that does not average, or of clipping by gradients that nobody averages."""
    inner = net()
    optimizer, other = make.optimizer(inner[4].parameters(), SGD, lr=0.1), SGD(inner[:4].parameters(), lr=0.1)
    loop(inner, optimizer, rank, steps=1)
    other.step()


@refused
def never_synchronized(make, rank):
    inner = net()
    model, optimizer = make(inner, SGD, lr=0.1)
    with optimizer.no_sync():
        loss_of(model, 0, rank).backward()
    optimizer.step()


def with_optimizer(optimizer_class, **settings):
    return refused(lambda make, rank: make(net(), optimizer_class, **settings))


class Lars(torch.optim.Optimizer):
    """By norms of whole parameters."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.norm() / p.grad.norm() * p.grad)


@refused
def left_in_ddp(make, rank):
    inner = net()
    _, optimizer = make(inner, SGD, lr=0.1)
    loop(DDP(inner), optimizer, rank)


@refused
def double(make, _rank):
    make(net().double(), SGD, lr=0.1)


@refused
def converted_later(make, rank):
    inner = net()
    model, optimizer = make(inner, SGD, lr=0.1)
    inner.bfloat16()
    (model(batch(0, rank)[0].bfloat16()) ** 2).mean().backward()
    optimizer.step()


@refused
def other_strides_later(make, rank):
    inner = nn.Sequential(nn.Unflatten(1, (2, 2, 5)), nn.Conv2d(2, 4, 2), nn.Flatten(), nn.Linear(16, 5))
    model, optimizer = make(inner, SGD, lr=0.1)
    inner.to(memory_format=torch.channels_last)
    loop(model, optimizer, rank)


@refused
def loaded_into_bfloat16(make, rank):
    inner = net().bfloat16()
    model, optimizer = make(inner, SGD, lr=0.1)
    inner.load_state_dict(net(7).state_dict())
    (model(batch(0, rank)[0].bfloat16()) ** 2).mean().backward()
    optimizer.step()


@refused
def sparse(make, _rank):
    inner = nn.Embedding(20, 4, sparse=True)
    model, _ = make(inner, SGD, lr=0.1)
    model(torch.tensor([1, 2])).sum().backward()


@refused
def unfrozen_later(make, rank):
    inner = net()
    inner[0].requires_grad_(False)
    model, optimizer = make(inner, SGD, lr=0.1)
    inner[0].requires_grad_(True)
    loop(model, optimizer, rank)


@refused
def groups_changed(make, rank):
    model, optimizer = make(net(), SGD, lr=0.1)
    optimizer.param_groups[0]["params"].pop()
    loop(model, optimizer, rank)


@refused
def two_optimizers(make, _rank):
    inner = net()
    make(inner, SGD, lr=0.1)
    make(inner, SGD, lr=0.1)


@refused
def kept_gradient(make, rank):
    inner = net()
    model, optimizer = make(inner, SGD, lr=0.1)
    loss_of(model, 0, rank).backward()
    kept = inner[0].weight.grad
    optimizer.zero_grad()
    kept.sum()


@refused
def after_close(make, rank):
    model, optimizer = make(net(), SGD, lr=0.1)
    loop(model, optimizer, rank)
    optimizer.close()
    optimizer.comm.lost_between()


def alone(call):
    """Rank 0 makes a collective call that rank 1 does not make."""
    @refused
    def case(make, rank):
        model, optimizer = make(net(), SGD, lr=0.1)
        loop(model, optimizer, rank, steps=1)
        if rank == 0:
            call(optimizer)
        start = time.monotonic()
        try:
            loop(model, optimizer, rank, steps=1)
        finally:
            assert time.monotonic() - start < PEER_TIMEOUT + 30
    return case


@refused
def skips_alone(make, rank):
    """One rank leaves a batch out, and is a step behind in the end."""
    model, optimizer = make(net(), SGD, lr=0.1)
    loop(model, optimizer, rank, steps=3 + rank)
    optimizer.synchronize()


@refused
def hook_after(make, rank):
    inner = net()
    model, optimizer = make(inner, SGD, lr=0.1)
    inner[0].weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    loop(model, optimizer, rank)


def enters_model(optimizer):
    with optimizer.model():
        pass


TABLE = {
    "plain": plain, "model.zero_grad": never_zeroed, "p.grad.mul_": changes_gradients(scale),
    "p.grad.data.clamp_": changes_gradients(scale_data), "p.grad = 0.1 * p.grad": changes_gradients(replace),
    "p.grad = ones": changes_gradients(replace_unseen), "p.grad = None": changes_gradients(drop_some),
    "p.grad.numpy()": changes_gradients(write_through_numpy), "p.grad on rank 0": changes_gradients(on_rank_0),
    "clip_grad_norm_": changes_gradients(lambda inner, _: nn.utils.clip_grad_norm_(inner.parameters(), 0.05)),
    "clip_grad_value_": changes_gradients(lambda inner, _: nn.utils.clip_grad_value_(inner.parameters(), 0.003)),
    "GradScaler": scaled_by_grad_scaler, "GradScaler, inf": scaled_and_infinite, "SAM": sharpness_aware,
    "skipped batches": skipped_batches,
    "no no_sync": added_up, "step() twice": stepped_twice, "EMA and copies": average_of_weights,
    "p.data.clamp_": clamped_weights, "views kept": views_that_were_kept,
    "vector_to_parameters": weights_from_a_vector, "frozen later": frozen_later,
    "unused experts": unused_experts, "all from rank 0": all_from_rank_0, "BatchNorm": statistics_of_batches,
    "head alone": head_alone, "BatchNorm, two passes": passes_of_a_step, "buffers replaced": buffers_replaced,
    "no_sync, uneven": kept_apart, "written in forward": shrinks(0), "frozen in turn": frozen_in_turn,
    "p.grad zeroed": changes_gradients(zero_as_of_old), "other defaults": other_defaults,
    "compiled step": compiled_step,
    "written in forward later": refused(shrinks(4)), "no zero_grad": in_loop(zero=False),
    "step() twice, one gradient": in_loop(lambda _inner, optimizer: optimizer.step()),
    "p.grad after step()": in_loop(lambda inner, _optimizer: inner[0].weight.grad.norm()),
    "another optimizer": beside_another_optimizer, "no_sync alone": never_synchronized,
    "Muon, whole": whole_parameters(torch.optim.Muon, bias=False, lr=1e-2),
    "Adafactor, whole": whole_parameters(torch.optim.Adafactor, lr=1e-2),
    "masters apart": apart(torch.float32), "masters apart, bfloat16": apart(torch.bfloat16),
    "GAN": adversaries, "NaN, caught": goes_on_after_nan, "NaN, dropped": drops_nan,
    "Muon": refused(lambda make, _rank: make(nn.Linear(20, 20, bias=False), torch.optim.Muon)),
    "Muon, biases": refused(lambda make, _rank: make(net(), torch.optim.Muon, shard="parameter")),
    "Adafactor": with_optimizer(torch.optim.Adafactor), "LBFGS": with_optimizer(torch.optim.LBFGS),
    "Lars": with_optimizer(Lars), "SparseAdam": with_optimizer(torch.optim.SparseAdam), "DDP": left_in_ddp,
    "float64": double, "bfloat16 later": converted_later, "channels_last later": other_strides_later,
    "loaded into bfloat16": loaded_into_bfloat16, "sparse": sparse, "unfrozen later": unfrozen_later,
    "state[p]": in_loop(lambda inner, optimizer: optimizer.state[inner[0].weight]),
    "state.clear": built(net, lambda _inner, optimizer, _step: optimizer.state.clear(), ADAMW, lr=1e-2),
    "state.values": built(net, lambda _inner, optimizer, _step: [
        state["exp_avg"].zero_() for state in optimizer.state.values()], ADAMW, lr=1e-2),
    "param_groups": groups_changed, "two optimizers": two_optimizers,
    "weight_norm and prune": built(reparametrized), "attention, tied, checkpoint": built(Attends, lr=0.01),
    "loads others": built(lambda: Noisy(0), loads_others), "goes back": built(net, goes_back(), ADAMW, lr=1e-2),
    "goes back, dampening": built(net, goes_back(), momentum=0.9, dampening=0.5),
    "fused": built(net, None, ADAMW, lr=1e-2, fused=True), "drops other parts": drops_other_parts,
    "skips a batch alone": skips_alone, "hook after": hook_after,
    "complex": refused(lambda make, _: make.optimizer([nn.Parameter(torch.ones(3, dtype=torch.complex64))], SGD)),
    "gathered_state_dict() alone": alone(lambda optimizer: optimizer.gathered_state_dict()),
    "kept gradient": kept_gradient, "after close()": after_close,
    "state_dict() alone": alone(lambda optimizer: optimizer.state_dict()), "model() alone": alone(enters_model),
}
