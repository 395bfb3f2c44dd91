"""Which cases of a product of parameters the fast suite runs."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


def fewer(cases: Iterable[Any], extended: Collection[Any]) -> list[Any]:
    """Parameters of which the `extended` run with `--all-cases` only: they repeat others in a further layout, say."""
    cases = list(cases)
    assert all(case in cases for case in extended), f"not among the cases: {[x for x in extended if x not in cases]}"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.extended)
        if case in extended
        else case
        for case in cases
    ]


def crossed(firsts: Sequence[Any], seconds: Sequence[Any], extended: Collection[Any] = ()) -> list[Any]:
    """Parameters for all pairs, of which those beyond a cover run with `--all-cases` only, as do the `extended`.

    In the cover each first and each second occurs: the n-th first with the n-th second, then what is left of the
    seconds with the firsts in turn, or what is left of the firsts with the first of the seconds. So the cheapest of
    the seconds, like a layout of two ranks, is best put in front.
    """
    count = max(len(firsts), len(seconds))
    kept = {(i % len(firsts), i if i < len(seconds) else 0) for i in range(count)}
    return [
        pytest.param(
            firsts[i],
            seconds[j],
            id=f"{_named(firsts[i])}-{_named(seconds[j])}",
            marks=() if (i, j) in kept and (firsts[i], seconds[j]) not in extended else pytest.mark.extended,
        )
        for i, j in itertools.product(range(len(firsts)), range(len(seconds)))
    ]


def _named(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(_named, value))
    return value.__name__ if isinstance(value, type) else str(value)
