"""Private names of torch's FSDP2 (torch 2.11-2.13)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any


def is_post_backward(node: Any) -> bool:
    """Whether a node of an autograd graph is the one that FSDP2 hangs on all inputs of a unit together: each of its
    outputs is the input of the same position, and knows nothing of the others."""
    return type(node).__name__ == "RegisterPostBackwardFunctionBackward"


def forget_accumulated(module: Any) -> None:
    """Let go of the gradients that a module made by `fully_shard` keeps in its `reduce_dtype` where that isn't the
    parameters'."""
    group = module._get_fsdp_state()._fsdp_param_group
    for parameter in group.fsdp_params if group is not None else ():
        parameter.unsharded_accumulated_grad = None


def look_at_shards(module: Any, meanwhile: Callable[[], AbstractContextManager[Any]]) -> None:
    """Let a module made by `fully_shard` read its parameters off the modules that have them, which it does whenever
    these have loaded a state dict, in a context of its own."""

    def within(reset: Callable[[], None]) -> None:
        with meanwhile():
            reset()

    group = module._get_fsdp_state()._fsdp_param_group
    for parameter in group.fsdp_params if group is not None else ():
        parameter.reset_sharded_param = functools.partial(within, parameter.reset_sharded_param)
