"""What a step sets for its forward and puts back after it: modes (`eval()`, then `train()`), flags, hooks, methods that
it swaps. Stages before the last leave the step before it does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from lightning_megatp.snapshots.leftovers import is_own_object
from lightning_megatp.snapshots.snapshot import Snapshot, is_same, refill


class Spot(NamedTuple):
    """An entry of a dict, such as an object's attributes; or, without a key, all that a container holds."""

    holder: Any
    key: Any = None


class Toggles:
    """Records what a step sets during a dry run and puts back afterwards.

    Args:
        snapshot: of before it.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._ours: dict[tuple[int, Any], Spot] = {}
        self._found: dict[tuple[int, Any], Spot] = {}
        self._last: dict[tuple[int, Any], Any] = {}
        """What the changed places held at the last look."""

    def begin(self) -> None:
        """Before the step: what was put in place for the dry run is not looked at."""
        self._ours = self._changed()

    def look(self) -> None:
        """Where a later stage goes on, and an earlier one may have ended."""
        changed = self._changed()
        self._found.update(changed)
        self._last = {identity: _held(spot) for identity, spot in changed.items()}

    def put_back_by_now(self) -> tuple[Spot, ...]:
        """At the end: what was seen to be changed, and is as it was before."""
        not_back = {**self._ours, **self._changed()}
        return tuple(spot for identity, spot in self._found.items() if identity not in not_back)

    def set_late(self) -> list[Any]:
        """At the end: the dicts, lists and sets in which something was set since the last look, for good."""
        changed = {i: spot for i, spot in self._changed().items() if i not in self._ours}
        return [spot.holder for i, spot in changed.items() if not is_same(_held(spot), self._last.get(i, _NOTHING))]

    def _changed(self) -> dict[tuple[int, Any], Spot]:
        """Keys that are no names (of a hook, of a batch) are others each time: all that their dict holds is taken."""
        entries = self._snapshot.changed_entries()
        spots = (Spot(holder, key if isinstance(key, str) else None) for holder, key in entries)
        return {(id(spot.holder), spot.key): spot for spot in spots}


@contextlib.contextmanager
def putting_back(spots: Sequence[Spot]) -> Iterator[None]:
    """Around a stage's part of a step: at its end these places hold what they held before."""
    before = [_held(spot) for spot in spots]
    try:
        yield
    finally:
        for (holder, key), held in zip(spots, before, strict=True):
            if key is None:
                refill(holder, dict(held) if isinstance(holder, dict) else held)
            elif held is _NOTHING:
                dict.pop(holder, key, None)
            elif dict.get(holder, key, _NOTHING) is not held:
                dict.__setitem__(holder, key, held)


_NOTHING = object()


def _held(spot: Spot) -> Any:
    holder, key = spot
    if key is None:
        return tuple(holder.items() if isinstance(holder, dict) else holder)
    return dict.get(holder, key, _NOTHING)


def modules_with(holders: Sequence[Any], modules: Mapping[str, nn.Module]) -> list[str]:
    """The names of the modules that these dicts, lists and sets belong to: attributes of the module itself, or of an
    object of the user's on it, or what a container on it holds."""
    wanted = set(map(id, holders))
    return [name for name, module in modules.items() if wanted & set(map(id, _holders_on(module)))] if wanted else []


def _holders_on(module: nn.Module) -> Iterator[Any]:
    yield vars(module)
    for value in vars(module).values():
        yield getattr(value, "__dict__", value) if is_own_object(value) else value
