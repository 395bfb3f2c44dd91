"""The pairwise cover holds every pair that the whole matrix holds."""

from __future__ import annotations

from tests.parity.cases import _pairs, pairwise, whole_matrix

MODELS = ["tied", "untied", "manual", "uneven"]


def test_every_possible_pair_is_covered() -> None:
    wanted = {pair for case in whole_matrix(MODELS) for pair in _pairs(case)}
    cases = pairwise(MODELS)
    assert wanted == {pair for case in cases for pair in _pairs(case)}
    assert set(cases) <= set(whole_matrix(MODELS))
    assert len(cases) < 40, len(cases)


def test_the_cover_is_the_same_each_time() -> None:
    assert pairwise(MODELS) == pairwise(MODELS)
