"""The places of a model's parameters in the vector that the library sends, and in its buckets; and of masters."""
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
        self.seen = -1  # the last step in which the script was seen to read the parameter
        self.pieces: list[tuple[slice, torch.nn.Parameter, torch.Tensor]] = []  # what this rank owns: one or none, and
        # the gradient of that

    def is_own(self) -> bool:
        """Whether p.grad is what this rank adds to the average: what backward() has left, or what was there before."""
        return self.parameter.grad is self.sent or hasattr(self.parameter.grad, "own")

    def go_on(self) -> None:
        """To the average of all ranks, or to none, backward() adds at some rank."""
        if self.parameter.grad is None:
            self.sent = None
        else:
            self.parameter.grad.own = True

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
            most: float, owners: int) -> tuple[list[Entry], list[int], list[list[int]] | None]:
    """Puts parameters into buckets of at most so many elements; backward finishes the last ones first. names: by id.
    owners: of whole parameters, which lie in order of ranks then. Returns their places, the elements of each bucket,
    and those that each owner has of it."""
    if buckets is None:
        buckets = [[]]
        for parameter in reversed(trained):
            if buckets[-1] and sum(p.numel() for p in buckets[-1]) + parameter.numel() > most:
                buckets.append([])
            buckets[-1].append(parameter)
    if not trained:
        raise ValueError("lossynet: no parameter requires a gradient: expected requires_grad_(True) for those to train "
                         "before ShardedOptimizer is made")
    listed = [id(p) for bucket in buckets for p in (bucket if isinstance(bucket, (list, tuple)) else [None])]
    if sorted(listed) != sorted(map(id, trained)) or not all(buckets):
        raise ValueError(f"lossynet: buckets list {len(listed)} parameters: expected lists of parameters, each of the "
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


def device_of_masters(devices: set[torch.device], elements: int) -> torch.device:
    """Where a rank's masters, their gradients and the optimizer's state are: on the GPU of the parameters, if that has
    twice the memory for five float32 of each element."""
    for device in devices:
        if torch.cuda.mem_get_info(device)[0] > 40 * elements:
            return device
    return torch.device("cpu")


def there(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device, or the tensor itself where it is there."""
    return tensor.to(device)


def bring(tensor: torch.Tensor, copy: torch.Tensor) -> None:
    if copy.data_ptr() != tensor.data_ptr():
        copy.copy_(tensor)


def uses(tensor: torch.Tensor) -> int:
    """How many tensors share its memory."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1  # the object that is asked
