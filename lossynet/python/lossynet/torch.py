"""With nothing lost, whatever your script does, the result is that of DistributedDataParallel with the same
optimizer, or an exception names the line to write instead.

Trains a PyTorch model over a network that loses packets: one line of a training script changes.

    optimizer = lossynet.torch.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-3)

takes the place of ``DistributedDataParallel`` and of the optimizer. Every rank has a replica of the
parameters. A step averages gradients at the owners of 1/N of the parameters each, runs the given optimizer
there (ZeRO stage 1, Rajbhandari et al. 2020), and broadcasts the new values:

    backward()   a bucket of gradients leaves as soon as it is final
    step()       owners average what arrived, clip by the global norm, update, and begin to broadcast
    forward      each module waits for its own parameters; what was lost stays as it was, and is corrected
                 by a later step

A script that touches ``p.grad`` or a parameter meanwhile finds what DistributedDataParallel would show: the
average of all ranks, and complete parameters (_touch.py). That costs the time that was saved. Parameters in
float32 on the CPU are memory of the vector that the library sends. Others (bfloat16, GPUs) are copied to and
from float32 in the host's memory, which is pinned for GPUs; their masters are float32.
"""
from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from . import _model, _state, _touch
from ._layout import Entry, bring, device_of_masters, lay_out, there, uses
from ._library import NotFinite
from .comm import Comm, Place, is_lossy, number, options
from .rule import Rule


class _Said(NamedTuple):
    """What ranks have told each other, put together."""
    squares: float  # the square of the averaged gradient's norm
    used: np.ndarray  # of each entry, whether any rank has a gradient
    moving: bool  # a buffer has changed on any rank
    looking: bool  # a rank needs the averages of all gradients
    writing: bool  # a rank's script may have written parameters


class _Root:
    """A module within no other that was called."""

    def __init__(self, module: torch.nn.Module):
        self.modules = list(module.modules())
        self.whole = any(map(_model.is_compiled, self.modules))
        self.syncs = True  # the next forward pass takes rank 0's buffers
        self.step = -1  # of its last pass with gradients


_APART = (  # what a script has changed, and not alike on all ranks
    "param_groups of rank {} have another lr, or other settings, than those of rank 0: expected the same on all ranks; "
    "where a schedule follows a loss, its mean: optimizer.comm.all_gather(numpy.array([loss])).mean()",
    "buffers of rank {} were written, and not as on rank 0, since the last step(): expected the same on all ranks, and "
    "model.eval() before forward passes without gradients",
    "optimizer.state was written on rank {}, or on other ranks and not there: expected the same on all ranks",
    "buffers of rank {} have another size than those of rank 0: expected the same on all ranks, such as a cache for "
    "the longest sequence")


class ShardedOptimizer(_state.Saved, torch.optim.Optimizer):
    """An optimizer whose ranks each own 1/N of the parameters, over a network that loses packets.

    ``params``: the model, all of which then comes from rank 0; or, as for every optimizer, parameters, (name,
    parameter) pairs or groups, with ``model`` beside them. ``optimizer_class``: one that treats elements alone
    (AdamW, Adam, SGD, ...); it gets the keyword arguments that are not named here (``lr``, ``weight_decay``, ...).
    ``shard="parameter"``: each rank owns whole parameters, for an optimizer that treats these alone (Muon, Adafactor).
    ``clip``: largest norm of the averaged gradient, of all ranks together; 0: no limit. ``bucket_mb``: size of a
    bucket in 2^20 bytes of float32. ``buckets``: instead, lists of parameters in the order in which backward
    finishes them. ``overlap``: parameters arrive during the next forward pass. ``rank``, ``ranks``, ``address``,
    ``timeout``, ``rule`` and the trainer's options (``loss_rate``, ``wire_dtype``, ...): see ``lossynet.Comm``.
    ``wire_dtype`` is float32 where no loss is asked for, so that nothing is rounded; ``"auto"`` is the trainer's.

    At construction all ranks take rank 0's values. Each step needs a zero_grad(), as in PyTorch. A parameter without
    a gradient at any rank is left alone. Raises LossynetError where the model differs between ranks, and, in later
    calls, where a rank dies, leaves or makes another call.
    """

    def __init__(self, params: torch.nn.Module | Iterable[Any], optimizer_class: type[torch.optim.Optimizer], *,
                 model: torch.nn.Module | None = None, shard: str = "element", clip: float = 0.0, bucket_mb: float = 4,
                 overlap: bool = True, buckets: list[list[torch.nn.Parameter]] | None = None,
                 rank: int | None = None, ranks: int | None = None, address: str | None = None,
                 timeout: float = 60, rule: Rule | None = None, **keywords: Any):
        whole = _model.check_kinds(params, model, optimizer_class, shard, overlap)
        place = Place.of(rank, ranks, address)
        if isinstance(params, torch.nn.Module):
            model, params = params, params.named_parameters()
        super().__init__(params, {})
        given = {name: keywords.pop(name) for name in options() if name in keywords}
        if not is_lossy(given.get("loss_rate")) and not given.get("loss_at"):
            given.setdefault("wire_dtype", "float32")  # a script that loses nothing gets DDP's numbers
        self.clip, self._overlap, self._sync, self._late = number("clip", clip), overlap, True, False
        every = [p for group in self.param_groups for p in group["params"]]
        if any(id(p) in _touch.OWNERS for p in every):
            raise ValueError("lossynet: a parameter has a ShardedOptimizer already: expected its close() before")
        names = {id(p): name for group in self.param_groups
                 for p, name in zip(group["params"], group.get("param_names", ()))}
        _model.check_parameters([(names.get(id(p), ""), p) for p in every if p.requires_grad])
        self._names_of = functools.partial(_model.check_optimizer, optimizer_class, keywords, whole, place.rank)
        self._state_names = self._names_of(self.param_groups)
        self._entries, sizes, shards = lay_out([p for p in every if p.requires_grad], names, buckets,
                                               max(number("bucket_mb", bucket_mb) * 2**18, 1),
                                               place.ranks if whole else 0)
        self._of = {id(entry.parameter): entry for entry in self._entries}
        self._groups = [list(map(id, group["params"])) for group in self.param_groups]
        self._others = _model.Others([p for p in every if id(p) not in self._of])
        if model is not None:
            _model.check_modules(model)
        tensors = {entry.name or f"{number}": entry.place for number, entry in enumerate(self._entries)}
        named = [(entry.name or "one", entry.parameter) for entry in self._entries]
        self.comm = Comm(sizes, **place._asdict(), timeout=timeout, rule=rule, tensors=tensors, shards=shards,
                         check=functools.partial(_model.same_model, named), **given)
        self._take_memory(sum(sizes))
        self.optimizer = self._optimizer_of_shards(optimizer_class, keywords, whole)
        self.steps, self._step_begun = 0, -1  # that were made; the last that the library has begun
        self._begun = self._broadcasting = False  # a gradient phase; a parameter phase
        self._dropped = False  # the script has begun anew with zero_grad() while gradients were on their way
        self._averaged, self._unsent = False, None  # gradients are the average of all ranks; the last of this step, if
        # one came, came within no_sync()
        self._events: dict[int, torch.cuda.Event] = {}  # of buckets: the copy from a GPU is complete
        self._norm, self._report = 0.0, {}
        self._not_finite: NotFinite | None = None  # what no receiver took in this step
        self._sending = self._may_write = False  # parameters, while the script goes on; it may write them unseen
        self._equal = not (rule or float(self.comm.option("look_ahead"))  # replicas, as long as nothing is lost
                           or self.comm.option("wire_dtype") != "float32")
        self._sum: int | None = None  # of the parameters as the last of the first steps left them
        self._next = 0  # the first bucket that has not been sent in this step
        self._of_bucket = [[entry for entry in self._entries if entry.bucket == each] for each in range(len(sizes))]
        self._arriving = [False] * len(sizes)
        self._hooked = -2  # the step in which a module has called hooks
        self._passing = self._overlaps = False  # a forward pass goes on; parameters have arrived during the last
        self._roots: dict[torch.nn.Module, _Root | None] = {}  # modules that were called, or lie within one
        self._hooks = [register_module_forward_pre_hook(self._before_forward),
                       register_module_forward_hook(self._after_forward, always_call=True)]
        for entry in self._entries:
            self._hooks += (entry.parameter.register_hook(functools.partial(self._gradient_comes, entry)),
                            entry.parameter.register_post_accumulate_grad_hook(self._gradient_final))
            _touch.OWNERS[id(entry.parameter)] = self
        self.state = self.optimizer.state
        self._state_facts = self._facts_of_state()
        self._others.spread(self.comm, [("frozen", p) for p in self._others.frozen])
        if model is not None:
            self._cover(model)

    @property
    def state(self) -> _state.OfPieces:
        """Of this rank's part of each parameter: to change all of it alike, as ``clear()`` does."""
        return self.optimizer.state

    @state.setter
    def state(self, value: dict[Any, Any]) -> None:
        if hasattr(self, "optimizer"):
            self.optimizer.state = _state.OfPieces(dict, value)

    # ---- construction

    def _take_memory(self, elements: int) -> None:
        devices = {entry.parameter.device for entry in self._entries} - {torch.device("cpu")}
        if len(devices) > 1 or any(device.type != "cuda" for device in devices):
            raise ValueError(f"lossynet: parameters on {sorted(map(str, devices))}: expected the CPU, or one GPU "
                             "per rank")
        self._stream = torch.cuda.Stream(next(iter(devices))) if devices else None
        host = {"dtype": torch.float32, "device": "cpu", "pin_memory": self._stream is not None}
        self._values, self._gradients = torch.empty(elements, **host), torch.zeros(elements, **host)
        memory = self._values.numpy()
        for entry in self._entries:
            shape = entry.parameter.shape
            # The storage is the parameter's own: safetensors saves storages, and others compare them.
            entry.value = torch.from_numpy(memory[entry.place]).view(shape)
            entry.gradient = self._gradients[entry.place].view(shape)
            entry.address = entry.value.data_ptr()
            entry.value.copy_(entry.parameter.detach())
        self.comm.spread(self._values)
        self.comm.start(self._values)
        self._place(self._entries)
        self._owned = [shard for shard in self.comm.owned() if shard.stop > shard.start]
        owned = sum(shard.stop - shard.start for shard in self._owned)
        device = device_of_masters(devices, owned)
        self._masters = [(shard, there(self._values[shard], device), there(self._gradients[shard], device))
                         for shard in self._owned]  # and their gradients: views of the vectors, or copies on a GPU
        self._ahead = torch.empty(owned, dtype=torch.float32, device=device)

    def _place(self, entries: list[Entry]) -> None:
        """Parameters get their values, and become memory of the vector, but for those whose own is used by more: views
        that the script has, or other processes."""
        sharing = Counter(entry.parameter.untyped_storage()._cdata for entry in entries)
        for entry in entries:
            known = sharing[entry.parameter.untyped_storage()._cdata]
            entry.direct = entry.exact and uses(entry.parameter) == known and not entry.parameter.is_shared()
        for entry in entries:
            if entry.direct:
                entry.parameter.data = entry.value
            else:
                entry.parameter.data.copy_(entry.value)
            entry.version, entry.uses = entry.parameter._version, uses(entry.value)

    def _optimizer_of_shards(self, optimizer_class: type[torch.optim.Optimizer], keywords: dict[str, Any],
                             whole: bool) -> torch.optim.Optimizer:
        """The user's optimizer, on this rank's part of each parameter: views of the masters."""
        for entry in self._entries:
            for shard, values, gradients in self._masters:
                begin, end = max(entry.place.start, shard.start), min(entry.place.stop, shard.stop)
                if begin < end:
                    part, shape = slice(begin - shard.start, end - shard.start), entry.value.shape if whole else (-1,)
                    entry.pieces.append((slice(begin, end), torch.nn.Parameter(values[part].view(shape)),
                                         gradients[part].view(shape)))
        of, groups = self._of, []
        for group in self.param_groups:
            pieces = [piece for p in group["params"] if id(p) in of for _, piece, _ in of[id(p)].pieces]
            groups.append({**_model.settings(group), "params": pieces})
        inner = optimizer_class(groups, **keywords)
        for group, shards in zip(self.param_groups, inner.param_groups):
            for name, value in _model.settings(shards).items():
                group.setdefault(name, value)
        self.defaults = dict(inner.defaults)
        return inner

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

    @torch._disable_dynamo
    def _gradient_comes(self, entry: Entry, _gradient: torch.Tensor) -> None:
        """Autograd calls this before it adds to a parameter's gradient. If that has left already, it becomes the
        average of all ranks, as DistributedDataParallel leaves it."""
        before = entry.parameter.grad
        if not (before is None or before is entry.sent or isinstance(before, _touch.Sent)) and uses(before) > 1:
            raise RuntimeError(f"lossynet: p.grad of {entry.words} is a view of memory that the script has: expected "
                               "optimizer.zero_grad() before backward(), and p.grad after it")
        if self._sending and entry.seen != self.steps:
            raise RuntimeError(f"lossynet: {entry.words} was read while it was still arriving, by code in C++, or "
                               "before step(): expected ShardedOptimizer(..., overlap=False)")
        if entry.final or self._dropped:
            logging.getLogger("lossynet").info("lossynet: another backward() before step(): from now on gradients "
                                               "leave in step(); optimizer.no_sync() around all but the last is faster")
            self._average()
            self._late = True

    @torch._disable_dynamo
    def _gradient_final(self, parameter: torch.nn.Parameter) -> None:
        """Autograd calls this when it has added a parameter's gradient."""
        entry = self._of[id(parameter)]
        _touch.plain(parameter)
        came = parameter.grad
        if came.is_sparse:
            raise RuntimeError(f"lossynet: {entry.words} has a sparse gradient: expected a dense one: sparse=False "
                               "in nn.Embedding")
        if came.requires_grad:
            raise RuntimeError(f"lossynet: {entry.words} has a gradient with a graph, which no ranks average: expected "
                               "torch.autograd.grad(create_graph=True) for it, and backward() without")
        entry.check()
        if getattr(came, "spent", False):
            return  # that of an earlier step, to which backward() has added: step() refuses
        for each in self._entries if self._averaged else ():
            each.go_on()
        self._averaged, self._unsent = False, not self._sync
        entry.final = self._sync and not self._late
        if entry.final and not self._begun:
            self._begin()
            self._watch(True)  # others, whose gradients may come at another rank alone
            _touch.plain(parameter)
        if entry.final or entry.direct:
            self._collect(entry)
        if parameter.grad is not came:  # a script that keeps it is told, should it use it
            _touch.sent(came, parameter, self._touched)
        if self._sync and not isinstance(parameter.grad, _touch.Sent):
            parameter.grad = _touch.sent(parameter.grad, parameter, self._touched)
        elif not self._sync:
            parameter.grad.own = True  # it is not that of all ranks once a pass outside no_sync() has ended
        entry.sent = parameter.grad
        if entry.final:
            self._send(wait=False)
        if self._hooked == self.steps:
            parameter.__class__ = _touch.watched(entry.kind)

    def _touched(self, gradient: _touch.Sent) -> torch.Tensor:
        """A script uses p.grad: from now on it is the average of all ranks. Returns it."""
        parameter = gradient.parameter
        entry = self._of[id(parameter)]
        if parameter.grad is gradient and not gradient.spent:
            if torch._C._current_graph_task_id() >= 0:
                raise RuntimeError("lossynet: p.grad is used during backward(): expected the hook to be registered "
                                   "before ShardedOptimizer is made, or Tensor.register_hook")
            self._average()
        if entry.sent is not gradient or parameter.grad is None or parameter.grad is gradient:
            raise RuntimeError("lossynet: what p.grad was before backward(), zero_grad() or step() is used: expected "
                               "p.grad, or its clone(), and optimizer.zero_grad() between step() and backward()")
        return parameter.grad

    @torch.no_grad()
    def _collect(self, entry: Entry) -> None:
        """Puts a gradient into the vector; nothing has come: zeros."""
        gradient = entry.parameter.grad
        if gradient is None:
            entry.gradient.zero_()
        elif entry.direct:
            if gradient is not entry.sent:  # else autograd has added to it in place
                entry.gradient.copy_(gradient)
                entry.parameter.grad = entry.sent = entry.gradient.detach()
        else:
            if self._stream:
                self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
            with torch._C.DisableTorchFunctionSubclass(), torch.cuda.stream(self._stream):  # None: does nothing
                entry.gradient.copy_(gradient, non_blocking=True)
                if self._stream:
                    gradient.record_stream(self._stream)
                    self._events[entry.bucket] = self._stream.record_event()

    def _begin(self) -> None:
        if self._step_begun != self.steps:
            self.comm.step_begin_known(self.steps)
            self._step_begun = self.steps
        self.comm.reduce_begin(self._gradients)
        self._begun, self._next, self._events = True, 0, {}

    def _send(self, wait: bool) -> None:
        """Lets buckets leave that are final and in the host's memory."""
        while self._next < len(self._of_bucket) and all(entry.final for entry in self._of_bucket[self._next]):
            event = self._events.get(self._next)
            if event is not None and not wait and not event.query():
                return
            if event is not None:
                event.synchronize()
            self.comm.bucket_ready(self._next)
            self._next += 1

    # ---- step

    @torch._disable_dynamo
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Averages, updates and begins to broadcast. Collective. Returns the closure's result.

        Raises FloatingPointError on every rank if the gradient's norm is not finite; LossynetError if
        another rank has died, after ``peer_timeout`` seconds.
        """
        with torch.enable_grad():
            loss = closure() if closure else None
        self._watch(False)
        self._check_script()
        said = self._gradients_of_step()
        norm = math.sqrt(said.squares)
        failed = said.used.any() and (self._not_finite or not math.isfinite(norm))
        self._end_gradients(keep=not failed)
        if failed:
            raise FloatingPointError(f"lossynet: step {self.steps}: {self._not_finite or f'the norm is {norm}'}: "
                                     "expected finite gradients; the parameters are those of the step before; a loop "
                                     "that catches this on every rank can go on")
        self._norm = self.comm.norm = norm
        self._adopt()
        if self._equal and (said.writing or self._report.get("drift")):
            totals = self.comm.all_gather(np.array([_model.total([("", self._values)])]), "")
            if (totals != totals[0]).any():
                _model.same_values(self.comm, [(entry.words, entry.value) for entry in self._entries])
        if self._sum is not None and self._sum != _model.checksum(self._values):
            self._overlap = False  # the script writes parameters outside step(), perhaps while they would be sent
        self._sum = None
        self._update(norm, said.used)
        self._others.moving |= said.moving
        self._others.passes = self._others.seen = 0
        if self._others.moving:
            self._others.send(self.comm)
        self._broadcasting = True
        self.steps += 1
        self._begin_broadcast()
        return loss

    def _check_script(self) -> None:
        if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
            raise RuntimeError("lossynet: hooks of all optimizers are called for the one within, too: expected "
                               "optimizer.register_step_pre_hook() or register_step_post_hook()")
        if [list(map(id, group["params"])) for group in self.param_groups] != self._groups:
            raise RuntimeError("lossynet: param_groups have other parameters than at construction: expected close() "
                               "and a new ShardedOptimizer")
        for parameter in self._others.to_train():
            raise RuntimeError(f"lossynet: a parameter of shape {tuple(parameter.shape)} requires a gradient that did "
                               "not, or was not in the model, at construction: expected requires_grad_(True) before "
                               "ShardedOptimizer is made, load_state_dict() without assign=True, or a new one")
        for entry in self._entries:
            entry.check()
            if getattr(entry.parameter.grad, "spent", False):
                raise RuntimeError(f"lossynet: {entry.words} has the gradient of an earlier step: expected "
                                   "optimizer.zero_grad() between step() and backward(), and one step() for it")
        if self._unsent and not self._begun and any(entry.parameter.grad is not None for entry in self._entries):
            raise RuntimeError("lossynet: the last backward() before step() was within no_sync(): expected it outside, "
                               "so that its gradients are averaged")

    def _gradients_of_step(self) -> _Said:
        """Lets the gradients of this step be averaged at their owners."""
        if not self._averaged:  # p.grad may be set or dropped, as it may be after an all-reduce
            said = self._reduce(f"step() {self.steps}", not all(e.is_own() for e in self._entries))
            if not said.looking:
                return said
        for entry in self._entries:
            if entry.pieces:
                self._collect(entry)
        if self._stream:
            self._stream.synchronize()
        return self._exchange(functools.partial(self.comm.all_gather, name=f"step() {self.steps}, after p.grad"),
                              written=True)

    def _end_gradients(self, keep: bool) -> None:
        """p.grad is then of no use: whoever uses it, or adds to it, is told so. keep: it was that of a step."""
        self._averaged, self._unsent = False, None
        for entry in self._entries:
            parameter, entry.sent = entry.parameter, None
            if not keep:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad = _touch.spend(parameter.grad, parameter, self._touched)

    # ---- what ranks tell each other

    def _exchange(self, function: Callable[[np.ndarray], np.ndarray], looks: bool = False,
                  written: bool = False) -> _Said:
        """All ranks say what their gradients are like, and what their scripts have changed. RuntimeError, on all
        ranks: that is not the same. looks: this one needs the averages of all. written: p.grad is the script's."""
        squares = sum(torch.linalg.vector_norm(self._gradients[shard]).item() ** 2 for shard in self._owned)
        writes = self.steps < _model.CHECKED_STEPS or self._may_write or any(
            entry.direct and entry.parameter._version != entry.version for entry in self._entries)
        bits = np.packbits([looks, self._others.changed(), writes,
                            *(entry.parameter.grad is not None for entry in self._entries)])
        numbers = [number("clip", self.clip), [len(group) for group in self._groups], *(
            [v.tolist() if torch.is_tensor(v) else v for v in _model.settings(group).values()
             if isinstance(v, (int, float, tuple, torch.Tensor))] for group in self.param_groups)]
        gradients = [("the gradient of " + entry.words,
                      torch.zeros_like(entry.value) if entry.parameter.grad is None else entry.parameter.grad)
                     for entry in self._entries] if written else []
        given = np.float64([squares, self._others.passes, _model.total(gradients), zlib.crc32(repr(numbers).encode()),
                            self._others.seen, self._state_written(), self._others.elements()]).view(np.uint8)
        every = function(np.concatenate([given, bits]))
        squares, passes, totals, *checks = every[:, :len(given)].copy().view(np.float64).T
        checks[1][passes != passes[0]] = np.nan  # nothing to say
        for values, words in zip(checks, _APART):
            said = np.flatnonzero(~np.isnan(values))
            apart = [rank for rank in said if values[rank] != values[said[0]]]
            if apart:
                raise RuntimeError("lossynet: " + words.format(apart[0]))
        if (totals != totals[0]).any():
            _model.same_values(self.comm, gradients)
        looking, moving, writing, *used = np.unpackbits(every[:, len(given):], axis=1,
                                                        count=3 + len(self._entries)).any(axis=0)
        return _Said(squares.sum(), np.array(used), moving, looking, writing)

    def _reduce(self, name: str, looks: bool) -> _Said:
        """Ends the gradient phase. If a rank looks, p.grad becomes the average, on all ranks. Collective."""
        if not self._begun:
            self._begin()
        for entry in self._entries:
            if not entry.is_own():  # the script has put it there, the same on all ranks
                entry.gradient.zero_()
            elif not entry.final:
                self._collect(entry)
            entry.final = True
        self._send(wait=True)
        self._end_broadcast()
        if self._broadcasting:
            self.comm.report_begin(self.steps - 1, self._values)
        self.comm.place = name
        self.comm.reduce(self._gradients)
        said = self._exchange(functools.partial(self.comm.pulse, name=""), looks)
        self._not_finite = self.comm.not_finite()
        self.comm.carry(self._not_finite is None)
        if self._broadcasting:
            self._keep_report(self.comm.report_end())
        self._begun = self._broadcasting = False
        for entry in self._entries:
            entry.final = False
        if said.looking:
            self._share_gradients(said.used)
        self._dropped = False
        return said

    def _average(self) -> None:
        """Gradients become the average of all ranks, on every rank, as DistributedDataParallel leaves them."""
        self._watch(False)
        self._reduce(f"p.grad of step {self.steps}, or another backward()", True)
        self._watch(True)

    @torch.no_grad()
    def _share_gradients(self, used: np.ndarray) -> None:
        fresh = torch.empty_like(self._gradients)
        self.comm.gather_fresh(self._gradients, fresh)
        if self._not_finite and not self._not_finite.phase:
            fresh[self._not_finite.element] = self._not_finite.value  # its owner has not received it
        for entry in itertools.compress(self._entries, used):
            if entry.is_own() and not (self._dropped and entry.parameter.grad is None):  # not replaced by the script
                gradient = fresh[entry.place].view(entry.parameter.shape)
                entry.parameter.grad = gradient.to(entry.device, entry.dtype, copy=True)
        self._averaged = True

    # ---- parameters

    @torch.no_grad()
    def _adopt(self, loads: bool = False) -> None:
        """Takes what the script has put in a parameter's place. loads: also into those with a master elsewhere."""
        replaced = []
        for entry in self._entries:
            entry.check()
            parameter = entry.parameter
            if entry.direct and parameter.data_ptr() != entry.value.data_ptr():
                if uses(entry.value) >= entry.uses:  # a copy into it would change that, too
                    raise RuntimeError(f"lossynet: {entry.words} has other memory, while the script has that of "
                                       "before: expected p.data.clone()")
                entry.value.copy_(parameter)
                replaced.append(entry)
            elif not entry.direct and (
                    entry.device.type == "cpu" or self._may_write or parameter._version != entry.version):
                if loads or entry.exact:
                    entry.value.copy_(parameter)
                elif not torch.equal(parameter.to("cpu"), entry.value.to(entry.dtype)):
                    raise RuntimeError(f"lossynet: {entry.words}, {entry.dtype} on {entry.device}, was written, but "
                                       "step() trains its float32 master: expected weights to be loaded before "
                                       "ShardedOptimizer is made, or optimizer.load_state_dict() after them")
                entry.version = parameter._version
        self._place(replaced)

    def _begin_broadcast(self) -> None:
        self.comm.broadcast_begin(self._values)
        self._arriving = [True] * len(self._arriving)
        checks, hooked = self.steps <= _model.CHECKED_STEPS, self._hooked == self.steps - 1
        # Nobody sees that a script reads memory which it has kept, such as p.data or model.state_dict().
        kept = any(entry.exact and (not entry.direct or uses(entry.value) > entry.uses) for entry in self._entries)
        self._overlaps = self._sending = self._overlap and hooked and not kept and not checks
        self._may_write = kept or not (self._overlap or self._stream)
        for entry in filter(lambda each: each.direct, self._entries):
            entry.version = entry.parameter._version
        if not self._overlaps:  # no module waits for parameters
            self._end_broadcast()
            self._sum = _model.checksum(self._values) if checks else None
        self._watch(True)

    def _watch(self, on: bool) -> None:
        """From now on the package sees who touches parameters, or does not; where modules call hooks, so that
        forward passes find plain ones."""
        for entry in self._entries:
            entry.parameter.__class__ = _touch.watched(entry.kind) if on and self._hooked >= self.steps - 1 else \
                entry.kind

    def _end_broadcast(self) -> None:
        """Waits for all parameters."""
        written = [entry.words for entry in self._entries
                   if self._sending and entry.direct and entry.parameter._version != entry.version]
        self._sending = False
        if written:
            raise RuntimeError(f"lossynet: {written[0]} was written while it was still being sent: "
                               "expected ShardedOptimizer(..., overlap=False)")
        self.comm.broadcast_end()
        for bucket in range(len(self._arriving) - 1, -1, -1):
            self._wait(bucket)
        if self._stream:
            self._stream.synchronize()  # the vector is written next

    def _update(self, norm: float, used: np.ndarray) -> None:
        """Owners step, and prepare what they broadcast: values ahead of the model (lead.c)."""
        if 0 < self.clip < norm:
            for shard in self._owned:
                self._gradients[shard].mul_(self.clip / (norm + 1e-6))
        for shard, _, gradients in self._masters:
            bring(self._gradients[shard], gradients)
        lead = self.comm.lead() if self._masters else 0.0
        masters = [values for _, values, _ in self._masters]
        if lead:
            torch.cat(masters, out=self._ahead)
        for group, shards in zip(self.param_groups, self.optimizer.param_groups):
            shards.update(_model.settings(group))
        for entry, each in zip(self._entries, used):
            for _, piece, gradient in entry.pieces:  # where no rank has a gradient the optimizer leaves it alone
                piece.grad = gradient if each else None
        self.optimizer.step()
        for group, shards in zip(self.param_groups, self.optimizer.param_groups):
            group.update(_model.settings(shards))  # some optimizers count there
        torch.autograd.graph.increment_version(  # so that backward() through an earlier pass is refused, as always
            [entry.parameter for entry in itertools.compress(self._entries, used)])
        self._state_facts = self._facts_of_state()
        for shard, values, _ in self._masters:
            bring(values, self._values[shard])
        if lead:  # old + (1 + lead) (new - old)
            for ahead, values in zip(self._ahead.split([len(values) for values in masters]), masters):
                ahead.lerp_(values, 1 + lead)
        self.comm.broadcast_ahead(self._ahead.cpu() if lead else None, lead)

    # ---- forward

    def _before_forward(self, module: torch.nn.Module, _inputs: Any) -> None:
        """Every module calls this before its forward pass: waits for the module's own parameters."""
        if torch.compiler.is_compiling() or self._is_forked():
            return
        inner = getattr(module, "_orig_mod", module)
        if inner not in self._roots:
            self._meet(inner)
        root = self._roots.get(inner)
        if torch._C._functorch.peek_interpreter_stack() is not None:  # parameters are wrapped
            self._end_broadcast()
        self._others.show(root.modules if root else [module])
        if root:
            self._begin_pass(root)
        for parameter in (module.parameters() if module is not inner or root and root.whole else
                          module._parameters.values()):
            if isinstance(parameter, _touch.Watched) and id(parameter) in self._of:
                self._read(parameter)

    def _after_forward(self, module: torch.nn.Module, _inputs: Any, _output: Any) -> None:
        if not torch.compiler.is_compiling() and (root := self._roots.get(getattr(module, "_orig_mod", module))):
            self._passing = False
            if not root.whole:
                self._watch(True)

    def _begin_pass(self, root: _Root) -> None:
        """As DistributedDataParallel, gives all ranks rank 0's buffers before a forward pass. Those that change were
        sent by step(); further passes of a step send them again, except within no_sync()."""
        self._passing, self._hooked = True, self.steps
        trains, again = torch.is_grad_enabled(), root.step == self.steps
        if trains and again and root.syncs and self._others.may_move(self.steps):
            self._end_broadcast()
            if self._begun:
                self._average()
                self._late = True
            self.comm.agree(f"a forward pass of step {self.steps}, buffers of {self._others.elements()} elements")
            self._others.send(self.comm)
            self._others.show(root.modules)
        if trains and not again:
            root.step = self.steps
            self._others.note(root.modules)
        root.syncs = trains and self._sync

    def _cover(self, module: torch.nn.Module) -> None:
        """Takes what is not trained of a module from rank 0, too. Collective."""
        new = self._others.cover(module)
        trained = [(f"{name}, element {self._of[id(p)].place.start} of the vector", p)
                   for name, p in module.named_parameters()
                   if id(p) in self._of and not torch.jit.is_tracing()]  # which records shapes
        _model.same_model(new + trained, lambda mine: [
            bytes(each) for each in self.comm.all_gather(np.frombuffer(mine, np.uint8))], self.comm.rank)
        self._others.spread(self.comm, new)

    def _meet(self, module: torch.nn.Module) -> None:
        """Sees a module for the first time."""
        own = list(module.parameters())
        if not any(id(p) in self._of for p in own):
            if own and all(isinstance(p, torch.nn.Parameter) for p in own):  # none: of a moment; else: functional_call
                self._roots[module] = None
        elif not torch.is_grad_enabled():
            self._end_broadcast()  # it may run on one rank alone
            self._watch(False)
        else:
            _model.check_modules(module)
            if module not in self._others.covered and not self._begun and (
                    self.steps == 0 or self._others.is_news(module)):
                self.comm.agree("its first forward pass")
                self._cover(module)
            self._roots.update((each, None) for each in module.modules() if each not in self._roots)
            self._roots[module] = _Root(module)

    def _arrive(self, parameter: torch.nn.Parameter, whole: bool) -> None:
        """A script touches a parameter: it waits for all until no more is sent; within a forward pass, unless it needs
        the whole, and in backward(), where a function reads its own weight, for this one."""
        if self._is_forked():
            return
        if (whole or not self._passing) and torch._C._current_graph_task_id() < 0:
            self._may_write = True
            self._end_broadcast()
            self._watch(False)
        else:
            self._read(parameter)

    def _read(self, parameter: torch.Tensor) -> None:
        entry = self._of[id(parameter)]
        entry.seen = self.steps
        self._wait(entry.bucket)
        _touch.plain(parameter)

    def _is_forked(self) -> bool:
        """Whether this is another process than that of the optimizer, in which parameters stay as they are."""
        if os.getpid() != self.comm.process and any(self._arriving):
            raise RuntimeError("lossynet: parameters were still arriving when this process was forked: expected "
                               "optimizer.synchronize() before")
        return os.getpid() != self.comm.process

    @torch.no_grad()
    def _wait(self, bucket: int) -> None:
        if not self._arriving[bucket]:
            return
        self._arriving[bucket] = False
        self.comm.bucket_wait(bucket)
        for entry in self._of_bucket[bucket]:
            if not entry.direct:
                with torch._C.DisableTorchFunctionSubclass(), torch.cuda.stream(self._stream):  # None: does nothing
                    entry.parameter.copy_(entry.value, non_blocking=True)
                entry.version = entry.parameter._version
        if self._stream:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    # ---- results

    def synchronize(self) -> None:
        """Ends the last step: all its parameters have arrived, and ``report()`` is about it. Collective."""
        self._rest("synchronize()")

    def _rest(self, name: str, loads: bool = False) -> None:
        """Ends what goes on in the background, before a collective call that is no part of a step."""
        self._watch(False)
        if self._begun:
            self._average()
        self.comm.agree(name)
        if self._broadcasting:
            self._end_broadcast()
            self.comm.report_begin(self.steps - 1, self._values)
            self._keep_report(self.comm.report_end())
            self._broadcasting = False
        self._adopt(loads)
        self._watch(True)

    def _keep_report(self, measured: dict[str, Any]) -> None:
        self._report = {"step": self.steps - 1, "norm": self._norm, **measured}
        self._equal &= not measured["lost"][1] and not measured["lead"]

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
        evaluate or save it. It takes the memory of two vectors. Collective. RuntimeError: they were written."""
        self._rest("model()")
        fresh, replica = torch.empty_like(self._values), self._values.clone()
        self.comm.gather_fresh(self._values, fresh)
        self._show(fresh)
        try:
            yield
            self._watch(False)
            if not all(torch.equal(entry.parameter.cpu().flatten(), fresh[entry.place].to(entry.dtype))
                       for entry in self._entries):
                raise RuntimeError("lossynet: parameters were written within model(), which puts back what was there "
                                   "before: expected load_state_dict() and step() outside")
        finally:
            self._show(replica)

    @torch.no_grad()
    def _show(self, values: torch.Tensor) -> None:
        self._values.copy_(values)
        for entry in self._entries:
            if not entry.direct:
                entry.parameter.copy_(entry.value)
                entry.version = entry.parameter._version

    def close(self) -> None:
        """Leaves the other ranks. It happens at the end of the process, too."""
        if os.getpid() != self.comm.process:
            return  # in a forked process, such as a DataLoader's worker
        for hook in (*self._hooks, *self._others.hooks):
            hook.remove()
        try:
            if any(self._arriving):
                self._end_broadcast()
        finally:
            for entry in self._entries:
                _touch.OWNERS.pop(id(entry.parameter), None)
                entry.parameter.__class__ = entry.kind
                if entry.parameter.grad is entry.sent:
                    entry.parameter.grad = None
            self.comm.close()
