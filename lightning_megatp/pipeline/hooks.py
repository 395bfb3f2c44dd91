"""Which of the user's hooks may read what steps left behind."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

_KINDS = ("train", "validation", "test", "predict")


@dataclass(frozen=True)
class Hook:
    """A hook that runs after steps."""

    name: str
    gets_outputs: bool
    """What the step returned is among its arguments."""


def hooks_after_steps(module: nn.Module) -> Iterator[Hook]:
    """Those that the user defined: what Lightning's own class has does nothing."""
    for kind in _KINDS:
        for hook in (Hook(f"on_{kind}_batch_end", True), Hook(f"on_{kind}_epoch_end", False)):
            function = getattr(module, hook.name, None)
            if function is not None and getattr(function, "__module__", None) not in _EMPTY:
                yield hook


_EMPTY = ("lightning.pytorch.core.hooks", "pytorch_lightning.core.hooks")
