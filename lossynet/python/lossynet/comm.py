"""Bare vectors: a worker of each rank averages its vector with the others' and receives the result."""
from __future__ import annotations

import ctypes
import functools
import itertools
import operator
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .rule import Bound, Rule
from ._library import EVENT_NAMES, Counters, Drift, LossynetError, NotFinite, World, call, get, must, tell

GRADIENT, PARAMETER = 0, 1  # the phases of a step
_ALL_WORKERS = -1
_NAME_BYTES = 64
_ELSEWHERE = "another rank waits in another collective call"  # a status, after which ranks may still swap names
_BUSY = "lossynet: {}() while another call of this comm runs, in another thread or for a rule: expected one at a time"
_TORCHRUN = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
             "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FORK_LAUNCHED")
_LAUNCHERS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")  # how many processes a launcher started
_SPREAD_BYTES = 16 << 20  # that leave at once
_ANY_THREAD = ("bucket_ready", "bucket_wait")  # may be called while another call runs


class Place(NamedTuple):
    """A rank's place among the ranks, and where they meet: "HOST:PORT", at which rank 0 listens."""
    rank: int
    ranks: int
    address: str

    @classmethod
    def take(cls) -> Place:
        """The same as ``of()``, and takes torchrun's variables out of the environment, so that frameworks that are
        imported later (transformers, accelerate, Lightning) see one process and do not average, too. Hand it on:
        ``ShardedOptimizer(..., **place._asdict())``."""
        place = cls.of()
        for name in [*os.environ]:
            if name in _TORCHRUN or name.startswith(("TORCHELASTIC_", "ACCELERATE_USE_")):
                del os.environ[name]
        return place

    @classmethod
    def of(cls, rank: int | None = None, ranks: int | None = None, address: str | None = None) -> Place:
        """Takes what is not given from torchrun's variables RANK, WORLD_SIZE and MASTER_ADDR. The port is
        LOSSYNET_PORT, else MASTER_PORT + 1, else 7010. Without any of them: rank 0 of 1."""
        environment = os.environ
        for name in _LAUNCHERS if rank is ranks is None and not {"RANK", "WORLD_SIZE"} & {*environment} else ():
            if environment.get(name, "1") != "1":  # each process would train alone
                raise LossynetError(f"lossynet: started with {name}={environment[name]}, without RANK and WORLD_SIZE: "
                                    "expected torchrun's variables, or rank, ranks and address")
        port = environment.get("LOSSYNET_PORT") or _whole("MASTER_PORT", environment.get("MASTER_PORT", 7009)) + 1
        return cls(_whole("RANK", environment.get("RANK", 0)) if rank is None else _whole("rank", rank),
                   _whole("WORLD_SIZE", environment.get("WORLD_SIZE", 1)) if ranks is None else _whole("ranks", ranks),
                   str(address or f"{environment.get('MASTER_ADDR', '127.0.0.1')}:{port}"))


def options() -> list[str]:
    """The keyword arguments that ``Comm`` hands to the library: names of the trainer's options."""
    names = []
    while (name := get("named_name", len(names))) is not None:
        names.append(name.decode())
    return [name.replace("-", "_") for name in names if name not in ("workers", "deadline")]


def _no_option(name: str) -> TypeError:
    return TypeError(f"lossynet: there is no option {name!r}: expected one of {', '.join(options())}")


def number(name: str, given: Any) -> float:
    """A setting that is a number from 0 on."""
    try:
        value = float("nan") if isinstance(given, (bool, str)) else float(given)
    except (TypeError, ValueError):
        value = float("nan")
    if not value >= 0:
        raise ValueError(f"lossynet: {name}={given!r}: expected a number from 0 on")
    return value


def _whole(name: str, given: Any) -> int:
    try:
        value = int(given) if isinstance(given, str) else operator.index(given)
    except (TypeError, ValueError):
        value = -1
    if value < 0:
        raise ValueError(f"lossynet: {name}={given!r}: expected a whole number from 0 on")
    return value


def is_lossy(rate: object) -> bool:
    """Whether it is other than 0, as a number, several or text: what is not a rate the library refuses."""
    return bool(_text(rate).strip("0.,- e"))


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, (tuple, list)):  # of gradients, of parameters
        return ",".join(map(_text, value))
    return str(int(value)) if isinstance(value, bool) else str(value)


def _array(vector: Any, elements: int, what: str, changes: bool = True) -> np.ndarray:
    """A NumPy array or a tensor on the CPU, of `elements` float32 without gaps, as an array. changes: the library may
    write to it."""
    array = vector
    if str(getattr(vector, "device", "")) == "cpu" and str(vector.dtype) == "torch.float32":
        array = vector.detach().numpy()
    if not (isinstance(array, np.ndarray) and array.dtype == np.float32 and array.flags.c_contiguous
            and array.flags.aligned and array.size == elements and (array.flags.writeable or not changes)):
        fixed = " that is read-only" * (isinstance(array, np.ndarray) and not array.flags.writeable)
        raise ValueError(f"lossynet: {what}: expected {elements} contiguous float32 in the host's memory, got "
                         f"{type(vector).__name__} {getattr(vector, 'dtype', '')} "
                         f"{tuple(getattr(vector, 'shape', ()))}{fixed}")
    return array


def _numbers(given: Any) -> np.ndarray:
    array = np.asarray(given, order="C")
    if array.dtype.hasobject:
        raise TypeError(f"lossynet: expected numbers, or an array of them, got {type(given).__name__} {given!r}")
    return array


def _sizes(what: str, given: Any) -> Any:
    numbers = [operator.index(each) for each in given]
    sizes = (ctypes.c_size_t * len(numbers))(*numbers)
    if [*sizes] != numbers:
        raise ValueError(f"lossynet: {what}: expected whole numbers from 0 on, got {numbers}")
    return sizes


def _index(name: str, index: int, count: int) -> int:
    if not 0 <= index < count:
        raise IndexError(f"lossynet: {name} {index}: expected 0 to {count - 1}")
    return index


def _address(vector: Any, elements: int, what: str, changes: bool = True) -> int:
    return _array(vector, elements, what, changes).ctypes.data


class Comm:
    """The workers of a job, one in each rank, and their vectors of ``elements`` float32.

    ``elements``: of the vector, or a list: of each bucket, in the order in which a step's gradients become
    final. ``rank``, ``ranks``, ``address``: see ``Place.of``. ``timeout``: seconds to wait for other ranks.
    Other keywords are the trainer's options with ``_`` for ``-`` (``lossynet.options()``;
    ``train_llama2 --help`` explains them), for example ``loss_rate=0.1`` or ``wire_dtype="bf16"``;
    ``loss_rate=(0.2, 0)`` is of gradients and of parameters. ``rule``: what to do about loss instead (``Rule``).
    ``tensors``: names of parts of the vector, slices, for ``loss_at`` and ``repair_at``. ``shards``: of each bucket,
    the elements that each rank owns of it, in order of ranks; by default as many as the others. ``check``: is called
    with a function, which gathers as many bytes of each rank, and the rank, before settings are compared. What is not
    given has the library's default. Collective. Raises LossynetError if the ranks do not meet, or if a setting is
    wrong or differs between ranks.

    Methods marked *collective* must be called by all ranks in the same order. They raise LossynetError when
    another rank dies or leaves; the error names it, and the comm can then only be closed.
    """

    def __init__(self, elements: int | Sequence[int], *, rank: int | None = None, ranks: int | None = None,
                 address: str | None = None, timeout: float = 60, rule: Rule | None = None,
                 tensors: dict[str, slice] | None = None, shards: Sequence[Sequence[int]] | None = None,
                 check: Callable[..., None] | None = None, **given: Any):
        self.buckets = [_whole("elements", each) for each in (elements if np.ndim(elements) else [elements])]
        self.elements, sizes = sum(self.buckets), _sizes("elements", self.buckets)
        place, world, self.process = Place.of(rank, ranks, address), World(), os.getpid()
        call("rendezvous_open", place.address.encode(), place.rank, place.ranks, number("timeout", timeout), world)
        self.rank, self.ranks = place.rank, place.ranks
        handle, self._busy = ctypes.c_void_p(), threading.Lock()
        self._named = get("named_open", len(self.buckets), sizes)
        self._end = weakref.finalize(  # also when Python ends
            self, _close, self._named, handle, world, os.getpid(), self._busy)
        for name in given.keys() - set(options()):
            raise _no_option(name)
        for name, value in {**given, "workers": world.ranks}.items():
            call("named_set", self._named, name.replace("_", "-").encode(), _text(value).encode())
        for name, place in (tensors or {}).items():
            if not isinstance(place, slice) or place.indices(self.elements) != (place.start, place.stop, 1) or \
                    place.stop < place.start:
                raise ValueError(f"lossynet: tensors[{name!r}] is {place}: expected slice(FIRST, END) of the "
                                 f"{self.elements} elements")
            call("named_tensor", self._named, name.encode(), place.start, place.stop - place.start)
        self._rule = Bound(rule) if rule is not None else None
        if self._rule:
            get("named_rule", self._named, ctypes.addressof(self._rule.functions))
        if shards and [len(bucket) for bucket in shards] != [self.ranks] * len(self.buckets):
            raise ValueError(f"lossynet: shards: expected a list of {len(self.buckets)} buckets, each of {self.ranks} "
                             "numbers, one for each rank")
        if shards:
            owned = _sizes("shards", itertools.chain(*shards))
            get("named_shards", self._named, owned)  # which stays until the comm is open
        if check:
            check(functools.partial(_gather_at_start, world), self.rank)
        self.norm, self.steps = float("nan"), 0  # of the last averaged gradient, of the run: for a rule
        self._step, self._lossless = 0, False
        self._begun: tuple[int, ...] = ()  # the present step and the one before
        self._sent: tuple[list[Any], ...] = [], []  # by phase: vectors that the library reads until it has ended
        self.place = ""  # what the caller is in, for errors: by default the name of a method
        call("open", world, get("named_settings", self._named, world.ranks), ctypes.byref(handle))
        self._handle = handle
        self._ahead = None  # memory that the library reads
        self.carry(True)

    def close(self) -> None:
        """Leaves the other ranks. The comm is then of no use."""
        if self._end.alive and self._busy.locked() and os.getpid() == self.process:
            raise LossynetError(_BUSY.format("close"), "busy")
        self._end()

    def __enter__(self) -> Comm:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    @property
    def _comm(self) -> ctypes.c_void_p:
        if not self._handle:
            raise LossynetError("the comm is closed: expected calls before close()", "closed")
        if os.getpid() != self.process:
            raise LossynetError("this process was forked from a rank: expected the rank to make the call", "forked")
        return self._handle

    def _get(self, name: str, *given: Any) -> Any:
        """Calls lossynet_<name>, which takes one thread at a time."""
        comm = self._comm
        if name in _ANY_THREAD:
            return get(name, comm, *given)
        if not self._busy.acquire(blocking=False):
            raise LossynetError(_BUSY.format(name), "busy")
        try:
            return get(name, comm, *given)
        finally:
            self._busy.release()

    def _call(self, name: str, *given: Any) -> None:
        """The same, of functions that return a status."""
        must(name, self._get(name, *given))

    # ---- facts

    def option(self, name: str) -> str:
        """The value of an option as text, also where it is a default."""
        found = get("named_get", self._comm and self._named, name.replace("_", "-").encode())
        if found is None:
            raise _no_option(name)
        return found.decode()

    @property
    def link(self) -> str:
        """How packets travel: "udp", "verbs", or "memory" with a single rank."""
        return self._get("link_name").decode()

    def _bucket(self, bucket: int) -> int:
        return _index("bucket", bucket, len(self.buckets))

    def shard(self, rank: int, bucket: int) -> slice:
        """The elements of the whole vector that a rank owns in a bucket. It may be empty."""
        offset, count = ctypes.c_size_t(), ctypes.c_size_t()
        self._get("shard", _index("rank", rank, self.ranks), self._bucket(bucket), offset, count)
        return slice(offset.value, offset.value + count.value)

    def owned(self, rank: int | None = None) -> list[slice]:
        """A rank's shards of all buckets; by default this rank's."""
        who = self.rank if rank is None else rank
        return [self.shard(who, bucket) for bucket in range(len(self.buckets))]

    # ---- a step

    def _vectors(self, vector: Any) -> Any:
        return (ctypes.c_void_p * 1)(_address(vector, self.elements, "vector"))

    def step_begin(self, step: int) -> None:
        """Starts step 0, 1, ..., the same on every rank. Collective."""
        self.agree(f"step_begin() of step {step}")
        self.step_begin_known(step)

    def step_begin_known(self, step: int) -> None:
        """The same where ranks are known to be in the same step, without a round trip."""
        self._call("step_begin", step)
        self._step, self._begun = step, (*self._begun[-1:], step)
        self._ask_rule(GRADIENT)

    def _ask_rule(self, phase: int) -> None:
        if self._rule and "reliable" in self._rule.has:
            self._lossless = self._rule.reliable(phase, self._step, self.steps, self.norm)
            self.agree(f"reliable() = {self._lossless} of step {self._step}")

    def _phase(self, name: str, *given: Any) -> None:
        """A call in which the library may call the rule, and in which other ranks may not be."""
        try:
            self._call(name, *given)
        except LossynetError as error:
            if error.status == _ELSEWHERE:
                self.agree(self.place or f"{name}() of step {self._step}")
            raise
        if self._rule:
            self._rule.check()

    def _send(self, phase: int, name: str, vector: Any) -> None:
        """A phase or its begin. Where it fails, what was begun before may go on."""
        vectors = self._vectors(vector)
        self._sent[phase].append((vector, vectors))
        self._phase(name, vectors, self._lossless)
        del self._sent[phase][:-1]

    def agree(self, name: str) -> None:
        """All ranks say which call they are in. LossynetError, on all ranks: they are not in the same. Collective."""
        text = np.frombuffer(name.encode()[:_NAME_BYTES].ljust(_NAME_BYTES), np.uint8)
        places: dict[str, list[str]] = {}
        try:
            every = self.all_gather(text, "")
        except LossynetError as error:  # another rank was in a call that does not begin with a name
            if error.status != _ELSEWHERE:
                raise
            every = self.all_gather(text, "")
        for rank, row in enumerate(every):
            places.setdefault(bytes(row).decode(errors="replace").strip(), []).append(str(rank))
        if len(places) > 1:
            said = "; ".join(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)} in {place}"
                             for place, ranks in places.items())
            raise LossynetError(f"lossynet: ranks make different calls: {said}: expected the same collective calls on "
                                "all ranks, in the same order; what one rank does alone, it does after them",
                                "elsewhere")

    def reduce_begin(self, vector: Any) -> None:
        """From now on buckets leave when they are ready. ``reduce`` of the same vector must follow."""
        self._send(GRADIENT, "reduce_begin", vector)

    def bucket_ready(self, bucket: int) -> None:
        """This rank's vector is final in a bucket. Buckets become ready in ascending order."""
        self._phase("bucket_ready", self.rank, self._bucket(bucket))

    def reduce(self, vector: Any) -> None:
        """GRADIENT phase: this rank's shards of ``vector`` (elements float32, changed in place) become the
        average of what arrived. With ``carry`` other elements change, too. Collective."""
        self._send(GRADIENT, "reduce", vector)

    def broadcast(self, vector: Any) -> None:
        """PARAMETER phase: every rank sends its shards of ``vector``; what arrives overwrites, what does not
        arrive stays. Collective."""
        self._ask_rule(PARAMETER)
        self._send(PARAMETER, "broadcast", vector)

    def broadcast_begin(self, vector: Any) -> None:
        """The same in parts: until ``broadcast_end`` only buckets that were waited for may be read, and what
        this rank owns must not be written before the next ``reduce`` has returned. Collective."""
        self._ask_rule(PARAMETER)
        self._send(PARAMETER, "broadcast_begin", vector)

    def bucket_wait(self, bucket: int) -> None:
        """Waits until no more of a bucket can arrive. The last bucket arrives first."""
        self._call("bucket_wait", self._bucket(bucket), None)

    def broadcast_end(self) -> None:
        """Ends what ``broadcast_begin`` began, if anything. Collective."""
        self._phase("broadcast_end")

    def carry(self, on: bool) -> None:
        """Whether the next ``reduce`` adds what was lost of earlier gradients (option ``carry``). A gradient that was
        not finite was lost, and the next step should be made without it: False then. The same on all ranks."""
        share = float(self.option("carry").replace("auto", "1"))
        self._get("error_feedback_share", share if on else 0.0)

    def lead(self) -> float:
        """How many steps ahead of the model owners should broadcast (options ``lead``, ``look_ahead``)."""
        measured = self._get("lead") if self.option("lead") == "auto" else 0.0
        return measured + float(self.option("look_ahead")) if self.ranks > 1 else 0.0

    def broadcast_ahead(self, ahead: Any | None, lead: float) -> None:
        """From now on broadcasts send ``ahead`` (owned elements, float32, in order of buckets) instead of the
        shards; None: the shards again. Its contents must stay until the next ``reduce`` has returned."""
        count = self._get("owned_elements", self.rank)
        self._ahead = None if ahead is None else (
            ahead, (ctypes.c_void_p * 1)(_address(ahead, count, "ahead", changes=False)))
        self._get("broadcast_ahead", self._ahead and self._ahead[1], lead)

    # ---- reliable exchanges

    def start(self, vector: Any) -> None:
        """Rounds equal vectors as a broadcast with ``wire_dtype`` would have left them."""
        self._get("round_as_sent", self._vectors(vector))

    def gather_fresh(self, vector: Any, fresh: Any) -> None:
        """Puts the shards of all ranks' ``vector`` together in ``fresh`` (elements float32), on every rank.
        Nothing is lost. Collective."""
        if np.may_share_memory(_array(vector, self.elements, "vector"), _array(fresh, self.elements, "fresh")):
            raise ValueError("lossynet: fresh is a part of vector: expected other memory")
        self.agree("gather_fresh()")
        self._call("gather_fresh", self._vectors(vector), _address(fresh, self.elements, "fresh"))

    def spread(self, vector: Any) -> None:
        """Gives every rank rank 0's ``vector``. Nothing is lost. Collective."""
        self.agree("spread()")
        self.spread_bytes(_array(vector, self.elements, "vector").reshape(-1).view(np.uint8))

    def spread_bytes(self, content: np.ndarray) -> None:
        """The same with an array of uint8 of any length, equal on all ranks."""
        for begin in range(0, len(content), _SPREAD_BYTES):
            part, gives = content[begin:begin + _SPREAD_BYTES], self.rank == 0
            self._swap(np.tile(part, self.ranks) if gives else part, [part.nbytes * gives] * self.ranks,
                       part, [part.nbytes, *[0] * (self.ranks - 1)])

    def all_gather(self, mine: np.ndarray, name: str | None = None) -> np.ndarray:
        """A small array of each rank: (ranks, *mine.shape). Nothing is lost. name: of the call, for errors, or empty
        where all ranks are known to call it. Collective."""
        mine = _numbers(mine)
        if name != "":
            self.agree(name or f"all_gather() of {mine.dtype} {mine.shape}")
        result = np.empty((self.ranks, *mine.shape), mine.dtype)
        sizes = [mine.nbytes] * self.ranks
        self._swap(np.tile(mine.reshape(-1), self.ranks), sizes, result, sizes)
        return result

    def _swap(self, gives: np.ndarray, given: list[int], takes: np.ndarray, taken: list[int]) -> None:
        """given: bytes for each rank, which lie in gives one after the other; taken: from each rank."""
        offsets = [(ctypes.c_size_t * (self.ranks + 1))(0, *itertools.accumulate(sizes)) for sizes in (given, taken)]
        self._call("swap", gives.ctypes.data, offsets[0], takes.ctypes.data, offsets[1])

    def pulse(self, mine: np.ndarray, name: str | None = None) -> np.ndarray:
        """The all_gather that a step makes once; it carries the step's measurements. name: as in all_gather, or empty
        where all ranks are known to call it, which takes half a round trip less. Collective."""
        mine = _numbers(mine)
        if name != "":
            self.agree(name or f"pulse() of {mine.dtype} {mine.shape}")
        result = np.empty((self.ranks, *mine.shape), mine.dtype)
        self._phase("pulse", mine.ctypes.data, result.ctypes.data, mine.nbytes)
        return result

    def not_finite(self) -> NotFinite | None:
        """What the last pulse told of numbers that no receiver takes, the same on every rank: the first rank that
        has one in what it sends (its gradient, or the parameters that it owns), and where. None: there is none.
        Such a step should be made without an update; the next one goes on."""
        found = NotFinite()
        return found if self._get("is_not_finite", found) else None

    # ---- accounting

    def counters(self, step: int) -> dict[str, Any]:
        """What became of the packets of a step whose broadcast has ended: this one or the one before.
        ``lost``: shares by phase. Collective."""
        counters = Counters()
        if step not in self._begun:
            raise ValueError(f"lossynet: counters of step {step}: expected the present step or the one before, "
                             f"{' or '.join(map(str, self._begun[::-1])) or 'after step_begin()'}")
        self.agree("counters()")
        self._call("step_counters", step, counters)
        return _counters(counters)

    def report_begin(self, step: int, vector: Any) -> None:
        """Measures the step whose broadcast has ended; ``report_end`` computes. A pulse in between
        carries the measurements. Collective."""
        self._call("report_begin", step, self._vectors(vector))

    def report_end(self) -> dict[str, Any]:
        """``counters``, and drift and ages of the step of ``report_begin``. Collective."""
        counters, drift = Counters(), Drift()
        self._phase("report_end", counters, drift)
        names = ("lead", "lag", "mean_age", "max_age", "sigma2")
        return {**_counters(counters), "drift": drift.pair, "drift_expected": drift.expected_pair,
                **{name: getattr(drift, name) for name in names}}

    def lost_between(self) -> np.ndarray:
        """(ranks, ranks) float32: [r, s] is the share of packets from rank s to rank r that was lost since
        the comm was opened. Collective."""
        lost = np.empty((self.ranks, self.ranks), np.float32)
        self.agree("lost_between()")
        self._call("lost_between", lost.ctypes.data)
        return lost

    # ---- state, for resuming

    def state(self) -> dict[str, bytes]:
        """What the comm remembers from step to step. Between steps only."""
        state = {}
        for name, worker in (("worker", self.rank), ("all", _ALL_WORKERS)):
            buffer = ctypes.create_string_buffer(self._get("state_bytes", worker))
            self._get("state_save", worker, buffer)
            state[name] = buffer.raw
        return state

    def load_state(self, state: dict[str, bytes]) -> None:
        """Loads ``state()`` into a comm that has made no step. ValueError: it is of another one."""
        for name, worker in (("worker", self.rank), ("all", _ALL_WORKERS)):
            held = state.get(name) if isinstance(state, dict) else None
            if not isinstance(held, bytes) or not self._get("state_load", worker, held, len(held)):
                raise ValueError(f"lossynet: state of rank {self.rank}: it is of a comm with other ranks, "
                                 "buckets, packets or seed: expected the same settings")


def _gather_at_start(world: World, mine: bytes) -> list[bytes]:
    each = len(mine)
    everything = ctypes.create_string_buffer(each * world.ranks)
    everything[world.rank * each:(world.rank + 1) * each] = mine
    call("bootstrap_gather", world, everything, each)
    return [everything.raw[r * each:(r + 1) * each] for r in range(world.ranks)]


def _counters(counters: Counters) -> dict[str, Any]:
    expected, arrived = list(counters.expected), list(counters.arrived)
    lost = [1 - a / e if e else 0.0 for a, e in zip(arrived, expected)]
    return {"expected": expected, "arrived": arrived, "lost": lost, "bytes": list(counters.bytes),
            "resent": list(counters.resent), **dict(zip(EVENT_NAMES, counters.network))}


def _close(named: int, handle: ctypes.c_void_p, world: World, process: int, busy: threading.Lock) -> None:
    if os.getpid() != process or not busy.acquire(blocking=False):
        return  # in a forked process, such as a DataLoader's worker: the comm is the parent's; or a thread is in a call
    if handle:
        get("close", handle)
        handle.value = None
    get("named_close", named)
    get("rendezvous_close", world)
    tell()
