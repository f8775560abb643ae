"""A rule of your own about loss: what owners make of the gradients that arrived, and receivers of parameters."""
from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from ctypes import POINTER, c_bool, c_double, c_float, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from typing import Any

import numpy as np


class Part(ctypes.Structure):
    """What one owner has of a bucket: each function of a rule is called about one. ``offset``: of its ``count``
    elements in the whole vector. ``packet``: elements of a packet; the last one may have fewer."""
    _fields_ = [("step", c_uint64), ("workers", c_int), ("owner", c_int), ("bucket", c_int), ("offset", c_size_t),
                ("count", c_size_t), ("packet", c_size_t), ("packets", c_size_t)]  # struct lossynet_rule_part

    @property
    def elements(self) -> slice:
        """Of the whole vector."""
        return slice(self.offset, self.offset + self.count)

    def spread(self, of_packets: np.ndarray) -> np.ndarray:
        """A value for each packet, (..., packets), as one for each element, (..., count)."""
        wide = np.broadcast_to(np.expand_dims(of_packets, -1), (*np.shape(of_packets), self.packet))
        return wide.reshape(*wide.shape[:-2], -1)[..., :self.count]


class Rule:
    """What to do about loss, in place of the library's rule. A subclass has one or more of these methods; what it
    leaves out is the library's. Give an object to ``Comm`` or ``ShardedOptimizer`` as ``rule=``, on all ranks.
    Arrays are float32 unless said otherwise; ``values`` is there for the call alone. What a method raises, the call
    raises in which the library needed it."""

    def send(self, part: Part, worker: int, values: np.ndarray) -> None:
        """May change ``values`` (count) in place: what ``worker``, this rank, sends to an owner, or keeps as one.
        Not with ``carry``."""

    def average(self, part: Part, gradients: np.ndarray, arrived: np.ndarray, carried: np.ndarray) -> np.ndarray:
        """Returns the average (count) of ``gradients`` (workers, count), which are 0 where a packet was lost.
        ``arrived`` (workers, packets), bool: where it was not. ``carried`` (workers, packets): how many earlier
        gradients a packet holds besides (with ``carry``)."""

    def receive(self, part: Part, worker: int, values: np.ndarray, age: np.ndarray) -> None:
        """May change ``values`` (count) in place: another owner's parameters, as this rank has them after a
        broadcast. ``age`` (packets), uint32: how many broadcasts ago a packet last arrived; 0: just now."""

    def reliable(self, phase: int, step: int, steps: int, norm: float) -> bool:
        """Whether nothing is to be lost in this phase (``GRADIENT`` or ``PARAMETER``) of a step. ``steps``: of the
        run, 0: not known. ``norm``: of the averaged gradient, before PARAMETER that of this step, else of the last;
        NaN: not known. The same on all ranks, and so must be what it returns."""


_CALLBACKS = {
    "send": ctypes.CFUNCTYPE(None, c_void_p, POINTER(Part), c_int, c_void_p),
    "average": ctypes.CFUNCTYPE(None, c_void_p, POINTER(Part), POINTER(c_void_p), c_void_p, c_void_p, c_void_p),
    "receive": ctypes.CFUNCTYPE(None, c_void_p, POINTER(Part), c_int, c_void_p, c_void_p),
    "reliable": ctypes.CFUNCTYPE(c_bool, c_void_p, c_int, c_uint64, c_uint64, c_double)}


class Functions(ctypes.Structure):
    """struct lossynet_rule."""
    _fields_ = [("size", c_size_t), ("context", c_void_p), *_CALLBACKS.items()]


def _view(address: int, count: int, kind: type) -> np.ndarray:
    """Memory of the library as an array."""
    return np.frombuffer((kind * count).from_address(address), kind)


class Bound:
    """A rule as the library calls it. It must live as long as the comm."""

    def __init__(self, rule: Rule):
        if not isinstance(rule, Rule):
            raise TypeError(f"lossynet: rule={rule!r}: expected an object of a subclass of lossynet.Rule")
        self.rule, self.failed = rule, None
        self.has = {name for name in _CALLBACKS if getattr(getattr(rule, name), "__func__", None) is not getattr(Rule, name)}
        if not self.has:
            raise TypeError(f"lossynet: rule={rule!r}: expected one of the methods {', '.join(_CALLBACKS)}")
        np.empty(1 << 24, np.uint8)  # glibc keeps as much from then on, so that arrays of each step are not new pages
        self.functions = Functions(size=ctypes.sizeof(Functions))
        for name in self.has - {"reliable"}:  # Comm asks that before each phase
            setattr(self.functions, name, _CALLBACKS[name](self._guard(getattr(self, f"_{name}"))))

    def _guard(self, function: Callable[..., None]) -> Callable[..., None]:
        """An exception cannot pass through the library: it is kept for ``check``."""
        def guarded(*arguments: Any) -> None:
            try:
                function(*arguments)
            except BaseException as error:  # pylint: disable=broad-exception-caught
                self.failed = self.failed or error
        return guarded

    def check(self) -> None:
        """Raises what a method of the rule has raised."""
        if self.failed is not None:
            error, self.failed = self.failed, None
            self._refuse_exit(error)
            raise error

    def _refuse_exit(self, error: BaseException) -> None:
        """sys.exit() in a rule would end an unfinished run as if it had succeeded."""
        if isinstance(error, SystemExit):
            raise RuntimeError(f"lossynet: {type(self.rule).__name__} called exit(): expected its methods to "
                               "return") from error

    def _refuse_kept(self, array: np.ndarray, method: str) -> None:
        """Later its memory may be gone."""
        if sys.getrefcount(array) > 3:  # here, in the caller, and as an argument
            raise RuntimeError(f"lossynet: {type(self.rule).__name__}.{method} keeps `values`: expected values.copy()")

    def reliable(self, *given: Any) -> bool:
        """The rule's method, which Comm calls itself."""
        try:
            return bool(self.rule.reliable(*given))
        except SystemExit as error:
            self._refuse_exit(error)
            raise

    def _send(self, _context: Any, pointer: Any, worker: int, values: int) -> None:
        part = Part.from_buffer_copy(pointer.contents)
        array = _view(values, part.count, c_float)
        self.rule.send(part, worker, array)
        self._refuse_kept(array, "send")

    def _average(self, _context: Any, pointer: Any, gradients: Any, arrived: int, carried: int, average: int) -> None:
        part = Part.from_buffer_copy(pointer.contents)
        shape = part.workers, part.packets
        came = _view(arrived, shape[0] * shape[1], c_uint8).reshape(shape).astype(bool)
        matrix = np.stack([_view(gradients[sender], part.count, c_float) for sender in range(part.workers)])
        np.copyto(matrix, 0, where=part.spread(~came))
        made = self.rule.average(part, matrix, came, _view(carried, shape[0] * shape[1], c_float).reshape(shape).copy())
        found = np.asarray(made)
        if made is None or found.shape != (part.count,) or found.dtype.kind not in "fiu":
            raise ValueError(f"lossynet: {type(self.rule).__name__}.average returned " + (
                "None" if made is None else f"{found.dtype} of the shape {found.shape}") +
                f": expected {part.count} numbers, the average of each element")
        _view(average, part.count, c_float)[:] = found

    def _receive(self, _context: Any, pointer: Any, worker: int, age: int, values: int) -> None:
        part = Part.from_buffer_copy(pointer.contents)
        array = _view(values, part.count, c_float)
        self.rule.receive(part, worker, array, _view(age, part.packets, c_uint32).copy())
        self._refuse_kept(array, "receive")
