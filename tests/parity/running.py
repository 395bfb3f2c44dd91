"""One training run and what parity compares of it. The reference process uses it: nothing here imports this package."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from tests.devices import placed
from tests.parity.variants import GLOBAL_BATCH, loader, variant

OPTIMIZER_STEPS = 20
CLIPPING: dict[str, dict[str, Any]] = {
    "none": {},
    "norm": {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "norm"},
    "value": {"gradient_clip_val": 0.003, "gradient_clip_algorithm": "value"},
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """What a reference run depends on."""

    model: str
    precision: str = "64-true"
    accumulate: int = 1
    clip: str = "none"
    length: int = 4
    rows: int = GLOBAL_BATCH


@dataclasses.dataclass
class Run:
    """What one process saw of one fit."""

    losses: list[float] = dataclasses.field(default_factory=list)
    gradients: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Of the first optimizer step, whole, before clipping."""
    parameters: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """The whole state after the last step; on global rank 0 only."""
    local: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """This process's own parameters after the last step."""
    steps: int = 0
    warnings: list[str] = dataclasses.field(default_factory=list)


def gradients_of(trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
    """The gradients of a one-device run."""
    return {name: p.grad.detach().clone() for name, p in module.named_parameters() if p.grad is not None}


class Recorder(Callback):
    """Fills a Run while the trainer fits."""

    def __init__(self, gradients: Callable[[Trainer, LightningModule], dict[str, Tensor]]) -> None:
        self.run = Run()
        self.gradients = gradients

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        if not self.run.gradients:
            self.run.gradients = {name: g.detach().clone() for name, g in self.gradients(trainer, pl_module).items()}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.run.losses.append(float(outputs["loss"]))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        self.run.parameters = {name: value.detach().clone() for name, value in state.items()}
        own = {name: p for name, p in pl_module.named_parameters() if not hasattr(p, "to_local")}  # no rows of some
        self.run.local = {name: p.detach().clone() for name, p in own.items()}
        self.run.steps = trainer.global_step


def fit(
    setting: Setting,
    strategy: Any = "auto",
    devices: int = 1,
    dp: int = 1,
    gradients: Callable[[Trainer, LightningModule], dict[str, Tensor]] = gradients_of,
    callbacks: tuple[Callback, ...] = (),
    seed: int = 7,
) -> Run:
    """Train the setting's model for OPTIMIZER_STEPS and return what this process saw."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    chosen = variant(setting.model)
    module = chosen.build(seed)
    recorder = Recorder(gradients)
    manual = not module.automatic_optimization
    trainer = Trainer(
        **placed(devices),
        strategy=strategy,
        precision=setting.precision,  # type: ignore[arg-type]
        max_epochs=1,
        accumulate_grad_batches=setting.accumulate,
        callbacks=[*callbacks, recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **CLIPPING[setting.clip],
    )
    batches = OPTIMIZER_STEPS if manual else OPTIMIZER_STEPS * setting.accumulate
    data = loader(chosen.vocab, setting.length, batches * setting.rows, dp, rows=setting.rows)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data)
    recorder.run.warnings = [str(warning.message) for warning in caught]
    return recorder.run


def fit_reference(setting: Setting) -> Run:
    """The truth: Lightning on one device."""
    assert not torch.distributed.is_initialized()
    return fit(setting)
