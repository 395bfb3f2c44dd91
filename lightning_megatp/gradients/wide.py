"""Gradients of 16-bit parameters in float32, from the first backward until the optimizer's step.

Microbatches, accumulated batches and data-parallel ranks then add up without rounding to 16 bits each time, as in
Megatron's `main_grad`. torch's own `Tensor.grad_dtype` lets autograd cast each gradient before it is added.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_NARROW = (torch.bfloat16, torch.float16)


def widen(parameters: Iterable[Tensor]) -> None:
    """Let gradients be added up in float32, also to those that are there already. Those of other dtypes stay.

    Memory: 4 bytes per parameter for the gradient instead of 2.
    """
    for parameter in parameters:
        if parameter.dtype in _NARROW and parameter.requires_grad:
            _set(parameter, torch.float32)


def narrow(parameters: Iterable[Tensor]) -> None:
    """Give gradients back in the dtype of their parameters, which optimizers expect."""
    for parameter in parameters:
        if parameter.grad_dtype != parameter.dtype:
            _set(parameter, parameter.dtype)


def _set(parameter: Tensor, dtype: torch.dtype) -> None:
    grad = parameter.grad
    if parameter.grad_dtype != dtype:  # which can't be said while there is a gradient
        parameter.grad = None
        parameter.grad_dtype = dtype
        parameter.grad = None if grad is None else grad.to(dtype)
