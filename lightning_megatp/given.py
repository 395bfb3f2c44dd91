"""What a call is given besides tensors, and may fill: lists, dicts, and objects of the user's."""

from __future__ import annotations

import contextlib
from collections import UserDict, UserList
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_megatp.snapshots.leftovers import is_own_object

Path = tuple[Any, ...]
"""Positions, keys and names that lead from arguments to what holds values: a list, a dict, an object's attributes."""


def held_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[Path, Any]]:
    """The lists, the dicts, and the attributes of the user's own objects among arguments, each once. What is large is
    not looked into."""
    waiting: list[tuple[Path, Any]] = [((key,), x) for key, x in (*enumerate(args), *kwargs.items())]
    seen: set[int] = set()
    while waiting:
        path, x = waiting.pop()
        kind: Any = type(x)
        if kind in _PLAIN or id(x) in seen:
            continue
        seen.add(id(x))
        held = x if kind in (list, dict, tuple) else vars(x) if _is_open(x) else ()
        if not isinstance(held, tuple):
            yield path, held
        if len(held) <= _MOST:
            entries = held.items() if isinstance(held, dict) else enumerate(held)
            waiting += [((*path, key), entry) for key, entry in entries]


class Holding:
    """What objects of the user's hold at one moment.

    Args:
        values: what a call is given; the objects among them, and what hangs on these.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        objects = [x for x in values if type(x) not in _PLAIN and _is_open(x)]
        self._held = [(held, held.copy()) for _, held in held_in(objects, {})]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Meanwhile they hold it again."""
        now = [(held, held.copy()) for held, _ in self._held]
        _fill(self._held)
        try:
            yield
        finally:
            _fill(now)


def _is_open(x: Any) -> bool:
    """Whether its attributes are looked at."""
    return isinstance(x, (UserDict, UserList)) or is_own_object(x)


def _fill(contents: Sequence[tuple[Any, Any]]) -> None:
    for held, content in contents:
        held.clear()
        (held.extend if isinstance(held, list) else held.update)(content)


_PLAIN = frozenset([type(None), bool, int, float, str])
_MOST = 1000
