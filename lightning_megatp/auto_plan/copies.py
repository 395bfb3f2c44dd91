"""Copies of what hangs on modules, and what stays out of copies of these."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from lightning_megatp.auto_plan.blocks import PLAIN, hooks_on, nothing, tensors_anywhere_in
from lightning_megatp.origins import module_of
from lightning_megatp.shim.torch import tree_leaves
from lightning_megatp.tensor.functions import without_arguments

_HELD = ("_parameters", "_buffers", "_modules")
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


def copied(x: Any) -> Any:
    """A copy of a tensor, a leaf, or of an object that a module may change (a cache), where it can be copied."""
    if isinstance(x, Tensor):
        return x.detach().clone().requires_grad_(x.requires_grad)
    return copied_object(x, copied)


def copied_object(x: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of an object, where it can be copied, with changed tensors in it."""
    if isinstance(x, (*PLAIN, nn.Module)):
        return x
    changed = {id(held): change(held) for held in tensors_anywhere_in(x)}
    try:
        return copy.deepcopy(x, changed)
    except Exception:
        return x


def uncopied(module: nn.Module) -> dict[int, Any]:
    """id -> something instead, for what hangs on modules and can't be copied: a leaf for tensors with a graph (a weight
    that `torch.nn.utils.weight_norm` computes, what a step left), nothing for the hooks of Lightning's PyTorchProfiler,
    locks themselves, and functions with arguments, as LightningCLI makes them of an `OptimizerCallable`."""
    attributes = [value for child in module.modules() for key, value in vars(child).items() if key not in _HELD]
    tensors = {id(x): copied(x) for x in tree_leaves(attributes) if isinstance(x, Tensor) and not x.is_leaf}
    profiling = [
        x for child in module.modules() for x in hooks_on(child) if ".profilers." in module_of(without_arguments(x))
    ]
    shared = {id(x): x for x in tree_leaves(attributes) if isinstance(x, _LOCKS) or _is_bare_partial(x)}
    return {**tensors, **shared, **{id(x): nothing for x in profiling}}


def _is_bare_partial(x: Any) -> bool:
    """Whether it has nothing of a module: a method of one, or a tensor."""
    if not isinstance(x, functools.partial) or not isinstance(x.func, (FunctionType, BuiltinFunctionType, type)):
        return False
    return not any(isinstance(y, (Tensor, nn.Module, MethodType)) for y in tree_leaves((x.args, x.keywords)))
