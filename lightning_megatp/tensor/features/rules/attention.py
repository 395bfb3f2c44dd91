"""The rule of scaled_dot_product_attention: on own heads, each with its key-value head."""

from __future__ import annotations

from typing import Any

from lightning_megatp.plan.ranges import grouped_units, repeat_each
from lightning_megatp.tensor.features.call import Call, Operand
from lightning_megatp.tensor.features.decision import Action, Decision, Enter
from lightning_megatp.tensor.features.rules.operands import agree, align, broadcast_dims, fit


def attention(call: Call) -> Decision | None:
    """scaled_dot_product_attention, on own heads; each with its key-value head."""
    given = [call.argument(i, name) for i, name in enumerate(["query", "key", "value", "attn_mask"])]
    q, k, v, mask = given
    if not isinstance(q, Operand) or not isinstance(k, Operand) or not isinstance(v, Operand):
        return None
    dim, size = call.layout.dim, call.layout.size
    if (
        len({x.layout.dim for x in call.operands if x.layout and x.sharded}) > 1
        or dim > -3
        or min(q.ndim, k.ndim, v.ndim) < -dim
    ):
        return None
    if k.shape[dim] != q.shape[dim] and (k.shape[dim] != 1 or call.argument(7, "enable_gqa")):
        return _grouped_attention(call, q, k, v, mask)
    dims = broadcast_dims(call, dim, size) if agree(call) else None
    aligned = None if dims is None or q.shape[dim] != size else align(call, dims)
    return None if aligned is None else Decision(call.layout.with_(dim, aligned[1], size), aligned[0])


def _grouped_attention(call: Call, q: Operand, k: Operand, v: Operand, mask: Any) -> Decision | None:
    """Several query heads to one key-value head: each rank needs those of its queries."""
    heads, groups = q.shape[-3], k.shape[-3]
    if not call.argument(7, "enable_gqa") or call.layout.dim != -3 or heads % groups or v.shape[-3] != groups:
        return None
    each = heads // groups
    own = q.layout.by_rank if q.layout is not None and q.sharded else repeat_each(call.layout.by_rank, each)
    needed = grouped_units(own, each)
    if needed is None:
        return None
    actions: list[Action | None] = [None] * len(call.operands)
    wanted = [(q, own, heads), (k, needed, groups), (v, needed, groups)]
    if isinstance(mask, Operand) and mask.ndim > 2 and mask.shape[-3] != 1:
        wanted.append((mask, own, heads))
    elif isinstance(mask, Operand):
        actions[mask.position] = Enter(call.layout.context) if mask.layout is None else None
    for x, by_rank, size in wanted:
        fits, actions[x.position] = fit(call, x, -3, by_rank, size)
        if not fits:
            return None
    return Decision(call.layout.with_(-3, own, heads), actions)
