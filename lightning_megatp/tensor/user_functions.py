"""The user's `torch.autograd.Function`s, torch.jit functions, and torch.func's transforms. None of them asks
`__torch_function__`, and what they save and compute can't know of parts, so they get whole tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_megatp.shim.autograd import (
    function_name,
    functorch_is_active,
    handle_functions,
    handle_transforms,
    is_scripted,
)
from lightning_megatp.shim.torch import tensor_version, tree_leaves, tree_map
from lightning_megatp.tensor.context import TensorContext
from lightning_megatp.tensor.functions import OwnFunction
from lightning_megatp.tensor.outside import WholeParameter, used_whole
from lightning_megatp.tensor.reentrant import not_reentrant
from lightning_megatp.tensor.shards import LayerWeight, Shard, WeightMatrix, is_flat

_PARTS = Shard, LayerWeight, WeightMatrix
"""What stands for whole tensors."""


@contextlib.contextmanager
def functions_take_whole(context: TensorContext | None = None) -> Iterator[None]:
    """Around a user's code. Reentrant activation checkpoints, which are functions, too, are run as the others.

    Args:
        context: of the parallel layers, to tell whether a function runs some.

    Communication: a gather, differentiable, for each shard and each split parameter that such a function is given.
    """

    def handle(function: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def on_whole(*args: Any, **kwargs: Any) -> Any:
            return _apply(function, apply, args, kwargs, context)

        return not_reentrant(function, on_whole, args, kwargs)

    with handle_functions(handle, others_only=True), handle_transforms(_transform_whole):
        yield


def _transform_whole(name: str, function: Callable[..., Any], arguments: Any) -> tuple[Callable[..., Any], Any]:
    """What a transform of torch.func is to take.

    Raises:
        RuntimeError: within another one, where nothing can be gathered; or, when it is called, the function returns a
            part: of a tensor that it did not get as an argument.
    """

    def take(x: Any) -> Any:
        if not isinstance(x, _PARTS):
            return x
        if functorch_is_active():
            raise RuntimeError(_in_transform(name, "is given, inside of another transform"))
        return x.whole(name) if isinstance(x, Shard) else used_whole(x, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if any(isinstance(x, Shard) for x in tree_leaves(result)):
            raise RuntimeError(_in_transform(name, "maps a function that returns what it makes of"))
        return result

    return functools.wraps(function, updated=())(called), tree_map(take, arguments)


def _in_transform(name: str, how: str) -> str:
    return (
        f"MegaTPStrategy: `torch.func.{name}` {how} a tensor of which each tensor rank holds a part. Give that tensor"
        " to the outermost transform as an argument, or leave the layers around it out of the plan (of tokens: take"
        " the style `sequence` from their block, or use sequence_parallel=False)."
    )


def _apply(
    function: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Any
) -> Any:
    scripted = is_scripted(function)
    if not scripted and issubclass(function, OwnFunction):
        return apply(*args, **kwargs)
    name, copies, weights = function_name(function), list[tuple[Tensor, int]](), list[str]()

    def take(x: Any) -> Any:
        if isinstance(x, WholeParameter):
            weights.append(x.spec.name)
        if not isinstance(x, Shard):
            return used_whole(x, name)
        whole = x.whole(name)
        copies.append((whole, tensor_version(whole)))
        return whole

    def taken(value: Any) -> Any:
        """A container without parts is the user's own: the function may fill it."""
        return tree_map(take, value) if any(isinstance(x, _PARTS) for x in tree_leaves(value)) else value

    values = [*args, *kwargs.values()]
    if not is_flat(values) or any(isinstance(x, _PARTS) for x in values):
        args, kwargs = tuple(map(taken, args)), {key: taken(value) for key, value in kwargs.items()}
    before = None if context is None else context.entered
    result = apply(*args, **kwargs)
    if weights and before is not None and context.entered != before and torch.is_grad_enabled():
        raise RuntimeError(
            f"MegaTPStrategy: `{name}` runs layers that the plan splits, and is given `{weights[0]}`, of which each"
            " tensor rank holds a part: the gradient it computes for that would be lost. If it is an activation"
            " checkpoint, use torch.utils.checkpoint.checkpoint in its place; else leave these layers out of the plan."
        )
    returned = result if isinstance(result, tuple) else (result,)
    if not scripted and any(isinstance(x, Shard) and x.requires_grad for x in returned):
        raise RuntimeError(
            f"MegaTPStrategy: `{name}` runs layers that the plan splits and returns a value of which each rank has a"
            " part, so its backward would get the gradient of that alone. Let it run whole blocks, and these without"
            " sequence regions: take the style `sequence` from their layers, or use sequence_parallel=False."
        )
    if scripted and any(tensor_version(whole) != version for whole, version in copies):
        raise RuntimeError(
            f"MegaTPStrategy: `{name}`, which torch.jit made, changes in place a tensor of which each tensor rank holds"
            " a part. Write it without in-place change, or as a Python function."
        )
    return result
