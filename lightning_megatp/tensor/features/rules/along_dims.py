"""Rules of operations along other dims than the sharded one: softmax, reductions, norms, padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_megatp.plan.ranges import length
from lightning_megatp.tensor.features.call import Call, Operand, Rule
from lightning_megatp.tensor.features.decision import Decision
from lightning_megatp.tensor.features.rules.operands import align, beside, dims_of, single


def along(position: int, *names: str, default: Any = None) -> Rule:
    """Operations that keep the number of dims and work along some of them."""

    def rule(call: Call) -> Decision | None:
        actions = beside(call)
        dims = dims_of(call.operands[0], call.argument(position, *(names or ("dim",)), default=default))
        if actions is None or not dims or call.layout.dim in dims:
            return None
        return Decision(call.layout, actions)

    return rule


def normalise(call: Call) -> Decision | None:
    """layer_norm and rms_norm over dims behind the sharded one."""
    actions, shape = beside(call), call.argument(1, "normalized_shape")
    if actions is None or not isinstance(shape, (tuple, list)) or len(shape) >= -call.layout.dim:
        return None
    return Decision(call.layout, actions)


def group_norm(call: Call) -> Decision | None:
    """Where each rank holds whole groups: of heads, say."""
    x, groups, layout = call.argument(0, "input"), call.argument(1, "num_groups"), call.layout
    if not isinstance(x, Operand) or not x.sharded or layout.dim != 1 - x.ndim:
        return None
    if not isinstance(groups, int) or groups < 1 or layout.size % groups:
        return None
    size = layout.size // groups
    held = [[edge % size for edges in ranges for edge in edges] for ranges in layout.by_rank]
    aligned = align(call, [layout.dim if operand is x else -1 for operand in call.operands])
    if not all(held) or any(map(any, held)) or aligned is None or aligned[1] != layout.by_rank:
        return None
    own, eps = length(layout.own) // size, call.argument(4, "eps", default=1e-5)
    weight, bias = call.argument(2, "weight"), call.argument(3, "bias")

    def run(tensors: Sequence[Tensor]) -> Tensor:
        scale, shift = (None if operand is None else tensors[operand.position] for operand in (weight, bias))
        return F.group_norm(tensors[x.position], own, scale, shift, eps)

    return Decision(layout, aligned[0], run)


def reduce(call: Call) -> Decision | None:
    """mean, sum, ... over other dims."""
    return _reduced(call, 1, 2)


def norm(call: Call) -> Decision | None:
    return _reduced(call, 2, 3)


def spread(call: Call) -> Decision | None:
    """var and std, whose second positional argument may also be `unbiased`."""
    return _reduced(call, 1, 2) if len(call.args) <= 2 else None


def _reduced(call: Call, at: int, keep_at: int) -> Decision | None:
    x, layout = single(call), call.layout
    given = call.argument(at, "dim", "axis")
    if x is None or (isinstance(given, (tuple, list)) and not given):
        return None
    dims = dims_of(x, given)
    if dims is None or layout.dim in dims:
        return None
    if call.argument(keep_at, "keepdim", "keepdims", default=False):
        return Decision(layout)
    behind = sum(dim > layout.dim for dim in set(dims))
    return Decision(layout.with_(layout.dim + behind, layout.by_rank, layout.size))


def triangle(call: Call) -> Decision | None:
    return Decision(call.layout) if single(call) and call.layout.dim < -2 else None


def pad(call: Call) -> Decision | None:
    pad = call.argument(1, "pad")
    if not single(call) or not isinstance(pad, (tuple, list)):
        return None
    pair = pad[2 * (-call.layout.dim - 1) :][:2]
    return None if any(pair) else Decision(call.layout)
