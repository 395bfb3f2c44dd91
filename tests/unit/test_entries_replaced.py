"""`entries_replaced` leaves dicts as they were, also where it fails half-way or replaces an entry twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lightning_megatp.detour import entries_replaced


class Shown(dict[str, Any]):
    """Hands out other objects than it holds, as the parameters of split layers."""

    def __getitem__(self, key: str) -> Any:
        return f"whole {super().__getitem__(key)}"

    def get(self, key: str, default: Any = None) -> Any:
        return f"whole {super().get(key, default)}"


def test_what_was_absent_is_absent_again_and_what_was_held_is_held_again() -> None:
    plain, shown = {"a": 1}, Shown(weight="part")
    with entries_replaced([(plain, "a", 2), (plain, "b", 3), (plain, "a", 4), (shown, "weight", None)]):
        assert plain == {"a": 4, "b": 3}
        assert dict.get(shown, "weight") is None
        del plain["b"]
    assert plain == {"a": 1} and dict.get(shown, "weight") == "part"


def test_each_entry_is_made_when_those_before_it_are_in_place() -> None:
    held: dict[str, Any] = {}
    with entries_replaced((held, "calls", (*held.get("calls", ()), name)) for name in ("block", "stack")):
        assert held["calls"] == ("block", "stack")
    assert not held


def test_a_failure_on_the_way_undoes_what_was_done() -> None:
    held = {"a": 1}

    def entries() -> Iterator[tuple[dict[str, int], str, int]]:
        yield held, "a", 2
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"), entries_replaced(entries()):
        raise AssertionError("not entered")
    assert held == {"a": 1}
