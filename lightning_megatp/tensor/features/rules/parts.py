"""Rules of parts of a tensor: split, select, narrow, and the gated units."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from lightning_megatp.plan.ranges import ascending, local_span, slice_span
from lightning_megatp.tensor.features.call import Call
from lightning_megatp.tensor.features.decision import Decision
from lightning_megatp.tensor.features.layout import FeatureLayout
from lightning_megatp.tensor.features.rules.operands import dims_of, single
from lightning_megatp.tensor.functions import operation_names


def split(call: Call) -> Decision | None:
    x, dims = single(call), None
    if x is not None:
        dims = dims_of(x, call.argument(2, "dim", default=0))
    if x is None or dims is None or len(dims) != 1:
        return None
    layout = call.layout
    if dims[0] != layout.dim:
        return Decision(layout)
    sizes = _sections(call.name, call.argument(1, *_SECTIONS), layout.size)
    spans = None if sizes is None else spans_of(layout, sizes)
    if sizes is None or spans is None or 0 in sizes:
        return None
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    layouts = tuple(
        layout.with_(layout.dim, slice_span(layout.by_rank, start, start + size), size)
        for start, size in zip(starts, sizes, strict=True)
    )
    local = [size for _, size in spans]
    return Decision(layouts, (), lambda tensors: torch.Tensor.split_with_sizes(tensors[0], local, layout.dim))


_SECTIONS = operation_names("split_size split_size_or_sections split_sizes chunks indices_or_sections sections indices")


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


def glu(call: Call) -> Decision | None:
    x, layout = single(call), call.layout
    dims = None if x is None else dims_of(x, call.argument(1, "dim", default=-1))
    if dims is None or layout.size % 2:
        return None
    if dims != [layout.dim]:
        return Decision(layout)
    half = layout.size // 2
    spans = spans_of(layout, [half, half])
    gate, value = slice_span(layout.by_rank, 0, half), slice_span(layout.by_rank, half, layout.size)
    return Decision(layout.with_(layout.dim, gate, half)) if spans is not None and gate == value else None


def unbind(call: Call) -> Decision | None:
    x = single(call)
    dims = None if x is None else dims_of(x, call.argument(1, "dim", default=0))
    return None if x is None or dims is None else _without(call, dims)


def select(call: Call) -> Decision | None:
    x = single(call)
    dims = None if x is None else dims_of(x, call.argument(1, "dim"))
    return None if x is None or dims is None else _without(call, dims)


def _without(call: Call, dims: list[int]) -> Decision | None:
    layout = call.layout
    if len(dims) != 1 or dims[0] == layout.dim:
        return None
    return Decision(layout.with_(layout.dim + (dims[0] > layout.dim), layout.by_rank, layout.size))


def narrow(call: Call) -> Decision | None:
    x, layout = single(call), call.layout
    dims = None if x is None else dims_of(x, call.argument(1, "dim"))
    start, size = call.argument(2, "start"), call.argument(3, "length")
    if dims is None or len(dims) != 1 or not isinstance(start, int) or not isinstance(size, int):
        return None
    if dims[0] != layout.dim:
        return Decision(layout)
    start = start % layout.size if start < 0 else start
    part = part_of(layout, start, start + size)
    if part is None:
        return None
    own, after = part
    return Decision(after, (), lambda tensors: tensors[0].narrow(layout.dim, *own))


def spans_of(layout: FeatureLayout, sizes: Sequence[int]) -> list[tuple[int, int]] | None:
    """Where consecutive parts of the sharded dim lie on this rank: start, length. None unless each rank holds its
    features in their order, so that its part of a part is one piece."""
    if sum(sizes) != layout.size or not all(map(ascending, layout.by_rank)):
        return None
    found, start = [], 0
    for size in sizes:
        found.append(local_span(layout.own, start, start + size))
        start += size
    return found


def part_of(layout: FeatureLayout, start: int, stop: int) -> tuple[tuple[int, int], FeatureLayout] | None:
    """A span of the sharded dim: where it lies on this rank, and who owns what of it."""
    if not 0 <= start < stop <= layout.size:
        return None
    spans = spans_of(layout, [start, stop - start, layout.size - stop])
    if spans is None:
        return None
    return spans[1], layout.with_(layout.dim, slice_span(layout.by_rank, start, stop), stop - start)
