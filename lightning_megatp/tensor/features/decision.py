"""What a rule answers: how an operation runs on this rank's features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_megatp.plan.ranges import ByRank, Ranges
from lightning_megatp.tensor.collectives import take_ranges
from lightning_megatp.tensor.context import TensorContext

Action = Callable[[Tensor], Tensor]
"""What is done with one operand before an operation runs on this rank's features."""


class Decision(NamedTuple):
    """How an operation runs on this rank's features."""

    layouts: Any
    """The layouts of the result: one for all tensors in it, a tuple of one for each; None if the result is a whole
    value."""
    actions: Sequence[Action | None] = ()
    """For each tensor among the arguments; empty if there is nothing to do."""
    run: Callable[[Sequence[Tensor]], Any] | None = None
    """Runs it on the tensors, where sizes or indices differ from the given ones."""


@dataclass(frozen=True)
class Enter:
    """A whole value used as it is: the gradient of a computed one is all-reduced. That of a leaf is a part, which is
    summed with the other parameters' at the end of backward."""

    context: TensorContext

    def __call__(self, x: Tensor) -> Tensor:
        entered: Tensor = self.context.exchange.copy(x) if _is_computed(x, self.context) else x
        return entered


@dataclass(frozen=True)
class Scatter:
    """A whole value of which this rank takes its own features."""

    context: TensorContext
    dim: int
    by_rank: ByRank

    def __call__(self, x: Tensor) -> Tensor:
        if _is_computed(x, self.context):
            own: Tensor = self.context.exchange.scatter(x, self.dim, self.by_rank)
            return own
        return take_local(x, self.dim, self.by_rank[self.context.rank])


@dataclass(frozen=True)
class Pick:
    """Some of the features that a rank holds."""

    dim: int
    ranges: Ranges

    def __call__(self, x: Tensor) -> Tensor:
        return take_local(x, self.dim, self.ranges)


def take_local(x: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """Ranges of a dim, by plain differentiable operations; a view where they are one."""
    if len(ranges) == 1:
        return x.narrow(dim, ranges[0][0], ranges[0][1] - ranges[0][0])
    return take_ranges(x, dim, ranges)


def _is_computed(x: Tensor, context: TensorContext) -> bool:
    wanted = x.requires_grad and torch.is_grad_enabled()
    return wanted and (not x.is_leaf or id(x) in context.kept_whole)
