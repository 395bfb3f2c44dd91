"""Where the features of a result lie, per operation: what runs on a FeatureShard without communication, and how.

A rule looks at whole shapes and at the ownership of all ranks, so that every rank decides the same. None says that the
operation needs whole tensors. Dims are counted from the last (-1), so that broadcasting keeps them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatp.plan.ranges import (
    ByRank,
    ascending,
    concatenate,
    contains,
    grouped_units,
    local_span,
    merge_dims,
    positions,
    repeat_dim,
    repeat_each,
    slice_span,
    split_dim,
)
from lightning_megatp.tensor.features import Action, Call, Decision, Enter, FeatureLayout, Operand, Pick, Scatter
from lightning_megatp.tensor.functions import operation_names

Rule = Callable[[Call], Decision | None]

# ---------------------------------------------------------------- operands beside a shard


def _fit(call: Call, x: Operand, dim: int, by_rank: ByRank, size: int) -> tuple[bool, Action | None]:
    """How an operand that spans the sharded dim comes to the features of `by_rank`; (False, None) if it can't."""
    if x.layout is None:
        return True, Scatter(call.layout.context, dim, by_rank)
    if x.layout.replicated:
        return True, Pick(dim, by_rank[call.rank])
    if (x.layout.dim, x.layout.size) != (dim, size) or not contains(x.layout.by_rank, by_rank):
        return False, None
    if x.layout.by_rank == by_rank:
        return True, None
    return True, Pick(dim, positions(x.layout.by_rank[call.rank], by_rank[call.rank]) or ())


def _align(call: Call, dims: Sequence[int | None]) -> tuple[list[Action | None], ByRank] | None:
    """Bring all operands to the same features: those that all sharded ones hold.

    Args:
        dims: for each operand where it spans the sharded dim; None where it doesn't.
    """
    sharded = [x.layout for x in call.operands if x.layout is not None and x.sharded]
    size = sharded[0].size
    chosen = next((a.by_rank for a in sharded if all(contains(b.by_rank, a.by_rank) for b in sharded)), None)
    if chosen is None:
        return None
    actions: list[Action | None] = []
    for x, dim in zip(call.operands, dims, strict=True):
        if dim is None:
            if x.sharded:
                return None
            actions.append(Enter(call.layout.context) if x.layout is None else None)
            continue
        fits, action = _fit(call, x, dim, chosen, size)
        if not fits:
            return None
        actions.append(action)
    return actions, chosen


def _beside(call: Call) -> list[Action | None] | None:
    """What is done with the operands of an operation on its first one alone; None if another one is sharded too."""
    if not call.operands[0].sharded or any(x.sharded for x in call.operands[1:]):
        return None
    return [Enter(call.layout.context) if x.layout is None else None for x in call.operands]


def _first(call: Call) -> Operand | None:
    """The first argument, if it is the only tensor and sharded."""
    x = call.args[0] if call.args else None
    return x if isinstance(x, Operand) and x.sharded and len(call.operands) == 1 else None


def _broadcast_dims(call: Call, dim: int, size: int) -> list[int | None] | None:
    dims: list[int | None] = []
    for x in call.operands:
        spans = x.ndim >= -dim and x.shape[dim] != 1
        if spans and x.shape[dim] != size:
            return None
        dims.append(dim if spans or x.sharded else None)
    return dims


# ---------------------------------------------------------------- element by element


def _pointwise(call: Call) -> Decision | None:
    layout = call.layout
    if not _agree(call):
        return None
    if len(call.operands) == 1:
        return Decision(layout)
    dims = _broadcast_dims(call, layout.dim, layout.size)
    aligned = None if dims is None else _align(call, dims)
    if aligned is None:
        return None
    actions, by_rank = aligned
    if call.in_place:
        x = call.operands[0]
        if not x.sharded or actions[0] is not None or x.ndim < max(y.ndim for y in call.operands):
            return None
    return Decision(layout.with_(layout.dim, by_rank, layout.size), actions)


def _agree(call: Call) -> bool:
    """Whether all sharded operands are sharded on the same dim."""
    found = {(x.layout.dim, x.layout.size) for x in call.operands if x.layout is not None and x.sharded}
    return len(found) == 1


def _extreme(call: Call) -> Decision | None:
    """max and min: of two tensors, or over a dim."""
    return _pointwise(call) if len(call.operands) > 1 else _reduce(call)


def _where(call: Call) -> Decision | None:
    return _pointwise(call) if len(call.args) + len(call.kwargs) == 3 else None


def _cast(call: Call) -> Decision | None:
    """`to` and `type_as`: the other tensor only lends its type."""
    x = call.operands[0]
    return Decision(x.layout if x.layout is not None else None)


# ---------------------------------------------------------------- along other dims


def _dims(x: Operand, given: Any) -> list[int] | None:
    """Dims counted from the last."""
    values = [given] if isinstance(given, int) else given
    if isinstance(given, bool) or not isinstance(values, (tuple, list)):
        return None
    if not all(isinstance(dim, int) and -x.ndim <= dim < x.ndim for dim in values):
        return None
    return [dim if dim < 0 else dim - x.ndim for dim in values]


def _along(position: int, *names: str, default: Any = None) -> Rule:
    """Operations that keep the number of dims and work along some of them."""

    def rule(call: Call) -> Decision | None:
        actions = _beside(call)
        dims = _dims(call.operands[0], call.argument(position, *(names or ("dim",)), default=default))
        if actions is None or not dims or call.layout.dim in dims:
            return None
        return Decision(call.layout, actions)

    return rule


def _normalise(call: Call) -> Decision | None:
    """layer_norm and rms_norm over dims behind the sharded one."""
    actions, shape = _beside(call), call.argument(1, "normalized_shape")
    if actions is None or not isinstance(shape, (tuple, list)) or len(shape) >= -call.layout.dim:
        return None
    return Decision(call.layout, actions)


def _reduce(call: Call) -> Decision | None:
    """mean, sum, ... over other dims."""
    return _reduced(call, 1, 2)


def _norm(call: Call) -> Decision | None:
    return _reduced(call, 2, 3)


def _spread(call: Call) -> Decision | None:
    """var and std, whose second positional argument may also be `unbiased`."""
    return _reduced(call, 1, 2) if len(call.args) <= 2 else None


def _reduced(call: Call, at: int, keep_at: int) -> Decision | None:
    x, layout = _first(call), call.layout
    given = call.argument(at, "dim", "axis")
    if x is None or (isinstance(given, (tuple, list)) and not given):
        return None
    dims = _dims(x, given)
    if dims is None or layout.dim in dims:
        return None
    if call.argument(keep_at, "keepdim", "keepdims", default=False):
        return Decision(layout)
    behind = sum(dim > layout.dim for dim in set(dims))
    return Decision(layout.with_(layout.dim + behind, layout.by_rank, layout.size))


def _triangle(call: Call) -> Decision | None:
    return Decision(call.layout) if _first(call) and call.layout.dim < -2 else None


def _pad(call: Call) -> Decision | None:
    pad = call.argument(1, "pad")
    if not _first(call) or not isinstance(pad, (tuple, list)):
        return None
    pair = pad[2 * (-call.layout.dim - 1) :][:2]
    return None if any(pair) else Decision(call.layout)


def _glu(call: Call) -> Decision | None:
    x, layout = _first(call), call.layout
    dims = None if x is None else _dims(x, call.argument(1, "dim", default=-1))
    if dims is None or layout.size % 2:
        return None
    if dims != [layout.dim]:
        return Decision(layout)
    half = layout.size // 2
    spans = _spans(layout, [half, half])
    gate, value = slice_span(layout.by_rank, 0, half), slice_span(layout.by_rank, half, layout.size)
    return Decision(layout.with_(layout.dim, gate, half)) if spans is not None and gate == value else None


def _complex(change: int) -> Rule:
    """view_as_complex (the last dim goes) and view_as_real (one comes)."""

    def rule(call: Call) -> Decision | None:
        layout = call.layout
        if not _first(call) or (change > 0 and layout.dim == -1):
            return None
        return Decision(layout.with_(layout.dim + change, layout.by_rank, layout.size))

    return rule


# ---------------------------------------------------------------- views


def _sizes(call: Call, *names: str) -> list[int] | None:
    """Sizes given as one sequence or one by one."""
    given = call.args[1:] or tuple(call.kwargs[name] for name in names if name in call.kwargs)
    if len(given) == 1 and isinstance(given[0], (tuple, list)):
        given = tuple(given[0])
    return list(given) if all(isinstance(size, int) for size in given) else None


def _view(call: Call) -> Decision | None:
    x = _first(call)
    if x is None:
        return None
    if call.name == "view" and len(call.args) == 2 and isinstance(call.args[1], torch.dtype):
        return Decision(call.layout) if call.args[1].itemsize == x.dtype.itemsize else None
    sizes = _sizes(call, "size", "shape")
    return None if sizes is None else _viewed(call, x, sizes)


def _view_like(call: Call) -> Decision | None:
    x, other = call.operands
    if not x.sharded:
        if call.in_place or x.layout is not None:
            return None
        shape, change = other.shape, _change(call.name)
        return Decision(None, (), lambda tensors: change(tensors[0], shape))
    return _viewed(call, x, list(other.shape))


def _change(name: str) -> Callable[..., Tensor]:
    return torch.Tensor.view if name in ("view", "view_as") else torch.Tensor.reshape


def _flatten(call: Call) -> Decision | None:
    x = _first(call)
    if x is None:
        return None
    ends = _dims(x, [call.argument(1, "start_dim", default=0), call.argument(2, "end_dim", default=-1)])
    if ends is None or ends[0] > ends[1]:
        return None
    start, end = ends[0] % x.ndim, ends[1] % x.ndim
    return _viewed(call, x, [*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :]])


def _unflatten(call: Call) -> Decision | None:
    x, sizes = _first(call), call.argument(2, "sizes", "unflattened_size")
    dims = None if x is None else _dims(x, call.argument(1, "dim"))
    if x is None or dims is None or len(dims) != 1 or not isinstance(sizes, (tuple, list)):
        return None
    at = dims[0] % x.ndim
    filled = _filled(list(sizes), x.shape[at])
    return None if filled is None else _viewed(call, x, [*x.shape[:at], *filled, *x.shape[at + 1 :]])


def _filled(sizes: list[int], total: int) -> list[int] | None:
    """Sizes with the -1 computed; None if they don't hold the elements."""
    known = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) == 1 and known > 0:
        sizes = [total // known if size == -1 else size for size in sizes]
    return sizes if math.prod(sizes) == total and min(sizes, default=1) >= 0 else None


def _viewed(call: Call, x: Operand, given: list[int]) -> Decision | None:
    """A view of other sizes: the dims that the sharded one is merged with or split into tell where it goes."""
    sizes = _filled(given, x.shape.numel())
    if sizes is None or not x.shape.numel():
        return None
    layout, at = call.layout, call.layout.dim % x.ndim
    (i, j), (k, n) = _group(x.shape, sizes, at)
    merged = merge_dims(layout.by_rank, layout.size, math.prod(x.shape[i:at]), math.prod(x.shape[at + 1 : j]))
    found = None if merged is None else split_dim(merged, tuple(sizes[k:n]))
    if found is None:
        return None
    dim, by_rank = k + found[0], found[1]
    after = layout.with_(dim - len(sizes), by_rank, sizes[dim])
    local = [*sizes]
    local[dim] = sum(stop - start for start, stop in by_rank[call.rank])
    change = _change(call.name)
    return Decision(after, (), lambda tensors: change(tensors[0], local))


def _group(before: Sequence[int], after: Sequence[int], at: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """The smallest spans of dims before and after a view, around the dim `at`, that hold the same elements."""
    i = j = 0
    while True:
        first = i, j
        left, right = before[i], after[j] if j < len(after) else 1
        i, j = i + 1, j + 1
        while left != right:
            if left < right:
                left, i = left * before[i], i + 1
            else:
                right, j = right * after[j], j + 1
        if first[0] <= at < i:
            if j == first[1] + 1 > len(after):  # a last dim of size 1 that goes
                return (first[0] - 1, i), (first[1] - 1, len(after))
            return (first[0], i), (first[1], j)


def _unsqueeze(call: Call) -> Decision | None:
    x, dim = _first(call), call.argument(1, "dim")
    if x is None or not isinstance(dim, int):
        return None
    layout, at = call.layout, dim % (x.ndim + 1)
    behind = at > layout.dim % x.ndim
    return Decision(layout.with_(layout.dim - behind, layout.by_rank, layout.size))


def _squeeze(call: Call) -> Decision | None:
    x, layout = _first(call), call.layout
    if x is None:
        return None
    given = call.argument(1, "dim")
    dims = list(range(-x.ndim, 0)) if given is None else _dims(x, given)
    if dims is None:
        return None
    gone = tuple(sorted({dim for dim in dims if x.shape[dim] == 1}))
    if layout.dim in gone:
        return None
    after = layout.with_(layout.dim + sum(dim > layout.dim for dim in gone), layout.by_rank, layout.size)
    return Decision(after, (), lambda tensors: torch.Tensor.squeeze(tensors[0], gone))


def _permuted(call: Call, x: Operand, order: list[int]) -> Decision:
    dim = order.index(call.layout.dim % x.ndim) - x.ndim
    return Decision(call.layout.with_(dim, call.layout.by_rank, call.layout.size))


def _transpose(call: Call) -> Decision | None:
    x = _first(call)
    pair = (call.argument(1, "dim0", "axis0"), call.argument(2, "dim1", "axis1"))
    dims = None if x is None else _dims(x, pair)
    if x is None or dims is None:
        return None
    order, (a, b) = list(range(x.ndim)), dims
    order[a], order[b] = order[b], order[a]
    return _permuted(call, x, order)


def _permute(call: Call) -> Decision | None:
    x, sizes = _first(call), _sizes(call, "dims")
    dims = None if x is None or sizes is None else _dims(x, sizes)
    return None if x is None or dims is None else _permuted(call, x, [dim % x.ndim for dim in dims])


def _move(call: Call) -> Decision | None:
    x = _first(call)
    if x is None:
        return None
    source, target = _dims(x, call.argument(1, "source")), _dims(x, call.argument(2, "destination"))
    if source is None or target is None or len(source) != len(target):
        return None
    place = {b % x.ndim: a % x.ndim for a, b in zip(source, target, strict=True)}
    rest = iter([dim for dim in range(x.ndim) if dim not in place.values()])
    return _permuted(call, x, [place[dim] if dim in place else next(rest) for dim in range(x.ndim)])


def _reverse(call: Call) -> Decision | None:
    """t, T, mT: the last two dims change places (T of more dims: all of them)."""
    x = _first(call)
    if x is None or x.ndim < 2:
        return None
    order = list(range(x.ndim))
    return _permuted(call, x, order[::-1] if call.name == "T" else [*order[:-2], x.ndim - 1, x.ndim - 2])


# ---------------------------------------------------------------- parts


def _spans(layout: FeatureLayout, sizes: Sequence[int]) -> list[tuple[int, int]] | None:
    """Where consecutive parts of the sharded dim lie on this rank: start, length. None unless each rank holds its
    features in their order, so that its part of a part is one piece."""
    if sum(sizes) != layout.size or not all(map(ascending, layout.by_rank)):
        return None
    found, start = [], 0
    for size in sizes:
        found.append(local_span(layout.own, start, start + size))
        start += size
    return found


_SECTIONS = operation_names("split_size split_size_or_sections split_sizes chunks indices_or_sections sections indices")


def _split(call: Call) -> Decision | None:
    x, dims = _first(call), None
    if x is not None:
        dims = _dims(x, call.argument(2, "dim", default=0))
    if x is None or dims is None or len(dims) != 1:
        return None
    layout = call.layout
    if dims[0] != layout.dim:
        return Decision(layout)
    sizes = _sections(call.name, call.argument(1, *_SECTIONS), layout.size)
    spans = None if sizes is None else _spans(layout, sizes)
    if sizes is None or spans is None or 0 in sizes:
        return None
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    layouts = tuple(
        layout.with_(layout.dim, slice_span(layout.by_rank, start, start + size), size)
        for start, size in zip(starts, sizes, strict=True)
    )
    local = [size for _, size in spans]
    return Decision(layouts, (), lambda tensors: torch.Tensor.split_with_sizes(tensors[0], local, layout.dim))


def _sections(name: str, given: Any, size: int) -> list[int] | None:
    if name == "tensor_split":
        if isinstance(given, int):
            return [size // given + (i < size % given) for i in range(given)]
        if not isinstance(given, (tuple, list)) or list(given) != sorted(given):
            return None
        edges = [0, *given, size]
        return [b - a for a, b in itertools.pairwise(edges)]
    if isinstance(given, (tuple, list)):
        return list(given)
    if not isinstance(given, int) or given < 1:
        return None
    each = -(-size // given) if name == "chunk" else given
    return [min(each, size - start) for start in range(0, size, each)]


def _unbind(call: Call) -> Decision | None:
    x = _first(call)
    dims = None if x is None else _dims(x, call.argument(1, "dim", default=0))
    return None if x is None or dims is None else _without(call, dims)


def _select(call: Call) -> Decision | None:
    x = _first(call)
    dims = None if x is None else _dims(x, call.argument(1, "dim"))
    return None if x is None or dims is None else _without(call, dims)


def _without(call: Call, dims: list[int]) -> Decision | None:
    layout = call.layout
    if len(dims) != 1 or dims[0] == layout.dim:
        return None
    return Decision(layout.with_(layout.dim + (dims[0] > layout.dim), layout.by_rank, layout.size))


def _narrow(call: Call) -> Decision | None:
    x, layout = _first(call), call.layout
    dims = None if x is None else _dims(x, call.argument(1, "dim"))
    start, size = call.argument(2, "start"), call.argument(3, "length")
    if dims is None or len(dims) != 1 or not isinstance(start, int) or not isinstance(size, int):
        return None
    if dims[0] != layout.dim:
        return Decision(layout)
    start = start % layout.size if start < 0 else start
    part = _part(layout, start, start + size)
    if part is None:
        return None
    own, after = part
    return Decision(after, (), lambda tensors: tensors[0].narrow(layout.dim, *own))


def _part(layout: FeatureLayout, start: int, stop: int) -> tuple[tuple[int, int], FeatureLayout] | None:
    """A span of the sharded dim: where it lies on this rank, and who owns what of it."""
    if not 0 <= start < stop <= layout.size:
        return None
    spans = _spans(layout, [start, stop - start, layout.size - stop])
    if spans is None:
        return None
    return spans[1], layout.with_(layout.dim, slice_span(layout.by_rank, start, stop), stop - start)


def _getitem(call: Call) -> Decision | None:
    x = call.args[0]
    if not isinstance(x, Operand) or not x.sharded:
        return None
    given = call.args[1]
    ascending_list = _as_slice(given)
    found = _indexed(call, x, given if ascending_list is None else ascending_list)
    if found is None:
        return None
    index, layout = found
    if ascending_list is not None:  # a list takes copies, a slice is a view
        return Decision(layout, (), lambda tensors: tensors[0][index].clone())
    return Decision(layout, (), lambda tensors: tensors[0][_with_tensors(index, tensors)])


def _as_slice(index: Any) -> tuple[Any, ...] | None:
    """An index in which a single list takes neighbours, as one with a slice: [..., [-2, -1], :] -> [..., -2:, :]."""
    items = list(index) if isinstance(index, tuple) else [index]
    lists = [i for i, item in enumerate(items) if isinstance(item, list)]
    if len(lists) != 1 or not all(isinstance(item, (list, slice)) or item in (None, Ellipsis) for item in items):
        return None
    values = items[lists[0]]
    if not values or any(type(value) is not int for value in values):
        return None
    if values != list(range(values[0], values[0] + len(values))) or values[0] < 0 <= values[-1]:
        return None
    items[lists[0]] = slice(values[0], values[-1] + 1 or None)
    return tuple(items)


def _setitem(call: Call) -> Decision | None:
    x, value = call.args[0], call.args[2]
    found = _indexed(call, x, call.args[1]) if isinstance(x, Operand) and x.sharded else None
    if found is None:
        return None
    index, layout = found
    actions: list[Action | None] = [None] * len(call.operands)
    if isinstance(value, Operand):
        spans = value.ndim >= -layout.dim and value.shape[layout.dim] != 1
        if spans:
            fits, action = _fit(call, value, layout.dim, layout.by_rank, layout.size)
            if not fits or value.shape[layout.dim] != layout.size:
                return None
            actions[value.position] = action
        elif value.sharded:
            return None
        else:
            actions[value.position] = Enter(layout.context) if value.layout is None else None

    def run(tensors: Sequence[Tensor]) -> None:
        tensors[0][_with_tensors(index, tensors)] = tensors[value.position] if isinstance(value, Operand) else value

    return Decision(layout, actions, run)


def _with_tensors(index: tuple[Any, ...], tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    return tuple(tensors[item.position] if isinstance(item, Operand) else item for item in index)


def _indexed(call: Call, x: Operand, index: Any) -> tuple[tuple[Any, ...], FeatureLayout] | None:
    """The index for this rank's features, and the layout of what it takes; None if it selects among the features."""
    items = list(index) if isinstance(index, tuple) else [index]
    if not all(map(_is_simple, items)):
        return None
    taken = sum(_consumes(item) for item in items)
    if taken > x.ndim or sum(item is Ellipsis for item in items) > 1:
        return None
    fill = [slice(None)] * (x.ndim - taken)
    at = next((i for i, item in enumerate(items) if item is Ellipsis), None)
    items = [*items, *fill] if at is None else [*items[:at], *fill, *items[at + 1 :]]
    layout, local, marks, dim = call.layout, list[Any](), list[str](), 0
    sharded = layout.dim % x.ndim
    for item in items:
        size = _consumes(item)
        if dim <= sharded < dim + size:
            if not isinstance(item, slice):
                return None
            start, stop, step = item.indices(layout.size)
            part = _part(layout, start, stop) if step == 1 else None
            if part is None:
                return None
            (first, count), layout = part
            item = slice(first, first + count)
            marks.append("sharded")
        elif isinstance(item, Operand):
            marks.append("tensor")
        elif isinstance(item, slice) or item is None:
            marks.append("dim")
        else:
            marks.append("number")
        local.append(item)
        dim += size
    after = _dims_behind(marks, [item for item in items if isinstance(item, Operand)])
    return None if after is None else (tuple(local), layout.with_(-1 - after, layout.by_rank, layout.size))


def _dims_behind(marks: list[str], tensors: list[Operand]) -> int | None:
    """How many dims come behind the sharded one, after indexing; None where index tensors are not side by side."""
    where = [i for i, mark in enumerate(marks) if mark == "tensor"]
    if where and ("number" in marks or where[-1] - where[0] != len(where) - 1):
        return None
    at = marks.index("sharded")
    behind = sum(mark == "dim" for mark in marks[at:])
    if where and where[0] > at:
        behind += max(1 if x.dtype == torch.bool else x.ndim for x in tensors)
    return behind


def _is_simple(item: Any) -> bool:
    if isinstance(item, Operand):
        return item.layout is None and item.dtype in (torch.bool, torch.int64, torch.int32)
    return item is None or item is Ellipsis or isinstance(item, slice) or type(item) is int


def _consumes(item: Any) -> int:
    """How many dims an index takes."""
    if isinstance(item, Operand):
        return item.ndim if item.dtype == torch.bool else 1
    return 0 if item is None or item is Ellipsis else 1


# ---------------------------------------------------------------- putting together, repeating


def _cat(call: Call) -> Decision | None:
    """Empty tensors of one dim, with which caches begin, count for nothing."""
    parts = [x for x in call.operands if x.shape != (0,)]
    x, layout = parts[0], call.layout
    dim = _dims(x, call.argument(1, "dim", "axis", default=0))
    if dim is None or not _agree(call) or any(y.ndim != x.ndim for y in parts):
        return None
    if dim == [layout.dim]:
        return _cat_features(call) if len(parts) == len(call.operands) else None
    if any(y.shape[layout.dim] != layout.size for y in parts):
        return None
    aligned = _align(call, [None if y.shape == (0,) else layout.dim for y in call.operands])
    return None if aligned is None else Decision(layout.with_(layout.dim, aligned[1], layout.size), aligned[0])


def _cat_features(call: Call) -> Decision | None:
    """Of values that are not split here, every rank owns all."""
    layout, ways = call.layout, len(call.layout.by_rank)
    sizes = [x.shape[layout.dim] for x in call.operands]
    owned = [
        x.layout.by_rank if x.layout is not None and x.sharded else (((0, size),),) * ways
        for x, size in zip(call.operands, sizes, strict=True)
    ]
    by_rank = concatenate(tuple(zip(owned, sizes, strict=True)))
    actions = [Enter(layout.context) if x.layout is None else None for x in call.operands]
    return Decision(layout.with_(layout.dim, by_rank, sum(sizes)), actions)


def _stack(call: Call) -> Decision | None:
    x, layout = call.operands[0], call.layout
    dim = call.argument(1, "dim", default=0)
    if not isinstance(dim, int) or any(y.shape != x.shape for y in call.operands) or not _agree(call):
        return None
    aligned = _align(call, [layout.dim] * len(call.operands))
    if aligned is None:
        return None
    behind = dim % (x.ndim + 1) > layout.dim % x.ndim
    return Decision(layout.with_(layout.dim - behind, aligned[1], layout.size), aligned[0])


def _expand(call: Call) -> Decision | None:
    x, sizes = _first(call), _sizes(call, "size")
    return None if x is None or sizes is None else _expanded(call, sizes)


def _expand_like(call: Call) -> Decision | None:
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


def _repeat(call: Call) -> Decision | None:
    x, times = _first(call), _sizes(call, "repeats", "dims")
    layout = call.layout
    if x is None or times is None or len(times) < x.ndim or times[layout.dim] < 1:
        return None
    n = times[layout.dim]
    return Decision(layout.with_(layout.dim, repeat_dim(layout.by_rank, layout.size, n), layout.size * n))


def _repeat_each(call: Call) -> Decision | None:
    x, times, layout = _first(call), call.argument(1, "repeats"), call.layout
    dims = None if x is None else _dims(x, call.argument(2, "dim"))
    if dims is None or len(dims) != 1 or not isinstance(times, int) or times < 1:
        return None
    if dims[0] != layout.dim:
        return Decision(layout)
    return Decision(layout.with_(layout.dim, repeat_each(layout.by_rank, times), layout.size * times))


# ---------------------------------------------------------------- products


def _contract(call: Call, labels: Sequence[Sequence[Any]], out: Sequence[Any]) -> Decision | None:
    """A product of operands whose dims carry labels, as in an einsum: local if the sharded dim is in the result."""
    found = {labels[x.position][x.layout.dim] for x in call.operands if x.layout is not None and x.sharded}
    label = found.pop()
    if found or label not in out or any(own.count(label) > 1 for own in labels):
        return None
    size = call.layout.size
    dims: list[int | None] = []
    for x, own in zip(call.operands, labels, strict=True):
        dim = own.index(label) - len(own) if label in own else None
        if dim is not None and x.shape[dim] not in (1, size):
            return None
        dims.append(dim if dim is not None and (x.shape[dim] == size or x.sharded) else None)
    aligned = _align(call, dims)
    if aligned is None:
        return None
    return Decision(call.layout.with_(out.index(label) - len(out), aligned[1], size), aligned[0])


def _batch(x: Operand) -> list[Any]:
    """Labels of all dims but the last two, as broadcasting pairs them."""
    return list(range(-x.ndim, -2))


def _matmul(call: Call) -> Decision | None:
    if len(call.operands) != 2 or not all(x.ndim for x in call.operands):
        return None
    x, y = call.operands if call.name != "__rmatmul__" else call.operands[::-1]
    left = ["k"] if x.ndim == 1 else [*_batch(x), "m", "k"]
    right = ["k"] if y.ndim == 1 else [*_batch(y), "k", "n"]
    out = max(_batch(x), _batch(y), key=len) + ["m"] * (x.ndim > 1) + ["n"] * (y.ndim > 1)
    return _contract(call, [left, right] if x.position == 0 else [right, left], out)


def _add_matmul(call: Call) -> Decision | None:
    """baddbmm and addmm: another operand is added to the product."""
    if len(call.operands) != 3:
        return None
    out = ["b", "m", "n"] if "b" in call.name else ["m", "n"]
    batch = out[:-2]
    added = call.operands[0]
    if added.ndim > len(out):
        return None
    return _contract(call, [out[len(out) - added.ndim :], [*batch, "m", "k"], [*batch, "k", "n"]], out)


def _linear(call: Call) -> Decision | None:
    x, *rest = call.operands
    if not rest or rest[0].ndim != 2:
        return None
    out = [*range(-x.ndim, -1), "n"]
    return _contract(call, [[*range(-x.ndim, -1), "k"], ["n", "k"], ["n"]][: len(call.operands)], out)


def _outer(call: Call) -> Decision | None:
    return _contract(call, [["m"], ["n"]], ["m", "n"]) if len(call.operands) == 2 else None


def _einsum(call: Call) -> Decision | None:
    equation = call.args[0] if call.args else None
    if not isinstance(equation, str):
        return None
    terms, arrow, out = equation.replace(" ", "").partition("->")
    inputs = terms.split(",")
    if len(inputs) != len(call.operands):
        return None
    labels = [_letters(term, x.ndim) for term, x in zip(inputs, call.operands, strict=True)]
    known = [own for own in labels if own is not None]
    if len(known) < len(labels):
        return None
    dots = max(sum(isinstance(label, int) for label in own) for own in known)
    if not arrow:
        letters = terms.replace(",", "").replace(".", "")
        out = "..." * (dots > 0) + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    result = _letters(out, len(out.replace("...", "")) + dots)
    return None if result is None else _contract(call, known, result)


def _letters(term: str, ndim: int) -> list[Any] | None:
    """A label for each dim: letters, and numbers for what the dots stand for."""
    before, dots, after = term.partition("...")
    spare = ndim - len(before) - len(after)
    if spare < 0 or (spare and not dots):
        return None
    return [*before, *range(-spare, 0), *after]


def _attention(call: Call) -> Decision | None:
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
    dims = _broadcast_dims(call, dim, size) if _agree(call) else None
    aligned = None if dims is None or q.shape[dim] != size else _align(call, dims)
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
        fits, actions[x.position] = _fit(call, x, -3, by_rank, size)
        if not fits:
            return None
    return Decision(call.layout.with_(-3, own, heads), actions)


# ---------------------------------------------------------------- the table

POINTWISE = operation_names(
    """
    add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow float_power
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__ __mod__
    __pow__ __rpow__ __neg__ __pos__ __abs__ __invert__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__
    __iadd__ __isub__ __imul__ __itruediv__ __ipow__ __iand__ __ior__ __ixor__
    __eq__ __ne__ __lt__ __le__ __gt__ __ge__ eq ne lt le gt ge equal_ greater less greater_equal less_equal not_equal
    logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor
    neg negative positive abs absolute square sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh tanh
    atan erf erfc sigmoid sign reciprocal floor ceil round trunc frac nan_to_num isnan isinf isfinite logit
    gelu relu relu6 silu softplus leaky_relu elu celu selu mish hardswish hardsigmoid hardtanh softsign tanhshrink
    logsigmoid threshold clamp clip clamp_min clamp_max maximum minimum fmax fmin atan2 lerp addcmul addcdiv
    masked_fill dropout alpha_dropout bernoulli rand_like randn_like randint_like zeros_like ones_like full_like
    empty_like normal uniform exponential fill zero copy
    float half bfloat16 double int long bool contiguous clone detach real imag conj conj_physical resolve_conj angle
    polar complex
    """
)
_REDUCTIONS = operation_names(
    "mean sum prod amax amin argmax argmin any all nansum nanmean logsumexp median count_nonzero"
)
RULES: dict[str, Rule] = {
    **dict.fromkeys(POINTWISE, _pointwise),
    **dict.fromkeys(["max", "min"], _extreme),
    **dict.fromkeys(["to", "type_as", "type"], _cast),
    "where": _where,
    **dict.fromkeys(["softmax", "log_softmax", "softmin", "cumsum", "cumprod", "logcumsumexp"], _along(1)),
    **dict.fromkeys(["sort", "argsort"], _along(1, default=-1)),
    "topk": _along(2, default=-1),
    "normalize": _along(2, default=1),
    "flip": _along(1, "dims"),
    "roll": _along(2, "dims"),
    "index_select": _along(1),
    **dict.fromkeys(["layer_norm", "rms_norm"], _normalise),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    **dict.fromkeys(["var", "std", "var_mean", "std_mean"], _spread),
    **dict.fromkeys(["norm", "vector_norm", "linalg_vector_norm"], _norm),
    **dict.fromkeys(["tril", "triu"], _triangle),
    "pad": _pad,
    "glu": _glu,
    "view_as_complex": _complex(1),
    "view_as_real": _complex(-1),
    **dict.fromkeys(["view", "reshape"], _view),
    **dict.fromkeys(["view_as", "reshape_as"], _view_like),
    "flatten": _flatten,
    "unflatten": _unflatten,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    **dict.fromkeys(["transpose", "swapaxes", "swapdims"], _transpose),
    "permute": _permute,
    **dict.fromkeys(["movedim", "moveaxis"], _move),
    **dict.fromkeys(["t", "T", "mT"], _reverse),
    **dict.fromkeys(["split", "split_with_sizes", "chunk", "tensor_split"], _split),
    "unbind": _unbind,
    "select": _select,
    "narrow": _narrow,
    "__getitem__": _getitem,
    "__setitem__": _setitem,
    **dict.fromkeys(["cat", "concat", "concatenate"], _cat),
    "stack": _stack,
    **dict.fromkeys(["expand", "broadcast_to"], _expand),
    "expand_as": _expand_like,
    **dict.fromkeys(["repeat", "tile"], _repeat),
    "repeat_interleave": _repeat_each,
    **dict.fromkeys(["matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "mv"], _matmul),
    **dict.fromkeys(["baddbmm", "addmm"], _add_matmul),
    "linear": _linear,
    **dict.fromkeys(["outer", "ger"], _outer),
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
}
