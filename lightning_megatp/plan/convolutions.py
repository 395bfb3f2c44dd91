"""Convolutions in a plan: each rank computes some output channels, which are gathered behind it.

With groups a rank takes whole groups, and reads their input channels only.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_megatp.plan.layer import LayerPlan, Split
from lightning_megatp.plan.ranges import Ranges, length, shard_ranges
from lightning_megatp.plan.styles import Style
from lightning_megatp.shim.modules import runs_own_convolution, weight_norm_of

_MOST = 0.95
"""The least share of what all convolutions hold that is split: the largest ones that hold so much."""
_SMALL_PART = 0.02
"""Where convolutions are a smaller part of a model, they aren't worth their collectives."""
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def is_convolution(module: nn.Module) -> bool:
    """Whether this is one of torch's convolutions, with a weight of its own, or a subclass that computes the same: with
    another constructor, and nothing else."""
    own = module._parameters.get("weight") is not None and not is_parametrized(module)
    return own and runs_own_convolution(module)


def is_weight_normed(module: nn.Module) -> bool:
    """Whether this is such a convolution whose weight one of torch's two `weight_norm` computes."""
    return runs_own_convolution(module) and weight_norm_of(module) is not None


def weights(module: nn.Module) -> int:
    """How many weights a convolution holds; 0 for anything else."""
    if is_convolution(module):
        return module.get_parameter("weight").numel()
    normed = weight_norm_of(module) if runs_own_convolution(module) else None
    return 0 if normed is None else module.get_parameter(normed.direction).numel()


def convolution_plan(name: str, style: Style, module: Any, tp: int) -> LayerPlan:
    """Output channels dealt to the ranks, evenly or not; whole groups, if there are several.

    Raises:
        ValueError: an option of linear layers, or fewer channels or groups than ranks.
    """
    if style.parts != 1 or style.unit != 1 or style.lazy:
        raise ValueError(
            f"MegaTPStrategy: the plan gives `{name}` options of the style `column_gather` that a convolution does not"
            " take: `parts`, `unit` and `lazy` are for linear layers. Leave them out."
        )
    groups, outputs = module.groups, module.out_channels
    pieces, what = (outputs, "output channels") if groups == 1 else (groups, "groups of channels")
    if pieces < tp:
        raise ValueError(
            f"MegaTPStrategy: `{name}` has {pieces} {what} for tp={tp} ranks, and each needs one or more. Use"
            f" tp <= {pieces}, or leave this convolution out of the plan."
        )
    by_rank = shard_ranges(outputs, tp, 1, outputs // pieces)
    dim, ranges = 0, by_rank
    if isinstance(module, _TRANSPOSED):  # weight: (in, out of a group, ...)
        dim, ranges = (1, by_rank) if groups == 1 else (0, input_ranges(module, by_rank) or ())
    splits = [Split("weight", dim, ranges)]
    if (normed := weight_norm_of(module)) is not None:
        splits = [Split(normed.direction, dim, ranges)]
        splits += [Split(normed.length, dim, ranges)] if normed.dim == dim else []
    splits += [] if module.bias is None else [Split("bias", 0, by_rank)]
    return LayerPlan(name, style, by_rank, outputs // pieces, splits=tuple(splits))


def input_ranges(module: Any, by_rank: tuple[Ranges, ...]) -> tuple[Ranges, ...] | None:
    """The input channels that each rank's groups read; None where every output reads every input."""
    if module.groups == 1:
        return None
    inputs, outputs = module.in_channels // module.groups, module.out_channels // module.groups
    return tuple(
        tuple((start // outputs * inputs, stop // outputs * inputs) for start, stop in ranges) for ranges in by_rank
    )


def own_groups(module: Any, ranges: Ranges) -> int:
    """How many groups a rank's output channels are; 1 where there is one that all share."""
    return 1 if module.groups == 1 else length(ranges) * module.groups // module.out_channels


def channel_dim(module: Any) -> int:
    """Where the channels lie, counted from the last dim: inputs may come without a batch."""
    return -1 - len(module.kernel_size)


def least_size(model: nn.Module) -> float:
    """The number of weights from which on an automatic plan splits a convolution.

    The largest convolutions come last, as a rule, where images are small: their weights are worth most, and gathering
    what they make costs least.
    """
    sizes = sorted(filter(None, map(weights, model.modules())), reverse=True)
    if not sizes or sum(sizes) < _SMALL_PART * sum(p.numel() for p in model.parameters()):
        return math.inf
    held = itertools.accumulate(sizes)
    return next(float(size) for size, total in zip(sizes, held, strict=True) if total >= _MOST * sum(sizes))


def fits(module: Any, tp: int) -> bool:
    """Whether each of `tp` ranks can have output channels, and whole groups of them."""
    return bool(tp <= (module.out_channels if module.groups == 1 else module.groups))
