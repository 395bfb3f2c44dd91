"""Whether what the parts of a stack of experts compute adds up to what the whole does, for a way of splitting it: tried
on thin copies, whose experts have few features inside."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatp.plan.auto.blocks import PLAIN, Call, is_linear, own_attributes, tensors_anywhere_in
from lightning_megatp.plan.auto.exact import exact, exact_in_thread
from lightning_megatp.plan.auto.thin import block_copy, concrete_call, thin_copy
from lightning_megatp.plan.layer_styles import pieces
from lightning_megatp.plan.ranges import Ranges
from lightning_megatp.plan.styles import ExpertParameter
from lightning_megatp.shim.torch import tree_flatten
from lightning_megatp.tensor.collectives import take_ranges

_CLOSE = 1e-8
_THIN, _THINNEST = 24, 3
"""Features inside of the experts of a thin copy, of which a third makes a part (some kernels want multiples of 8), and
if these have more than `_FEW` elements."""
_FEW = 2**23


@dataclass(frozen=True)
class StackLayout:
    """How a stack of experts is split."""

    parameters: tuple[ExpertParameter, ...]
    counts: tuple[str, ...] = ()
    """Attributes that count the features inside, by their names from the module on."""
    returns: tuple[bool, ...] = ()
    """Of each tensor that it returns, whether it is a sum; the others are the same on every rank. Empty for one sum."""
    kept: tuple[str, ...] = ()
    """Attributes in which it leaves tensors with a graph that are the same on every rank."""
    draws_alike: bool = False
    """Whether random numbers are drawn for what is the same on every rank, and not for the features inside."""


class NotAdditive(Exception):
    """Why a module is not what this file is about."""


def proven(module: nn.Module, layout: StackLayout, calls: Sequence[Call]) -> StackLayout:
    """Run the parts of a thin copy, and compare their sum.

    Raises:
        NotAdditive: it isn't.
        Exception: whatever the module raises.
    """
    linears = [name for name, child in module.named_modules() if is_linear(child)]
    with thinned(module, layout) as inside:
        whole = thin_copy(module, seed=0, dense=linears)
    shares = [_share(whole, layout, inside, own) for own in ((0, inside // 3), (inside // 3, inside))]
    verdicts, draws, single = [], set[bool](), False
    for train, call in itertools.product((True, False), calls):
        wanted, *parts = (_run(block_copy(part, train), call) for part in (whole, *shares))
        verdicts.append(_adds_up(wanted, parts))
        draws |= _drawn_alike(wanted, parts)
        single = isinstance(wanted.result, Tensor)
    returns = tuple(all(same) for same in zip(*(same for same, _ in verdicts), strict=True))
    if all(returns):
        raise NotAdditive("what it returns is the same whatever its experts compute")
    if len(draws) > 1:
        raise NotAdditive("it draws random numbers for the features inside of experts, and for what all ranks share")
    return replace(
        layout,
        returns=() if single else tuple(not same for same in returns),
        kept=tuple(sorted(set().union(*(names for _, names in verdicts)))),
        draws_alike=draws == {True},
    )


def _share(whole: nn.Module, layout: StackLayout, inside: int, own: tuple[int, int]) -> nn.Module:
    """What a rank has that computes with some of the features inside."""
    start, stop = own
    share = block_copy(whole)
    for entry in layout.parameters:
        holder, leaf = holder_of(share, entry.name)
        parameter = share.get_parameter(entry.name)
        if entry.dim is not None:
            parts = range(0, parameter.shape[entry.dim], inside * entry.unit)
            ranges: Ranges = tuple((part + start * entry.unit, part + stop * entry.unit) for part in parts)
            holder._parameters[leaf] = nn.Parameter(take_ranges(parameter.detach(), entry.dim, ranges))
        elif entry.once and start:
            parameter.data.zero_()
    for count in layout.counts:
        holder, key = holder_of(share, count)
        vars(holder)[key] = stop - start
    return share


@dataclass
class _Ran:
    """What a run of a module left."""

    result: Any
    kept: dict[str, Any]
    """Attributes that are others than before, by their names from the module on."""
    buffers: dict[str, Tensor]
    drew: list[Any]
    """Shapes of what random numbers were drawn for."""


def _run(module: nn.Module, call: Call) -> _Ran:
    given = concrete_call(call, 0, noise=0.1)
    drew: list[Any] = []
    before = _attributes(module)
    with exact(), exact_in_thread(lambda x: drew.append(tuple(x.shape) if isinstance(x, Tensor) else None)):
        result = module(*given.args, **given.kwargs)
    kept = {name: x for name, x in _attributes(module).items() if before.get(name) is not x}
    return _Ran(result, kept, dict(module.named_buffers()), drew)


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {
        f"{name}.{key}".lstrip("."): value
        for name, child in module.named_modules()
        for key, value in own_attributes(child).items()
    }


def _adds_up(wanted: _Ran, parts: Sequence[_Ran]) -> tuple[list[bool], set[str]]:
    """Of each tensor that is returned, whether it is the same in all parts, and not a sum; and the attributes with a
    graph that are.

    Raises:
        NotAdditive: anything is neither.
    """
    returned, trees = zip(*(tree_flatten(ran.result) for ran in (wanted, *parts)), strict=True)
    if any(tree != trees[0] for tree in trees):
        raise NotAdditive("its parts return something else than the whole")
    same = []
    for x, *of_parts in zip(*returned, strict=True):
        if _alike(x, of_parts):
            same += [True] if isinstance(x, Tensor) else []
        elif isinstance(x, Tensor) and x.is_floating_point() and all(_fits(x, part) for part in of_parts):
            if not torch.allclose(sum(of_parts[1:], of_parts[0]), x, rtol=_CLOSE, atol=_CLOSE):
                raise NotAdditive("what its parts compute does not add up")
            same.append(False)
        else:
            raise NotAdditive("its parts return something else than the whole")
    for name, buffer in wanted.buffers.items():
        if not _alike(buffer, [part.buffers.get(name) for part in parts]):
            raise NotAdditive(f"its buffer `{name}` would be another on each rank")
    left = set()
    for name, value in wanted.kept.items():
        if not _alike(value, [part.kept.get(name) for part in parts]):
            raise NotAdditive(f"what it leaves in `{name}` would be another on each rank")
        if isinstance(value, Tensor) and value.requires_grad:
            left.add(name)
        elif any(x.requires_grad for x in tensors_anywhere_in(value)):
            raise NotAdditive(f"it leaves tensors with a graph in `{name}`")
    return same, left


def _drawn_alike(wanted: _Ran, parts: Sequence[_Ran]) -> set[bool]:
    """Of each draw of random numbers, whether it is the same for the whole and all parts."""
    each = list(zip(wanted.drew, *(part.drew for part in parts), strict=True))
    return {all(shape == shapes[0] for shape in shapes) for shapes in each}


def _fits(x: Tensor, part: Any) -> bool:
    return isinstance(part, Tensor) and part.shape == x.shape


def _alike(x: Any, parts: Sequence[Any]) -> bool:
    """Whether parts have what the whole has."""
    if isinstance(x, Tensor):
        return all(_fits(x, y) and torch.allclose(x.double(), y.double(), rtol=_CLOSE, atol=_CLOSE) for y in parts)
    if isinstance(x, PLAIN):
        return all(type(x) is type(y) and x == y for y in parts)
    tensors = [tensors_anywhere_in(value) for value in (x, *parts)]
    return len(set(map(len, tensors))) == 1 and all(_alike(y, z) for y, *z in zip(*tensors, strict=True))


@contextlib.contextmanager
def thinned(module: nn.Module, layout: StackLayout) -> Iterator[int]:
    """Meanwhile a stack's experts have few features inside, and split parameters without values.

    Returns:
        How many.
    """
    inside = _few_inside(module, layout.parameters)
    before: list[tuple[dict[str, Any], str, Any]] = []

    def put(held: dict[str, Any], key: str, value: object) -> None:
        before.append((held, key, held[key]))
        held[key] = value

    for entry in layout.parameters:
        if entry.dim is not None:
            holder, leaf = holder_of(module, entry.name)
            parameter = holder._parameters[leaf]
            assert parameter is not None
            dim, shape = entry.dim, list(parameter.shape)
            shape[dim] = inside * entry.unit * len(pieces(shape[dim], entry.parts))
            put(holder._parameters, leaf, nn.Parameter(parameter.new_empty(shape, device="meta")))
    for count in layout.counts:
        holder, key = holder_of(module, count)
        put(vars(holder), key, inside)
    try:
        yield inside
    finally:
        for held, key, value in reversed(before):
            held[key] = value


def _few_inside(module: nn.Module, parameters: Sequence[ExpertParameter]) -> int:
    size = sum(module.get_parameter(entry.name).numel() for entry in parameters if entry.split)
    return _THIN if size // features_inside(module, parameters) * _THIN <= _FEW else _THINNEST


def features_inside(module: nn.Module, parameters: Sequence[ExpertParameter]) -> int:
    """Features inside of each expert."""
    entry = next(entry for entry in parameters if entry.split)
    size = module.get_parameter(entry.name).shape[entry.dim or 0]
    return pieces(size, entry.parts)[0] // entry.unit


def holder_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has a parameter or an attribute, and its name there."""
    path, _, leaf = name.rpartition(".")
    return module.get_submodule(path), leaf
