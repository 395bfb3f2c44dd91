"""Which cases of the tests on real ranks the default run takes.

A test with several `parametrize` marks has all combinations of their values. Most of what one of them finds any other
one with that value finds too, and each starts programs on several processes. So the default run takes a cover: of each
mark every value at least once. `--all-cases` runs all combinations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path

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
    for cases in of_tests.values():
        taken = cover([_values(case) for case in cases])
        found.update(case for i, case in enumerate(cases) if i not in taken)
    return found


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


def _values(case: pytest.Function) -> Values:
    if not hasattr(case, "callspec"):
        return frozenset()
    marks, found = list(case.iter_markers("parametrize")), set()
    for number, mark in enumerate(marks):
        names = mark.args[0] if mark.args else mark.kwargs["argnames"]
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        found.add((number, tuple(_value(case.callspec.params.get(name)) for name in names)))
    return frozenset(found)


def _value(x: object) -> Hashable:
    """A case's value; an object by which it is, since all cases with it have the same."""
    return (type(x), x) if isinstance(x, str | int | float | bool | None) else id(x)
