"""The state of a ShardedOptimizer: each rank's part, or the whole, to save and to go on from."""
from __future__ import annotations

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch

from . import _touch
from ._model import checksum, settings


class OfPieces(defaultdict):
    """``optimizer.state``: of this rank's pieces. Whoever asks for that of a whole parameter is told."""


def _by_piece(name: str) -> Callable[..., Any]:
    def method(self: OfPieces, key: Any, *given: Any) -> Any:
        if id(key) in _touch.OWNERS:
            raise RuntimeError("lossynet: optimizer.state[p]: every rank has the state of its shards alone: expected "
                               "optimizer.gathered_state_dict(), and optimizer.load_state_dict() to change it")
        return getattr(defaultdict, name)(self, key, *given)
    return method


for _name in ("__getitem__", "__setitem__", "__delitem__", "__contains__", "get", "pop", "setdefault"):
    setattr(OfPieces, _name, _by_piece(_name))


class OfRank(OrderedDict):
    """What ``state_dict()`` returns; a plain OrderedDict when saved. Who takes it for a plain optimizer's is told."""

    def __missing__(self, key: Any) -> None:
        raise KeyError(f"lossynet: {key!r} in state_dict(), which is this rank's part: expected "
                       "optimizer.gathered_state_dict(), which is that of a plain optimizer, or optimizer.param_groups")

    def __reduce__(self) -> Any:
        return OrderedDict, (), None, None, iter(self.items())


class Saved:
    """The part of ShardedOptimizer that saves and loads."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's part: its shards, and what the comm remembers. With the rank's own
        ``model.state_dict()`` a run of as many ranks continues as if it had not stopped. Collective."""
        self._rest("state_dict()")
        return OfRank({"lossynet": {"step": self.steps, "rank": self.comm.rank, "ranks": self.comm.ranks,
                                    "equal": self._equal, "comm": self.comm.state()},
                       "optimizer": self.optimizer.state_dict(),
                       "values": [self._values[shard].clone() for shard in self._owned]})

    def gathered_state_dict(self) -> dict[str, Any]:
        """The state of all shards put together, as ``optimizer_class`` on the whole parameters would return
        it, on every rank. Any number of ranks can load it. Collective."""
        self._rest("gathered_state_dict()")
        if None in self._state_names.values():
            raise ValueError("lossynet: the optimizer's state has other shapes than the parameters: expected "
                             "state_dict() instead of gathered_state_dict()")
        plain = torch.optim.Optimizer([dict(group) for group in self.param_groups], {})
        for key in sorted(self._state_names):
            mine, whole = torch.full_like(self._values, torch.nan), torch.empty_like(self._values)
            for entry in self._entries:
                for where, piece, _ in entry.pieces:
                    held = self.optimizer.state.get(piece, {}).get(key)
                    if held is not None:  # a number: the same in each element
                        mine[where] = torch.as_tensor(held, dtype=torch.float32).flatten()
            self.comm.gather_fresh(mine, whole)
            for entry in self._entries:
                part = whole[entry.place]
                if not part.isnan().all():  # no rank has any where the parameter has had no gradient
                    value = part.view(entry.parameter.shape) if self._state_names[key] else part[0]
                    plain.state[entry.parameter][key] = value.clone()
        return plain.state_dict()

    def __getstate__(self) -> None:
        raise TypeError("lossynet: a ShardedOptimizer cannot be copied or saved: expected its state_dict(), or "
                        "gathered_state_dict()")

    def _hook(self, *_given: Any, **_more: Any) -> None:
        raise RuntimeError("lossynet: hooks of state_dict(): expected the change where it is called")

    register_state_dict_pre_hook = register_state_dict_post_hook = _hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = _hook

    def _facts_of_state(self) -> list[Any]:
        return [(id(value), value._version) if torch.is_tensor(value) else value
                for held in self.optimizer.state.values() for value in held.values()]

    def _state_written(self) -> float:
        """Whether the script has changed the state; NaN: there is none."""
        return float(self._facts_of_state() != self._state_facts) if self._state_facts else math.nan

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads ``state_dict()`` of the same rank of as many, before the first step, or
        ``gathered_state_dict()``. Load the model before. ValueError: it does not fit. Collective."""
        self._rest("load_state_dict()", loads=True)
        self._sum = None
        keys = list(state_dict) if isinstance(state_dict, dict) else type(state_dict).__name__
        if not ({"lossynet", "optimizer", "values"} == set(keys) or {"state", "param_groups"} <= set(keys)):
            raise ValueError(f"lossynet: load_state_dict() of {keys[:20]}: expected what state_dict() or "
                             "gathered_state_dict() has returned")
        if "lossynet" in state_dict:
            self._load_shards(state_dict)
        else:
            self._load_gathered(state_dict)
        self.state = self.optimizer.state
        self._state_facts = self._facts_of_state()
        self._show(self._values)
        for shard, values, _ in self._masters:
            values.copy_(self._values[shard])
        for group, shards in zip(self.param_groups, self.optimizer.param_groups):
            group.update(settings(shards))

    def _load_shards(self, state_dict: dict[str, Any]) -> None:
        of = state_dict["lossynet"]
        if (of["rank"], of["ranks"]) != (self.comm.rank, self.comm.ranks):
            raise ValueError(f"lossynet: state of rank {of['rank']} of {of['ranks']}: expected that of rank "
                             f"{self.comm.rank} of {self.comm.ranks}, or gathered_state_dict()")
        self.comm.agree(f"load_state_dict() of step {of['step']}")
        self.comm.load_state(of["comm"])
        self.optimizer.load_state_dict(state_dict["optimizer"])
        for shard, values in zip(self._owned, state_dict["values"]):
            self._values[shard] = values
        self.steps = of["step"]
        self._equal &= of.get("equal", False)  # replicas are those that the run had

    def _load_gathered(self, state_dict: dict[str, Any]) -> None:
        held = [value for _, each in sorted(state_dict["state"].items()) for value in each.values()]
        self.comm.agree(f"load_state_dict() of {len(held)} values with the checksum "
                        f"{sum(checksum(torch.as_tensor(value)) for value in held):x}")
        theirs, ours = ([len(group["params"]) for group in groups]
                        for groups in (state_dict["param_groups"], self.param_groups))
        if theirs != ours:
            raise ValueError(f"lossynet: state of groups with {theirs} parameters: expected {ours}")
        self._state_names = names = self._names_that_fit(state_dict)
        inner = self.optimizer.state_dict()
        numbers = {id(p): number for number, p in enumerate(p for group in self.param_groups for p in group["params"])}
        pieces = [piece for group in self.optimizer.param_groups for piece in group["params"]]
        order = {id(piece): number for number, piece in enumerate(pieces)}
        for entry in self._entries:
            whole = state_dict["state"].get(numbers[id(entry.parameter)], {})
            for key, value in whole.items():
                if names.get(key) and value.shape != entry.parameter.shape:
                    raise ValueError(f"lossynet: state {key} of {entry.words} of shape {tuple(value.shape)}: expected "
                                     f"{tuple(entry.parameter.shape)}")
            for where, piece, _ in entry.pieces:
                part = slice(where.start - entry.place.start, where.stop - entry.place.start)
                inner["state"][order[id(piece)]] = {
                    key: value.flatten()[part].view(piece.shape).clone() if names.get(key) else value
                    for key, value in whole.items()}
        for group, loaded in zip(inner["param_groups"], state_dict["param_groups"]):
            group.update(settings(loaded))
        self.optimizer.load_state_dict(inner)

    def _names_that_fit(self, state_dict: dict[str, Any]) -> dict[str, bool | None]:
        """Of the state that the optimizer has with the loaded settings. ValueError: what is loaded is another's."""
        groups = state_dict["param_groups"]
        lacking = sorted({name for name, value in self.defaults.items() if type(value) in (int, float, tuple)
                          and not all(name in group for group in groups)})
        names = {} if lacking else self._names_of([
            {**group, "params": own["params"]} for group, own in zip(groups, self.param_groups)])
        for held in state_dict["state"].values():
            given = {name for name, value in held.items() if value is not None}
            if not lacking and given and (given - names.keys() or None not in names.values()):
                lacking = sorted(given ^ names.keys())  # None: the names depend on the shape
        if lacking:
            raise ValueError("lossynet: load_state_dict() of another optimizer, which differs in "
                             f"{', '.join(lacking)}: expected the state of {type(self.optimizer).__name__}")
        return names
