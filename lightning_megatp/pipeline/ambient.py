"""What is set around code, and goes for all operations of a thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch


class Ambient(NamedTuple):
    """Whether gradients are recorded, and autocast's settings, which a step may change between its calls."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> Ambient:
        kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        autocast = ((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)
        return cls(torch.is_grad_enabled(), tuple(autocast))

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Take them over, but for inference mode, whose tensors can't tell in-place changes."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype in self.autocast:
                if (enabled, dtype) != (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)):
                    stack.enter_context(torch.autocast(kind, dtype, enabled))
            yield
