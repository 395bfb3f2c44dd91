"""Parallel layers as torch.compile traces them: operations of torch's library, at which no graph breaks.

The compiler can't follow what `collectives.py` and `entry.py` do: they start messages and wait for them later, and note
what entered. Here whatever lies between two values of its graph is one operation, with shapes for the tracer and a
backward of its own:

    columns     the column layers that read one value. Backward: starts to sum the gradient of the input over the ranks,
                computes those of the weights meanwhile, waits.
    row         a row layer without its bias, and the sum over the ranks.
    reduce      as `reduce_from_region`.
    gather      shards, of features or of a parameter that the code reads beside its layer.

A compiled graph bears no marks of regions (see `lineage.py`): these are known from a step that ran uncompiled.

Source: as of `entry.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_megatp.plan.ranges import Ranges, length
from lightning_megatp.shim.torch import group_named
from lightning_megatp.tensor.collectives import all_gather, all_reduce, take_own


@torch.library.custom_op("lightning_megatp::columns", mutates_args=())
def columns(x: Tensor, weights: list[Tensor], biases: list[Tensor], biased: list[bool], group: str) -> list[Tensor]:
    """y = x A^T + b of a whole value that enters a tensor region, for each layer that reads it.

    Args:
        x: (..., h), the same on every rank, of the weights' dtype.
        weights: (features of this rank, h) each.
        biases: (features of this rank) each, of those layers that have one.
        biased: which have.
        group: name of the tensor-parallel process group.

    Returns:
        (..., features of this rank) each.

    Communication: none forward; 2 (t - 1) / t * numel(x) backward, for all layers together, behind the gradients of
    their weights.
    """
    left = iter(biases)
    return [F.linear(x, weight, next(left) if has else None) for weight, has in zip(weights, biased, strict=True)]


@columns.register_fake
def _(x: Tensor, weights: list[Tensor], biases: list[Tensor], biased: list[bool], group: str) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


def _keep_columns(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, weights, biases, biased, ctx.group = inputs
    of_x, *of_parameters = ctx.needs_input_grad
    ctx.of_x, ctx.of_weights = of_x, of_parameters[: len(weights)]
    left = iter(of_parameters[len(weights) : len(weights) + len(biases)])
    ctx.of_biases = [has and next(left) for has in biased]
    ctx.biased = biased
    ctx.save_for_backward(x, *weights)


def _columns_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    x, *weights = ctx.saved_tensors
    found = columns_backward(grads, x, weights, ctx.of_x, ctx.of_weights, ctx.of_biases, ctx.group)
    each = iter(found)
    of_x = next(each) if ctx.of_x else None
    of_weights = [next(each) if wanted else None for wanted in ctx.of_weights]
    of_biases = [next(each) if wanted else None for wanted, has in zip(ctx.of_biases, ctx.biased, strict=True) if has]
    return of_x, of_weights, of_biases, None, None


columns.register_autograd(_columns_backward, setup_context=_keep_columns)


@torch.library.custom_op("lightning_megatp::columns_backward", mutates_args=())
def columns_backward(
    grads: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    of_x: bool,
    of_weights: list[bool],
    of_biases: list[bool],
    group: str,
) -> list[Tensor]:
    """The gradients that are asked for: of x, of weights, of biases.

    Args:
        of_weights: of which layers' weights; `of_biases` likewise.
    """
    found: list[Tensor] = []
    work = None
    if of_x:
        total = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            total += grad @ weight
        found.append(total)
        work = dist.all_reduce(total, group=group_named(group), async_op=True)
    found += [_rows(grad).t() @ _rows(x) for grad, wanted in zip(grads, of_weights, strict=True) if wanted]
    found += [_rows(grad).sum(0) for grad, wanted in zip(grads, of_biases, strict=True) if wanted]
    if work is not None:
        work.wait()
    return found


@columns_backward.register_fake
def _(
    grads: list[Tensor],
    x: Tensor,
    weights: list[Tensor],
    of_x: bool,
    of_weights: list[bool],
    of_biases: list[bool],
    group: str,
) -> list[Tensor]:
    found = [x.new_empty(x.shape)] if of_x else []
    found += [weight.new_empty(weight.shape) for weight, wanted in zip(weights, of_weights, strict=True) if wanted]
    return found + [grad.new_empty(grad.shape[-1:]) for grad, wanted in zip(grads, of_biases, strict=True) if wanted]


@torch.library.custom_op("lightning_megatp::row", mutates_args=())
def row(x: Tensor, weight: Tensor, group: str) -> Tensor:
    """y = x A^T, summed over the ranks: leaves a tensor region.

    Args:
        x: (..., features of this rank), of the weight's dtype.
        weight: (o, features of this rank).

    Returns:
        (..., o), the same on every rank.

    Communication: 2 (t - 1) / t * numel(y) forward; none backward.
    """
    y = F.linear(x, weight)
    dist.all_reduce(y, group=group_named(group))
    return y


@row.register_fake
def _(x: Tensor, weight: Tensor, group: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _keep_row(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _ = inputs
    of_x, of_weight, *_ = ctx.needs_input_grad
    ctx.save_for_backward(x if of_weight else None, weight if of_x else None)


def _row_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    of_x = None if weight is None else grad @ weight
    return of_x, None if x is None else _rows(grad).t() @ _rows(x), None


row.register_autograd(_row_backward, setup_context=_keep_row)


@torch.library.custom_op("lightning_megatp::reduce", mutates_args=())
def reduce(x: Tensor, group: str) -> Tensor:
    """`reduce_from_region`."""
    return all_reduce(x, group_named(group))


@reduce.register_fake
def _(x: Tensor, group: str) -> Tensor:
    return x.new_empty(x.shape)


reduce.register_autograd(lambda ctx, grad: (grad, None))


@torch.library.custom_op("lightning_megatp::gather", mutates_args=())
def gather(x: Tensor, dim: int, sizes: list[int], rank: int, group: str) -> Tensor:
    """The shards of all ranks along `dim`, one after another; the gradient is sliced.

    Args:
        sizes: along `dim`, of each rank.
        rank: this one.

    Communication: (t - 1) / t * numel(result) forward (padded to equal sizes); none backward.
    """
    return all_gather(x, group_named(group), dim, sizes)


@gather.register_fake
def _(x: Tensor, dim: int, sizes: list[int], rank: int, group: str) -> Tensor:
    dim = dim % x.dim()
    return x.new_empty((*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]))


@torch.library.custom_op("lightning_megatp::scatter", mutates_args=())
def scatter(x: Tensor, dim: int, sizes: list[int], rank: int, group: str) -> Tensor:
    """This rank's part of what lies in the order of the ranks: the conjugate of `gather`."""
    return take_own(x, group_named(group), dim, sizes)


@scatter.register_fake
def _(x: Tensor, dim: int, sizes: list[int], rank: int, group: str) -> Tensor:
    dim = dim % x.dim()
    return x.new_empty((*x.shape[:dim], sizes[rank], *x.shape[dim + 1 :]))


def _keep_sizes(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.how = inputs


gather.register_autograd(lambda ctx, grad: (scatter(grad, *ctx.how), *[None] * 4), setup_context=_keep_sizes)
scatter.register_autograd(lambda ctx, grad: (gather(grad, *ctx.how), *[None] * 4), setup_context=_keep_sizes)


def gather_in_order(x: Tensor, dim: int, by_rank: Sequence[Ranges], rank: int, group: str) -> Tensor:
    """The whole of shards, in the order of its indices.

    Args:
        x: the shard of this rank.
        by_rank: the ranges of every rank along `dim`; what several own is taken from one of them, whose gradient is
            that of all.
    """
    pieces, at = [], 0
    for start, stop in [piece for ranges in by_rank for piece in ranges]:
        pieces.append((start, stop, at))
        at += stop - start
    gathered = gather(x, dim, [length(ranges) for ranges in by_rank], rank, group)
    parts, done = [], 0
    for start, stop, at in sorted(pieces):
        if stop > done:
            skipped = max(0, done - start)
            parts.append(gathered.narrow(dim, at + skipped, stop - start - skipped))
            done = stop
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _rows(x: Tensor) -> Tensor:
    """(..., k) -> (n, k)"""
    return x.reshape(-1, x.shape[-1])
