"""What ShardedOptimizer checks and shares of a model besides the values that it trains."""
from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from ._library import LossynetError, World
from .comm import Comm, gather_at_start

_WRAPPERS = {"DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}  # each averages, too
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CHECKED_STEPS = 2  # in so many first steps contents tell which buffers change; later their versions do

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
    start, *gradients = (torch.randn(shape, generator=generator) for _ in range(4))
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


def same_model(world: World, trained: Named, buckets: Iterable[int], others: Named) -> None:
    """Raises LossynetError, on all ranks, if a rank has another model than rank 0."""
    every = [*trained, *others]
    texts = [f"{name} {tuple(t.shape)} {t.dtype} {bucket}"
             for (name, t), bucket in zip(every, [*buckets, *(-1 for _ in others)])]
    digests = np.frombuffer(b"".join(hashlib.sha256(text.encode()).digest()[:8] for text in texts), np.uint64)
    elements = sum(t.numel() for _, t in every)
    mine = np.array([len(every), elements], np.uint64)
    for rank, part in enumerate(gathered := gather_at_start(world, mine.tobytes())):
        theirs, first = np.frombuffer(part, np.uint64), np.frombuffer(gathered[0], np.uint64)
        if theirs[0] != first[0]:
            raise LossynetError(f"rank {rank} has another model than rank 0: {theirs[0]} parameters with "
                                f"{theirs[1]} elements, rank 0 has {first[0]} with {first[1]}: expected "
                                "the same model on all ranks")
    parts = [np.frombuffer(part, np.uint64) for part in gather_at_start(world, digests.tobytes())]
    for rank, theirs in enumerate(parts):
        for number in np.flatnonzero(theirs != parts[0])[:1]:
            name, tensor = every[number]
            raise LossynetError(f"rank {rank} has another model than rank 0: parameter {number} of the vector "
                                f"differs; on rank {world.rank} it is {name or 'one'} of shape "
                                f"{tuple(tensor.shape)}: expected the same names, shapes and types on all ranks")


# ---- what is not trained: frozen parameters and buffers

def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().reshape(-1)
    return flat.view(torch.uint8)


def _checksum(tensor: torch.Tensor) -> int:
    flat = _bytes(tensor)
    return int((flat.view(torch.int32) if flat.numel() % 4 == 0 else flat).sum(dtype=torch.int64))


def _write(tensor: torch.Tensor, content: torch.Tensor) -> None:
    real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    with torch.no_grad():
        real.copy_(content.view(real.dtype).view(real.shape))


class Others:
    """The frozen parameters and the buffers of a model. They come from rank 0 at the start. Buffers that change come
    from rank 0 again after each step, and are there in the next forward pass, as with DistributedDataParallel."""

    def __init__(self, trained: set[int]):
        self._trained = trained
        self.covered: set[torch.nn.Module] = set()
        self.frozen: Named = []
        self.units: list[list[torch.Tensor]] = []  # the buffers of a module
        self.agreed = False  # all ranks have the same units
        self.digest = 0  # of what was not given to the optimizer, before the first step; 0: nothing
        self._sums: list[list[int]] = []
        self._always = np.zeros(0, bool)
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._steps = 0

    def cover(self, module: torch.nn.Module) -> None:
        """Takes in all of a module that is not known yet."""
        known = self._trained | {id(t) for _, t in self.frozen} | {id(t) for unit in self.units for t in unit}
        for each in module.modules():
            if each in self.covered:
                continue
            self.covered.add(each)
            for name, parameter in each.named_parameters(recurse=False):
                if id(parameter) not in known and not torch.nn.parameter.is_lazy(parameter):
                    self.frozen.append((name, parameter))
                    known.add(id(parameter))
            unit = [b for b in each.buffers(recurse=False) if id(b) not in known and b.layout == torch.strided]
            known.update(map(id, unit))
            if unit:
                self.units.append(unit)
        self._sums = [self._facts(unit, True) for unit in self.units]
        self._always = np.zeros(len(self.units), bool)

    def everything(self) -> Named:
        return [*self.frozen, *(("buffer", b) for unit in self.units for b in unit)]

    def take_digest(self) -> None:
        text = " ".join(f"{tuple(t.shape)} {t.dtype} {_checksum(t)}" for _, t in self.everything())
        self.digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little") + 1

    def spread(self, comm: Comm) -> None:
        """All of it comes from rank 0. Collective."""
        for _, tensor in self.everything():
            content = _bytes(tensor).cpu().numpy().copy()
            comm.spread_bytes(content)
            if comm.rank:
                _write(tensor, torch.from_numpy(content))
        self._sums = [self._facts(unit, True) for unit in self.units]

    def _facts(self, unit: list[torch.Tensor], contents: bool) -> list[int]:
        return [b._version for b in unit] + ([_checksum(b) for b in unit] if contents else [])

    def changed(self) -> np.ndarray:
        """Of each unit, whether it has changed since it was last asked."""
        changed = self._always.copy()
        for number, unit in enumerate(self.units):
            if not changed[number]:
                facts = self._facts(unit, self._steps < _CHECKED_STEPS)
                before, self._sums[number] = self._sums[number], facts
                changed[number] = before[:len(facts)] != facts
                self._always[number] = changed[number] and self._steps < _CHECKED_STEPS
        self._steps += 1
        return changed

    def send(self, comm: Comm, numbers: Iterable[int]) -> None:
        """Rank 0's units leave for the other ranks, which show them in the next forward pass. Collective."""
        buffers = [b for number in numbers for b in self.units[number]]
        contents = [_bytes(b).cpu() for b in buffers]
        whole = torch.cat(contents).numpy()
        comm.spread_bytes(whole)
        parts = torch.from_numpy(whole).split([part.numel() for part in contents])
        self._pending = list(zip(buffers, (part.clone() for part in parts))) if comm.rank else []

    def show(self) -> None:
        for buffer, content in self._pending:
            _write(buffer, content)
        if self._pending:
            self._pending = []
            self._sums = [self._facts(unit, self._steps < _CHECKED_STEPS) for unit in self.units]
