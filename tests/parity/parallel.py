"""A parity case on one rank, with this package's strategy."""

from __future__ import annotations

from typing import Any
from unittest import mock

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from tests.parity.cases import Case
from tests.parity.running import Run, Setting, fit
from tests.parity.variants import variant


def setting_of(case: Case) -> Setting:
    """What the case's one-device run depends on."""
    return Setting(case.model, case.precision, case.accumulate, case.clip, case.length)


def whole_gradients(trainer: Trainer, module: LightningModule) -> dict[str, Tensor]:
    """The gathered gradients under canonical names."""
    gradients: dict[str, Tensor] = trainer.strategy.full_gradients()  # type: ignore[attr-defined]
    return gradients


def make_strategy(case: Case, **options: Any) -> Any:
    from lightning_megatp import MegaTPStrategy

    options = {"plan": variant(case.model).plan, "summary": False, **options}
    return MegaTPStrategy(tp=case.tp, dp=case.dp, sequence_parallel=case.sequence, **options)


def fit_case(rank: int, world_size: int, case: Case, callbacks: tuple[Callback, ...] = ()) -> Run:
    """Train the case on this rank, its few tokens treated as the many of a real model: gathered again in backward."""
    from lightning_megatp.tensor import entry

    strategy = make_strategy(case)
    with mock.patch.object(entry, "KEPT_BYTES", 0):
        return fit(setting_of(case), strategy, world_size, case.dp, whole_gradients, callbacks)


def fit_ddp(rank: int, world_size: int, setting: Setting) -> Run:
    """Lightning's own data parallelism in the same harness: what the harness itself is checked with."""
    return fit(setting, "ddp", world_size, world_size)
