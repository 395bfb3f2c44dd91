"""Tensors in nested containers, and in optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatp.shim.torch import tree_leaves, tree_map


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts, in order, and in what else torch's pytree knows."""
    found: list[Tensor] = []
    _collect(values, found)
    return found


def with_tensors(replaced: Callable[[Tensor], Any], value: Any) -> Any:
    """A copy of nested containers with other things in place of the tensors that `tensors_in` finds."""
    kind = type(value)
    if isinstance(value, Tensor):
        return replaced(value)
    if kind is tuple or kind is list:
        return kind([with_tensors(replaced, x) for x in value])
    if kind is dict:
        return {key: with_tensors(replaced, x) for key, x in value.items()}
    if kind in _PLAIN:
        return value
    return tree_map(lambda x: replaced(x) if isinstance(x, Tensor) else x, value)


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """What an optimizer steps, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def leaves_in(*values: Any) -> list[Any]:
    """What nested lists, tuples and dicts hold at last, in order, and what else torch's pytree knows holds."""
    found: list[Any] = []
    _collect_leaves(values, found)
    return found


def _collect(values: Iterable[Any], found: list[Tensor]) -> None:
    """The usual containers by hand: pytree takes ten times as long, and pipelines ask for every microbatch."""
    for value in values:
        kind = type(value)
        if isinstance(value, Tensor):
            found.append(value)
        elif kind is tuple or kind is list:
            _collect(value, found)
        elif kind is dict:
            _collect(value.values(), found)
        elif kind not in _PLAIN:
            found += [x for x in tree_leaves(value) if isinstance(x, Tensor)]


def _collect_leaves(values: Iterable[Any], found: list[Any]) -> None:
    """Goes through containers as `_collect` does; one walk for both would cost `tensors_in` half of its time more."""
    for value in values:
        kind = type(value)
        if isinstance(value, Tensor) or kind in _PLAIN:
            found.append(value)
        elif kind is tuple or kind is list:
            _collect_leaves(value, found)
        elif kind is dict:
            _collect_leaves(value.values(), found)
        else:
            found += tree_leaves(value)


_PLAIN = frozenset(
    {type(None), bool, int, float, str, slice, type(...), torch.dtype, torch.device, torch.layout, torch.memory_format}
)
"""What is no container, to pytree either; operations are given these most often."""
