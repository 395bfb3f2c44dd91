"""Private names of torch's FSDP2 (torch 2.11-2.13)."""

from __future__ import annotations

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
