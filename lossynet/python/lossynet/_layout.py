"""The places of a model's parameters in the vector that the library sends, and in its buckets."""
from __future__ import annotations

import torch


class Entry:
    """A parameter and its place in the vector."""

    def __init__(self, parameter: torch.nn.Parameter, name: str, bucket: int, offset: int):
        self.parameter, self.name, self.bucket = parameter, name, bucket
        self.place = slice(offset, offset + parameter.numel())
        self.dtype, self.device, self.kind = parameter.dtype, parameter.device, type(parameter)
        self.tensor = parameter._cdata  # in C++, where its hooks are
        self.exact = parameter.dtype == torch.float32 and parameter.device.type == "cpu"
        self.direct = False  # the parameter is memory of the vector, else copied to and from there
        self.words = f"parameter {name}" if name else f"a parameter of shape {tuple(parameter.shape)}"
        self.final = False  # its gradient of this step is with the library
        self.sent: torch.Tensor | None = None  # p.grad whose elements are in the vector
        self.value: torch.Tensor  # its part of the vector of parameters, and of gradients
        self.address = 0  # of the value
        self.gradient: torch.Tensor
        self.uses = 0  # of the value's memory
        self.version = 0  # of the parameter, when it was last like the value
        self.pieces: list[tuple[slice, torch.nn.Parameter, torch.Tensor]] = []  # what this rank owns: one or none, and
        # the gradient of that

    def check(self) -> None:
        """Raises RuntimeError if the script has converted the parameter."""
        now = self.parameter
        if now.dtype != self.dtype or now.device != self.device or now.shape != self.value.shape or \
                (self.direct and now.stride() != self.value.stride()) or self.value.data_ptr() != self.address or \
                now._cdata != self.tensor:
            raise RuntimeError(f"lossynet: {self.words} is {now.dtype} {tuple(now.shape)} on {now.device} with strides "
                               f"{now.stride()} now: expected model.to(...) before ShardedOptimizer is made, and "
                               "share_memory() of a copy")


def lay_out(trained: list[torch.nn.Parameter], names: dict[int, str], buckets: list[list[torch.nn.Parameter]] | None,
            most: int, owners: int) -> tuple[list[Entry], list[int], list[list[int]] | None]:
    """Puts parameters into buckets of at most so many elements; backward finishes the last ones first. names: by id.
    owners: of whole parameters, which lie in order of ranks then. Returns their places, the elements of each bucket,
    and those that each owner has of it."""
    if buckets is None:
        buckets = [[]]
        for parameter in reversed(trained):
            if buckets[-1] and sum(p.numel() for p in buckets[-1]) + parameter.numel() > most:
                buckets.append([])
            buckets[-1].append(parameter)
    listed = [id(p) for bucket in buckets for p in bucket]
    if sorted(listed) != sorted(map(id, trained)) or not trained or not all(buckets):
        raise ValueError(f"lossynet: buckets list {len(listed)} parameters: expected each of the "
                         f"{len(trained)} that require a gradient once, and none empty")
    shards = None
    if owners:
        owner, owned = {}, [0] * owners
        for parameter in sorted(trained, key=lambda p: -p.numel()):
            owner[id(parameter)] = least = owned.index(min(owned))
            owned[least] += parameter.numel()
        buckets = [sorted(bucket, key=lambda p: owner[id(p)]) for bucket in buckets]
        shards = [[sum(p.numel() for p in bucket if owner[id(p)] == rank) for rank in range(owners)]
                  for bucket in buckets]
    entries, offset = [], 0
    for number, bucket in enumerate(buckets):
        for parameter in bucket:
            entries.append(Entry(parameter, names.get(id(parameter), ""), number, offset))
            offset += parameter.numel()
    return entries, [sum(p.numel() for p in bucket) for bucket in buckets], shards
