"""Loads liblossynet.so and declares the functions of lossynet.h that the package calls (ctypes).

The library is the one that pip built into the package, or the file that the environment variable
LOSSYNET_LIBRARY names. Nothing of the library's logic is repeated here.
"""
from __future__ import annotations

import ctypes
import logging
import operator
import os
import pathlib
import sys
from ctypes import c_bool, c_char_p, c_double, c_float, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any

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


def _whole(kind: Any) -> type:
    """A whole number as an argument. ctypes alone would wrap one that does not fit."""
    class Whole(kind):  # pylint: disable=too-few-public-methods
        """What ctypes calls for each argument."""
        @classmethod
        def from_param(cls, value: Any) -> Any:
            """Also takes numbers of NumPy."""
            number = operator.index(value)
            if kind(number).value != number:
                bits = 8 * ctypes.sizeof(kind) - (kind(-1).value < 0)
                raise ValueError(f"lossynet: {number}: expected a whole number up to 2**{bits} - 1" +
                                 ", 0 or more" * (kind(-1).value > 0))
            return kind(number)
    return Whole


# The functions of lossynet.h by what they return, with a letter for each argument. Those with an int return a status.
_LETTERS = {"i": _whole(c_int), "d": c_double, "n": _whole(c_size_t), "q": _whole(c_uint64), "b": c_bool, "t": c_char_p,
            "p": c_void_p}
_FUNCTIONS = {
    c_int: "rendezvous_open:tiidp bootstrap_gather:ppn named_set:ptt named_tensor:ptnn open:ppp step_begin:pq "
           "reduce:ppb reduce_begin:ppb bucket_ready:pii broadcast:ppb broadcast_begin:ppb bucket_wait:pip "
           "broadcast_end:p gather_fresh:ppp pulse:pppn swap:ppppp step_counters:pqp report_begin:pqp "
           "report_end:ppp lost_between:pp",
    None: "messages_to:pp rendezvous_close:p named_close:p named_rule:pp named_shards:pp close:p shard:piipp "
          "round_as_sent:pp broadcast_ahead:ppd error_feedback_share:pd state_save:pip",
    c_char_p: "version: status_string:i named_get:pt named_name:i link_name:p",
    c_size_t: "struct_bytes:t owned_elements:pi state_bytes:pi",
    c_void_p: "named_open:ip named_settings:pi",
    c_double: "lead:p",
    c_bool: "is_not_finite:pp state_load:pipn",
}
_LOG = ctypes.CFUNCTYPE(None, c_void_p, c_char_p)
_messages: list[bytes] = []  # what the library has said since the last call returned
# It must live as long as the library. Not a function of Python's, in which a Ctrl-C would be raised and lost; the
# first argument is the context below.
_keep = _LOG(_messages.insert)


def _load() -> ctypes.CDLL:
    path = os.environ.get("LOSSYNET_LIBRARY") or pathlib.Path(__file__).with_name("liblossynet.so")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"cannot load {path}: {error}: expected `pip install ./lossynet/python` in the "
                          "repository, or LOSSYNET_LIBRARY=FILE") from error
    for result, functions in _FUNCTIONS.items():
        for name, letters in (each.split(":") for each in functions.split()):
            function = getattr(library, f"lossynet_{name}")
            function.restype, function.argtypes = result, [_LETTERS[letter] for letter in letters]
    for name, ours in (("world", World), ("counters", Counters), ("drift", Drift), ("not_finite", NotFinite)):
        size = library.lossynet_struct_bytes(name.encode())
        if size != ctypes.sizeof(ours):
            raise ImportError(f"{path}: struct lossynet_{name} has {size} bytes, expected "
                              f"{ctypes.sizeof(ours)}: the library is of another version than the package")
    library.lossynet_messages_to(_keep, sys.maxsize)
    return library


LIBRARY = _load()


def tell() -> None:
    """Hands the library's messages to the logger "lossynet"."""
    while _messages:
        LOGGER.warning("%s", _messages.pop(0).decode(errors="replace"))


def call(name: str, *arguments: object) -> None:
    """Calls lossynet_<name>, which returns a status. Raises LossynetError if it fails."""
    must(name, get(name, *arguments))


def must(name: str, status: int) -> None:
    """Raises LossynetError if lossynet_<name> has failed."""
    if status:
        text = get("status_string", status).decode()
        said, _messages[:] = "; ".join(each.decode(errors="replace") for each in _messages), []
        raise LossynetError(said or f"lossynet_{name}: {text}", text)
    tell()


def get(name: str, *arguments: object):
    """Calls lossynet_<name>, which cannot fail, and returns its result. Structs and numbers to be filled in are given
    as they are."""
    return getattr(LIBRARY, f"lossynet_{name}")(*(
        ctypes.byref(given) if isinstance(given, (ctypes.Structure, c_size_t)) else given for given in arguments))
