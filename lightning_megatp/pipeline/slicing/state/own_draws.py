"""Generators of Python and NumPy that a module holds (`self.rng = numpy.random.default_rng(0)`), and a step draws from.

Stages before the last leave a step before its end, and so draw less from them. Where a step draws from one both before
and behind such a place, the numbers of the next microbatch would be others on each stage: then each microbatch has its
own seed, as it has for torch's random numbers. Otherwise they are those of one device.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from torch import nn

from lightning_megatp.pipeline.slicing.state.put_back import Spot
from lightning_megatp.random_states import generator_state, is_host_generator
from lightning_megatp.snapshots.snapshot import places_of


class OwnDraws:
    """What a dry run draws from the generators on a module.

    Args:
        module: whose step it is.
    """

    def __init__(self, module: nn.Module) -> None:
        self._spots = [Spot(holder, key) for holder, key in places_of(module.modules(), is_host_generator)]
        self._states = self._now()
        self._pieces = [0] * len(self._spots)
        """In how many pieces of the step something was drawn."""

    def look(self) -> None:
        """A piece of the step ends: a stage may leave it here."""
        before, self._states = self._states, self._now()
        self._pieces = [n + (a != b) for n, a, b in zip(self._pieces, before, self._states, strict=True)]

    @property
    def any(self) -> bool:
        """Whether something was drawn."""
        return any(self._pieces)

    def apart(self, to_the_end: bool) -> tuple[Spot, ...]:
        """Where the generators are of which stages would draw other numbers.

        Args:
            to_the_end: the step was seen to its end.
        """
        most = 1 if to_the_end else 0
        return tuple(spot for spot, n in zip(self._spots, self._pieces, strict=True) if n > most)

    def _now(self) -> list[bytes]:
        held = map(_at, self._spots)
        return [pickle.dumps(generator_state(x)) if is_host_generator(x) else b"" for x in held]


def generators_at(spots: Sequence[Spot]) -> list[Any]:
    """The generators that are there now."""
    return [x for x in map(_at, spots) if is_host_generator(x)]


def _at(spot: Spot) -> Any:
    holder, key = spot
    if isinstance(holder, dict):
        return holder.get(key)
    return holder[key] if key < len(holder) else None
