"""Notices when a script touches a tensor that is not what DistributedDataParallel would show.

Between backward() and step() ``p.grad`` is this rank's gradient alone, a ``Sent``: whoever reads or changes it
gets the average of all ranks. Outside forward passes parameters are ``Watched``: after step() they may still be
arriving, so that whoever touches them waits, and who writes them is remembered. Both see every call of PyTorch's
Python interface (``__torch_function__``), ``.data`` included, and of functions of ``torch.jit.script``.
"""
from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

# What may be asked without a look at the elements: properties, and these.
_FACTS = {name for name, _ in inspect.getmembers(torch._C.TensorBase, inspect.isgetsetdescriptor)} - {
    "data", "T", "mT", "H", "mH", "real", "imag"} | {
    "grad=", "requires_grad=", "requires_grad_", "size", "dim", "numel", "nelement", "stride", "element_size",
    "is_floating_point", "is_complex", "is_contiguous", "__hash__", "__len__", "register_hook", "_backward_hooks=",
    "register_post_accumulate_grad_hook", "retain_grad", "_has_compatible_shallow_copy_type", "is_shared",
    "zeros_like", "ones_like", "empty_like"}
# What gives access to the memory itself.
_MEMORY = {"data", "data=", "detach", "numpy", "data_ptr", "storage", "untyped_storage", "__array__", "__dlpack__",
           "set_", "share_memory_"}
_CONVERSIONS = {"cpu", "cuda", "to", "float", "half", "bfloat16", "double", "data="}
OWNERS: dict[int, Any] = {}  # by the id of a parameter: the optimizer that moves it


@functools.cache
def _name_of_property(function: Any) -> str:
    return getattr(function.__self__, "__name__", "property") + ("" if function.__name__ == "__get__" else "=")


def _name(function: Any) -> str:
    name = getattr(function, "__name__", "")
    return _name_of_property(function) if name in ("__get__", "__set__", "__delete__") else name


def _is_asked(owner: Any, parameter: Any, gradient: Any) -> bool:
    """A script asks for p.grad. After backward() others may have one where there is none, or this rank's alone: True,
    and p.grad is the average of all. Not for a zero_grad(), which begins anew."""
    if owner._unsent is not False or owner._averaged or torch._C._current_graph_task_id() >= 0 or owner._is_forked():
        return False
    frame: Any = sys._getframe(2)
    callers = []
    while frame and len(callers) < 5:
        callers.append(frame.f_code.co_name)
        frame = frame.f_back
    if "zero_grad" in callers:
        if owner._begun:
            owner._dropped = True
        else:
            owner._of[id(parameter)].sent = None
    elif gradient is None or hasattr(gradient, "own"):
        owner._average()
        return True
    return False


def _plainly(function: Any, args: Any, kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **(kwargs or {}))


class Watched:
    """A parameter's class outside its module's forward pass."""
    kind: type[torch.nn.Parameter]  # its class before

    @classmethod
    @torch._disable_dynamo
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _name(function)
        if name in _FACTS:
            found = _plainly(function, args, kwargs)
            if name == "grad" and id(args[0]) in OWNERS and _is_asked(OWNERS[id(args[0])], args[0], found):
                found = _plainly(function, args, kwargs)
            return found
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, Watched):
                arrive(tensor, not torch.is_grad_enabled() or name in _MEMORY)
        return function(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> Any:
        arrive(self, True)
        return copy.deepcopy(self, memo)


@functools.cache
def watched(kind: type) -> type:
    return type(kind.__name__, (Watched, kind), {"kind": kind, "__module__": kind.__module__})


def arrive(parameter: Any, whole: bool) -> None:
    """Waits for a parameter, or for all and until no more is sent."""
    owner = OWNERS.get(id(parameter))
    if owner is not None:
        owner._arrive(parameter, whole)
    plain(parameter)


def plain(parameter: Any) -> None:
    if isinstance(parameter, Watched):
        parameter.__class__ = parameter.kind


class Sent(torch.Tensor):
    """This rank's gradient of a parameter, which ``step()`` averages. spent: nobody may use it any more."""
    parameter: torch.nn.Parameter
    spent = False
    touched: Callable[[Sent], torch.Tensor]  # averages, and returns what takes its place

    @classmethod
    @torch._disable_dynamo
    def __torch_function__(cls, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = _name(function)
        if name in _FACTS:
            return _plainly(function, args, kwargs)
        if name == "detach_":
            return args[0]
        if name in _CONVERSIONS and getattr(args[0], "spent", False):  # as model.to(...) does after training
            of = args[0].parameter, args[0].touched
            return None if name == "data=" else spend(_plainly(function, args, kwargs), *of)
        if name in ("zero_", "_foreach_zero_"):  # as zero_grad(set_to_none=False) does
            args = pytree.tree_map(lambda a: _zeros(a) if isinstance(a, Sent) and a.parameter.grad is a else a, args)
        args, kwargs = pytree.tree_map(lambda a: a.touched(a) if isinstance(a, Sent) else a, (args, kwargs or {}))
        return function(*args, **kwargs)


_call_script = torch.jit.ScriptFunction.__call__


@functools.wraps(_call_script)
def _called(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Functions of torch.jit.script do not ask ``__torch_function__`` themselves."""
    for tensor in pytree.tree_leaves((args, kwargs)):
        if isinstance(tensor, (Watched, Sent)):
            return tensor.__torch_function__(_called, (), (self, *args), kwargs)
    return _call_script(self, *args, **kwargs)


torch.jit.ScriptFunction.__call__ = _called


def _zeros(gradient: Sent) -> torch.Tensor:
    gradient.parameter.grad = zeros = torch.zeros_like(gradient)
    if not getattr(OWNERS.get(id(gradient.parameter)), "_begun", True):
        zeros.own = True  # before backward(), as by zero_grad(set_to_none=False)
    return zeros


def sent(gradient: torch.Tensor, parameter: torch.nn.Parameter, touched: Callable[[Sent], torch.Tensor]) -> Sent:
    gradient.__class__ = Sent
    gradient.parameter, gradient.touched = parameter, touched
    return gradient


def spend(gradient: torch.Tensor, *of: Any) -> Sent:
    marked = gradient if isinstance(gradient, Sent) else sent(gradient.detach(), *of)
    marked.spent = True
    return marked
