"""Cutting parameters to shards, putting shards together, and using whole parameters in sharded layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_megatp.plan.ranges import Ranges
from lightning_megatp.plan.shard import ShardedTensorSpec
from lightning_megatp.tensor.collectives import gather_ranges, take_ranges
from lightning_megatp.tensor.functions import OwnFunction


def shard_(parameter: nn.Parameter, spec: ShardedTensorSpec, rank: int) -> None:
    """Cut a parameter to a rank's shard. The Parameter object stays the same, so ties and references hold.

    Args:
        parameter: of the spec's full shape.
    """
    replace_data(parameter, spec.spec(rank).take(parameter.data))


def replace_data(parameter: Tensor, data: Tensor) -> None:
    """`parameter.data = data`, of another shape, also where a graph of before is alive (a loss, or an output of
    `__init__`, that somebody keeps): new graphs shall not share its node for the gradient, which knows the old shape.
    The node is forgotten where the dtype changes (torch 2.11-2.13)."""
    other = torch.float32 if data.dtype != torch.float32 else torch.float64
    parameter.data = torch.empty(0, dtype=other, device=parameter.device)
    parameter.data = data


def gather_shards(local: Tensor, spec: ShardedTensorSpec, group: dist.ProcessGroup) -> Tensor:
    """The full tensor of a shard (a parameter, its gradient or its optimizer state), on every rank of the group.

    Communication: one all-gather; no gradient.
    """
    with torch.no_grad():
        return gather_ranges(local, group, spec.dim, spec.by_rank)


@contextlib.contextmanager
def whole_values(split: Sequence[tuple[Tensor, ShardedTensorSpec]], group: dist.ProcessGroup) -> Iterator[None]:
    """Let split parameters be whole meanwhile. At the end each rank keeps its part of what they have become.

    Communication: one all-gather for each.
    """
    shards = [parameter.data for parameter, _ in split]
    for (parameter, spec), shard in zip(split, shards, strict=True):
        parameter.data = gather_shards(shard, spec, group)
    try:
        yield
    finally:
        for (parameter, spec), shard in zip(split, shards, strict=True):
            shard.copy_(spec.spec(group.rank()).take(parameter.data))
            parameter.data = shard


def gather_parameter(parameter: Tensor, spec: ShardedTensorSpec, group: dist.ProcessGroup) -> Tensor:
    """The full parameter for a use outside its layer, where values are whole; its gradient is sliced.

    Communication: one all-gather forward; none backward.
    """
    return _GatherParameter.apply(parameter, group, spec)


def slice_whole(parameter: Tensor, group: dist.ProcessGroup, dim: int, by_rank: Sequence[Ranges]) -> Tensor:
    """This rank's ranges of a parameter that is kept whole; the gradients of all ranks are put together.

    Communication: none forward; an all-reduce of the full gradient backward.
    """
    return _SliceWhole.apply(parameter, group, dim, by_rank)


class _GatherParameter(OwnFunction):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: dist.ProcessGroup, spec: ShardedTensorSpec) -> Tensor:
        ctx.spec, ctx.rank = spec, group.rank()
        ctx.region_above, ctx.region_below = "whole", "tensor"
        return gather_ranges(parameter, group, spec.dim, spec.by_rank)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad = take_ranges(grad, ctx.spec.dim, ctx.spec.by_rank[ctx.rank]).clone()
        if ctx.spec.shared:  # summed over the owners later
            for start, stop, owners in ctx.spec.pieces(ctx.rank):
                grad.narrow(ctx.spec.dim, start, stop - start).div_(owners)
        return grad, None, None


class _SliceWhole(OwnFunction):
    @staticmethod
    def forward(ctx: Any, parameter: Tensor, group: dist.ProcessGroup, dim: int, by_rank: Sequence[Ranges]) -> Tensor:
        ctx.group, ctx.dim, ctx.ranges, ctx.shape = group, dim, by_rank[group.rank()], parameter.shape
        ctx.region_above, ctx.region_below = "tensor", "whole"
        return take_ranges(parameter, dim, ctx.ranges)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        full, at = grad.new_zeros(ctx.shape), 0
        for start, stop in ctx.ranges:
            full.narrow(ctx.dim, start, stop - start).copy_(grad.narrow(ctx.dim, at, stop - start))
            at += stop - start
        dist.all_reduce(full, group=ctx.group)  # a sum: elements owned by several ranks add up
        return full, None, None, None
