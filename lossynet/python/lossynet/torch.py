"""Trains a PyTorch model over a network that loses packets: one line of a training script changes.

    optimizer = lossynet.torch.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)

takes the place of ``DistributedDataParallel`` and of the optimizer. Every rank has a replica of the
parameters. A step averages gradients at the owners of 1/N of the parameters each, runs the given optimizer
there (ZeRO stage 1, Rajbhandari et al. 2020), and broadcasts the new values:

    backward()   a bucket of gradients leaves as soon as it is final
    step()       owners average what arrived, clip by the global norm, update, and begin to broadcast
    forward      each module waits for its own parameters; what was lost stays as it was, and is corrected
                 by a later step

Parameters in float32 on the CPU become views of the vector that the library sends. Others (bfloat16, GPUs)
are copied to and from float32 in the host's memory, which is pinned for GPUs; their masters are float32.
"""
from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ._library import LossynetError, World, get
from .comm import Comm, Place, gather_at_start, meet, options

_NOT_SETTINGS = ("params", "param_names")  # entries of a parameter group that are no hyperparameters
_KEYS_BYTES = 192  # room for the names of an optimizer's state


class _Entry:
    """A parameter and its place in the vector."""

    def __init__(self, parameter: torch.nn.Parameter, name: str, bucket: int, offset: int):
        self.parameter, self.name, self.bucket = parameter, name, bucket
        self.place = slice(offset, offset + parameter.numel())
        self.direct = parameter.dtype == torch.float32 and parameter.device.type == "cpu"
        self.final = False  # its gradient of this step
        self.value: torch.Tensor  # its part of the vector of parameters, and of gradients
        self.gradient: torch.Tensor
        self.pieces: list[tuple[slice, torch.nn.Parameter]] = []  # what this rank owns of it: one or none

    def digest(self) -> bytes:
        parameter = self.parameter
        text = f"{self.name} {tuple(parameter.shape)} {parameter.dtype} {self.bucket}"
        return hashlib.sha256(text.encode()).digest()[:8]


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer whose ranks each own 1/N of the parameters, over a network that loses packets.

    ``params``: as for every optimizer: parameters, (name, parameter) pairs or groups. ``optimizer_class``:
    one that treats elements alone (AdamW, Adam, SGD, ...); it gets the keyword arguments that are not named
    here (``lr``, ``weight_decay``, ...). ``clip``: largest norm of the averaged gradient, of all ranks
    together; 0: no limit. ``bucket_mb``: size of a bucket in 2^20 bytes of float32. ``buckets``: instead,
    lists of parameters in the order in which backward finishes them. ``overlap``: parameters arrive during
    the next forward pass. ``rank``, ``ranks``, ``address``, ``timeout`` and the trainer's options
    (``loss_rate``, ``wire_dtype``, ``carry``, ...): see ``lossynet.Comm``.

    At construction all ranks take rank 0's values. Buffers (as of BatchNorm) stay each rank's own. Gradients
    are consumed: ``step()`` sets them to None. LR schedulers see ``param_groups`` as usual. Raises
    LossynetError where the model differs between ranks, and, in later calls, where a rank dies or leaves.
    """

    def __init__(self, params: Iterable[Any], optimizer_class: type[torch.optim.Optimizer], *,
                 clip: float = 0.0, bucket_mb: float = 4, overlap: bool = True,
                 buckets: list[list[torch.nn.Parameter]] | None = None, rank: int | None = None,
                 ranks: int | None = None, address: str | None = None, timeout: float = 60, **keywords: Any):
        super().__init__(params, {})
        given = {name: keywords.pop(name) for name in options() if name in keywords}
        self.clip, self._overlap, self._sync = clip, overlap, True
        self._entries, sizes = self._lay_out(buckets, int(bucket_mb * 2**18) or 1)
        world = meet(Place.of(rank, ranks, address), timeout)
        try:
            _same_model(world, self._entries)
        except LossynetError:
            get("rendezvous_close", world)
            raise
        self.comm = Comm(sizes, world=world, **given)
        self._take_memory(sum(sizes))
        self.optimizer = self._optimizer_of_shards(optimizer_class, keywords)
        self._steps = 0  # that step() has begun to broadcast
        self._begun = self._broadcasting = False  # a gradient phase; a parameter phase
        self._events: dict[int, torch.cuda.Event] = {}  # of buckets: the copy from a GPU is complete
        self._norm, self._report = 0.0, {}
        self._next = 0  # the first bucket that has not been sent in this step
        self._unready = self._parameters_of_buckets()
        self._arriving = [False] * len(sizes)
        self._known: set[int] | None = set()  # parameters that a module waits for; None: learnt
        self._first: list[int] = []  # buckets that the first module waits for
        self._modules: dict[torch.nn.Module, list[_Entry]] = {}
        self._of = {id(entry.parameter): entry for entry in self._entries}
        for entry in self._entries:
            entry.parameter.register_post_accumulate_grad_hook(self._gradient_final)
        self._hook = register_module_forward_pre_hook(self._before_forward)

    # ---- construction

    def _lay_out(self, buckets: list[list[torch.nn.Parameter]] | None,
                 most: int) -> tuple[list[_Entry], list[int]]:
        """Places all parameters that are trained in one vector; backward finishes the last ones first."""
        names: dict[int, str] = {}
        for group in self.param_groups:
            names.update(zip(map(id, group["params"]), group.get("param_names", [])))
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
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
        entries, offset = [], 0
        for number, bucket in enumerate(buckets):
            for parameter in bucket:
                entries.append(_Entry(parameter, names.get(id(parameter), ""), number, offset))
                offset += parameter.numel()
        return entries, [sum(p.numel() for p in bucket) for bucket in buckets]

    def _take_memory(self, elements: int) -> None:
        devices = {entry.parameter.device for entry in self._entries} - {torch.device("cpu")}
        if len(devices) > 1 or any(device.type != "cuda" for device in devices):
            raise ValueError(f"lossynet: parameters on {sorted(map(str, devices))}: expected the CPU, or one GPU "
                             "per rank")
        self._stream = torch.cuda.Stream(devices.pop()) if devices else None
        pinned = self._stream is not None
        self._values = torch.empty(elements, pin_memory=pinned)
        self._gradients = torch.zeros(elements, pin_memory=pinned)
        self._ahead: torch.Tensor | None = None
        for entry in self._entries:
            shape = entry.parameter.shape
            entry.value = self._values[entry.place].view(shape)
            entry.gradient = self._gradients[entry.place].view(shape)
            entry.value.copy_(entry.parameter.detach())
        self.comm.spread(self._values)
        self.comm.start(self._values)
        for entry in self._entries:
            if entry.direct:
                entry.parameter.data = entry.value
            else:
                entry.parameter.data.copy_(entry.value)
        self._owned = [shard for shard in self.comm.owned() if shard.stop > shard.start]

    def _optimizer_of_shards(self, optimizer_class: type[torch.optim.Optimizer],
                             keywords: dict[str, Any]) -> torch.optim.Optimizer:
        """The user's optimizer, on this rank's part of each parameter: views of the vector."""
        for entry in self._entries:
            for shard in self._owned:
                begin, end = max(entry.place.start, shard.start), min(entry.place.stop, shard.stop)
                if begin < end:
                    piece = torch.nn.Parameter(self._values[begin:end])
                    piece.grad = self._gradients[begin:end]
                    entry.pieces.append((slice(begin, end), piece))
        of = {id(entry.parameter): entry for entry in self._entries}
        groups = []
        for group in self.param_groups:
            pieces = [piece for p in group["params"] if id(p) in of for _, piece in of[id(p)].pieces]
            groups.append({**_settings(group), "params": pieces})
        inner = optimizer_class(groups, **keywords)
        for group, shards in zip(self.param_groups, inner.param_groups):
            for name, value in _settings(shards).items():
                group.setdefault(name, value)
        self.defaults = dict(inner.defaults)
        return inner

    def _parameters_of_buckets(self) -> list[int]:
        counts = [0] * len(self.comm.buckets)
        for entry in self._entries:
            counts[entry.bucket] += 1
        return counts

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only at construction: owners agree on the vector then."""
        if hasattr(self, "comm"):
            raise RuntimeError("lossynet: add_param_group: expected all groups at construction")
        super().add_param_group(param_group)

    # ---- backward

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backward passes within are added up and not sent, as with
        ``DistributedDataParallel.no_sync``. The last pass of a step must be outside."""
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    def _gradient_final(self, parameter: torch.nn.Parameter) -> None:
        """Autograd calls this when it has added a parameter's gradient."""
        entry = self._of[id(parameter)]
        if entry.final:
            raise RuntimeError("lossynet: a second backward() before step(): expected `with "
                               "optimizer.no_sync():` around all backward passes of a step but the last")
        if entry.direct:
            self._collect(entry)
        if not self._sync:
            return
        if not self._begun:
            self._begin()
        if not entry.direct:
            self._collect(entry)
        entry.final = True
        self._unready[entry.bucket] -= 1
        self._send(wait=False)

    @torch.no_grad()
    def _collect(self, entry: _Entry) -> None:
        """Puts a gradient into the vector; nothing has come: zeros."""
        gradient = entry.parameter.grad
        if gradient is None:
            entry.gradient.zero_()
        elif gradient is entry.gradient:
            pass  # autograd has added to it in place
        elif entry.direct:
            entry.gradient.copy_(gradient)
            entry.parameter.grad = entry.gradient
        elif self._stream:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch.cuda.stream(self._stream):
                entry.gradient.copy_(gradient, non_blocking=True)
            gradient.record_stream(self._stream)
            self._events[entry.bucket] = self._stream.record_event()
        else:
            entry.gradient.copy_(gradient)

    def _begin(self) -> None:
        self.comm.step_begin(self._steps)
        self.comm.reduce_begin(self._gradients)
        self._begun, self._next, self._events = True, 0, {}

    def _send(self, wait: bool) -> None:
        """Lets buckets leave that are final and in the host's memory."""
        while self._next < len(self._unready) and not self._unready[self._next]:
            event = self._events.get(self._next)
            if event is not None and not wait and not event.query():
                return
            if event is not None:
                event.synchronize()
            self.comm.bucket_ready(self._next)
            self._next += 1

    # ---- step

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Averages, updates and begins to broadcast. Collective. Returns the closure's result.

        Raises FloatingPointError on every rank if the gradient's norm is not finite; LossynetError if
        another rank has died, after ``peer_timeout`` seconds.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._finish_gradients()
        self._end_broadcast()
        if self._broadcasting:
            self.comm.report_begin(self._steps - 1, self._values)
        self.comm.reduce(self._gradients)
        squares = sum(torch.linalg.vector_norm(self._gradients[shard]).item() ** 2 for shard in self._owned)
        norm = math.sqrt(self.comm.pulse(np.array([squares], np.float64)).sum())
        if self._broadcasting:
            self._keep_report(self.comm.report_end())
        if not math.isfinite(norm):
            raise FloatingPointError(f"lossynet: step {self._steps}: the gradient's norm is {norm}: expected a "
                                     "finite one; the parameters are those of the step before")
        self._norm = norm
        self._update(norm)
        self._begun, self._broadcasting = False, True
        self._steps += 1
        self._unready = self._parameters_of_buckets()
        for entry in self._entries:
            entry.final = False
            entry.parameter.grad = None
        self.comm.broadcast_begin(self._values)
        self._arriving = [True] * len(self._arriving)
        self._learn()
        if not self._overlap:
            self._end_broadcast()
        return loss

    def _finish_gradients(self) -> None:
        if not self._begun:
            self._begin()
        for entry in self._entries:
            if not entry.final:
                self._collect(entry)
        self._unready = [0] * len(self._unready)
        self._send(wait=True)

    def _end_broadcast(self) -> None:
        """Waits for all parameters."""
        self.comm.broadcast_end()
        for bucket in range(len(self._arriving) - 1, -1, -1):
            self._wait(bucket)
        if self._stream:
            self._stream.synchronize()  # the vector is written next

    def _update(self, norm: float) -> None:
        """Owners step, and prepare what they broadcast: values ahead of the model (lead.c)."""
        if 0 < self.clip < norm:
            for shard in self._owned:
                self._gradients[shard].mul_(self.clip / (norm + 1e-6))
        lead = self.comm.lead()
        if lead and self._ahead is None:
            self._ahead = torch.empty(sum(shard.stop - shard.start for shard in self._owned))
        if lead:
            torch.cat([self._values[shard] for shard in self._owned], out=self._ahead)
        for group, shards in zip(self.param_groups, self.optimizer.param_groups):
            shards.update(_settings(group))
        self.optimizer.step()
        place = 0
        for shard in self._owned if lead else ():  # old + (1 + lead) (new - old)
            end = place + shard.stop - shard.start
            self._ahead[place:end].lerp_(self._values[shard], 1 + lead)
            place = end
        self.comm.broadcast_ahead(self._ahead if lead else None, lead)

    # ---- forward

    def _before_forward(self, module: torch.nn.Module, _inputs: Any) -> None:
        """Every module calls this before its forward pass: waits for the module's own parameters."""
        if torch.compiler.is_compiling() or (self._known is None and not any(self._arriving)):
            return
        if module not in self._modules:
            whole = hasattr(module, "_orig_mod")  # compiled: the modules within do not call hooks
            self._modules[module] = [self._of[id(p)] for p in module.parameters(whole) if id(p) in self._of]
        entries = self._modules[module]
        if self._known is not None:
            self._known.update(id(entry) for entry in entries)
        elif entries:
            for bucket in self._first:
                self._wait(bucket)
        for entry in entries:
            self._wait(entry.bucket)

    def _learn(self) -> None:
        """After the first step: which parameters do modules read that do not own them? These have to be there
        before any module runs; if no module calls hooks, before step() returns."""
        if self._known is None:
            return
        known, self._known = self._known, None
        unknown = {entry.bucket for entry in self._entries if id(entry) not in known}
        self._first = sorted(unknown, reverse=True)
        self._overlap = self._overlap and bool(known)

    @torch.no_grad()
    def _wait(self, bucket: int) -> None:
        if not self._arriving[bucket]:
            return
        self._arriving[bucket] = False
        self.comm.bucket_wait(bucket)
        for entry in self._entries:
            if entry.bucket == bucket and not entry.direct:
                with torch.cuda.stream(self._stream):  # None: does nothing
                    entry.parameter.copy_(entry.value, non_blocking=True)
        if self._stream:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    # ---- results

    @property
    def steps(self) -> int:
        """The number of steps that were made."""
        return self._steps

    def synchronize(self) -> None:
        """Ends the last step: all its parameters have arrived, and ``report()`` is about it. Collective."""
        if self._begun:
            raise RuntimeError("lossynet: between backward() and step(): expected a call after step()")
        if self._broadcasting:
            self._end_broadcast()
            self.comm.report_begin(self._steps - 1, self._values)
            self._keep_report(self.comm.report_end())
            self._broadcasting = False

    def _keep_report(self, measured: dict[str, Any]) -> None:
        self._report = {"step": self._steps - 1, "norm": self._norm, **measured}

    def report(self) -> dict[str, Any]:
        """What the last measured step was like: the one before the last, or the last after ``synchronize()``.
        Empty before. By phase (gradients, parameters): ``lost`` (shares), ``expected``, ``arrived``,
        ``resent`` (packets), ``bytes``, of all ranks. ``norm`` of the averaged gradient. ``drift`` between
        replicas and ``drift_expected`` by the formula, ``lead``, ``lag``, ``mean_age`` in steps. ``late``,
        ``duplicates``, ``rejected``, ``overruns``, ``stragglers``: datagrams and ranks that did not count.
        ``comm.lost_between()`` says who lost what from whom."""
        return dict(self._report)

    @contextlib.contextmanager
    def model(self) -> Iterator[None]:
        """Within, the parameters hold the model, the owners' values, instead of this rank's replica: to
        evaluate or save it. It takes the memory of two vectors. Collective."""
        self.synchronize()
        fresh = torch.empty_like(self._values)
        self.comm.gather_fresh(self._values, fresh)
        replica = self._values.clone()
        self._show(fresh)
        del fresh
        try:
            yield
        finally:
            self._show(replica)

    @torch.no_grad()
    def _show(self, values: torch.Tensor) -> None:
        self._values.copy_(values)
        for entry in self._entries:
            if not entry.direct:
                entry.parameter.copy_(entry.value)

    # ---- state

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: its shards, and what the comm remembers. With the rank's own
        ``model.state_dict()`` a run of as many ranks continues as if it had not stopped. Collective."""
        self.synchronize()
        return {"lossynet": {"step": self._steps, "rank": self.comm.rank, "ranks": self.comm.ranks,
                             "comm": self.comm.state()},
                "optimizer": self.optimizer.state_dict(),
                "values": [self._values[shard].clone() for shard in self._owned]}

    def gathered_state_dict(self) -> dict[str, Any]:
        """The state of all shards put together, as ``optimizer_class`` on the whole parameters would return
        it, on every rank. Any number of ranks can load it. Collective."""
        self.synchronize()
        state: dict[int, dict[str, Any]] = {}
        numbers = self._numbers()
        for key in self._state_keys():
            mine, whole = torch.zeros_like(self._values), torch.empty_like(self._values)
            for where, held in self._held(key):
                mine[where] = held.flatten() if held.dim() else held  # a number: the same in each element
            self.comm.gather_fresh(mine, whole)
            scalar = key == "step"
            for entry in self._entries:
                part = whole[entry.place]
                value = part[0].clone() if scalar else part.view(entry.parameter.shape).clone()
                state.setdefault(numbers[id(entry.parameter)], {})[key] = value
        groups, count = [], 0
        for group in self.param_groups:
            groups.append({**_settings(group), "params": list(range(count, count + len(group["params"])))})
            count += len(group["params"])
        return {"state": state, "param_groups": groups}

    def _numbers(self) -> dict[int, int]:
        every = [p for group in self.param_groups for p in group["params"]]
        return {id(parameter): number for number, parameter in enumerate(every)}

    def _held(self, key: str) -> Iterator[tuple[slice, torch.Tensor]]:
        for entry in self._entries:
            for where, piece in entry.pieces:
                held = self.optimizer.state.get(piece, {}).get(key)
                if held is not None:
                    yield where, torch.as_tensor(held, dtype=torch.float32)

    def _state_keys(self) -> list[str]:
        """The names of the optimizer's state, also on a rank that owns nothing."""
        keys = {key for state in self.optimizer.state.values() for key, value in state.items()
                if value is not None}
        mine = np.zeros(_KEYS_BYTES, np.uint8)
        text = np.frombuffer(" ".join(sorted(keys)).encode(), np.uint8)
        mine[:len(text)] = text
        every = {bytes(row).rstrip(b"\0").decode() for row in self.comm.all_gather(mine)}
        return max(every, key=len).split()

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads ``state_dict()`` of the same rank of as many, before the first step, or
        ``gathered_state_dict()``. Load the model before. ValueError: it does not fit."""
        for entry in self._entries:
            if not entry.direct:
                entry.value.copy_(entry.parameter)
        if "lossynet" in state_dict:
            self._load_shards(state_dict)
        else:
            self._load_gathered(state_dict)
        for group, shards in zip(self.param_groups, self.optimizer.param_groups):
            group.update(_settings(shards))

    def _load_shards(self, state_dict: dict[str, Any]) -> None:
        of = state_dict["lossynet"]
        if (of["rank"], of["ranks"]) != (self.comm.rank, self.comm.ranks):
            raise ValueError(f"lossynet: state of rank {of['rank']} of {of['ranks']}: expected that of rank "
                             f"{self.comm.rank} of {self.comm.ranks}, or gathered_state_dict()")
        self.comm.load_state(of["comm"])
        self.optimizer.load_state_dict(state_dict["optimizer"])
        for shard, values in zip(self._owned, state_dict["values"]):
            self._values[shard] = values
        self._steps = of["step"]

    def _load_gathered(self, state_dict: dict[str, Any]) -> None:
        inner = self.optimizer.state_dict()
        numbers = self._numbers()
        pieces = [piece for group in self.optimizer.param_groups for piece in group["params"]]
        order = {id(piece): number for number, piece in enumerate(pieces)}
        for entry in self._entries:
            whole = state_dict["state"].get(numbers[id(entry.parameter)], {})
            for where, piece in entry.pieces:
                part = slice(where.start - entry.place.start, where.stop - entry.place.start)
                inner["state"][order[id(piece)]] = {
                    key: value.flatten()[part].clone() if torch.is_tensor(value) and value.dim() else value
                    for key, value in whole.items()}
        for group, loaded in zip(inner["param_groups"], state_dict["param_groups"]):
            group.update(_settings(loaded))
        self.optimizer.load_state_dict(inner)

    def close(self) -> None:
        """Leaves the other ranks. It happens at the end of the process, too."""
        self._hook.remove()
        self.comm.close()


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in _NOT_SETTINGS}


def _same_model(world: World, entries: list[_Entry]) -> None:
    """Raises LossynetError, on all ranks, if a rank has other parameters than rank 0."""
    digests = np.frombuffer(b"".join(entry.digest() for entry in entries), np.uint64)
    elements = sum(entry.parameter.numel() for entry in entries)
    mine = np.array([len(entries), elements], np.uint64)
    every = [np.frombuffer(part, np.uint64) for part in gather_at_start(world, mine.tobytes())]
    for rank, theirs in enumerate(every):
        if theirs[0] != every[0][0]:
            raise LossynetError(f"rank {rank} has another model than rank 0: {theirs[0]} parameters with "
                                f"{theirs[1]} elements, rank 0 has {every[0][0]} with {every[0][1]}: expected "
                                "the same model on all ranks")
    parts = [np.frombuffer(part, np.uint64) for part in gather_at_start(world, digests.tobytes())]
    for rank, theirs in enumerate(parts):
        for number in np.flatnonzero(theirs != parts[0])[:1]:
            entry = entries[number]
            raise LossynetError(f"rank {rank} has another model than rank 0: parameter {number} of the vector "
                                f"differs; on rank {world.rank} it is {entry.name or 'one'} of shape "
                                f"{tuple(entry.parameter.shape)}: expected the same names, shapes and types "
                                "on all ranks")
