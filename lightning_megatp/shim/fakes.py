"""Grouped products of tensors without data. torch's shape function for them refuses all dtypes but bfloat16, while the
operation itself takes others (2.13)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

# FakeTensorMode (what torch.compile and torch.export plan with: shapes, dtypes and devices without data) has no public
# import path, TorchDispatchMode only the one that "Extending PyTorch" names.


def fake_tensor_mode(allow_non_fake_inputs: bool = False) -> FakeTensorMode:
    """A mode that knows grouped products. No class of its own: by torch's, operations of higher order (FlexAttention)
    find what they do in it."""
    mode = FakeTensorMode(allow_non_fake_inputs=allow_non_fake_inputs)
    know_grouped_products(mode)
    return mode


def know_grouped_products(mode: FakeTensorMode) -> None:
    """`dispatch` is what `__torch_dispatch__` calls."""
    dispatch = mode.dispatch

    def knowing(func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if _is_refused(func, args):
            with mode:
                return _grouped_product(*args, **(kwargs or {}))
        return dispatch(func, types, args, kwargs or {})

    mode.__dict__["dispatch"] = knowing


class GroupedProductsOnMeta(TorchDispatchMode):
    """A mode that knows grouped products of tensors on the meta device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if _is_refused(func, args) and args[0].is_meta:
            return _grouped_product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _is_refused(func: Any, args: Sequence[Any]) -> bool:
    return func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16


def _grouped_product(
    x: Tensor, y: Tensor, offs: Tensor | None = None, _: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """A grouped product without data: (rows, n) of (rows, k) and (groups, k, n); (groups, m, n) of two matrices, where
    groups lie along k; where they lie along the columns of y, or both have a dim for them, as of any two matrices."""
    groups: tuple[int, ...] = ()
    if x.dim() == 3 and y.dim() == 3:
        groups = (x.shape[0],)
    elif x.dim() == 2 and y.dim() == 2:
        groups = (0 if offs is None else offs.shape[0],)
    return torch.empty((*groups, x.shape[-2], y.shape[-1]), dtype=out_dtype or x.dtype, device=x.device)
