"""How the batches of an evaluation are run, by what earlier ones have shown."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_megatp.pipeline.remote.ways import Way, Ways


def _loop(ways: Ways, loop: int, planned: Sequence[bool], runs: Sequence[bool]) -> str:
    """The ways of a loop's batches: a letter each.

    Args:
        planned: whether a batch has a plan.
        runs: whether a batch would run to its end where it is cut.
    """
    found = ""
    for has_plan, works in zip(planned, runs, strict=True):
        ways.enter(loop)
        way = ways.of_batch(has_plan)
        if way is Way.CUT and not works:
            way = ways.instead
        ways.ran(way, not (has_plan and works))
        found += way.name[0]
    return found


def test_steps_that_can_be_cut_are() -> None:
    assert _loop(Ways(), 1, [True] * 3, [True] * 3) == "CCC"


def test_where_no_batch_can_be_cut_they_are_run_as_on_one_device() -> None:
    ways = Ways()
    assert _loop(ways, 1, [False] * 3, [False] * 3) == "WWW"
    assert _loop(ways, 2, [True] * 3, [False] * 3) == "WWW"


def test_a_loop_counts_all_its_batches_alike() -> None:
    assert _loop(Ways(), 1, [True] * 3, [False, True, True]) == "WWW", "the first decides"
    assert _loop(Ways(), 1, [True, True, False], [True, False, False]) == "CPP"


def test_the_next_loop_is_cut_where_some_batches_can_be() -> None:
    ways = Ways()
    assert _loop(ways, 1, [True] * 3, [False, True, True]) == "WWW"
    assert _loop(ways, 2, [True] * 3, [False, True, True]) == "PCC"
    assert _loop(ways, 3, [True] * 3, [True, True, True]) == "CCC"
