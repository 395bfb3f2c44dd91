"""Rules of `x[index]` and `x[index] = value`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatp.tensor.features.call import Call, Operand
from lightning_megatp.tensor.features.decision import Action, Decision, Enter
from lightning_megatp.tensor.features.layout import FeatureLayout
from lightning_megatp.tensor.features.rules.operands import fit
from lightning_megatp.tensor.features.rules.parts import part_of


def getitem(call: Call) -> Decision | None:
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


def setitem(call: Call) -> Decision | None:
    x, value = call.args[0], call.args[2]
    found = _indexed(call, x, call.args[1]) if isinstance(x, Operand) and x.sharded else None
    if found is None:
        return None
    index, layout = found
    actions: list[Action | None] = [None] * len(call.operands)
    if isinstance(value, Operand):
        spans = value.ndim >= -layout.dim and value.shape[layout.dim] != 1
        if spans:
            fits, action = fit(call, value, layout.dim, layout.by_rank, layout.size)
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
            part = part_of(layout, start, stop) if step == 1 else None
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
