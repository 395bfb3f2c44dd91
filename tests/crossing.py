"""Which cases of a product of parameters the fast suite runs.

What a combination of values finds, most others with one of them find too, and each starts programs on several
processes. So the fast suite takes a cover, of each parameter every value at least once: of the tests on ranks that have
several `parametrize` marks (`left_out`), and of pairs that one mark has (`crossed`). A test whose cases are layouts
alone runs in one of them. `--all-cases` takes all.
"""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

ON_RANKS = [Path(__file__).parent / name for name in ("distributed", "parity")]

Values = frozenset[tuple[int, Hashable]]
"""Which mark, and which of its values."""


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Cases of tests on ranks that are not in the cover of their test."""
    of_tests: dict[tuple[Path, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and any(item.path.is_relative_to(folder) for folder in ON_RANKS):
            of_tests[item.path, item.nodeid.split("[")[0]].append(item)
    found: set[pytest.Item] = set()
    for (_, test), cases in of_tests.items():
        taken = one_of(test, len(cases)) if _differ_by_layout(cases) else cover([_values(case) for case in cases])
        found.update(case for i, case in enumerate(cases) if i not in taken)
    return found


def one_of(test: str, n: int) -> set[int]:
    """One of so many cases: another one from test to test, the same in every run."""
    return {zlib.crc32(test.encode()) % n}


def cover(cases: Sequence[Values]) -> set[int]:
    """The numbers of cases in which all values occur: greedy, of equally good ones the first."""
    missing = set().union(*cases)
    taken: set[int] = set()
    if len(cases) == 1 or not missing:
        return set(range(len(cases)))
    while missing:
        best = max(range(len(cases)), key=lambda i: (len(missing & cases[i]), -i))
        taken.add(best)
        missing -= cases[best]
    return taken


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


def _differ_by_layout(cases: Sequence[pytest.Function]) -> bool:
    return all(hasattr(case, "callspec") and case.callspec.params.keys() == {"layout"} for case in cases)


def _values(case: pytest.Function) -> Values:
    if not hasattr(case, "callspec"):
        return frozenset()
    params = dict(case.callspec.params)
    marks = [mark.args[0] if mark.args else mark.kwargs["argnames"] for mark in case.iter_markers("parametrize")]
    together = [[name.strip() for name in names.split(",")] if isinstance(names, str) else names for names in marks]
    of_marks = [tuple(_value(params.pop(name, None)) for name in names) for names in together]
    of_fixtures = [_value(x) for x in params.values()]
    return frozenset(enumerate([*of_marks, *of_fixtures]))


def _value(x: object) -> Hashable:
    """A case's value; an object by which it is, since all cases with it have the same."""
    return (type(x), x) if isinstance(x, str | int | float | bool | None) else id(x)


def _named(value: Any) -> str:
    if isinstance(value, tuple):
        return "-".join(map(_named, value))
    return value.__name__ if isinstance(value, type) else str(value)
