"""Rules of operations element by element."""

from __future__ import annotations

from lightning_megatp.tensor.features.call import Call
from lightning_megatp.tensor.features.decision import Decision
from lightning_megatp.tensor.features.rules.along_dims import reduce
from lightning_megatp.tensor.features.rules.operands import agree, align, broadcast_dims


def pointwise(call: Call) -> Decision | None:
    layout = call.layout
    if not agree(call):
        return None
    if len(call.operands) == 1:
        return Decision(layout)
    dims = broadcast_dims(call, layout.dim, layout.size)
    aligned = None if dims is None else align(call, dims)
    if aligned is None:
        return None
    actions, by_rank = aligned
    if call.in_place:
        x = call.operands[0]
        if not x.sharded or actions[0] is not None or x.ndim < max(y.ndim for y in call.operands):
            return None
    return Decision(layout.with_(layout.dim, by_rank, layout.size), actions)


def extreme(call: Call) -> Decision | None:
    """max and min: of two tensors, or over a dim."""
    return pointwise(call) if len(call.operands) > 1 else reduce(call)


def where(call: Call) -> Decision | None:
    return pointwise(call) if len(call.args) + len(call.kwargs) == 3 else None


def cast(call: Call) -> Decision | None:
    """`to` and `type_as`: the other tensor only lends its type."""
    x = call.operands[0]
    return Decision(x.layout if x.layout is not None else None)
