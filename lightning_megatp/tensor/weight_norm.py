"""torch's weight norms of a layer whose weight is split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_megatp.plan.ranges import Ranges
from lightning_megatp.shim.modules import WeightNormed, compute_weight
from lightning_megatp.tensor.context import TensorContext
from lightning_megatp.tensor.parameters import slice_whole


@dataclass(frozen=True)
class SplitWeightNorm:
    """w = g v / |v| for this rank's part of v.

    Args:
        dim: the dim that the norm is not taken over; -1 for none.
        split: the dim of v that is split, and the ranges of every rank.

    Communication: none where the norm is taken within what is split (`dim` is the split dim); else one all-reduce of as
    many numbers as g has, each way.
    """

    context: TensorContext
    dim: int
    split: tuple[int, tuple[Ranges, ...]]

    def __call__(self, g: Tensor, v: Tensor) -> Tensor:
        if self.context.user_code and self._is_whole(v):  # the whole weight, outside of its layer
            return compute_weight(g, v, self.dim)
        return weight_of_parts(self._own(g), self._own(v), self.dim, self.split[0], self.context.exchange)

    def _own(self, x: Tensor) -> Tensor:
        """This rank's part of what the step made whole, by using it outside of its layer."""
        return slice_whole(x, self.context.group, *self.split) if self._is_whole(x) else x

    def _is_whole(self, x: Tensor) -> bool:
        dim, by_rank = self.split
        size = max(stop for ranges in by_rank for _, stop in ranges)
        return x.dim() > dim and x.shape[dim] == size > 1


def weight_of_parts(g: Tensor, v: Tensor, dim: int, split_dim: int, exchange: Any) -> Tensor:
    """g v / |v| where each rank has a part of v, and of g if the norm is not taken over the split dim.

    Args:
        exchange: a `GroupExchange`, or a simulated one.
    """
    if dim == split_dim:
        return compute_weight(g, v, dim)
    squares = exchange.reduce(v.square().sum([other for other in range(v.dim()) if other != dim], keepdim=True))
    weight: Tensor = v * exchange.copy(g / squares.sqrt())
    return weight


class ComputesWeight:
    """A layer under the older `torch.nn.utils.weight_norm`. Its hook would leave this rank's part of the weight where
    users find it: it is computed at each use, as the parametrization does."""

    weight_norm: SplitWeightNorm
    weight_g: Tensor
    weight_v: Tensor

    @property
    def weight(self) -> Tensor:
        return self.weight_norm(self.weight_g, self.weight_v)


def split_weight_norm(layer: Any, normed: WeightNormed, norm: SplitWeightNorm) -> None:
    """Let a layer's norms be taken over all ranks' parts; with the older weight norm it is a `ComputesWeight`."""
    if not normed.is_hook:
        normed.norm.forward = norm
        return
    layer.weight_norm = norm
    layer.__dict__.pop("weight", None)
    for key, hook in list(layer._forward_pre_hooks.items()):
        if hook is normed.norm:
            del layer._forward_pre_hooks[key]
