"""ShardSpec: what one rank owns of one parameter. Checkpoints, norms and resharding read this object alone."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_megatp.plan.ranges import Ranges, first_owned, intersection, length, local_piece, owners


@dataclass(frozen=True)
class ShardSpec:
    """A rank's part of a parameter: the product of its index ranges per dim of the full, unpermuted tensor."""

    name: str
    """Canonical name, as in the state dict of the model on one device."""
    shape: tuple[int, ...]
    """Full shape."""
    ranges: tuple[Ranges, ...]
    """For each dim the ranges this rank owns, in the order in which they lie in the shard."""
    replicated: tuple[str, ...] = ("dp",)
    """The mesh axes over which the shard is the same."""
    written: tuple[Ranges, ...] | None = None
    """The part of `ranges` that this rank is the first to own, where other ranks own some of it too; None for all."""

    @classmethod
    def of_whole(cls, name: str, shape: Sequence[int]) -> ShardSpec:
        """The spec of a parameter that no axis splits."""
        return cls(name, tuple(shape), tuple(((0, size),) for size in shape), ("dp", "tp"))

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the shard."""
        return tuple(length(ranges) for ranges in self.ranges)

    def rows(self, start: int, stop: int, writes: bool = True) -> ShardSpec:
        """Some of this shard's rows: what one data-parallel rank holds of it.

        Args:
            start: the first row, counted in the shard.
            stop: one past the last.
            writes: False for a copy of what another rank writes.
        """
        own = local_piece(self.ranges[0], start, stop)
        written = None if self.written is None else (intersection(own, self.written[0]), *self.written[1:])
        if not writes:
            written = ((), *self.ranges[1:])
        axes = tuple(axis for axis in self.replicated if axis != "dp")
        return replace(self, ranges=(own, *self.ranges[1:]), replicated=axes, written=written)

    @property
    def numel(self) -> int:
        """Elements in the full parameter."""
        return int(torch.Size(self.shape).numel())

    def take(self, full: Tensor) -> Tensor:
        """This rank's shard of a full tensor, as a new contiguous tensor."""
        for dim, ranges in enumerate(self.ranges):
            if ranges != ((0, self.shape[dim]),):
                full = (
                    torch.cat([full.narrow(dim, start, stop - start) for start, stop in ranges], dim)
                    if ranges
                    else (full.narrow(dim, 0, 0))
                )
        return full.clone(memory_format=torch.contiguous_format)

    def put(self, full: Tensor, local: Tensor) -> None:
        """Write a shard to its place in a full tensor."""
        self._walk(full, local, 0)

    def _walk(self, full: Tensor, local: Tensor, dim: int) -> None:
        if dim == len(self.shape):
            full.copy_(local)
            return
        at = 0
        for start, stop in self.ranges[dim]:
            self._walk(full.narrow(dim, start, stop - start), local.narrow(dim, at, stop - start), dim + 1)
            at += stop - start


@dataclass(frozen=True)
class ShardedTensorSpec:
    """One parameter split along one dim: the ShardSpec of every rank of the tensor group."""

    name: str
    shape: tuple[int, ...]
    dim: int
    by_rank: tuple[Ranges, ...]

    def pieces(self, rank: int) -> list[tuple[int, int, int]]:
        """A rank's shard along `dim` as (start, stop, owners): local indices, and how many ranks own these elements
        (more than one for key-value heads when there are fewer of them than ranks)."""
        cuts = sorted({edge for ranges in self.by_rank for piece in ranges for edge in piece})
        found, at = [], 0
        for start, stop in self.by_rank[rank]:
            edges = [start, *(cut for cut in cuts if start < cut < stop), stop]
            for low, high in itertools.pairwise(edges):
                found.append((at, at + high - low, len(owners(self.by_rank, low))))
                at += high - low
        return found

    @functools.cached_property
    def shared(self) -> bool:
        """Whether some elements are owned by several ranks, whose gradients then add up."""
        return sum(map(length, self.by_rank)) > self.shape[self.dim]

    def spec(self, rank: int) -> ShardSpec:
        """What one rank of the tensor group owns."""
        ranges = self._along_dim(self.by_rank[rank])
        written = self._along_dim(first_owned(self.by_rank, rank)) if self.shared else None
        return ShardSpec(self.name, self.shape, ranges, written=written)

    def _along_dim(self, own: Ranges) -> tuple[Ranges, ...]:
        return tuple(own if dim == self.dim else ((0, size),) for dim, size in enumerate(self.shape))

    def renamed(self, name: str) -> ShardedTensorSpec:
        return ShardedTensorSpec(name, self.shape, self.dim, self.by_rank)
