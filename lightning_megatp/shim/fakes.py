"""Tensors without data, beyond what torch's own can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode as _FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

# What torch.compile and torch.export plan with (shapes, dtypes and devices without data) has no public import path.


_NONE: Mapping[str, Any] = MappingProxyType({})


class FakeTensorMode(_FakeTensorMode):
    """torch's, which also knows grouped products of other dtypes than bfloat16: its shape function refuses these, while
    the operation itself takes them (2.11-2.14)."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NONE
    ) -> Any:
        if _is_refused(func, args):
            with self:
                return _grouped_product(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)


class GroupedProductsOnMeta(TorchDispatchMode):
    """The same for tensors on the meta device."""

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
    """Of (rows, k) and (groups, k, n) (rows, n); of two matrices, where groups lie along k, (groups, m, n); where they
    lie along the columns of y, or both have a dim for them, as of any two matrices."""
    groups: tuple[int, ...] = ()
    if x.dim() == 3 and y.dim() == 3:
        groups = (x.shape[0],)
    elif x.dim() == 2 and y.dim() == 2:
        groups = (0 if offs is None else offs.shape[0],)
    return torch.empty((*groups, x.shape[-2], y.shape[-1]), dtype=out_dtype or x.dtype, device=x.device)
