"""What a rule is asked: an operation with its arguments, tensors as whole shapes and their owners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_megatp.tensor.features.decision import Decision
from lightning_megatp.tensor.features.layout import FeatureLayout
from lightning_megatp.tensor.functions import argument


@dataclass(frozen=True)
class Operand:
    """A tensor among the arguments of an operation, as a rule sees it."""

    position: int
    """Among the tensors of the call."""
    shape: torch.Size
    """The shape of the whole tensor."""
    dtype: torch.dtype
    layout: FeatureLayout | None
    """None for a whole tensor."""

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def sharded(self) -> bool:
        """Whether ranks own different features of it."""
        return self.layout is not None and not self.layout.replicated


@dataclass
class Call:
    """An operation and its arguments, with an Operand for each tensor."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    operands: list[Operand]
    layout: FeatureLayout
    """The layout of the first sharded operand."""
    in_place: bool

    @property
    def rank(self) -> int:
        return self.layout.context.rank

    def argument(self, position: int, *names: str, default: Any = None) -> Any:
        """See `functions.argument`."""
        return argument(self.args, self.kwargs, position, *names, default=default)


Rule = Callable[[Call], Decision | None]
