"""Stacks of experts with few features inside: what a rank has of one, and what the whole is."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatp.auto_plan.blocks import is_linear
from lightning_megatp.auto_plan.thin import block_copy, thin_copy
from lightning_megatp.detour import entries_replaced
from lightning_megatp.plan.layer import StackLayout
from lightning_megatp.plan.layer_styles import pieces
from lightning_megatp.plan.styles import ExpertParameter
from lightning_megatp.tensor.collectives import take_ranges

_THIN, _THINNEST = 24, 3
"""Features inside of the experts of a thin copy, of which a third makes a part (some kernels want multiples of 8), and
if these have more than `_FEW` elements."""
_FEW = 2**23

Features = tuple[int, int]
"""The first of the features inside, and the one behind the last."""


@dataclass(frozen=True)
class ThinStack:
    """A thin copy of a stack.

    Args:
        whole: that copy.
        inside: how many features its experts have inside.
    """

    whole: nn.Module
    inside: int

    @classmethod
    def of(cls, module: nn.Module, layout: StackLayout) -> ThinStack:
        """Make a thin copy of a stack.

        Args:
            layout: names the parameters of its experts.
        """
        linears = [name for name, child in module.named_modules() if is_linear(child)]
        with thinned(module, layout) as inside:
            return cls(thin_copy(module, seed=0, dense=linears), inside)

    def enlarged(self, by: float) -> ThinStack:
        """A copy with larger weights."""
        larger = block_copy(self.whole)
        for name, parameter in list(larger.named_parameters()):
            _replace(larger, name, parameter.detach() * by)
        return ThinStack(larger, self.inside)

    def share(self, layout: StackLayout, own: Features) -> nn.Module:
        """What a rank has that computes with some of the features inside."""
        start, stop = own
        share = block_copy(self.whole)
        for entry in layout.parameters:
            parameter = share.get_parameter(entry.name)
            if entry.dim is not None:
                _replace(share, entry.name, self.part_of(parameter.detach(), entry, own))
            elif entry.once and start:
                _replace(share, entry.name, torch.zeros_like(parameter))
        for count in layout.counts or ():
            holder, key = holder_of(share, count)
            vars(holder)[key] = stop - start
        return share

    def part_of(self, x: Tensor, entry: ExpertParameter, own: Features) -> Tensor:
        """The part of a parameter that belongs to some features inside; or of its gradient."""
        assert entry.dim is not None
        starts = range(0, x.shape[entry.dim], self.inside * entry.unit)
        ranges = tuple((start + own[0] * entry.unit, start + own[1] * entry.unit) for start in starts)
        return take_ranges(x, entry.dim, ranges)


@contextlib.contextmanager
def thinned(module: nn.Module, layout: StackLayout) -> Iterator[int]:
    """Meanwhile a stack's experts have few features inside, and split parameters without values.

    Returns:
        How many.
    """
    inside = _few_inside(module, layout.parameters)

    def entries() -> Iterator[tuple[dict[str, Any], str, Any]]:
        for entry in layout.parameters:
            if entry.dim is not None:
                holder, leaf = holder_of(module, entry.name)
                parameter = holder._parameters[leaf]
                assert parameter is not None
                dim, shape = entry.dim, list(parameter.shape)
                shape[dim] = inside * entry.unit * len(pieces(shape[dim], entry.parts))
                yield holder._parameters, leaf, nn.Parameter(parameter.new_empty(shape, device="meta"))
        for count in layout.counts or ():
            holder, key = holder_of(module, count)
            yield vars(holder), key, inside

    with entries_replaced(entries()):
        yield inside


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


def _replace(module: nn.Module, name: str, values: Tensor) -> None:
    holder, leaf = holder_of(module, name)
    holder._parameters[leaf] = nn.Parameter(values, requires_grad=module.get_parameter(name).requires_grad)
