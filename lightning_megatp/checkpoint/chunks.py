"""A shard as torch.distributed.checkpoint (DCP) sees it: chunks of a full tensor, at any offsets.

A fused q, k, v is several index ranges of one dim, so that its shard is several chunks. DCP asks an object for them by
the protocol of its tensor-likes (`__create_write_items__`, `__create_chunk_list__`); no tensor subclass is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import ChunkStorageMetadata, DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from lightning_megatp.plan.ranges import Ranges
from lightning_megatp.plan.shard import ShardSpec

_Box = tuple[tuple[int, int, int], ...]
"""Per dim: start and stop in the full tensor, start in the shard."""


class Chunks:
    """A local tensor that is a part of a full one, and the chunks that a rank reads into it or writes of it.

    Args:
        tensor: of the spec's local shape.
        spec: what part it is.
        ranges: per dim the ranges that are read or written; None for none at all.
    """

    def __init__(self, tensor: Tensor, spec: ShardSpec, ranges: tuple[Ranges, ...] | None) -> None:
        self.tensor, self.spec = tensor, spec
        found = () if ranges is None else boxes(spec.ranges, ranges)
        self._boxes = {tuple(start for start, _, _ in box): box for box in found}

    @classmethod
    def to_read(cls, tensor: Tensor, spec: ShardSpec) -> Chunks:
        """All of it."""
        return cls(tensor, spec, spec.ranges)

    @classmethod
    def to_write(cls, tensor: Tensor, spec: ShardSpec, writes: bool) -> Chunks:
        """What of it this rank is the first to hold; nothing, if another rank of a replicated axis `writes`."""
        return cls(tensor, spec, (spec.written or spec.ranges) if writes else None)

    def size(self) -> torch.Size:
        """The size of the full tensor; DCP compares it with what is on disk."""
        return torch.Size(self.spec.shape)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(self.tensor)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets, i),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for i, chunk in enumerate(self.__create_chunk_list__())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size([stop - start for start, stop, _ in box]))
            for offsets, box in self._boxes.items()
        ]

    def view(self, offsets: Sequence[int]) -> Tensor:
        """The part of the local tensor whose chunk starts at these offsets."""
        part = self.tensor.detach()
        for dim, (start, stop, at) in enumerate(self._boxes[tuple(offsets)]):
            part = part.narrow(dim, at, stop - start)
        return part

    def stage(self) -> None:
        """Let go of the tensor: hold a copy, in host memory, of what is to be written."""
        if self._boxes:
            self.tensor = self.tensor.detach().to("cpu", copy=True)


def boxes(held: tuple[Ranges, ...], wanted: tuple[Ranges, ...]) -> Iterator[_Box]:
    """The pieces of a shard, each a box in the full tensor and in the shard.

    Args:
        held: the shard's ranges per dim.
        wanted: ranges per dim that lie within them.
    """
    return itertools.product(*(_pieces(h, w) for h, w in zip(held, wanted, strict=True)))


def _pieces(held: Ranges, wanted: Ranges) -> list[tuple[int, int, int]]:
    found, at = [], 0
    for start, stop in held:
        for low, high in wanted:
            a, b = max(start, low), min(stop, high)
            if a < b or (start, stop) == (low, high):  # a dim of size 0 is a piece, too
                found.append((a, b, at + a - start))
        at += stop - start
    return found


def whole(name: str, tensor: Tensor) -> ShardSpec:
    """The spec of a tensor that no axis splits."""
    return ShardSpec.of_whole(name, tensor.shape)


class SavePlanner(DefaultSavePlanner):
    """DCP's planner, for a flat state dict of Chunks. What several stages hold is the last one's: global rank order."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False, dedup_save_to_lowest_rank=True)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        chunks: Chunks = self.state_dict[index.fqn]
        assert index.offset is not None
        return chunks.view(index.offset)


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner for loading into a flat state dict of Chunks."""

    def __init__(self, state: dict[str, Any], metadata: Metadata) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.state_dict, self.metadata, self.original_state_dict = state, metadata, state

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        chunks: Chunks = self.state_dict[index.fqn]
        assert index.offset is not None
        return chunks.view(index.offset)
