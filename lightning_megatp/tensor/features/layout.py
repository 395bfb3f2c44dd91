"""Which rank owns which features of a tensor."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from lightning_megatp.plan.ranges import ByRank, Ranges, everything, owned_once
from lightning_megatp.tensor.context import TensorContext
from lightning_megatp.tensor.features.decision import Decision


@dataclass(frozen=True, eq=False)
class FeatureLayout:
    """Which rank owns which features of a dim."""

    dim: int
    """Negative, counted from the last dim."""
    by_rank: ByRank
    """The features of every rank, in the order in which they lie there. Ranks may overlap (repeated key-value heads);
    where all own everything, `dim` means nothing."""
    size: int
    """Features of the whole dim."""
    context: TensorContext = field(repr=False)
    """What communicates, and the random stream for dropout."""
    decisions: dict[Any, Decision | None] = field(default_factory=dict, repr=False)
    """What was found out about operations on shards of this layout."""

    @cached_property
    def key(self) -> tuple[Any, ...]:
        return (self.dim, self.by_rank, self.size, id(self.context))

    @cached_property
    def _hash(self) -> int:
        return hash(self.key)

    @cached_property
    def replicated(self) -> bool:
        """Whether every rank owns everything. Each then has a part of the gradient all the same."""
        return everything(self.by_rank, self.size)

    @cached_property
    def disjoint(self) -> bool:
        """Whether no feature has several owners."""
        return owned_once(self.by_rank, self.size)

    @property
    def own(self) -> Ranges:
        """This rank's features."""
        return self.by_rank[self.context.rank]

    def with_(self, dim: int, by_rank: ByRank, size: int) -> FeatureLayout:
        """Another layout of the same ranks."""
        if (dim, by_rank, size) == self.key[:3]:
            return self
        return FeatureLayout(dim, by_rank, size, self.context)

    def everywhere(self) -> FeatureLayout:
        """What every rank has all of."""
        return FeatureLayout(0, (((0, 1),),) * len(self.by_rank), 1, self.context)

    def shape(self, local: torch.Size) -> torch.Size:
        """The whole shape of a shard."""
        if self.replicated:
            return local
        whole = list(local)
        whole[self.dim] = self.size
        return torch.Size(whole)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, FeatureLayout) and self.key == other.key)

    def __hash__(self) -> int:
        return self._hash
