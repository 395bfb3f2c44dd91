"""Tensors kept for backward as autograd keeps them, outside of any operation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_megatp.tensor.features.shard import FeatureShard
from lightning_megatp.tensor.functions import OwnFunction
from lightning_megatp.tensor.sequence import SequenceShard

T = TypeVar("T")


def unwrapped(x: T) -> tuple[T | Tensor, Callable[[Tensor], Tensor] | None]:
    """A tensor as autograd can keep it, and what makes the same of it again: saved-tensor hooks lose subclasses."""
    if isinstance(x, SequenceShard):
        return x.plain, functools.partial(SequenceShard.wrap, layout=x.tokens)
    if isinstance(x, FeatureShard):
        return x.plain, functools.partial(FeatureShard.wrap, layout=x.features)
    return x, None


class Saved:
    """Keeps plain tensors until backward: through the saved-tensor hooks that are active now (offloading, activation
    checkpointing), and with autograd's check that nobody changes them in place. Their graph is not kept.

    Args:
        tensors: at least one.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._holder: Tensor | None = None
        """Whose node keeps them."""
        if tensors:
            with torch.enable_grad():
                anchor = torch.empty(0, requires_grad=True)
                self._holder = _Save.apply(anchor, *(x.detach() for x in tensors))

    def tensors(self) -> Sequence[Tensor]:
        """What was kept."""
        if self._holder is None:
            return ()
        node: Any = self._holder.grad_fn
        found: Sequence[Tensor] = node.saved_tensors
        return found


class _Save(OwnFunction):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        raise RuntimeError("MegaTPStrategy: what is only kept has no gradient.")
