"""Torch's functions as `__torch_function__` sees them, and this package's own autograd functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_megatp.shim.autograd import DirectFunction

_IN_PLACE_OPERATORS = frozenset(
    ["__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__", "__ipow__", "__iand__", "__ior__", "__ixor__"]
)


def operation_name(func: Callable[..., Any]) -> str:
    """`add`, `layer_norm`, or the property's name for a getter (`shape`)."""
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", name) if name in ("__get__", "__set__") else name


def operation_names(text: str) -> frozenset[str]:
    """A set of names as `operation_name` gives them."""
    return frozenset(text.split())


def is_in_place(name: str) -> bool:
    """Whether an operation changes its first operand."""
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_OPERATORS


class OwnFunction(DirectFunction):
    """An autograd function of this package. Its callers see to it that it gets plain tensors, never shards."""


@dataclass(frozen=True)
class OwnHook:
    """A hook of this package on a parameter whose gradient was accumulated. Unlike a user's, it may also be called
    where a backward leaves the gradient undefined, and then does nothing."""

    call: Callable[[Tensor], None]

    def __call__(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.call(parameter)
