"""What ShardedOptimizer checks and shares of a model besides the values that it trains."""
from __future__ import annotations

import hashlib
import itertools
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

from . import _touch
from ._library import LossynetError
from .comm import Comm

_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DDP"}  # replicate() makes a DDP
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHECKED_STEPS = 2  # in so many first steps contents tell what the script changes; later versions do
_SAMPLE = 16384  # elements of a buffer, at most, that tell whether it has changed

Named = list[tuple[str, torch.Tensor]]


def settings(group: dict[str, Any]) -> dict[str, Any]:
    """The entries of a parameter group that are hyperparameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


def is_compiled(module: torch.nn.Module) -> bool:
    """By torch.compile, torch.jit or module.compile(): its parts do not call hooks."""
    return hasattr(module, "_orig_mod") or isinstance(module, torch.jit.ScriptModule) or \
        bool(getattr(module, "_compiled_call_impl", None))


# ---- refusals

def check_kinds(params: Any, model: Any, optimizer_class: Any, shard: Any, overlap: Any) -> bool:
    """Raises TypeError or ValueError where an argument is of another kind. Returns whether ranks own whole
    parameters."""
    if not callable(optimizer_class):
        raise TypeError(f"lossynet: optimizer_class={type(optimizer_class).__name__} object: expected a class, as in "
                        "ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)")
    if isinstance(params, torch.optim.Optimizer):
        raise TypeError(f"lossynet: params is an optimizer, {type(params).__name__}: expected the model or parameters")
    if model is not None and (isinstance(params, torch.nn.Module) or not isinstance(model, torch.nn.Module)):
        raise TypeError(f"lossynet: model={type(model).__name__} object: expected a torch.nn.Module, beside parameters "
                        "or groups; a model that is the first argument is not named again")
    if shard not in ("element", "parameter"):
        raise ValueError(f'lossynet: shard={shard!r}: expected "element" or "parameter"')
    if overlap not in (True, False):
        raise ValueError(f"lossynet: overlap={overlap!r}: expected True or False")
    return shard == "parameter"


def check_parameters(parameters: Named) -> None:
    for name, parameter in parameters:
        if torch.nn.parameter.is_lazy(parameter):
            raise ValueError(f"lossynet: parameter {name or 'without a name'} has no shape yet: expected a forward "
                             "pass before")
        words = f"parameter {name or 'without a name'} of shape {tuple(parameter.shape)}"
        if parameter.dtype not in _DTYPES:
            raise ValueError(f"lossynet: {words} is {parameter.dtype}: expected float32, bfloat16 or "
                             "float16, as parameters travel and are trained in float32: model.float()"
                             + ("; torch.view_as_real for complex" if parameter.is_complex() else ""))
        if parameter.layout != torch.strided or type(parameter.data) is not torch.Tensor:
            raise ValueError(f"lossynet: {words} is a {type(parameter.data).__name__}, "
                             f"{parameter.layout}: expected a dense torch.Tensor, whole on each rank")
    check_memory(parameters)


def check_memory(tensors: Named) -> None:
    spans = sorted((t.data_ptr(), t.data_ptr() + t.element_size() * (1 + sum(
        step * (size - 1) for step, size in zip(t.stride(), t.shape))), t.requires_grad, f"{name} {tuple(t.shape)}")
                   for name, t in tensors if t.layout == torch.strided and t.numel())
    for number, (_, end, trained, name) in enumerate(spans):
        for _, _, other_trained, other in itertools.takewhile(lambda span: span[0] < end, spans[number + 1:]):
            if trained or other_trained:
                raise ValueError(f"lossynet: {name} has the memory of {other}: expected one parameter in both places, "
                                 "as in b.weight = a.weight, or a copy, a.weight.data.clone()")


def check_modules(module: torch.nn.Module) -> None:
    for each in module.modules():
        if getattr(each, "max_norm", None) is not None and each.weight.requires_grad:
            raise ValueError(f"lossynet: {type(each).__name__}(max_norm=...) writes its weight in forward passes, each "
                             "rank other rows of it: expected max_norm=None, and with torch.no_grad(): "
                             "weight.copy_(weight.renorm(2, 0, max_norm)) after step()")
        if isinstance(each, torch.nn.SyncBatchNorm) and not torch.distributed.is_initialized():
            raise ValueError("lossynet: SyncBatchNorm needs a process group for its statistics: expected "
                             "torch.distributed.init_process_group() before, or BatchNorm")
        found = _WRAPPERS.intersection(kind.__name__ for kind in type(each).__mro__)
        if found:
            raise RuntimeError(f"lossynet: {found.pop()} is around the model and averages, too: expected the model "
                               "itself, in a plain loop or with a framework that sees one process: "
                               "lossynet.Place.take() before the framework is imported (README)")
    if not torch.jit.is_tracing():  # which records shapes
        check_memory([*((name, p) for name, p in module.named_parameters() if p.requires_grad),
                      *((name, b.detach()) for name, b in module.named_buffers() if type(b) is torch.Tensor)])


def check_optimizer(optimizer_class: Any, keywords: dict[str, Any], whole: bool, rank: int,
                    groups: list[dict[str, Any]]) -> dict[str, bool | None]:
    """Ranks own parts of parameters, as flat vectors, or whole ones. Does the optimizer do the same with what a rank
    owns as with all? Returns the names of its state, and whether that has the shape of the parameter, or is a number
    (False), or neither (None). rank: each tries other values, so that an optimizer that exchanges them is seen."""
    state: dict[str, bool | None] = {}
    tried: list[Any] = []
    for group in groups:
        given, dims = {**keywords, **settings(group)}, sorted({p.dim() for p in group["params"]})
        if (given, dims) in tried:
            continue
        tried.append((given, dims))
        if "lr" in given and not given["lr"]:
            given = {**given, "lr": 1e-3}  # a warm-up begins with 0, where nothing moves

        def make(params: list[torch.Tensor], given: dict[str, Any] = given) -> torch.optim.Optimizer:
            return optimizer_class([{**given, "params": params}], **keywords)  # groups may hold more than it takes
        shapes = [shape[:count] for count in dims for shape in ((4, 6, 2, 2), (3, 5, 2, 2))]
        with torch.random.fork_rng(devices=[]):
            trials = [shapes] if whole else [[(4, 6)], [(2, 3, 2, 2)]]
            outcomes = (_try(make, each, not whole, rank, state) for each in trials)
            why = next(filter(None, outcomes), "")
            if why:
                fits = not whole and not _try(make, shapes, False, rank, {})
                raise ValueError(
                    f"lossynet: optimizer {getattr(optimizer_class, '__name__', optimizer_class)}: expected " + (
                        'shard="parameter", which gives each rank whole parameters' if fits else
                        f"one that treats each {'parameter' if whole else 'element'} alone, such as AdamW, Adam, SGD, "
                        "RMSprop or Adagrad, since every rank owns 1/N of them") + f" ({why})")
    return state


def _try(make: Callable[..., torch.optim.Optimizer], shapes: list[tuple[int, ...]], cut: bool, seed: int,
         state: dict[str, bool | None]) -> str:
    """What goes wrong with two optimizers, each for some tensors or (cut) parts of one. Empty: nothing."""
    generator = torch.Generator().manual_seed(seed)
    start, *gradients = ([scale * torch.randn(shape, generator=generator, device="cpu") for shape in shapes]
                         for scale in (1, 1, 1, 1e4))  # some clip what is large
    cuts = (lambda tensors: tensors[0].flatten().split([10, 9, 5])) if cut else list
    together = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    optimizers = [make(together)]  # with its own words about wrong keywords
    try:
        parts = [torch.nn.Parameter(part.clone()) for part in cuts(start)]
        optimizers += [make(parts[:1]), make(parts[1:])]
        for tensors in gradients:
            for parameter, gradient in zip((*together, *parts), (*tensors, *cuts(tensors))):
                parameter.grad = gradient.clone()
            for each in optimizers:
                each.step()
            for one, other, before in zip(parts, cuts(together), cuts(start)):
                if not (one - other).abs().max().item() <= 1e-4 * (other - before).abs().max().item():
                    return "with a part of what is trained it makes other steps than with all"
        for parameter, held in optimizers[0].state.items():
            state.update((name, torch.is_tensor(value) and value.dim() > 0 and (value.shape == parameter.shape or None))
                         for name, value in held.items() if value is not None)
    except Exception as error:  # pylint: disable=broad-exception-caught
        return f"{type(error).__name__}: {error}"
    return ""


def same_model(every: Named, gather: Callable[[bytes], list[bytes]], rank: int) -> None:
    """Raises LossynetError, on all ranks, if a rank has another model than rank 0. gather: the bytes of all ranks, as
    many of each."""
    texts = [f"{name} of shape {tuple(t.shape)}, {t.dtype}" for name, t in every]
    count = max(int.from_bytes(each, "little") for each in gather(len(texts).to_bytes(8, "little")))
    texts += ["nothing"] * (count - len(texts))
    parts = gather(b"".join(hashlib.sha256(text.encode()).digest()[:8] for text in texts)) if count else []
    for other, theirs in enumerate(parts):
        differ = np.flatnonzero(np.frombuffer(theirs, np.uint64) != np.frombuffer(parts[0], np.uint64))
        if len(differ):
            raise LossynetError(f"rank {other} has another model than rank 0: parameter {differ[0]} of the vector "
                                f"differs; on rank {rank} it is {texts[differ[0]]}: expected the same names, shapes "
                                "and types on all ranks")


def total(tensors: Named) -> int:
    """A sum of all bits, which is the same where ranks have the same."""
    result = 0
    for _, tensor in tensors:
        content = _bytes(tensor).cpu().numpy()
        whole = len(content) // 8 * 8
        result += int(np.add.reduce(content[:whole].view(np.uint64))) + zlib.crc32(content[whole:])
    return result % 2**52  # a float64 holds that


def same_values(comm: Comm, every: Named) -> None:
    """Raises RuntimeError, on all ranks, if a rank has other values than rank 0, in more than the last bits: kinds of
    processors differ there. Collective."""
    same = []
    for _, tensor in every:
        mine = tensor.detach().flatten().float().cpu().numpy()
        theirs = mine.copy()
        comm.spread_bytes(theirs.view(np.uint8))
        near = {"rtol": 2 * torch.finfo(tensor.dtype).eps, "atol": 1e-5 * np.abs(theirs).max(initial=0)}
        same.append(np.allclose(mine, theirs, equal_nan=True, **near))
    for rank, number in np.argwhere(~comm.all_gather(np.array(same), "")):
        raise RuntimeError(f"lossynet: {every[number][0]} is not the same on rank {rank} as on rank 0: expected the "
                           "script to write the same on all ranks; weights of one rank before ShardedOptimizer is "
                           "made, gradients of each rank by backward()")


# ---- what is not trained: frozen parameters and buffers

def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return _real(tensor).contiguous().reshape(-1).view(torch.uint8)


def checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(_bytes(tensor).cpu().numpy())


def _refuse(gradient: _touch.Sent) -> Any:
    raise RuntimeError(f"lossynet: the gradient of a parameter of shape {tuple(gradient.shape)} is used, which no "
                       "ShardedOptimizer has, so that no ranks average it: expected it among the optimizer's "
                       "parameters, or requires_grad_(False)")


def _mark(parameter: torch.nn.Parameter) -> None:
    if id(parameter) not in _touch.OWNERS and not isinstance(parameter.grad, _touch.Sent):
        parameter.grad = _touch.sent(parameter.grad, parameter, _refuse)


class Others:
    """What a model has besides the parameters that are trained. All of it comes from rank 0 at the start. Buffers
    come from there again once one of them has changed, as with DistributedDataParallel."""

    def __init__(self, frozen: list[torch.nn.Parameter]):
        self.frozen, self.hooks = frozen, []  # of the optimizer's groups
        self._known = {id(p) for p in frozen}  # and what models had when they were taken in
        self._models: list[torch.nn.Module] = []
        self.covered: dict[torch.nn.Module, int | None] = {}  # their modules, and the checksum of the buffers then
        self.moving = False  # a buffer has changed since the start, on any rank
        self._sums: dict[Any, tuple[Any, int]] = {}  # of a module's buffer: what it was like, and its checksum
        self._arrived: dict[torch.nn.Module, list[tuple[torch.Tensor, Any, torch.Tensor]]] = {}  # until a pass
        self.passes = self.seen = 0  # of models since the last step, and the checksums of their buffers before

    def cover(self, module: torch.nn.Module) -> Named:
        """Takes in a module. Returns what of it was not known."""
        there = [(name, p) for name, p in module.named_parameters() if not torch.nn.parameter.is_lazy(p)]
        new = [(name, p) for name, p in there if self._is_new(p)]
        self.hooks += [p.register_post_accumulate_grad_hook(_mark) for _, p in new if p.requires_grad]
        self._known.update(id(p) for _, p in there)
        self._models.append(module)
        modules = [each for each in module.modules() if each not in self.covered]
        self.covered.update(dict.fromkeys(modules))
        return [*new, *(("buffer", buffer) for buffer in _buffers(modules))]

    def is_news(self, module: torch.nn.Module) -> bool:
        """Whether a module has what was not taken in."""
        return any(self._is_new(p) for p in module.parameters()) or \
            bool(_buffers(each for each in module.modules() if each not in self.covered))

    def _is_new(self, parameter: torch.Tensor) -> bool:
        return id(parameter) not in self._known and id(parameter) not in _touch.OWNERS

    def to_train(self) -> list[torch.nn.Parameter]:
        """What has come later to be trained: parameters that were frozen, or that models did not have."""
        came = [p for model in self._models for p in model.parameters() if self._is_new(p)]
        return [p for p in self.frozen + came if p.requires_grad]

    def spread(self, comm: Comm, tensors: Named) -> None:
        """Rank 0's contents come to all ranks. Collective."""
        for _, tensor in tensors:
            content = _bytes(tensor).cpu().numpy().copy()
            comm.spread_bytes(content)
            _write(tensor, torch.from_numpy(content))
        for module, start in self.covered.items():
            self.covered[module] = self._sum([module]) if start is None else start

    def _sum(self, modules: Iterable[torch.nn.Module]) -> int:
        """A checksum of their buffers: the last one where neither a version nor a sample has changed."""
        total = 0
        for module in modules:
            for number, buffer in enumerate(_buffers([module])):
                now = _state_of(buffer)
                before, content = self._sums.get((module, number), (None, 0))
                if now != before:
                    content = checksum(buffer)
                    self._sums[module, number] = now, content
                total = zlib.crc32(content.to_bytes(4, "little"), total)
        return total

    def may_move(self, steps: int) -> bool:
        """Whether ranks' buffers may differ; nothing is known of them before the end of the first step."""
        return self.moving or (steps == 0 and bool(_buffers(self.covered)))

    def changed(self) -> bool:
        """Whether a buffer has changed since the start."""
        return self.moving or any(self._sum([module]) != start for module, start in self.covered.items())

    def elements(self) -> int:
        return sum(b.numel() for b in _buffers(self.covered))

    def show(self, modules: Iterable[torch.nn.Module]) -> None:
        """Buffers of modules become those that rank 0 has sent."""
        for module in modules if self._arrived else ():
            for buffer, before, content in self._arrived.pop(module, ()):
                if _state_of(buffer) == before:  # the script has loaded no others
                    _write(buffer, content)

    def note(self, modules: Iterable[torch.nn.Module]) -> None:
        """Remembers what the buffers of a model are like before its pass."""
        self.passes += 1
        self.seen += self._sum(modules)

    def send(self, comm: Comm) -> None:
        """Rank 0's buffers leave for the other ranks, where ``show`` shows them. Collective."""
        buffers = _buffers(self.covered)
        if buffers:
            contents = [_bytes(b).cpu() for b in buffers]
            whole = torch.cat(contents).numpy()
            comm.spread_bytes(whole)
            parts = iter(torch.from_numpy(whole).split([part.numel() for part in contents]))
            self._arrived = {module: [(b, _state_of(b), next(parts)) for b in _buffers([module])]
                             for module in self.covered} if comm.rank else {}


def _state_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """What is other if a script has written it; of a few elements of many without a trace this does not see."""
    flat = _real(tensor).reshape(-1)
    return id(tensor), tensor._version, checksum(flat[::1 + len(flat) // _SAMPLE])


def _buffers(modules: Iterable[torch.nn.Module]) -> list[torch.Tensor]:
    return [b for module in modules for b in module._buffers.values() if b is not None and b.layout == torch.strided]


@torch.no_grad()
def _write(tensor: torch.Tensor, content: torch.Tensor) -> None:
    real = _real(tensor)
    with torch.autograd._unsafe_preserve_version_counter(tensor):  # an earlier pass may have kept it for backward
        real.copy_(content.clone().view(real.dtype).view(real.shape))
