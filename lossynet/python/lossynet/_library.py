"""Loads liblossynet.so and declares the functions of lossynet.h that the package calls (ctypes).

The library is the one that pip built into the package, or the file that the environment variable
LOSSYNET_LIBRARY names. Nothing of the library's logic is repeated here.
"""
from __future__ import annotations

import ctypes
import logging
import os
import pathlib
from ctypes import POINTER, c_bool, c_char_p, c_double, c_float, c_int, c_size_t, c_uint32, c_uint64, c_void_p

LOGGER = logging.getLogger("lossynet")
LAGS, AGES = 16, 8
EVENT_NAMES = ("late", "duplicates", "rejected", "overruns", "stragglers", "pace", "relayed")


class LossynetError(RuntimeError):
    """A call of the library failed. The text says what happened, where, and what was expected; where
    another rank is the cause, it names the rank. ``status``: the library's status string."""

    def __init__(self, text: str, status: str = ""):
        super().__init__(text)
        self.status = status


class World(ctypes.Structure):
    """struct lossynet_world."""
    _fields_ = [("rank", c_int), ("ranks", c_int), ("local_rank", c_int), ("local_ranks", c_int),
                ("share", c_void_p), ("share_context", c_void_p)]


class Counters(ctypes.Structure):
    """struct lossynet_counters."""
    _fields_ = [("expected", c_uint64 * 2), ("arrived", c_uint64 * 2), ("bytes", c_uint64 * 2),
                ("resent", c_uint64 * 2), ("network", c_uint64 * len(EVENT_NAMES))]


class Drift(ctypes.Structure):
    """struct lossynet_drift."""
    _fields_ = [("pair", c_double), ("owner", c_double), ("sigma2", c_double), ("rho", c_double * LAGS),
                ("expected_pair", c_double), ("expected_owner", c_double), ("paper_pair", c_double),
                ("lead", c_double), ("lag", c_double), ("mean_age", c_double), ("max_age", c_uint32),
                ("age_share", c_double * AGES)]


class NotFinite(ctypes.Structure):
    """struct lossynet_not_finite."""
    _fields_ = [("workers", c_int), ("worker", c_int), ("phase", c_int), ("element", c_uint64), ("value", c_float)]

    def __str__(self) -> str:
        others = f", and {self.workers - 1} other ranks have such numbers" if self.workers > 1 else ""
        return f"the {'parameters' if self.phase else 'gradient'} of rank {self.worker} is {self.value:g} in element " \
               f"{self.element}{others}"


_VECTORS = POINTER(c_void_p)
_LOG = ctypes.CFUNCTYPE(None, c_void_p, c_char_p)
_STATUS_FUNCTIONS = {  # arguments of the functions that return a status
    "rendezvous_open": (c_char_p, c_int, c_int, c_double, POINTER(World)),
    "bootstrap_gather": (POINTER(World), c_void_p, c_size_t),
    "named_set": (c_void_p, c_char_p, c_char_p),
    "named_tensor": (c_void_p, c_char_p, c_size_t, c_size_t),
    "open": (POINTER(World), c_void_p, POINTER(c_void_p)),
    "step_begin": (c_void_p, c_uint64),
    "reduce": (c_void_p, _VECTORS, c_bool),
    "reduce_begin": (c_void_p, _VECTORS, c_bool),
    "broadcast": (c_void_p, _VECTORS, c_bool),
    "broadcast_begin": (c_void_p, _VECTORS, c_bool),
    "bucket_wait": (c_void_p, c_int, POINTER(c_double)),
    "broadcast_end": (c_void_p,),
    "gather_fresh": (c_void_p, _VECTORS, c_void_p),
    "all_gather": (c_void_p, c_void_p, c_void_p, c_size_t),
    "pulse": (c_void_p, c_void_p, c_void_p, c_size_t),
    "swap": (c_void_p, c_void_p, POINTER(c_size_t), c_void_p, POINTER(c_size_t)),
    "step_counters": (c_void_p, c_uint64, POINTER(Counters)),
    "report_begin": (c_void_p, c_uint64, _VECTORS),
    "report_end": (c_void_p, POINTER(Counters), POINTER(Drift)),
    "lost_between": (c_void_p, c_void_p),
}
_OTHER_FUNCTIONS = {
    "version": (c_char_p,),
    "status_string": (c_char_p, c_int),
    "struct_bytes": (c_size_t, c_char_p),
    "messages_to": (None, _LOG, c_void_p),
    "rendezvous_close": (None, POINTER(World)),
    "named_open": (c_void_p, c_int, POINTER(c_size_t)),
    "named_close": (None, c_void_p),
    "named_get": (c_char_p, c_void_p, c_char_p),
    "named_name": (c_char_p, c_int),
    "named_rule": (None, c_void_p, c_void_p),
    "named_shards": (None, c_void_p, POINTER(c_size_t)),
    "named_settings": (c_void_p, c_void_p, c_int),
    "close": (None, c_void_p),
    "shard": (None, c_void_p, c_int, c_int, POINTER(c_size_t), POINTER(c_size_t)),
    "owned_elements": (c_size_t, c_void_p, c_int),
    "link_name": (c_char_p, c_void_p),
    "packet_bytes": (c_size_t, c_void_p),
    "round_as_sent": (None, c_void_p, _VECTORS),
    "bucket_ready": (None, c_void_p, c_int, c_int),
    "broadcast_ahead": (None, c_void_p, _VECTORS, c_double),
    "error_feedback_share": (None, c_void_p, c_double),
    "lead": (c_double, c_void_p),
    "is_not_finite": (c_bool, c_void_p, POINTER(NotFinite)),
    "state_bytes": (c_size_t, c_void_p, c_int),
    "state_save": (None, c_void_p, c_int, c_void_p),
    "state_load": (c_bool, c_void_p, c_int, c_void_p, c_size_t),
}

_messages: list[str] = []  # what the library has said since the last call returned


def _keep_message(_context: object, message: bytes) -> None:
    _messages.append(message.decode(errors="replace"))


_keep = _LOG(_keep_message)  # it must live as long as the library


def _load() -> ctypes.CDLL:
    path = os.environ.get("LOSSYNET_LIBRARY") or pathlib.Path(__file__).with_name("liblossynet.so")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"cannot load {path}: {error}: expected `pip install ./lossynet/python` in the "
                          "repository, or LOSSYNET_LIBRARY=FILE") from error
    for name, arguments in _STATUS_FUNCTIONS.items():
        function = getattr(library, f"lossynet_{name}")
        function.restype, function.argtypes = c_int, arguments
    for name, (result, *arguments) in _OTHER_FUNCTIONS.items():
        function = getattr(library, f"lossynet_{name}")
        function.restype, function.argtypes = result, arguments
    for name, ours in (("world", World), ("counters", Counters), ("drift", Drift), ("not_finite", NotFinite)):
        size = library.lossynet_struct_bytes(name.encode())
        if size != ctypes.sizeof(ours):
            raise ImportError(f"{path}: struct lossynet_{name} has {size} bytes, expected "
                              f"{ctypes.sizeof(ours)}: the library is of another version than the package")
    library.lossynet_messages_to(_keep, None)
    return library


LIBRARY = _load()


def tell() -> None:
    """Hands the library's messages to the logger "lossynet"."""
    while _messages:
        LOGGER.warning("%s", _messages.pop(0))


def call(name: str, *arguments: object) -> None:
    """Calls lossynet_<name>, which returns a status. Raises LossynetError if it fails."""
    status = getattr(LIBRARY, f"lossynet_{name}")(*arguments)
    if status:
        text = LIBRARY.lossynet_status_string(status).decode()
        said, _messages[:] = "; ".join(_messages), []
        raise LossynetError(said or f"lossynet_{name}: {text}", text)
    if _messages:
        tell()


def get(name: str, *arguments: object):
    """Calls lossynet_<name>, which cannot fail, and returns its result."""
    return getattr(LIBRARY, f"lossynet_{name}")(*arguments)
