"""What a step sets for its forward and puts back after it: modes (`eval()`, then `train()`), flags, hooks, methods that
it swaps. Stages before the last leave the step before it does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lightning_megatp.pipeline.slicing.snapshot import Snapshot, refill


class Spot(NamedTuple):
    """An entry of a dict, such as an object's attributes; or, without a key, all that a container holds."""

    holder: Any
    key: Any = None


class Toggles:
    """Of one dry run.

    Args:
        snapshot: of before it.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._ours: dict[tuple[int, Any], Spot] = {}
        self._found: dict[tuple[int, Any], Spot] = {}

    def begin(self) -> None:
        """Before the step: what was put in place for the dry run is not looked at."""
        self._ours = self._changed()

    def look(self) -> None:
        """Where a stage begins, and earlier ones may have ended."""
        self._found.update(self._changed())

    def put_back_by_now(self) -> tuple[Spot, ...]:
        """At the end: what was seen to be changed, and is as it was before."""
        not_back = {**self._ours, **self._changed()}
        return tuple(spot for identity, spot in self._found.items() if identity not in not_back)

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
                refill(holder, held)
            elif held is _NOTHING:
                dict.pop(holder, key, None)
            elif dict.get(holder, key, _NOTHING) is not held:
                dict.__setitem__(holder, key, held)


_NOTHING = object()


def _held(spot: Spot) -> Any:
    holder, key = spot
    if key is None:
        return dict(holder) if isinstance(holder, dict) else list(holder)
    return dict.get(holder, key, _NOTHING)
