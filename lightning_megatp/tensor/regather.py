"""Gathered sequences that are not kept for backward, but gathered again.

Source: Korthikanti et al. 2022, section 4.2.2: of the input of a column layer each rank keeps its own tokens.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_megatp.shim.torch import checkpoint_region, functorch_is_active, storage_id, tensor_version
from lightning_megatp.tensor.collectives import all_gather, sequence_sizes
from lightning_megatp.tensor.deferred import autocast_to
from lightning_megatp.tensor.saving import Saved
from lightning_megatp.tensor.sequence import SequenceShard


class Regather:
    """For the column layers that read one sequence shard.

    Args:
        shard: what they read.

    Memory: 1 / t of the gathered sequence between forward and backward.
    Communication: one all-gather in backward, (t - 1) / t of the gathered sequence, for all of these layers together.
    """

    def __init__(self, shard: SequenceShard) -> None:
        self._layout = shard.tokens
        self._own: Tensor | None = shard.plain.detach()
        self._kept: Saved | None = None
        self._readers = self._left = 0
        self._again: Tensor | None = None

    @contextlib.contextmanager
    def reading(self, gathered: Tensor) -> Iterator[Tensor]:
        """Around one layer.

        Args:
            gathered: the whole sequence.

        Yields:
            the same, in the dtype in which the layer reads it.
        """
        if not torch.is_grad_enabled() or checkpoint_region() is not None or functorch_is_active():
            yield gathered  # nothing is kept, or everything is computed again
            return
        x = autocast_to(gathered)
        with saved_tensors_hooks(functools.partial(self._pack, storage_id(x), x.dtype), self._unpack):
            yield x
        if self._readers and self._kept is None and self._own is not None:
            self._kept, self._own = Saved([self._own]), None  # through the hooks outside of these

    def _pack(self, storage: int, dtype: torch.dtype, x: Tensor) -> _Piece | _AsItIs:
        if storage_id(x) != storage:
            return _AsItIs(x, tensor_version(x))
        self._readers += 1
        return _Piece(x.shape, x.stride(), int(x.storage_offset()), dtype)

    def _unpack(self, packed: _Piece | _AsItIs) -> Tensor:
        if isinstance(packed, _AsItIs):
            return packed.tensor()
        if self._again is None or self._again.dtype != packed.dtype:
            self._again, self._left = self._gather(packed.dtype), self._readers
        x = self._again.as_strided(packed.shape, packed.stride, packed.offset)
        self._left -= 1
        if self._left == 0:
            self._again = None  # all layers had it
        return x

    def _gather(self, dtype: torch.dtype) -> Tensor:
        assert self._kept is not None
        (own,), layout = self._kept.tensors(), self._layout
        sizes = sequence_sizes(layout.length, layout.group.size())
        return all_gather(own.to(dtype), layout.group, layout.dim, sizes)


@dataclass(frozen=True)
class _Piece:
    """A view of the gathered sequence."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class _AsItIs:
    """Anything else that the layer saves: its weight."""

    x: Tensor
    version: int

    def tensor(self) -> Tensor:
        if tensor_version(self.x) != self.version:
            raise RuntimeError(
                "MegaTPStrategy: a weight of shape"
                f" {tuple(self.x.shape)} was changed in place between the forward and the backward that needs it."
            )
        return self.x
