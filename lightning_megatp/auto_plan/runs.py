"""One run of a module by itself: what it returned, left behind, changed and drew."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megatp.auto_plan.blocks import PLAIN, Call, describe, own_attributes, tensors_anywhere_in
from lightning_megatp.auto_plan.exact import exact
from lightning_megatp.plan.layer import UserOperation
from lightning_megatp.shim.autograd import without_checkpoints
from lightning_megatp.shim.torch import tensor_version, tree_leaves
from lightning_megatp.tensor.draws import draws_random
from lightning_megatp.tensor.functions import done_by_user, operation_name


@dataclass
class Ran:
    """What a run of a module left."""

    module: nn.Module
    arguments: dict[int | str, Any]
    """By position or keyword."""
    given: list[Tensor]
    """The tensors that it was given, leaves if they need a gradient."""
    result: Any
    kept: dict[str, Any]
    """Attributes that are others than before, by their names from the module on."""
    buffers: dict[str, Tensor]
    drew: list[tuple[str, Any]]
    """What random numbers were drawn by, and their shape."""
    done: set[UserOperation]
    """All operations."""
    hides: bool
    """Whether floating tensors lay in objects that it was given."""
    changes: bool
    """Whether it changed what it was given."""
    checkpoints: int
    """How many activation checkpoints it made."""


def run(module: nn.Module, call: Call) -> Ran:
    """Call a module, without randomness.

    Args:
        module: which is changed by it.
        call: from `concrete_call`; its own.
    """
    inputs = call.args, call.kwargs
    tensors = tensors_anywhere_in(inputs)
    seen = {id(x) for x in tree_leaves(inputs)}
    before, shapes, versions = _attributes(module), describe(inputs), [tensor_version(x) for x in tensors]
    checkpoints: list[None] = []
    with exact(), without_checkpoints(lambda: checkpoints.append(None)), _Operations() as operations:
        result = module(*call.args, **call.kwargs)
    after = _attributes(module)
    return Ran(
        module,
        dict([*enumerate(call.args), *call.kwargs.items()]),
        tensors,
        result,
        {name: x for name, (x, inside) in after.items() if name not in before or not _same(before[name], (x, inside))},
        dict(module.named_buffers()),
        operations.drew,
        operations.done,
        any(x.is_floating_point() and id(x) not in seen for x in tensors),
        describe(inputs) != shapes or [tensor_version(x) for x in tensors] != versions,
        len(checkpoints),
    )


def large(call: Call, by: float) -> Call:
    """A call with larger numbers: limits are reached."""
    return _changed(call, lambda x: x * by if x.is_floating_point() else x)


def crowded(call: Call) -> Call:
    """A call whose rows, or tokens, are all the first one: a router sends them all to the same experts."""
    return _changed(call, lambda x: x.flatten(0, -2)[:1].expand(x.flatten(0, -2).shape).reshape(x.shape))


def _changed(call: Call, change: Callable[[Tensor], Tensor]) -> Call:
    with torch.no_grad():
        for x in tree_leaves((call.args, call.kwargs)):
            if isinstance(x, Tensor) and x.dim() > 1:
                x.data = change(x.data).clone()
    return call


class _Operations(TorchFunctionMode):
    """Notes operations, and what random ones draw."""

    def __init__(self) -> None:
        super().__init__()
        self.drew: list[tuple[str, Any]] = []
        self.done: set[UserOperation] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, operation_name(func)
        self.done.add(done_by_user(name))
        if draws_random(name, args, kwargs):
            of = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), None)
            self.drew.append((name, (args, kwargs.get("size")) if of is None else tuple(of.shape)))
        return func(*args, **kwargs)


def _attributes(module: nn.Module) -> dict[str, tuple[Any, list[int]]]:
    """Attributes of all modules in there, with the tensors inside of those that hold some."""
    return {
        f"{name}.{key}".lstrip("."): (value, [id(x) for x in tensors_anywhere_in(value)])
        for name, child in module.named_modules()
        for key, value in own_attributes(child).items()
    }


def _same(one: tuple[Any, list[int]], other: tuple[Any, list[int]]) -> bool:
    return one[1] == other[1] and (one[0] is other[0] or (isinstance(one[0], PLAIN) and one[0] == other[0]))
