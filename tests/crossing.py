"""Which cases of a product of parameters the fast suite runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def crossed(firsts: Sequence[Any], seconds: Sequence[Any]) -> list[Any]:
    """Parameters for all pairs, of which those beyond a cover run with `--all-cases` only.

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
            marks=() if (i, j) in kept else pytest.mark.extended,
        )
        for i, j in itertools.product(range(len(firsts)), range(len(seconds)))
    ]


def _named(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(_named, value))
    return value.__name__ if isinstance(value, type) else str(value)
