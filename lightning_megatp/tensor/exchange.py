"""What feature shards send: one object, so that ranks can also be simulated without a process group.

Source: Shoeybi et al. 2019, section 3 (f and g), for features that lie in any dim and that several ranks may own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatp.plan.ranges import ByRank, Ranges, everything, gathered_runs, length, owned_once, owner_counts
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.tensor.collectives import all_gather, all_reduce, copy_to_region, reduce_from_region, take_ranges
from lightning_megatp.tensor.cross_entropy import cross_entropy_of_slices
from lightning_megatp.tensor.functions import OwnFunction

_FEW_RUNS = 64


class GroupExchange:
    """Between whole values and the features of each rank of a process group.

    Args:
        group: the tensor-parallel process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def copy(self, x: Tensor) -> Tensor:
        """Identity: a whole value, any shape, used on this rank's features.

        Communication: none forward; an all-reduce of the gradient backward.
        """
        return copy_to_region(x, self.group)

    def reduce(self, x: Tensor) -> Tensor:
        """The sum of what all ranks have, any shape.

        Communication: an all-reduce forward; none backward.
        """
        return reduce_from_region(x, self.group)

    def scatter(self, x: Tensor, dim: int, by_rank: ByRank) -> Tensor:
        """This rank's ranges of a dim of a whole value.

        Communication: none forward; backward an all-gather of the gradient, or an all-reduce where several ranks own
            the same.
        """
        if len(by_rank) == 1:
            return x
        return _Take.apply(x, _Place(self.group, dim, by_rank, x.shape[dim]), False)

    def gather(self, x: Tensor, dim: int, by_rank: ByRank) -> Tensor:
        """All of a dim from the ranges of every rank, in its order, the same on every rank.

        Communication: an all-gather forward; none backward. The gradient is sliced, that of what several ranks own
            divided among them.
        """
        if len(by_rank) == 1:
            return x
        size = max(stop for ranges in by_rank for _, stop in ranges)
        return _Put.apply(x, _Place(self.group, dim, by_rank, size), True)

    def cross_entropy(self, logits: Tensor, target: Tensor, out_range: Ranges, **options: Any) -> Tensor:
        """`cross_entropy_of_slices`: logits (..., classes of this rank), target (...)."""
        return cross_entropy_of_slices(logits, target, group=self.group, out_range=out_range, **options)


@dataclass(frozen=True)
class _Place:
    """Which rank owns what of a dim."""

    group: dist.ProcessGroup
    dim: int
    by_rank: ByRank
    size: int

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def own(self) -> Ranges:
        return self.by_rank[self.rank]


# Each is the other's backward, so gradients of gradients are right too. `shared` says that what several ranks own is
# divided among them: then taking and putting together gives back the same.


class _Take(OwnFunction):
    """A whole dim -> this rank's ranges of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: _Place, shared: bool) -> Tensor:
        ctx.place, ctx.shared = place, shared
        ctx.region_above, ctx.region_below = "tensor", "whole"
        if everything(place.by_rank, place.size):
            return x / len(place.by_rank) if shared else x.clone()
        own = take_ranges(x, place.dim, place.own)
        own = own.clone() if len(place.own) < 2 else own  # never a view of the input
        if shared and not owned_once(place.by_rank, place.size):
            for start, stop, owners in owner_counts(place.by_rank, place.rank):
                own.narrow(place.dim, start, stop - start).div_(owners)
        return own

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Put.apply(grad, ctx.place, ctx.shared), None, None


class _Put(OwnFunction):
    """This rank's ranges of a dim -> all of it; what several ranks own is the same on all (`shared`), or added up."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: _Place, shared: bool) -> Tensor:
        ctx.place, ctx.shared = place, shared
        ctx.region_above, ctx.region_below = "whole", "tensor"
        return _put_together(x, place) if shared or owned_once(place.by_rank, place.size) else _add_up(x, place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Take.apply(grad, ctx.place, ctx.shared), None, None


def _put_together(x: Tensor, place: _Place) -> Tensor:
    if everything(place.by_rank, place.size):
        return x.clone()
    dim = place.dim % x.dim()
    if is_fake(x):
        return x.new_empty((*x.shape[:dim], place.size, *x.shape[dim + 1 :]))
    gathered = all_gather(x, place.group, dim, [length(ranges) for ranges in place.by_rank])
    runs = gathered_runs(place.by_rank)
    if len(runs) == 1:  # a tensor of its own, which code may change in place
        ((start, stop),) = runs
        return gathered if stop - start == gathered.shape[dim] else gathered.narrow(dim, start, stop - start).clone()
    if len(runs) <= _FEW_RUNS:
        return take_ranges(gathered, dim, runs)
    order = torch.cat([torch.arange(start, stop, device=x.device) for start, stop in runs])
    return gathered.index_select(dim, order)


def _add_up(x: Tensor, place: _Place) -> Tensor:
    if everything(place.by_rank, place.size):
        return all_reduce(x, place.group)
    dim = place.dim % x.dim()
    full, at = x.new_zeros((*x.shape[:dim], place.size, *x.shape[dim + 1 :])), 0
    for start, stop in place.own:
        full.narrow(dim, start, stop - start).add_(x.narrow(dim, at, stop - start))
        at += stop - start
    return all_reduce(full, place.group)
