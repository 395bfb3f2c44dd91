"""The fast suite leaves out cases, and no value of a parameter but layouts."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.crossing import ON_RANKS, cover, left_out

pytest_plugins = ["pytester"]

PROGRAM = """
import pytest

@pytest.fixture(params=["file", "folder"])
def kind(request):
    return request.param

@pytest.mark.parametrize("layout", [object(), object(), object()])
@pytest.mark.parametrize(("zero", "name"), [(0, "a"), (1, "a"), (1, "b")])
def test_product(layout, zero, name, kind): ...

@pytest.mark.parametrize(("a", "b"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_one_mark(a, b): ...

def test_fixture(kind): ...

@pytest.mark.parametrize("layout", [object(), object(), object()])
def test_layouts(layout): ...

def test_alone(): ...
"""


def test_a_cover_has_every_value() -> None:
    cases = [frozenset(enumerate(values)) for values in itertools.product("abcd", "xyz", "01")]
    taken = cover(cases)
    assert set().union(*(cases[i] for i in taken)) == set().union(*cases)
    assert len(taken) == 4 and taken == cover(cases)


def test_of_marks_and_fixtures_every_value_is_left(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(pytester.makepyfile(PROGRAM))
    items, _ = pytester.inline_genitems(path)
    assert not left_out(items), "of tests on ranks alone"
    monkeypatch.setattr("tests.crossing.ON_RANKS", [*ON_RANKS, path.parent])
    kept = [item for item in items if item not in left_out(items)]
    by_test = {name: [x for x in kept if x.name.split("[")[0] == name] for name in {x.name.split("[")[0] for x in kept}}
    assert {name: len(cases) for name, cases in by_test.items()} == {
        "test_product": 3, "test_one_mark": 4, "test_fixture": 2, "test_layouts": 1, "test_alone": 1,
    }  # fmt: skip
    params = [item.callspec.params for item in by_test["test_product"] if isinstance(item, pytest.Function)]
    assert {x["kind"] for x in params} == {"file", "folder"} and len({id(x["layout"]) for x in params}) == 3
    assert {(x["zero"], x["name"]) for x in params} == {(0, "a"), (1, "a"), (1, "b")}
    assert left_out(items[:1]) == set(), "what is asked for by its name is run"
