"""Tensors in nested containers, and in optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_megatp.shim.torch import tree_leaves


def tensors_in(*values: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and dicts, in order, and in what else torch's pytree knows."""
    found: list[Tensor] = []
    _collect(values, found)
    return found


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """What an optimizer steps, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


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
        elif value is not None and kind not in _PLAIN:
            found += [x for x in tree_leaves(value) if isinstance(x, Tensor)]


_PLAIN = frozenset({bool, int, float, str})
