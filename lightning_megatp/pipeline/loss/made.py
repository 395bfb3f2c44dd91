"""Numbers that a step has made of many: averages and sums, and what is a linear function of them."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

NEXT_TO_NOTHING = 1e-12
"""What a count of nothing that was taken for something is among others: where a batch has nothing to average, as where
all of its microbatches have not, one device divides by something, and its loss is a number."""


@dataclass(frozen=True, eq=False)
class Average:
    """One number that a step has made of many.

    Args:
        by: what made it, for messages.
        value: () a copy: a step may add to the number in place.
        count: how many values it is the mean of, or their weights' sum; None for a sum of them.
        over: the same for averages over the same things.
        of_targets: whether it is a cross-entropy of classes.
        unit: the unit inside of which it was made; "" for none.
        summed: of a sum, the shape of what it has added up.
        adds: whether that is nothing but a sum over samples: by `reduction="sum"`, or of whole numbers. What else a
            step sums up may have been divided before, by the number of samples or the sum of their weights.
        divisor: the Python number that such a sum was divided by: a count of them, or any number.
        of_sample: whether it was made of one sample, like a loss in a loop over samples: one number to add up.
        empty: () bool, whether a sum was divided by a count of nothing that was taken for something (`clamp(min=1)`):
            it is added to the batch's sum, and nothing to what that is divided by.
        factor: what it was multiplied by, which should be the same in all microbatches.
        weights: of classes, of a cross-entropy, likewise.
    """

    by: str
    value: Tensor
    count: Tensor | float | None
    over: Hashable
    of_targets: bool = False
    unit: str = ""
    summed: tuple[int, ...] = ()
    adds: bool = False
    divisor: float | None = None
    of_sample: bool = False
    empty: Tensor | bool = False
    factor: Tensor | float = 1.0
    weights: Tensor | None = None

    def times(self, factor: Tensor | float) -> Average:
        """What this number is after a product.

        Args:
            factor: a single number.
        """
        return replace(self, factor=self.factor * (factor.detach() if isinstance(factor, Tensor) else factor))

    def summed_up(self, result: Tensor) -> Average:
        """What is left of a table of sums when it is summed or averaged itself.

        Args:
            result: of that.
        """
        return self if self.count is not None or not self.value.dim() else replace(self, value=result.detach().clone())

    def divided(
        self,
        by: Tensor | float,
        over: Hashable,
        share: bool,
        result: Tensor,
        empty: Tensor | bool = False,
        times: float | None = None,
    ) -> Average:
        """What this number is after a division.

        Args:
            by: a count, or what else it is divided by.
            over: the same for divisions by the same.
            share: whether it is a mean itself (of a mask): `mean / mean` is over what counts in both. Any other divisor
                of an average is a factor.
            result: of the division, of which this may be an addend.
            empty: () bool, whether the count is known to be of nothing.
            times: what it is multiplied by besides. The mean of n numbers, times n, is their sum.
        """
        value = result.detach().clone()
        if self.count is not None and self.divisor is not None and not isinstance(by, Tensor):
            return replace(self, value=value, count=self.count * by, divisor=self.divisor * by)  # / length / rows
        if self.count is not None and self.count != times:
            return (
                replace(self, value=value, count=self.count * by, over=(self.over, over))
                if share
                else self.times(1 / by)
            )
        none = (self.value == 0) & (by <= 1)  # a count of nothing is often taken for 1, or for less
        if isinstance(by, Tensor):
            count, number = torch.where(none, torch.where(by != 0, NEXT_TO_NOTHING, 0.0), by), None
        else:
            count, number = torch.where(none, NEXT_TO_NOTHING, float(by)), float(by)
        return replace(self, by="sum / count", value=value, count=count, over=over, divisor=number, empty=empty)

    def divisor_counts(self, rows: int, batch: int) -> bool:
        """Whether the divisor may be a number of what was added up, by the shapes of a microbatch.

        Args:
            rows: its samples.
            batch: those of the batch.
        """
        by, counts = self.divisor, list(itertools.accumulate(self.summed, operator.mul))
        if by is None or by in counts:
            return True
        if self.of_sample:
            return by <= rows  # maybe of those alone that have something marked
        return by != batch and by >= rows and by % rows == 0 and bool(counts) and counts[-1] % by == 0


def _by_over(averages: Iterable[Average]) -> Iterable[list[Average]]:
    found: dict[Hashable, list[Average]] = {}
    for average in averages:
        found.setdefault(average.over, []).append(average)
    return found.values()


def _largest(same: Sequence[Average]) -> Average:
    """One of several averages over the same things, with the largest count: one of a loss of 0 may seem to be over
    nothing."""
    first, *others = same
    if not others or not isinstance(first.count, Tensor):
        return first
    return replace(first, count=functools.reduce(torch.maximum, [torch.as_tensor(a.count) for a in same]))


@dataclass(frozen=True, eq=False)
class Made:
    """What a number is a linear function of.

    Args:
        of: averages and sums.
        rest: whether a tensor is added, too, of which nothing is known.
        bent: the operation by which it isn't a linear one; "" if it is.
    """

    of: tuple[Average, ...]
    rest: bool = False
    bent: str = ""

    @property
    def distinct(self) -> list[Average]:
        """Sums, and averages over different things."""
        sums = [a for a in self.of if a.count is None]
        return sums + [_largest(same) for same in _by_over(a for a in self.of if a.count is not None)]

    @functools.cached_property
    def weighs_by(self) -> tuple[str, Average | None]:
        """What microbatches weigh by: "targets" or "elements", and the average whose count it is; nothing for "several"
        cross-entropies, whose counts all matter, and for "sums", which are added up; or "samples", if nothing is
        known."""
        means = [a for a in self.distinct if a.count is not None]
        if len(self.targets) == 1:
            return "targets", self.targets[0]
        if self.targets:
            return "several", None
        if means:
            return "elements", next((a for a in means if isinstance(a.count, Tensor)), means[0])
        sums = self.of and all(a.adds for a in self.of) and not self.rest and not self.bent
        return "sums" if sums else "samples", None

    @functools.cached_property
    def targets(self) -> list[Average]:
        """The cross-entropies over different targets."""
        return [a for a in self.distinct if a.of_targets and a.count is not None]

    def sums(self, rows: int, batch: int) -> str:
        """How it is a sum over samples, of which nothing shows that microbatches' are to be added up; "" if it isn't.
        Reads no values.

        Args:
            rows: the samples of a microbatch.
            batch: those of the batch.
        """
        if self.of and all(a.count is None and not (a.adds or a.of_sample) for a in self.of):
            return "a sum"
        constant = (a.divisor for a in self.of if a.empty is False and not a.divisor_counts(rows, batch))
        divisor = next(constant, None)
        return "" if divisor is None else f"a sum divided by {divisor:g}"

    @property
    def empty(self) -> Tensor | bool:
        """() bool, whether what it weighs by is a count of nothing that was taken for something."""
        chosen = self.weighs_by[1]
        return False if chosen is None else chosen.empty

    @property
    def count(self) -> Tensor | float | None:
        """How many values it is an average of; infinity for a sum of them, None if that can't be said."""
        kind, chosen = self.weighs_by
        if kind == "several":
            return sum(a.count for a in self.targets if a.count is not None)
        return torch.inf if kind == "sums" else None if chosen is None else chosen.count
