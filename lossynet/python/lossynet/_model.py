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


def check_elementwise(optimizer_class: Any, groups: list[dict[str, Any]], keywords: dict[str, Any]) -> None:
    """Ranks own parts of parameters, as flat vectors. Does the optimizer do the same with parts as with the whole?"""
    tried = []
    for group in groups:
        if settings(group) not in tried:
            tried.append(settings(group))
    for given in tried:
        given = {**keywords, **given}
        if "lr" in given and not given["lr"]:
            given["lr"] = 1e-3  # a warm-up begins with 0, where nothing moves
        with torch.random.fork_rng(devices=[]):
            for shape in ((4, 6), (2, 3, 2, 2)):
                _try_parts(optimizer_class, given, shape)


def _try_parts(optimizer_class: Any, given: dict[str, Any], shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    start, *gradients = (torch.randn(shape, generator=generator, device="cpu") for _ in range(4))
    name, why = getattr(optimizer_class, "__name__", str(optimizer_class)), ""
    whole = torch.nn.Parameter(start.clone())
    optimizer = optimizer_class([whole], **given)  # with its own words about wrong keywords
    try:
        parts = [torch.nn.Parameter(part.clone()) for part in start.flatten().split([10, 9, 5])]
        optimizers = [optimizer, optimizer_class(parts[:1], **given), optimizer_class(parts[1:], **given)]
        for gradient in gradients:
            whole.grad = gradient.clone()
            for part, its in zip(parts, gradient.flatten().split([10, 9, 5])):
                part.grad = its.clone()
            for each in optimizers:
                each.step()
        moved = (whole - start).abs().max().item()
        if not (torch.cat(list(parts)) - whole.flatten()).abs().max().item() <= 1e-4 * moved:
            why = "with parts of a parameter it makes other steps than with the whole"
    except Exception as error:  # pylint: disable=broad-exception-caught
        why = f"{type(error).__name__}: {error}"
    if why:
        raise ValueError(f"lossynet: optimizer {name}: expected one that treats each element alone, such as AdamW, "
                         f"Adam, SGD, RMSprop or Adagrad, since every rank owns 1/N of the elements ({why})")


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
