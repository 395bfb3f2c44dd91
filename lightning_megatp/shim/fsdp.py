"""Private names of torch's FSDP2. Seen in 2.11, 2.13 and 2.15, which adds gradients up where autograd does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

ADDS_UP_IN_PLACE = hasattr(FSDPModule, "finalize_backward")
"""Whether gradients that wait to be reduced are the gathered parameters' `.grad`, of `reduce_dtype` (2.15), and not a
tensor of FSDP2's own where that is another dtype than the parameters' (2.11-2.13)."""


def is_post_backward(kind: type) -> bool:
    """Whether nodes of this type in an autograd graph are those that FSDP2 hangs on all inputs of a unit together: each
    of their outputs is the input of the same position, and knows nothing of the others."""
    return kind.__name__ == "RegisterPostBackwardFunctionBackward"


def forget_accumulated(module: Any) -> None:
    """Let go of the gradients that a module made by `fully_shard` keeps in its `reduce_dtype` where that isn't the
    parameters'."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None or ADDS_UP_IN_PLACE:
        return
    for parameter in group.fsdp_params:
        parameter.unsharded_accumulated_grad = None


def accumulated_gradients(module: Any) -> list[Tensor]:
    """The gradients, not reduced, that a module made by `fully_shard` has added up, all of one dtype. Backwards cast to
    its `reduce_dtype` what they find, but neither what is computed later nor, in the end, the zeros that stand for a
    parameter that nobody has used: FSDP2 would refuse these (2.13)."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return []
    known = [p for p in group.fsdp_params if hasattr(p, "_unsharded_param")]  # gathered
    if ADDS_UP_IN_PLACE:
        group._set_unsharded_grad_dtypes(defer_upcast=False)
        return [p.unsharded_param.grad for p in known if p.unsharded_param.grad is not None]
    for parameter in known:
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()
    wide = any(parameter.unsharded_accumulated_grad is not None for parameter in known)
    found = []
    for parameter in known:
        whole, gradient = parameter.unsharded_param, parameter.unsharded_accumulated_grad
        if wide and gradient is None and whole.requires_grad:
            gradient = parameter.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=parameter.reduce_dtype)
        found.append(whole.grad if gradient is None else gradient)
    return [gradient for gradient in found if gradient is not None]


def reduce_accumulated(module: Any) -> None:
    """Reduce what a module made by `fully_shard` has added up, where no backward does. torch's own pipelines do it the
    same way."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is not None:
        group.post_backward()


def end_backward(root: Any) -> None:
    """What a module made by `fully_shard` does at the end of the last backward: let the current stream wait for what is
    reduced."""
    state = root._get_fsdp_state()
    if ADDS_UP_IN_PLACE and state._state_ctx.manual_backward_finalization_active is None:
        state._state_ctx.manual_backward_finalization_active = False  # as the first backward of a step sets it
    state._root_post_backward_final_callback()


def look_at_shards(module: Any, meanwhile: Callable[[], AbstractContextManager[Any]]) -> None:
    """Let a module made by `fully_shard` read its parameters off the modules that have them, which it does whenever
    these have loaded a state dict, in a context of its own."""

    def within(reset: Callable[[], None]) -> None:
        with meanwhile():
            reset()

    group = module._get_fsdp_state()._fsdp_param_group
    for parameter in group.fsdp_params if group is not None else ():
        parameter.reset_sharded_param = functools.partial(within, parameter.reset_sharded_param)
