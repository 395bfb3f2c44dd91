"""Linear layers whose weight is no matrix (out, in): Hugging Face's `transformers.pytorch_utils.Conv1D`, which stores
it as (in, out), and parameters of a module's own, of any dims."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_megatp.plan.layer import TRANSPOSED, MatrixDims
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
        ColumnParallelPermuted if _is_permuted(layer) else ColumnParallelLinear, layer
    )
    return kind


def row_kind(layer: nn.Module) -> type[RowParallel]:
    """The row class for an nn.Linear, a Conv1D or a BareLayer."""
    kind: type[RowParallel] = of_subclass(RowParallelPermuted if _is_permuted(layer) else RowParallelLinear, layer)
    return kind


def _is_permuted(layer: nn.Module) -> bool:
    return layer.matrix_dims != MatrixDims() if isinstance(layer, BareLayer) else is_conv1d(layer)


class _Permuted(ParallelLayer):
    """Reads its weight as (out, in). Gradients of what is made of a weight are computed at once, never put off."""

    matrix_dims = TRANSPOSED
    weight_shape: tuple[int, ...] = ()
    """Of the whole weight, where it is no matrix."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)

    def _own(self, name: str, dim: int, by_rank: tuple[Ranges, ...] | None = None) -> Tensor:
        if name != "weight":
            return super()._own(name, dim, by_rank)
        split = self.matrix_dims.split(dim, by_rank or self.by_rank, self.weight_shape)
        assert split is not None
        return self.matrix_dims.matrix(super()._own(name, *split))

    def _plain_parameters(self) -> None:
        """A permuted weight is a value of its own: its gradient is not computed while the input's is reduced."""


class ColumnParallelPermuted(_Permuted, ColumnParallel):
    """weight (in, features of this rank), or of other dims; bias (features of this rank)."""


class RowParallelPermuted(_Permuted, RowParallel):
    """weight (features of this rank, out), or of other dims; bias (out)."""
