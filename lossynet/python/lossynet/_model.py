"""What ShardedOptimizer checks and shares of a model besides the values that it trains."""
from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from . import _touch
from ._library import LossynetError
from .comm import Comm

_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}  # each averages, too
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHECKED_STEPS = 2  # in so many first steps contents tell what the script changes; later versions do

Named = list[tuple[str, torch.Tensor]]


def settings(group: dict[str, Any]) -> dict[str, Any]:
    """The entries of a parameter group that are hyperparameters."""
    return {name: value for name, value in group.items() if name not in ("params", "param_names")}


# ---- refusals

def check_parameters(parameters: Named) -> None:
    for name, parameter in parameters:
        if torch.nn.parameter.is_lazy(parameter):
            raise ValueError(f"lossynet: parameter {name} has no shape yet: expected a forward pass before")
        words = f"parameter {name or 'without a name'} of shape {tuple(parameter.shape)}"
        if parameter.dtype not in _DTYPES:
            raise ValueError(f"lossynet: {words} is {parameter.dtype}: expected float32, bfloat16 or "
                             "float16, as parameters travel and are trained in float32: model.float()"
                             + ("; torch.view_as_real for complex" if parameter.is_complex() else ""))
        if parameter.layout != torch.strided or type(parameter.data) is not torch.Tensor:
            raise ValueError(f"lossynet: {words} is a {type(parameter.data).__name__}, "
                             f"{parameter.layout}: expected a dense torch.Tensor, whole on each rank")


def check_wrapper(module: torch.nn.Module) -> None:
    for each in module.modules():
        found = _WRAPPERS.intersection(kind.__name__ for kind in type(each).__mro__)
        if found:
            raise RuntimeError(f"lossynet: {found.pop()} is around the model and averages, too: expected the model "
                               "itself, in a plain loop or with a framework that sees one process: "
                               "lossynet.Place.take() before the framework is imported (README)")


def check_optimizer(optimizer_class: Any, groups: list[dict[str, Any]], keywords: dict[str, Any], whole: bool) -> None:
    """Ranks own parts of parameters, as flat vectors, or whole ones. Does the optimizer do the same with what a rank
    owns as with all?"""
    name, tried = getattr(optimizer_class, "__name__", str(optimizer_class)), []
    for group in groups:
        given, dims = {**keywords, **settings(group)}, sorted({p.dim() for p in group["params"]})
        if (given, dims) in tried:
            continue
        tried.append((given, dims))
        if "lr" in given and not given["lr"]:
            given = {**given, "lr": 1e-3}  # a warm-up begins with 0, where nothing moves
        alone = [shape[:count] for count in dims for shape in ((4, 6, 2, 2), (3, 5, 2, 2))]
        with torch.random.fork_rng(devices=[]):
            why = _try(optimizer_class, given, alone, False) if whole else \
                _try(optimizer_class, given, [(4, 6)], True) or _try(optimizer_class, given, [(2, 3, 2, 2)], True)
            better = why and not whole and not _try(optimizer_class, given, alone, False)
        if why:
            raise ValueError(f"lossynet: optimizer {name}: expected " + (
                'shard="parameter", which gives each rank whole parameters' if better else "one that treats each "
                f"{'parameter' if whole else 'element'} alone, such as AdamW, Adam, SGD, RMSprop or Adagrad, since "
                "every rank owns 1/N of them") + f" ({why})")


def _try(optimizer_class: Any, given: dict[str, Any], shapes: list[tuple[int, ...]], cut: bool) -> str:
    """What goes wrong with several optimizers, each for some tensors or (cut) parts of one. Empty: nothing."""
    generator = torch.Generator().manual_seed(1)
    start, *gradients = ([torch.randn(shape, generator=generator, device="cpu") for shape in shapes] for _ in range(4))
    cuts = (lambda tensors: tensors[0].flatten().split([10, 9, 5])) if cut else (lambda tensors: tensors)
    together = [torch.nn.Parameter(tensor.clone()) for tensor in start]
    optimizers = [optimizer_class(together, **given)]  # with its own words about wrong keywords
    try:
        parts = [torch.nn.Parameter(part.clone()) for part in cuts(start)]
        optimizers += [optimizer_class(parts[:1], **given), optimizer_class(parts[1:], **given)]
        for tensors in gradients:
            for parameter, gradient in zip((*together, *parts), (*tensors, *cuts(tensors))):
                parameter.grad = gradient.clone()
            for each in optimizers:
                each.step()
        for one, other, before in zip(parts, cuts(together), cuts(start)):
            if not (one - other).abs().max().item() <= 1e-4 * (other - before).abs().max().item():
                return "with a part of what is trained it makes other steps than with all"
    except Exception as error:  # pylint: disable=broad-exception-caught
        return f"{type(error).__name__}: {error}"
    return ""


def same_model(gather: Callable[[bytes], list[bytes]], rank: int, every: Named) -> None:
    """Raises LossynetError, on all ranks, if a rank has another model than rank 0. gather: the bytes of all ranks."""
    texts = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in every]
    digests = np.frombuffer(b"".join(hashlib.sha256(text.encode()).digest()[:8] for text in texts), np.uint64)
    counts = [np.frombuffer(each, np.uint64).tolist() for each in
              gather(np.array([len(every), sum(t.numel() for _, t in every)], np.uint64).tobytes())]
    for other, (tensors, elements) in enumerate(counts):
        if tensors != counts[0][0]:
            raise LossynetError(f"rank {other} has another model than rank 0: {tensors} parameters with {elements} "
                                f"elements, rank 0 has {counts[0][0]} with {counts[0][1]}: expected the same model on "
                                "all ranks")
    parts = [np.frombuffer(part, np.uint64) for part in gather(digests.tobytes())] if every else []
    for other, theirs in enumerate(parts):
        for number in np.flatnonzero(theirs != parts[0])[:1]:
            name, tensor = every[number]
            raise LossynetError(f"rank {other} has another model than rank 0: parameter {number} of the vector "
                                f"differs; on rank {rank} it is {name} of shape {tuple(tensor.shape)}: expected the "
                                "same names, shapes and types on all ranks")


# ---- what is not trained: frozen parameters and buffers

def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return _real(tensor).contiguous().reshape(-1).view(torch.uint8)


def _checksum(tensor: torch.Tensor) -> int:
    flat = _bytes(tensor)
    return int((flat.view(torch.int32) if flat.numel() % 4 == 0 else flat).sum(dtype=torch.int64))


def _refuse(gradient: _touch.Sent) -> Any:
    raise RuntimeError(f"lossynet: the gradient of a parameter of shape {tuple(gradient.shape)} is used, which no "
                       "ShardedOptimizer has, so that no ranks average it: expected it among the optimizer's "
                       "parameters, or requires_grad_(False)")


def _mark(parameter: torch.nn.Parameter) -> None:
    if id(parameter) not in _touch.OWNERS and not isinstance(parameter.grad, _touch.Sent):
        parameter.grad = _touch.sent(parameter.grad, parameter, _refuse)


class Others:
    """What a model has besides the parameters that are trained. All of it comes from rank 0 at the start. Buffers
    that change come from there again, as with DistributedDataParallel. A unit is a module that has buffers."""

    def __init__(self, frozen: Named):
        self.frozen, self.hooks = frozen, []
        self.covered: set[torch.nn.Module] = set()
        self.units: list[torch.nn.Module] = []
        self.moving = np.zeros(0, bool)  # of each unit, whether it has changed since the start, on any rank
        self._facts: list[list[Any]] = []
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []

    def cover(self, module: torch.nn.Module) -> Named:
        """Takes in a module. Returns what of it was not known."""
        known, new = {id(p) for _, p in self.frozen} | _touch.OWNERS.keys(), []
        for name, parameter in module.named_parameters():
            if id(parameter) not in known and not torch.nn.parameter.is_lazy(parameter):
                new.append((name, parameter))
                if parameter.requires_grad:
                    self.hooks.append(parameter.register_post_accumulate_grad_hook(_mark))
        units = [each for each in module.modules() if each not in self.covered and _buffers(each)]
        self.frozen += new
        self.units += units
        self.moving = np.zeros(len(self.units), bool)
        self.covered.update(module.modules())
        return [*new, *(("buffer", b) for unit in units for b in _buffers(unit))]

    def spread(self, comm: Comm, tensors: Named) -> None:
        """Rank 0's contents come to all ranks. Collective."""
        for _, tensor in tensors:
            content = _bytes(tensor).cpu().numpy().copy()
            comm.spread_bytes(content)
            _write(tensor, torch.from_numpy(content))
        self._facts = [_facts(unit, True) for unit in self.units]

    def changed(self, contents: bool) -> list[bool]:
        """Of each unit, whether it has changed since the start. contents: looks at all elements, too."""
        return [bool(moved) or _facts(unit, contents) != (facts if contents else [fact[:2] for fact in facts])
                for unit, facts, moved in zip(self.units, self._facts, self.moving)]

    def send(self, comm: Comm, which: np.ndarray) -> None:
        """Rank 0's units leave for the other ranks, where ``show`` shows them. Collective."""
        buffers = [b for number in np.flatnonzero(which) for b in _buffers(self.units[number])]
        if buffers:
            contents = [_bytes(b).cpu() for b in buffers]
            whole = torch.cat(contents).numpy()
            comm.spread_bytes(whole)
            parts = torch.from_numpy(whole).split([part.numel() for part in contents])
            self._pending = list(zip(buffers, parts)) if comm.rank else []

    def show(self) -> None:
        for buffer, content in self._pending:
            _write(buffer, content)
        self._pending = []


def _buffers(module: torch.nn.Module) -> list[torch.Tensor]:
    return [b for b in module.buffers(recurse=False) if b.layout == torch.strided]


def _facts(unit: torch.nn.Module, contents: bool) -> list[tuple[int, ...]]:
    return [(id(b), b._version, *([_checksum(b)] if contents else [])) for b in _buffers(unit)]


@torch.no_grad()
def _write(tensor: torch.Tensor, content: torch.Tensor) -> None:
    real = _real(tensor)
    with torch.autograd._unsafe_preserve_version_counter(tensor):  # an earlier pass may have kept it for backward
        real.copy_(content.clone().view(real.dtype).view(real.shape))
