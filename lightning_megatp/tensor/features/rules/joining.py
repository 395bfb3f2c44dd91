"""Rules of putting tensors together and of repeating them."""

from __future__ import annotations

from lightning_megatp.plan.ranges import concatenate, repeat_dim, repeat_each
from lightning_megatp.tensor.features.call import Call
from lightning_megatp.tensor.features.decision import Decision, Enter
from lightning_megatp.tensor.features.rules.operands import agree, align, dims_of, single, sizes_of


def cat(call: Call) -> Decision | None:
    """Empty tensors of one dim, with which caches begin, count for nothing."""
    parts = [x for x in call.operands if x.shape != (0,)]
    x, layout = parts[0], call.layout
    dim = dims_of(x, call.argument(1, "dim", "axis", default=0))
    if dim is None or any(y.ndim != x.ndim for y in parts):
        return None
    if dim == [layout.dim]:
        return _cat_features(call) if len(parts) == len(call.operands) else None
    if not agree(call) or any(y.shape[layout.dim] != layout.size for y in parts):
        return None
    aligned = align(call, [None if y.shape == (0,) else layout.dim for y in call.operands])
    return None if aligned is None else Decision(layout.with_(layout.dim, aligned[1], layout.size), aligned[0])


def _cat_features(call: Call) -> Decision | None:
    """Put values together along the features; every rank owns all of those that are not split here."""
    layout, ways = call.layout, len(call.layout.by_rank)
    if any(x.layout is not None and x.sharded and x.layout.dim != layout.dim for x in call.operands):
        return None
    sizes = [x.shape[layout.dim] for x in call.operands]
    owned = [
        x.layout.by_rank if x.layout is not None and x.sharded else (((0, size),),) * ways
        for x, size in zip(call.operands, sizes, strict=True)
    ]
    by_rank = concatenate(tuple(zip(owned, sizes, strict=True)))
    actions = [Enter(layout.context) if x.layout is None else None for x in call.operands]
    return Decision(layout.with_(layout.dim, by_rank, sum(sizes)), actions)


def stack(call: Call) -> Decision | None:
    x, layout = call.operands[0], call.layout
    dim = call.argument(1, "dim", default=0)
    if not isinstance(dim, int) or any(y.shape != x.shape for y in call.operands) or not agree(call):
        return None
    aligned = align(call, [layout.dim] * len(call.operands))
    if aligned is None:
        return None
    behind = dim % (x.ndim + 1) > layout.dim % x.ndim
    return Decision(layout.with_(layout.dim - behind, aligned[1], layout.size), aligned[0])


def expand(call: Call) -> Decision | None:
    x, sizes = single(call), sizes_of(call, "size")
    return None if x is None or sizes is None else _expanded(call, sizes)


def expand_like(call: Call) -> Decision | None:
    x, other = call.operands
    if x.sharded:
        return _expanded(call, list(other.shape))
    shape = other.shape
    return Decision(None, (), lambda tensors: tensors[0].expand(shape)) if x.layout is None else None


def _expanded(call: Call, sizes: list[int]) -> Decision | None:
    layout = call.layout
    if len(sizes) < -layout.dim or sizes[layout.dim] not in (-1, layout.size):
        return None
    local = [*sizes]
    local[layout.dim] = -1
    return Decision(layout, (), lambda tensors: tensors[0].expand(local))


def repeat(call: Call) -> Decision | None:
    x, times = single(call), sizes_of(call, "repeats", "dims")
    layout = call.layout
    if x is None or times is None or len(times) < x.ndim or times[layout.dim] < 1:
        return None
    n = times[layout.dim]
    return Decision(layout.with_(layout.dim, repeat_dim(layout.by_rank, layout.size, n), layout.size * n))


def repeat_interleave(call: Call) -> Decision | None:
    x, times, layout = single(call), call.argument(1, "repeats"), call.layout
    dims = None if x is None else dims_of(x, call.argument(2, "dim"))
    if dims is None or len(dims) != 1 or not isinstance(times, int) or times < 1:
        return None
    dim, made = dims[0], layout
    if dim == layout.dim:
        made = layout.with_(dim, repeat_each(layout.by_rank, times), layout.size * times)
    if "output_size" in call.kwargs:  # of the whole
        return Decision(made, run=lambda tensors: tensors[0].repeat_interleave(times, dim))
    return Decision(made)
