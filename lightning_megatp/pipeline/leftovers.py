"""What a step, or a hook, leaves on its module."""

from __future__ import annotations

from collections import deque
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

_LARGE = 10_000
"""Containers with more entries are compared by their length."""
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_NOT_SEARCHED = ("builtins", "torch", "torchmetrics", "lightning", "pytorch_lightning", "lightning_megatp", "numpy")
"""Objects of these packages are compared by identity: trainers, loggers, tensors, metrics."""


class Attributes:
    """The attributes of a LightningModule at one moment, to be compared with those at a later one.

    They are compared by identity, and so are the entries of containers and the attributes of the user's own objects, at
    any depth. What was found is kept alive, so that no identity is given anew.

    Args:
        module: its submodules, and the values of tensors, are not looked into.
    """

    def __init__(self, module: nn.Module) -> None:
        self._held: list[Any] = []
        self._seen: set[int] = set()
        self._shape = self._describe(vars(module))

    def differ_from(self, earlier: Attributes) -> bool:
        """Whether anything was set, replaced, added or removed since."""
        return self._shape != earlier._shape

    def _describe(self, value: Any) -> Any:
        if id(value) in self._seen:
            return id(value)
        self._seen.add(id(value))
        self._held.append(value)
        if isinstance(value, _CONTAINERS):
            if len(value) > _LARGE:
                return id(value), len(value)
            keys = tuple(map(self._describe, value))
            entries = tuple(map(self._describe, value.values())) if isinstance(value, dict) else ()
            return id(value), keys, entries
        if isinstance(value, (nn.Module, Tensor, type, FunctionType, MethodType, ModuleType)):
            return id(value)
        if type(value).__module__.partition(".")[0] in _NOT_SEARCHED:
            return id(value)
        return id(value), self._describe(getattr(value, "__dict__", None))
