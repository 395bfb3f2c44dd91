"""torch's weight norm of a layer whose weight is split."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from lightning_megatp.plan.ranges import Ranges
from lightning_megatp.tensor.collectives import copy_to_region, reduce_from_region
from lightning_megatp.tensor.context import TensorContext
from lightning_megatp.tensor.parameters import slice_whole


class ParallelWeightNorm(nn.Module):
    """w = g v / |v| for this rank's part of v; made from torch's own parametrization, in place.

    Communication: none where the norm is taken within what is split (`dim` is the split dim); else one all-reduce of as
    many numbers as g has, each way.
    """

    context: TensorContext
    dim: int
    """The dim that the norm is not taken over; -1 for none."""
    split: tuple[int, tuple[Ranges, ...]]
    """The dim of v that is split, and the ranges of every rank."""
    size: int
    """Of that dim of the whole v."""

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        if self.context.user_code and v.shape[self.split[0]] == self.size:  # the whole weight, outside of its layer
            return self._whole(g, v)
        g, v = self._own(g), self._own(v)
        if self.dim == self.split[0]:
            return self._whole(g, v)
        group, dims = self.context.group, [dim for dim in range(v.dim()) if dim != self.dim]
        squares = reduce_from_region(v.square().sum(dims, keepdim=True), group)
        return v * copy_to_region(g / squares.sqrt(), group)

    def _whole(self, g: Tensor, v: Tensor) -> Tensor:
        result: Tensor = super().forward(g, v)
        return result

    def _own(self, x: Tensor) -> Tensor:
        """This rank's part of what the step made whole, by using it outside of its layer."""
        dim, by_rank = self.split
        whole = x.dim() > dim and x.shape[dim] == self.size > 1
        return slice_whole(x, self.context.group, dim, by_rank) if whole else x


def split_weight_norm(norm: Any, context: TensorContext, split: tuple[int, tuple[Ranges, ...]]) -> ParallelWeightNorm:
    """Let torch's parametrization take norms over all ranks' parts."""
    norm.__class__ = _combined(type(norm))  # type: ignore[arg-type]
    norm.context, norm.split = context, split
    norm.size = max(stop for ranges in split[1] for _, stop in ranges)
    found: ParallelWeightNorm = norm
    return found


@functools.cache
def _combined(original: Any) -> Any:
    return type("ParallelWeightNorm", (ParallelWeightNorm, original), {"__module__": __name__})
