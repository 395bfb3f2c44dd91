"""Rules of views and of dims in another order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lightning_megatp.plan.ranges import merge_dims, split_dim
from lightning_megatp.tensor.features.call import Call, Operand, Rule
from lightning_megatp.tensor.features.decision import Decision
from lightning_megatp.tensor.features.rules.operands import dims_of, single, sizes_of


def view(call: Call) -> Decision | None:
    x = single(call)
    if x is None:
        return None
    if call.name == "view" and len(call.args) == 2 and isinstance(call.args[1], torch.dtype):
        return Decision(call.layout) if call.args[1].itemsize == x.dtype.itemsize else None
    sizes = sizes_of(call, "size", "shape")
    return None if sizes is None else _viewed(call, x, sizes)


def view_like(call: Call) -> Decision | None:
    x, other = call.operands
    if not x.sharded:
        if call.in_place or x.layout is not None:
            return None
        shape, change = other.shape, _change(call.name)
        return Decision(None, (), lambda tensors: change(tensors[0], shape))
    return _viewed(call, x, list(other.shape))


def _change(name: str) -> Callable[..., Tensor]:
    return torch.Tensor.view if name in ("view", "view_as") else torch.Tensor.reshape


def flatten(call: Call) -> Decision | None:
    x = single(call)
    if x is None:
        return None
    ends = dims_of(x, [call.argument(1, "start_dim", default=0), call.argument(2, "end_dim", default=-1)])
    if ends is None or ends[0] > ends[1]:
        return None
    start, end = ends[0] % x.ndim, ends[1] % x.ndim
    return _viewed(call, x, [*x.shape[:start], math.prod(x.shape[start : end + 1]), *x.shape[end + 1 :]])


def unflatten(call: Call) -> Decision | None:
    x, sizes = single(call), call.argument(2, "sizes", "unflattened_size")
    dims = None if x is None else dims_of(x, call.argument(1, "dim"))
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


def unsqueeze(call: Call) -> Decision | None:
    x, dim = single(call), call.argument(1, "dim")
    if x is None or not isinstance(dim, int):
        return None
    layout, at = call.layout, dim % (x.ndim + 1)
    behind = at > layout.dim % x.ndim
    return Decision(layout.with_(layout.dim - behind, layout.by_rank, layout.size))


def squeeze(call: Call) -> Decision | None:
    x, layout = single(call), call.layout
    if x is None:
        return None
    given = call.argument(1, "dim")
    dims = list(range(-x.ndim, 0)) if given is None else dims_of(x, given)
    if dims is None:
        return None
    gone = tuple(sorted({dim for dim in dims if x.shape[dim] == 1}))
    if layout.dim in gone:
        return None
    after = layout.with_(layout.dim + sum(dim > layout.dim for dim in gone), layout.by_rank, layout.size)
    return Decision(after, (), lambda tensors: torch.Tensor.squeeze(tensors[0], gone))


def complex_view(change: int) -> Rule:
    """view_as_complex (the last dim goes) and view_as_real (one comes)."""

    def rule(call: Call) -> Decision | None:
        layout = call.layout
        if not single(call) or (change > 0 and layout.dim == -1):
            return None
        return Decision(layout.with_(layout.dim + change, layout.by_rank, layout.size))

    return rule


def transpose(call: Call) -> Decision | None:
    x = single(call)
    pair = (call.argument(1, "dim0", "axis0"), call.argument(2, "dim1", "axis1"))
    dims = None if x is None else dims_of(x, pair)
    if x is None or dims is None:
        return None
    order, (a, b) = list(range(x.ndim)), dims
    order[a], order[b] = order[b], order[a]
    return _permuted(call, x, order)


def permute(call: Call) -> Decision | None:
    x, sizes = single(call), sizes_of(call, "dims")
    dims = None if x is None or sizes is None else dims_of(x, sizes)
    return None if x is None or dims is None else _permuted(call, x, [dim % x.ndim for dim in dims])


def move(call: Call) -> Decision | None:
    x = single(call)
    if x is None:
        return None
    source, target = dims_of(x, call.argument(1, "source")), dims_of(x, call.argument(2, "destination"))
    if source is None or target is None or len(source) != len(target):
        return None
    place = {b % x.ndim: a % x.ndim for a, b in zip(source, target, strict=True)}
    rest = iter([dim for dim in range(x.ndim) if dim not in place.values()])
    return _permuted(call, x, [place[dim] if dim in place else next(rest) for dim in range(x.ndim)])


def reverse(call: Call) -> Decision | None:
    """t, T, mT: the last two dims change places (T of more dims: all of them)."""
    x = single(call)
    if x is None or x.ndim < 2:
        return None
    order = list(range(x.ndim))
    return _permuted(call, x, order[::-1] if call.name == "T" else [*order[:-2], x.ndim - 1, x.ndim - 2])


def _permuted(call: Call, x: Operand, order: list[int]) -> Decision:
    dim = order.index(call.layout.dim % x.ndim) - x.ndim
    return Decision(call.layout.with_(dim, call.layout.by_rank, call.layout.size))
