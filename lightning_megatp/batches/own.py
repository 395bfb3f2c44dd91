"""What a LightningModule tells of its microbatches: `split_batch(self, batch, microbatches)` and
`loss_weight(self, batch)`. A project may have these names for something else (`self.loss_weight = 0.5`)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_megatp.user_hooks import codes_of, words_of


def own_split(module: nn.Module) -> Callable[[Any, int], Any] | None:
    """The module's `split_batch`."""
    return _method(module, "split_batch", "batch", "microbatches")


def own_weight(module: nn.Module) -> Callable[[Any], Any] | None:
    """The module's `loss_weight`."""
    return _method(module, "loss_weight", "batch")


def _method(module: nn.Module, name: str, *parameters: str) -> Callable[..., Any] | None:
    """The method of a name that takes as many arguments; not one that steps call themselves, unless its parameters have
    the names that ours have."""
    found = getattr(module, name, None)
    if not callable(found) or isinstance(found, nn.Module):
        return None
    try:
        signature = inspect.signature(found)
        signature.bind(*parameters)
    except (TypeError, ValueError):
        return None
    is_called = any(name in words_of(code) for code in codes_of(module, "training_step"))
    return found if not is_called or list(signature.parameters)[: len(parameters)] == list(parameters) else None
