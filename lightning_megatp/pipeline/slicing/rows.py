"""Where the samples of a batch lie in tensors of its step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SCRAMBLED = 0
"""Rounds of what holds a part of the samples, or parts of them."""


class Rows(NamedTuple):
    """Where a tensor's samples lie."""

    dim: int
    rounds: int
    """How often all samples follow each other along the dim; each may have several neighbouring rows."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """A tensor of the samples of several: of each round, one after the other."""
        if self.rounds == 1:
            return torch.cat(list(parts), self.dim)
        return self.put([self.apart(part) for part in parts])

    def apart(self, x: Tensor) -> Tensor:
        """A tensor with a dim of its own for rounds, before that of the samples."""
        return x.unflatten(self.dim, (self.rounds, -1))

    def put(self, parts: Sequence[Tensor]) -> Tensor:
        """One of parts that have it."""
        return torch.cat(list(parts), self.dim + 1).flatten(self.dim, self.dim + 1)


class Placed(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    rows: Rows | None
    """None where no samples are known to lie in it."""
    has_graph: bool
    """Whether it requires a gradient."""

    def rows_in(self, part: Tensor, samples: int, of_part: int) -> Rows | None:
        """Where a part of the samples lies in a tensor that is a microbatch's; None if that isn't sure.

        Args:
            samples: in this tensor.
            of_part: in that one.
        """
        whole, rows, shape = self.shape, self.rows, part.shape
        if rows is None or not rows.rounds or len(whole) != len(shape):
            return None
        if [dim for dim, size in enumerate(shape) if size != whole[dim]] != [rows.dim]:
            return None
        size = shape[rows.dim]
        even = size * samples == whole[rows.dim] * of_part and size % (of_part * rows.rounds) == 0
        return rows if even and size else None


class CallRows(NamedTuple):
    """The tensors of one call, in their order."""

    taken: tuple[Placed, ...]
    made: tuple[Placed, ...]
