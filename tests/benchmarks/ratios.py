"""Ratios of step times, with what the noise leaves of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.benchmarks.turns import Taken

OURS = "ours"


@dataclass(frozen=True)
class Ratio:
    """The median of ratios of neighbours in time, and its 95 % interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}..{self.high:.3f})"


@dataclass(frozen=True)
class Figure:
    """One number with a goal that is no ratio of step times.

    Args:
        part: e.g. "pipeline".
        what: what was measured, where.
        value: in `unit`.
        goal: what it should be at most; None without a goal.
    """

    part: str
    what: str
    value: float
    unit: str
    goal: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.value <= self.goal


@dataclass(frozen=True)
class Row:
    """One comparison.

    Args:
        part: e.g. "tensor".
        what: what ran, with its size.
        peer: beside what.
        ratio: ours / peer's.
        goal: what the ratio should be at most; None without a goal.
        ours, theirs: medians in milliseconds.
        python: microseconds of ours and of the peer's outside of kernels and collectives; None where not measured.
    """

    part: str
    what: str
    peer: str
    ratio: Ratio
    goal: float | None
    ours: float
    theirs: float
    python: tuple[float, float] | None = None

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.ratio.median <= self.goal


def interval(values: Sequence[float]) -> Ratio:
    """The median, and the order statistics that enclose it with 95 % (no assumption on the distribution).

    Source: Conover, Practical Nonparametric Statistics, 3rd ed., section 3.2 (normal approximation of the binomial).
    """
    ordered = sorted(values)
    n = len(ordered)
    half = 0.98 * math.sqrt(n)
    low, high = max(0, math.floor(n / 2 - half)), min(n - 1, math.ceil(n / 2 + half) - 1)
    return Ratio(statistics.median(ordered), ordered[low], ordered[max(low, high)])


Round = Sequence[Mapping[str, Taken]]
"""What the programs of one round took, by rank."""


def compare(part: str, what: str, rounds: Sequence[Round], goals: Mapping[str, float | None]) -> list[Row]:
    """Ours beside every other program. A step lasts until the slowest rank is done.

    Args:
        goals: of the ratio to each peer, by its name.

    Raises:
        AssertionError: the programs of a round did not compute the same loss.
    """
    for by_rank in rounds:
        check_losses(what, by_rank)
    return [_row(part, what, rounds, peer, goal) for peer, goal in goals.items()]


def check_losses(what: str, by_rank: Round, tolerance: float = 1e-3) -> None:
    """Programs that are compared must have the same first loss, on average over the ranks that have one."""
    losses = {name: [taken[name].loss for taken in by_rank if not math.isnan(taken[name].loss)] for name in by_rank[0]}
    means = {name: statistics.fmean(found) for name, found in losses.items() if found}
    wrong = [name for name, loss in means.items() if not abs(loss - means[OURS]) <= tolerance * abs(means[OURS])]
    assert not wrong, f"{what}: the first losses differ: {means}"


def seconds(rounds: Sequence[Round], name: str) -> list[float]:
    """Of every step of every round, the slowest rank's."""
    return [max(step) for by_rank in rounds for step in zip(*(t[name].seconds for t in by_rank), strict=True)]


def python(rounds: Sequence[Round], name: str) -> float:
    """Median microseconds of a step outside of kernels and collectives, on the rank with the most."""
    ranks = range(len(rounds[0]))
    return 1e6 * max(statistics.median([x for r in rounds for x in r[rank][name].python]) for rank in ranks)


def _row(part: str, what: str, rounds: Sequence[Round], peer: str, goal: float | None) -> Row:
    ours, theirs = seconds(rounds, OURS), seconds(rounds, peer)
    ratio = interval([a / b for a, b in zip(ours, theirs, strict=True)])
    own = statistics.median(ours) * 1e3, statistics.median(theirs) * 1e3
    return Row(part, what, peer, ratio, goal, *own, (python(rounds, OURS), python(rounds, peer)))
