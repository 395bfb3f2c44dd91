"""The pairwise cover holds every pair that the whole matrix holds."""

from __future__ import annotations

from tests.parity.cases import _pairs, every_case, matrix, pairwise

MODELS = ["tied", "untied", "manual", "uneven"]


def test_every_possible_pair_is_covered() -> None:
    wanted = {pair for case in every_case(MODELS) for pair in _pairs(case)}
    cases = pairwise(MODELS)
    assert wanted == {pair for case in cases for pair in _pairs(case)}
    assert set(cases) <= set(every_case(MODELS))
    assert len(cases) < 40, len(cases)


def test_the_cover_is_the_same_each_time() -> None:
    assert pairwise(MODELS) == pairwise(MODELS)


def test_the_matrix_has_every_combination_in_float64_and_every_precision_in_every_layout() -> None:
    cases = list(matrix(MODELS))
    assert len(set(cases)) == len(cases)
    layouts = {(case.tp, case.sequence, case.dp) for case in cases}
    assert len(layouts) == 10
    tied = [case for case in cases if case.model == "tied"]
    assert sum(case.precision == "64-true" for case in tied) == 10 * 2 * 3 * 3
    assert sum(case.precision == "bf16-true" for case in tied) == 10
