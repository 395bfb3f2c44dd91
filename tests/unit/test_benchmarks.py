"""The benchmarks' own machinery: turns, ratios, and what they refuse to compare."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest
import torch

from tests.benchmarks.ratios import OURS, Ratio, check_losses, compare, interval
from tests.benchmarks.report import tables
from tests.benchmarks.turns import Program, Taken, alternate, loop


def test_programs_take_turns_in_an_order_that_goes_round() -> None:
    ran: list[str] = []

    def noting(name: str) -> Callable[[Program], None]:
        def step() -> torch.Tensor:
            ran.append(name)
            return torch.tensor(2.0)

        return loop(step)

    taken = alternate({"a": noting("a"), "b": noting("b")}, steps=3, warm_up=1)
    assert ran[:8] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert [len(t.seconds) for t in taken.values()] == [3, 3]
    assert [t.loss for t in taken.values()] == [2.0, 2.0]
    assert all(t.python for t in taken.values())


def test_an_error_of_a_program_is_raised_where_it_is_waited_for() -> None:
    def step() -> torch.Tensor:
        raise ValueError("broken")

    program = Program(loop(step))
    with pytest.raises(ValueError, match="broken"):
        program.step()


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    draw = random.Random(0)
    found = [interval([draw.lognormvariate(0, 1) for _ in range(60)]) for _ in range(1000)]  # its median is 1
    assert 0.93 <= statistics.fmean(ratio.low <= 1 <= ratio.high for ratio in found) <= 0.985


def test_a_step_lasts_until_the_slowest_rank_is_done() -> None:
    ranks = [{OURS: _taken([2.0, 1.0]), "peer": _taken([1.0, 2.0])}, {OURS: _taken([1.0, 4.0]), "peer": _taken([1, 1])}]
    (row,) = compare("tensor", "what", [ranks], {"peer": 1.0})
    assert row.ratio == Ratio(2.0, 2.0, 2.0) and row.met is False
    assert "**2.000**" in tables([row]) and "missed" in tables([row])


def test_programs_with_different_losses_are_not_compared() -> None:
    with pytest.raises(AssertionError, match="first losses differ"):
        check_losses("what", [{OURS: _taken([1.0]), "peer": Taken([1.0], [1.0], loss=3.1)}])


def _taken(seconds: list[float]) -> Taken:
    return Taken(seconds, [0.0], loss=3.0)
