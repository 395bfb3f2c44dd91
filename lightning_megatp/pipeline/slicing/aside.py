"""Units run aside of what watches a step, and alike in dry runs and in steps."""

from __future__ import annotations

import torch

from lightning_megatp.shim.torch import WithoutMode


class WithoutFastPath:
    """A context in which torch's Transformer layers take no fused kernel under autocast on a CPU.

    They ask CUDA's autocast alone. On a CPU the kernel's output would have another dtype than a layer's own.
    """

    __slots__ = ("_fast",)

    def __enter__(self) -> None:
        self._fast = torch.is_autocast_enabled("cpu") and torch.backends.mha.get_fastpath_enabled()
        if self._fast:
            torch.backends.mha.set_fastpath_enabled(False)

    def __exit__(self, *raised: object) -> None:
        if self._fast:
            torch.backends.mha.set_fastpath_enabled(True)


class Aside(WithoutMode):
    """A context without a mode, and without that kernel."""

    __slots__ = ("_path",)

    def __enter__(self) -> None:
        super().__enter__()
        self._path = WithoutFastPath()
        self._path.__enter__()

    def __exit__(self, *raised: object) -> None:
        self._path.__exit__(*raised)
        super().__exit__(*raised)
