"""Samples' state that a step keeps on the module for the next one: hidden states, memories.

On one device it meets the next batch. Here it meets the next microbatch, of other samples, and shapes agree.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megatp.pipeline.slicing.place import Place
from lightning_megatp.pipeline.slicing.plan import tensors_in
from lightning_megatp.pipeline.slicing.snapshot import Snapshot
from lightning_megatp.shim.torch import is_fake
from lightning_megatp.tensor.functions import operation_name


class CarriedState(TorchFunctionMode):
    """Warns of operations that take what another microbatch has left on the module, if it has a row per sample and is
    replaced each time: a table that is made once, or a codebook, is nobody's state.

    Looks at every operation, inside of units too, and at the module before and after: it is for a first batch.

    Args:
        module: whose step it is.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module, self._place = module, Place(module)
        self._left: dict[int, tuple[Tensor, int]] = {}
        """id -> what is on the module, and of which microbatch."""
        self._taken: dict[int, str] = {}
        self._microbatch = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tensors_in(args, kwargs or {}) if tensors_in(out) else ():
            _, microbatch = self._left.get(id(x), (None, self._microbatch))
            if microbatch != self._microbatch:
                self._taken.setdefault(id(x), f"`{operation_name(func)}` ({self._place.here()})")
        return out

    @contextlib.contextmanager
    def watching(self, microbatch: int, rows: int) -> Iterator[None]:
        """Around a stage's run of the step on a microbatch of so many rows."""
        before = Snapshot(self._module)
        self._microbatch, self._taken = microbatch, {}
        with self:
            yield
        after = Snapshot(self._module).tensors
        for by in [by for taken, by in self._taken.items() if taken not in after][:1]:
            warnings.warn(
                f"MegaTPStrategy: {by} takes a tensor that the step keeps on the module for the next one, and which has"
                " a row for each sample. With pp > 1 that next one is of the same batch, and other samples: losses are"
                " not those of one device. Use microbatches=1, or let the batch bring what belongs to its samples.",
                stacklevel=2,
            )
        self._left |= {
            key: (x, microbatch)
            for key, x in after.items()
            if key not in before.tensors and not is_fake(x) and x.dim() > 1 and rows in x.shape[:2]
        }
