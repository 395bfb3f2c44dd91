"""Cross-entropy of logits that stay split on the vocabulary: no rank ever holds a whole row of logits.

Names: N rows (targets), V vocabulary size, v this rank's share of it (any size, 0 included), r ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_megatp.plan.ranges import Ranges, length
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.tensor.collectives import all_gather
from lightning_megatp.tensor.functions import OwnFunction

_ELSEWHERE = 1.0
"""In place of a target's logit beside the largest, which is 0 at most: another rank holds it."""


def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    head: nn.Module,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy` for the output of a language model's head, whether the head is split over the tp axis or not.

    The class dim is the **last** one, as the head returns it: `F.cross_entropy` wants it at dim 1 for inputs of more
    than two dims, here no transpose is needed.

    Args:
        logits: (..., v), what `head` returned on this rank, any floating dtype; never modified.
        target: (...), class indices, the same on every tp rank.
        head: the layer that made the logits. A column-parallel layer says which classes this rank holds. With a plain
            `nn.Linear`, or a head whose output is gathered, the logits are whole and this is `F.cross_entropy`: so the
            same training step runs on one device.
        weight: (V,), a weight per class, the same on every tp rank.
        ignore_index: a target that counts for nothing.
        reduction: "none", "mean" (over the weights of the targets, nan when all are ignored) or "sum".
        label_smoothing: in [0, 1].

    Returns:
        What `F.cross_entropy` returns, the same on every tp rank: a scalar, or (...) with `reduction="none"`.

    Communication: an all-gather of 3 N + 1 numbers of every rank (N more with label smoothing, one more with weights),
        forward; none, backward.
    Source: Shoeybi et al. 2019, section 3; sums of exponentials beside each rank's own largest logit, put together
        afterwards, as Milakov and Gimelshein 2018 ("Online normalizer calculation for softmax") do for blocks; label
        smoothing as ATen's `cross_entropy_loss_label_smoothing`.
    """
    options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "reduction": reduction}
    options["label_smoothing"] = label_smoothing
    _check(logits, target, reduction, label_smoothing)
    if not hasattr(head, "out_range") or getattr(head, "gather_output", False):
        loss = F.cross_entropy(logits.reshape(target.numel(), logits.shape[-1]), target.reshape(-1), **options)
        return loss.reshape(target.shape) if reduction == "none" else loss
    return cross_entropy_of_slices(logits, target, group=head.group, out_range=head.out_range, **options)  # type: ignore[arg-type]


def cross_entropy_of_slices(
    logits: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup,
    out_range: Ranges,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`vocab_parallel_cross_entropy` for logits that come from no layer.

    Args:
        logits: (..., v), this rank's columns.
        target: (...), class indices.
        group: the ranks that hold the other columns.
        out_range: the classes of this rank's columns, in their order. Over the group each class is held exactly once.
        weight, ignore_index, reduction, label_smoothing: as there.

    Raises:
        ValueError: the columns are not the classes of `out_range`, or `weight` has not one entry per class.
        IndexError: a target is neither a class nor `ignore_index`. On CUDA that target's loss is nan instead: to look
            would make the host wait for the device.
    """
    _check(logits, target, reduction, label_smoothing)
    share = length(out_range)
    if logits.shape[-1] != share:
        raise ValueError(
            f"vocab_parallel_cross_entropy: the last dim of the logits is {logits.shape[-1]}, but this rank's classes "
            f"{list(out_range)} are {share}. Give the head's own output, neither gathered nor transposed."
        )
    rows, row_weights = _VocabParallelLoss.apply(
        logits.reshape(target.numel(), share),
        target.reshape(-1),
        weight,
        group,
        out_range,
        ignore_index,
        label_smoothing,
    )
    if reduction == "none":
        loss = rows.reshape(target.shape)
    elif reduction == "sum":
        loss = rows.sum()
    else:
        loss = rows.sum() / row_weights.sum()
    # F.cross_entropy keeps the input's dtype, except that autocast runs it in float32.
    autocast = torch.is_autocast_enabled(logits.device.type)
    return loss if autocast else loss.to(logits.dtype)


class _VocabParallelLoss(OwnFunction):
    """Loss and weight of each row; float32 inside for half inputs.

    The graph walk that finds what is split where reads the two attributes: what leaves is whole, what enters is split.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits_Nv: Tensor,
        target_N: Tensor,
        weight_V: Tensor | None,
        group: dist.ProcessGroup,
        out_range: Ranges,
        ignore_index: int,
        smoothing: float,
    ) -> tuple[Tensor, Tensor]:
        ctx.region_above, ctx.region_below = "whole", "tensor"
        dtype = torch.float32 if logits_Nv.dtype in (torch.float16, torch.bfloat16) else logits_Nv.dtype
        target_N = target_N.long()
        n, v = logits_Nv.shape
        weight_V = None if weight_V is None else weight_V.to(dtype)
        weight_v = None if weight_V is None else _slice(weight_V, out_range)
        column_N, elsewhere_N = _columns(target_N, out_range)

        # Each rank has its own largest: one message then does for all. It is finite where all of a slice is masked out.
        least = torch.finfo(dtype).min
        max_N = logits_Nv.amax(-1).to(dtype).clamp_(min=least) if v else logits_Nv.new_full((n,), least, dtype=dtype)
        shifted_Nv = logits_Nv - max_N[:, None]  # a new tensor, and promoted to float32 in the same kernel
        if v:
            picked_N = shifted_Nv.gather(1, column_N[:, None])[:, 0].masked_fill_(elsewhere_N, _ELSEWHERE)
        else:
            picked_N = max_N.new_full((n,), _ELSEWHERE)
        smooth_N = []
        if smoothing:
            smooth_N.append(shifted_Nv.sum(-1) if weight_v is None else shifted_Nv @ weight_v)
        exp_Nv = shifted_Nv.exp_()
        # The vocabulary's size travels along: no rank alone knows it, and float32 counts exactly to 16 million.
        counts = [max_N.new_full((1,), v)]
        if weight_v is not None:
            counts.append(weight_v.sum()[None])
        found = _of_all(torch.cat([max_N, exp_Nv.sum(-1), picked_N, *smooth_N, *counts]), group)
        sizes = [n] * (3 + len(smooth_N)) + [1] * len(counts)
        max_rN, sum_rN, picked_rN, *rest = found.split_with_sizes(sizes, 1)
        vocab, total_r1 = rest[len(smooth_N)].sum(), rest[-1]  # without weights each class counts 1
        below_rN = max_rN - max_rN.amax(0)
        scale_rN = below_rN.exp()
        denominator_N = (sum_rN * scale_rN).sum(0)
        log_denominator_N = denominator_N.log()
        picked_N = (picked_rN + below_rN).where(picked_rN != _ELSEWHERE, 0).sum(0)

        kept_N = target_N != ignore_index
        legal_N = (target_N >= 0) & (target_N < vocab)
        if weight_V is not None:
            legal_N &= vocab == len(weight_V)
        illegal_N = kept_N & ~legal_N
        checked = _check_classes(target_N, illegal_N, vocab, weight_V)
        row_weight_N = kept_N.to(dtype)
        if weight_V is not None:
            row_weight_N = weight_V[target_N.where(kept_N & legal_N, 0)] * row_weight_N

        slope_N = (1 - smoothing) * row_weight_N if smoothing else row_weight_N  # of the loss in what is picked
        loss_N = slope_N * (log_denominator_N - picked_N)
        factor_N = slope_N  # of the loss in the log of the denominator
        if smoothing:
            total = total_r1.sum()
            sum_N = (rest[0] + total_r1 * below_rN).sum(0)
            loss_N = loss_N + smoothing / vocab * (total * log_denominator_N - sum_N)
            factor_N = slope_N + smoothing / vocab * total * kept_N
        loss_N = loss_N.where(kept_N, 0)
        if not checked:
            loss_N.masked_fill_(illegal_N, torch.nan)

        # The softmax is exp_Nv * rest_N. Backward multiplies each row by something anyway: no pass over all of it here.
        rest_N = scale_rN[group.rank()] / denominator_N
        ctx.save_for_backward(
            exp_Nv, factor_N * rest_N, slope_N.masked_fill(elsewhere_N, 0), column_N, kept_N, vocab, weight_v
        )
        ctx.smoothing, ctx.dtype = smoothing, logits_Nv.dtype
        ctx.mark_non_differentiable(row_weight_N)
        ctx.set_materialize_grads(False)
        return loss_N, row_weight_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_N is None:
            return (None,) * 7
        exp_Nv, factor_N, picked_N, column_N, kept_N, vocab, weight_v = ctx.saved_tensors
        grad_N = grad_N.where(kept_N, 0)  # all ignored: the mean's gradient is inf, and theirs is still 0
        grad_Nv = exp_Nv * (grad_N * factor_N)[:, None]  # new: the graph may be walked twice
        if grad_Nv.shape[1]:
            grad_Nv.scatter_add_(1, column_N[:, None], (grad_N * picked_N).neg_()[:, None])
        if ctx.smoothing:
            smooth_N = grad_N * (ctx.smoothing / vocab)
            grad_Nv -= smooth_N[:, None] if weight_v is None else torch.outer(smooth_N, weight_v)
        return (grad_Nv.to(ctx.dtype), *(None,) * 6)


def _columns(target_N: Tensor, out_range: Ranges) -> tuple[Tensor, Tensor]:
    """The column of each target in this rank's slice (any, where another rank holds it), and whether one does."""
    found, offset = None, 0
    for start, stop in out_range:
        if stop == start:
            continue
        own_N = target_N - (start - offset)
        column_N = own_N.clamp(offset, offset + stop - start - 1)
        elsewhere_N = own_N != column_N
        if found is not None:
            column_N, elsewhere_N = found[0].where(elsewhere_N, column_N), found[1] & elsewhere_N
        found = column_N, elsewhere_N
        offset += stop - start
    return found or (torch.zeros_like(target_N), torch.ones_like(target_N, dtype=torch.bool))


def _slice(weight_V: Tensor, out_range: Ranges) -> Tensor:
    weight_v = torch.cat([weight_V[:0], *(weight_V[start:stop] for start, stop in out_range)])
    # Of the wrong length: all ranks say so together, later; raising here would leave peers waiting in a collective.
    return weight_v if len(weight_v) == length(out_range) else weight_V.new_zeros(length(out_range))


def _of_all(found: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(k) of each rank -> (ranks, k)"""
    return found[None] if group.size() == 1 else all_gather(found[None], group, 0, [1] * group.size())


def _check(logits: Tensor, target: Tensor, reduction: str, smoothing: float) -> None:
    if target.is_floating_point():
        raise TypeError(
            f"vocab_parallel_cross_entropy: the target is {target.dtype}; only class indices (integers) are supported. "
            "For class probabilities gather the logits and use F.cross_entropy."
        )
    if logits.shape[:-1] != target.shape:
        raise ValueError(
            f"vocab_parallel_cross_entropy: logits {tuple(logits.shape)} don't fit the target {tuple(target.shape)}. "
            "The class dim is the last one, not dim 1 as for F.cross_entropy: give the head's output as it is."
        )
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"vocab_parallel_cross_entropy: reduction is {reduction!r}. Use 'none', 'mean' or 'sum'.")
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"vocab_parallel_cross_entropy: label_smoothing is {smoothing}. It must be between 0 and 1.")


def _check_classes(target_N: Tensor, illegal_N: Tensor, vocab: Tensor, weight_V: Tensor | None) -> bool:
    """Whether the host could look."""
    if target_N.device.type != "cpu" or is_fake(target_N):
        return False
    if weight_V is not None and weight_V.shape != (int(vocab),):
        raise ValueError(
            f"vocab_parallel_cross_entropy: weight has shape {tuple(weight_V.shape)}, the vocabulary"
            f" {int(vocab)} classes. Give one weight per class, all of them on every rank."
        )
    if illegal_N.any():
        value = int(target_N[illegal_N][0])
        raise IndexError(f"vocab_parallel_cross_entropy: target {value} is out of bounds for {int(vocab)} classes.")
    return True
