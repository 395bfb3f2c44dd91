"""Exports of a module (TorchScript, ONNX, TensorRT), of which a rank holds a part."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from lightning_megatp.detour import Detour

_EXPORTS = ("to_onnx", "to_tensorrt", "to_torchscript")
"""Methods by which a LightningModule is exported; not every version has all."""


def refuse_exports(module: nn.Module, tp: int, pp: int, zero: int) -> None:
    """Let the module's exports say why they can't be, also after a fit. A whole module keeps them."""
    if tp == pp == 1 and zero == 0:
        return
    why = f"with tp={tp}, pp={pp}, zero={zero} each rank holds a part of it"
    for name in _EXPORTS:
        if hasattr(module, name) and name not in vars(module):
            Detour(module, name, functools.partial(_refuse, name, why))


def _refuse(name: str, why: str, export: Callable[[], Any]) -> None:
    raise RuntimeError(
        f"MegaTPStrategy: `{name}` exports a whole model, and {why}. Save a checkpoint by"
        " `trainer.save_checkpoint(path)` on all ranks, and export what `load_from_checkpoint(path)` makes of it in a"
        " process of its own."
    )
