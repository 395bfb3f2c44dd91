"""Where the samples of a batch lie in tensors of its step."""

from __future__ import annotations

from typing import NamedTuple

SCRAMBLED = 0
"""Rounds of what holds a part of the samples, or parts of them."""


class Rows(NamedTuple):
    """Where a tensor's samples lie."""

    dim: int
    rounds: int
    """How often all samples follow each other along the dim; each may have several neighbouring rows."""


class Placed(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    rows: Rows | None
    """None where no samples are known to lie in it."""
    has_graph: bool = False
    """Whether it requires a gradient."""


class CallRows(NamedTuple):
    """The tensors of one call, in their order."""

    taken: tuple[Placed, ...]
    made: tuple[Placed, ...]
