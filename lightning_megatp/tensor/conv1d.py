"""Hugging Face's `transformers.pytorch_utils.Conv1D`, a linear layer that stores its weight as (in, out)."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_megatp.plan.ranges import Ranges
from lightning_megatp.shim.transformers import is_conv1d
from lightning_megatp.tensor.bare import BareLayer
from lightning_megatp.tensor.layers import (
    ColumnParallel,
    ColumnParallelLinear,
    ParallelLayer,
    RowParallel,
    RowParallelLinear,
    of_subclass,
)


def column_kind(layer: nn.Module) -> type[ColumnParallel]:
    """The column class for an nn.Linear, a Conv1D or a BareLayer."""
    kind: type[ColumnParallel] = of_subclass(
        ColumnParallelConv1D if _is_transposed(layer) else ColumnParallelLinear, layer
    )
    return kind


def row_kind(layer: nn.Module) -> type[RowParallel]:
    """The row class for an nn.Linear, a Conv1D or a BareLayer."""
    kind: type[RowParallel] = of_subclass(RowParallelConv1D if _is_transposed(layer) else RowParallelLinear, layer)
    return kind


def _is_transposed(layer: nn.Module) -> bool:
    return layer.transposed if isinstance(layer, BareLayer) else is_conv1d(layer)


class _Transposed(ParallelLayer):
    """Reads a weight (in, out) as (out, in). Weight gradients of such a view are computed at once, never put off."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)

    transposed = True

    def _own(self, name: str, dim: int, by_rank: tuple[Ranges, ...] | None = None) -> Tensor:
        if name != "weight":
            return super()._own(name, dim, by_rank)
        return super()._own(name, 1 - dim, by_rank).t()

    def _plain_parameters(self) -> None:
        """A transposed weight is a value of its own: its gradient is not computed while the input's is reduced."""


class ColumnParallelConv1D(_Transposed, ColumnParallel):
    """weight (in, features of this rank), bias (features of this rank)."""


class RowParallelConv1D(_Transposed, RowParallel):
    """weight (features of this rank, out), bias (out)."""
