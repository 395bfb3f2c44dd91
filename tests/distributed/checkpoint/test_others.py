"""Checkpoints of real DDP and FSDP runs go on here, and ours go on there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, Strategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from tests.distributed.checkpoint.test_trainer import Losses
from tests.distributed.training import (
    DP2,
    PP2,
    QUIET,
    TP2,
    WEIGHTS_ONLY,
    Layout,
    make_trainer,
    run_program,
    train_loader,
)
from tests.parity.variants import variant

BATCHES = 4
ZERO3 = Layout(dp=2, zero=3)


class FSDPOnCPU(FSDPStrategy):
    """Lightning refuses FSDPStrategy on a CPU by its exact type, and torch wants to be told the device. All else,
    saving included, is what Lightning does on GPUs. With one rank: gathering an optimizer's state from several ends in
    a segmentation fault on CPUs (torch 2.13). What it saves has the same form."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


class Saves(Callback):
    """After the first epoch."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(self.path)


def _theirs(layout: Layout, kind: str, precision: str, save: str, load: str | None) -> list[float]:
    strategies = {"ddp": DDPStrategy, "fsdp": lambda: FSDPOnCPU(state_dict_type="full")}
    strategy: Strategy = strategies[kind]()
    losses = Losses()
    options: dict[str, Any] = {"accelerator": "cpu", "devices": layout.ranks, "precision": precision, **QUIET}
    trainer = Trainer(strategy=strategy, max_epochs=2, callbacks=[losses, Saves(save)], **options)
    trainer.fit(_module(precision), train_loader(layout, BATCHES), ckpt_path=load, **WEIGHTS_ONLY)
    return losses.values


def _ours(layout: Layout, precision: str, save: str, load: str | None) -> list[float]:
    losses = Losses()
    trainer = make_trainer(layout, max_epochs=2, callbacks=[losses, Saves(save)], precision=precision)
    trainer.fit(_module(precision), train_loader(layout, BATCHES), ckpt_path=load, **WEIGHTS_ONLY)
    return losses.values


def _module(precision: str) -> LightningModule:
    """Lightning restores a float32 module before it makes it float64: only a float64 one restores every bit."""
    module = variant("untied").build()
    return module.double() if precision == "64-true" else module


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("ddp", TP2),
        *(
            pytest.param(kind, layout, marks=pytest.mark.extended)
            for kind, layout in [("ddp", PP2), ("ddp", ZERO3), ("fsdp", TP2), ("fsdp", PP2), ("fsdp", ZERO3)]
        ),
    ],
    ids=str,
)
def test_runs_of_other_strategies_go_on(kind: str, layout: Layout, tmp_path: Path) -> None:
    precision, within = ("64-true", 1e-9) if kind == "ddp" else ("32-true", 2e-5)  # Lightning's FSDP has no float64
    there, here, unused = (str(tmp_path / f"{name}.ckpt") for name in ("theirs", "ours", "unused"))
    other = DP2 if kind == "ddp" else Layout()
    theirs = run_program(other, _theirs, kind, precision, there, None)[0]
    ours = run_program(layout, _ours, precision, here, None)[0]
    assert ours == pytest.approx(theirs, abs=within) and len(ours) == 2 * BATCHES
    for losses in run_program(layout, _ours, precision, unused, there):
        assert losses == pytest.approx(theirs[BATCHES:], abs=within), f"{kind} -> {layout}"
    for losses in run_program(other, _theirs, kind, precision, unused, here):
        assert losses == pytest.approx(theirs[BATCHES:], abs=within), f"{layout} -> {kind}"
