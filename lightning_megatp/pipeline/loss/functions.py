"""Torch's functions as they matter to averages: its losses, means and sums, what is linear, what compares rows.

Methods and operators have many names for one operation, so what is followed is known by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

COMPARISONS = frozenset(
    [torch.matmul, Tensor.matmul, torch.mm, Tensor.mm, torch.einsum, torch.cdist, F.cosine_similarity]
)
MEANS = frozenset([torch.mean, Tensor.mean, torch.nanmean, Tensor.nanmean])
OF_NUMBERS = frozenset([torch.nanmean, Tensor.nanmean, torch.nansum, Tensor.nansum])
"""Reductions of what isn't nan."""
SUMMED = frozenset([torch.sum, Tensor.sum])
REDUCTIONS = MEANS | OF_NUMBERS | SUMMED
DOTS = frozenset([torch.dot, Tensor.dot, torch.vdot, Tensor.vdot, torch.inner, Tensor.inner])
"""Sums of products, of vectors."""
EMPTY = frozenset([torch.zeros, torch.zeros_like, Tensor.new_zeros])
DIVISIONS = frozenset(["div", "div_", "divide", "divide_", "true_divide", "true_divide_", "__truediv__"])
INVERSIONS = frozenset(["reciprocal", "__rdiv__", "__rtruediv__"])
"""Inversions of a count, by which a sum is multiplied then."""
PRODUCTS = frozenset(["mul", "mul_", "multiply", "multiply_", "__mul__", "__rmul__"])
SUMS = frozenset(
    ["add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__", "rsub", "subtract"]
)
TOTALS = frozenset(["sum", "nansum", "mean", "nanmean"])
LINEAR = PRODUCTS | SUMS | {
    "mean", "sum", "nanmean", "nansum", "neg", "negative", "__neg__", "clone", "detach", "__get__", "to", "type",
    "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda", "contiguous", "squeeze", "unsqueeze", "reshape",
    "view", "view_as", "flatten", "ravel", "expand", "expand_as", "broadcast_to", "stack", "cat", "concat", "hstack",
    "vstack", "__getitem__", "select", "narrow", "where", "nan_to_num", "requires_grad_", "copy_",
}  # fmt: skip
CLAMPS = frozenset(["clamp", "clamp_", "clamp_min", "clamp_min_", "clip", "clip_", "maximum", "max"])
"""By which a count of nothing is taken for something."""
RESHAPES = frozenset(
    [
        "clone", "to", "type_as", "float", "double", "half", "bfloat16", "contiguous", "squeeze", "unsqueeze",
        "reshape", "view", "view_as", "flatten", "ravel", "expand", "expand_as", "__getitem__", "transpose", "neg",
    ]
)  # fmt: skip
"""Of a table that a sum is left to be taken of."""
JOINS = frozenset(["stack", "cat", "concat", "concatenate", "hstack", "vstack"])
LIKE = frozenset(["to", "type_as", "view_as", "expand_as"])
"""Whose second tensor is an example: its values are not used."""
CONSTANTS = frozenset(["ones_like", "zeros_like", "full_like", "empty_like", "new_ones", "new_zeros", "new_full"])
"""What they return is made of no value of their tensor's."""
_FIRST_TWO = ("input", "target")
LOSSES: dict[Callable[..., Any], tuple[str, ...]] = {
    F.cross_entropy: (*_FIRST_TWO, "weight", "size_average", "ignore_index", "reduce", "reduction"),
    F.nll_loss: (*_FIRST_TWO, "weight", "size_average", "ignore_index", "reduce", "reduction"),
    F.mse_loss: (*_FIRST_TWO, "size_average", "reduce", "reduction", "weight"),
    F.l1_loss: (*_FIRST_TWO, "size_average", "reduce", "reduction", "weight"),
    F.smooth_l1_loss: (*_FIRST_TWO, "size_average", "reduce", "reduction", "beta"),
    F.huber_loss: (*_FIRST_TWO, "reduction", "delta", "weight"),
    F.binary_cross_entropy: (*_FIRST_TWO, "weight", "size_average", "reduce", "reduction"),
    F.binary_cross_entropy_with_logits: (*_FIRST_TWO, "weight", "size_average", "reduce", "reduction", "pos_weight"),
    F.kl_div: (*_FIRST_TWO, "size_average", "reduce", "reduction", "log_target"),
    F.poisson_nll_loss: (*_FIRST_TWO, "log_input", "full", "size_average", "eps", "reduce", "reduction"),
    F.gaussian_nll_loss: (*_FIRST_TWO, "var", "full", "eps", "reduction"),
    F.soft_margin_loss: (*_FIRST_TWO, "size_average", "reduce", "reduction"),
    F.hinge_embedding_loss: (*_FIRST_TWO, "margin", "size_average", "reduce", "reduction"),
    F.multilabel_margin_loss: (*_FIRST_TWO, "size_average", "reduce", "reduction"),
    F.multilabel_soft_margin_loss: (*_FIRST_TWO, "weight", "size_average", "reduce", "reduction"),
    F.multi_margin_loss: (*_FIRST_TWO, "p", "margin", "weight", "size_average", "reduce", "reduction"),
    F.margin_ranking_loss: ("input1", "input2", "target", "margin", "size_average", "reduce", "reduction"),
    F.cosine_embedding_loss: ("input1", "input2", "target", "margin", "size_average", "reduce", "reduction"),
    F.triplet_margin_loss: (
        "anchor", "positive", "negative", "margin", "p", "eps", "swap", "size_average", "reduce", "reduction",
    ),
    F.ctc_loss: ("log_probs", "targets", "input_lengths", "target_lengths", "blank", "reduction", "zero_infinity"),
}  # fmt: skip
"""By torch's losses, what their arguments are called, in order."""
OF_CLASSES = frozenset([F.cross_entropy, F.nll_loss])
WEIGHTED = frozenset([F.mse_loss, F.l1_loss])
"""Whose mean with weights is divided by the sum of these (torch 2.13; `F.huber_loss`'s is not)."""
_BROADCAST = frozenset(
    [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits, F.kl_div]
)
"""Whose arguments are broadcast."""


def count_of(func: Callable[..., Any], given: Mapping[str, Any], x: Tensor) -> float:
    """How many values a loss averages, but for a factor that is the same in all microbatches."""
    if given.get("reduction") == "batchmean":
        return float(x.shape[0])
    if func is F.ctc_loss:
        return float(x.shape[-2])
    if func in _BROADCAST and isinstance(target := given.get("target"), Tensor):
        return float(torch.broadcast_shapes(x.shape, target.shape).numel())
    return float(x.numel())
