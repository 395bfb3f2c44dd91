"""Rules of what is asked of logits whose classes are split: the largest, a softmax, chosen ones, losses of
log-probabilities. No rank builds all classes of a token.

Communication: numbers per token and rank, as few as named at each rule; nothing that grows with the classes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatp.tensor.features.call import Call, Operand
from lightning_megatp.tensor.features.decision import Decision, Enter, Scatter
from lightning_megatp.tensor.features.layout import FeatureLayout
from lightning_megatp.tensor.features.rules.across import dtype_of, wide
from lightning_megatp.tensor.features.rules.operands import align, dims_of, single

_MOST_PIECES = 8
"""Ranges of a rank, in each of which is looked for a chosen class."""


def extreme(call: Call) -> Decision | None:
    """amax, amin, argmax, argmin, and max and min over a dim. One number per token, or two; all classes where a
    gradient goes to the largest value itself, which equal values share."""
    x, layout = single(call), call.layout
    given, keepdim = call.argument(1, "dim", "axis"), bool(call.argument(2, "keepdim", "keepdims"))
    dims = None if x is None else dims_of(x, given)
    if x is None or dims != [layout.dim] or not _adds_up(x):
        return None
    name, sign = call.name, -1 if "min" in call.name else 1

    def run(tensors: Sequence[Tensor]) -> Any:
        own = tensors[0]
        if name in ("amax", "amin"):
            if own.requires_grad and torch.is_grad_enabled():
                layout.context.gathers[name] += 1
                whole = layout.context.exchange.gather(own, layout.dim, layout.by_rank)
                return getattr(whole, name)(layout.dim, keepdim)
            value = sign * _largest(sign * own, layout)
            return value if keepdim else value.squeeze(layout.dim)
        index = _index_of_largest(sign * own.detach(), layout)
        found = index if keepdim else index.squeeze(layout.dim)
        if name in ("argmax", "argmin"):
            return found
        value = _take(own, index, layout)
        return getattr(torch.return_types, name)((value if keepdim else value.squeeze(layout.dim), found))

    return Decision(None, run=run)


def softmax(call: Call) -> Decision | None:
    """softmax and log_softmax, whose results are split as their inputs are. The largest of each rank, and a sum; in
    backward another."""
    x, layout = single(call), call.layout
    if x is None or dims_of(x, call.argument(1, "dim")) != [layout.dim] or not _adds_up(x):
        return None
    given = call.kwargs.get("dtype") or next((y for y in call.args if isinstance(y, torch.dtype)), None)
    like = torch.softmax if call.name == "softmax" else torch.log_softmax

    def run(tensors: Sequence[Tensor]) -> Tensor:
        x = wide(tensors[0] if given is None else tensors[0].to(given))
        x = x - _largest(x, layout)
        total = layout.context.exchange.reduce(x.exp().sum(layout.dim, keepdim=True))
        enter = Enter(layout.context)
        result = x.exp() / enter(total) if call.name == "softmax" else x - enter(total.log())
        return result.to(given or dtype_of(tensors[0], lambda x: like(x, -1)))

    return Decision(layout, run=run)


def logsumexp(call: Call) -> Decision | None:
    """The largest of each rank, and a sum."""
    x, layout = single(call), call.layout
    if x is None or dims_of(x, call.argument(1, "dim")) != [layout.dim] or not _adds_up(x):
        return None
    keepdim = bool(call.argument(2, "keepdim"))

    def run(tensors: Sequence[Tensor]) -> Tensor:
        x = wide(tensors[0])
        largest = _largest(x, layout)
        largest = largest.masked_fill(largest.isinf(), 0.0)
        total = layout.context.exchange.reduce((x - largest).exp().sum(layout.dim, keepdim=True)).log() + largest
        return (total if keepdim else total.squeeze(layout.dim)).to(tensors[0].dtype)

    return Decision(None, run=run)


def gather(call: Call) -> Decision | None:
    """torch.gather: chosen classes, a sum of each; or along another dim, on this rank's features."""
    if len(call.operands) != 2 or len(call.args) > 3:
        return None
    x, index = call.operands
    dims, layout = dims_of(x, call.argument(1, "dim")), call.layout
    if not dims or not x.sharded or index.layout is not None or index.ndim != x.ndim:
        return None
    if dims != [layout.dim]:
        if index.shape[layout.dim] != layout.size:
            return None
        return Decision(layout, [None, Scatter(layout.context, layout.dim, layout.by_rank)])
    if not _can_be_chosen(x):
        return None
    return Decision(None, run=lambda tensors: _take(tensors[0], tensors[1], layout))


def nll_loss(call: Call) -> Decision | None:
    """F.nll_loss of log-probabilities, without weights: a sum per token."""
    x, layout = call.operands[0], call.layout
    target, reduction = call.argument(1, "target"), call.argument(6, "reduction", default="mean")
    ignored = call.argument(4, "ignore_index", default=-100)
    others = [call.argument(at, name) for at, name in ((2, "weight"), (3, "size_average"), (5, "reduce"))]
    if not isinstance(target, Operand) or target.layout is not None or any(x is not None for x in others):
        return None
    dim = min(1, x.ndim - 1) - x.ndim
    rows = [*x.shape[: dim + x.ndim], *x.shape[dim + x.ndim + 1 :]]
    legal = target.shape == torch.Size(rows) and reduction in ("none", "mean", "sum") and target.dtype == torch.int64
    if not legal or layout.dim != dim or not _can_be_chosen(x):
        return None

    def run(tensors: Sequence[Tensor]) -> Tensor:
        own, target = tensors
        left_out = target == ignored
        chosen = _take(own, target.masked_fill(left_out, 0).unsqueeze(dim), layout).squeeze(dim)
        loss = -chosen.masked_fill(left_out, 0.0)
        if reduction == "none":
            return loss
        return loss.sum() if reduction == "sum" else loss.sum() / (~left_out).sum()

    return Decision(None, run=run)


def kl_div(call: Call) -> Decision | None:
    """F.kl_div of two distributions: one number for all; or without a reduction, this rank's features."""
    if len(call.operands) != 2 or call.operands[0].shape != call.operands[1].shape:
        return None
    reduction, layout = call.argument(4, "reduction", default="mean"), call.layout
    log_target = bool(call.argument(5, "log_target"))
    aligned = align(call, [layout.dim, layout.dim])
    legacy = [call.argument(at, name) for at, name in ((2, "size_average"), (3, "reduce"))]
    divisor = {"none": 1, "sum": 1, "batchmean": call.operands[0].shape[0], "mean": math.prod(call.operands[0].shape)}
    if aligned is None or reduction not in divisor or any(x is not None for x in legacy) or not layout.disjoint:
        return None
    if aligned[1] != layout.by_rank:
        return None

    def run(tensors: Sequence[Tensor]) -> Tensor:
        own = F.kl_div(tensors[0], tensors[1], reduction="none", log_target=log_target)
        if reduction == "none":
            return own
        total: Tensor = layout.context.exchange.reduce(wide(own).sum())
        return (total / divisor[reduction]).to(own.dtype)

    return Decision(layout if reduction == "none" else None, aligned[0], run)


def _adds_up(x: Operand) -> bool:
    return x.layout is not None and x.layout.disjoint and x.dtype.is_floating_point


def _can_be_chosen(x: Operand) -> bool:
    return _adds_up(x) and x.layout is not None and len(x.layout.own) <= _MOST_PIECES


def _largest(x: Tensor, layout: FeatureLayout) -> Tensor:
    """The largest of all classes, without a graph; the dim stays."""
    x = x.detach()
    own = x.amax(layout.dim, keepdim=True) if x.shape[layout.dim] else _nothing(x, layout)
    return _of_ranks(own, layout).amax(-1)


def _index_of_largest(x: Tensor, layout: FeatureLayout) -> Tensor:
    """The index of the largest of all classes, of equal ones the first; the dim stays."""
    classes = torch.cat([torch.arange(start, stop, device=x.device) for start, stop in layout.own or ((0, 0),)])
    if len(classes):
        index = x.argmax(layout.dim, keepdim=True)
        own = _of_ranks(x.gather(layout.dim, index), layout)
        index = classes[index]
    else:
        own = _of_ranks(_nothing(x, layout), layout)
        index = torch.full(own.shape[:-1], layout.size, device=x.device)
    winners = (own == own.amax(-1, keepdim=True)) | own.isnan()
    return torch.where(winners, _of_ranks(index, layout), layout.size).amin(-1)


def _nothing(x: Tensor, layout: FeatureLayout) -> Tensor:
    """The largest of no classes."""
    return x.sum(layout.dim, keepdim=True).fill_(-math.inf)


def _of_ranks(x: Tensor, layout: FeatureLayout) -> Tensor:
    """(...) of each rank -> (..., t)"""
    by_rank = tuple(((rank, rank + 1),) for rank in range(len(layout.by_rank)))
    found: Tensor = layout.context.exchange.gather(x.unsqueeze(-1), -1, by_rank)
    return found


def _take(x: Tensor, index: Tensor, layout: FeatureLayout) -> Tensor:
    """torch.gather along the split dim of what all ranks have."""
    own, at, size = torch.full_like(index, -1), 0, x.shape[layout.dim]
    for start, stop in layout.own:
        own = torch.where((index >= start) & (index < stop), index - start + at, own)
        at += stop - start
    unknown = (index < 0) | (index >= layout.size)
    if size == 0:  # a row of zeros, of which nothing is chosen
        x, size = F.pad(x, [0, 0] * (-layout.dim - 1) + [0, 1]), 1
    chosen = x.gather(layout.dim, own.clamp(min=0).masked_fill(unknown, size))  # complains where one device would
    total: Tensor = layout.context.exchange.reduce(chosen.masked_fill(own < 0, 0.0))
    return total
