"""Half precision with a loss scaler: all ranks skip a step together. float16 on CPU stands in for a GPU's."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.plugins import MixedPrecision

from tests import devices
from tests.distributed.training import DP2, TP2, TP2_DP2, Layout, make_trainer, run_program, train_loader
from tests.parity.variants import variant

SCALE = 2.0**8


class Poison(Callback):
    """Fills one gradient of one rank with inf, in one step."""

    def __init__(self, rank: int, step: int, parameter: str) -> None:
        self.rank, self.step, self.parameter = rank, step, parameter
        self.scales: list[float] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_rank == self.rank and len(self.scales) == self.step:
            grad = pl_module.get_parameter(self.parameter).grad
            grad.fill_(torch.inf)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())
        self.weights.append({name: p.detach().clone() for name, p in pl_module.named_parameters()})


def _fit(
    layout: Layout, poison: tuple[int, int, str], options: dict[str, Any], fused: bool = False
) -> tuple[list[float], list[bool], list[str]]:
    """Scales and whether the parameters moved, per batch; and what is not finite at the end. Of a fused optimizer in
    the Trainer's second fit, which finds the scaler of the first."""
    callback = Poison(*poison)
    kind = "cpu" if devices.chosen() == "cpu" else "cuda"
    scaler = torch.amp.GradScaler(kind, init_scale=SCALE, growth_interval=1000)
    plugins = [MixedPrecision("16-mixed", kind, scaler)]
    trainer = make_trainer(layout, callbacks=[callback], precision=None, plugins=plugins, **options)
    module = variant("untied").build()
    if fused:
        module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), 1e-2, fused=True)
        callback.step += 4
        trainer.fit(module, train_loader(layout, 4))
        trainer.fit_loop.max_epochs = 2
    trainer.fit(module, train_loader(layout, 4))
    scales, weights = callback.scales[-4:], callback.weights[-4:]
    moved = [
        any(not torch.equal(after[name], before[name]) for name in after)
        for before, after in itertools.pairwise(weights)
    ]
    bad = [name for name, p in weights[-1].items() if not p.isfinite().all()]
    return scales, moved, bad


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("parameter", ["blocks.0.mlp.up.weight", "norm.weight"], ids=["shard", "replica"])
@pytest.mark.parametrize("layout", [TP2, DP2, TP2_DP2], ids=str)
def test_an_inf_on_one_rank_makes_all_ranks_skip(layout: Layout, parameter: str, options: dict[str, Any]) -> None:
    last = layout.tp * layout.dp - 1
    for scales, moved, bad in run_program(layout, _fit, (last, 2, parameter), options):
        assert scales == [SCALE, SCALE, SCALE / 2, SCALE / 2], "every rank's scale halves after the third batch"
        assert moved == [True, False, True], "the third batch's step is skipped, on every rank"
        assert not bad


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.1}], ids=["unclipped", "clipped"])
def test_fused_optimizers_skip_together(options: dict[str, Any]) -> None:
    """Their kernels would unscale and look for inf, each rank for itself."""
    for scales, moved, bad in run_program(TP2, _fit, (1, 2, "blocks.0.mlp.up.weight"), options, True):
        assert scales == [SCALE, SCALE, SCALE / 2, SCALE / 2] and moved == [True, False, True] and not bad


def test_without_an_inf_every_step_counts() -> None:
    for scales, moved, bad in run_program(TP2, _fit, (-1, 0, ""), {}):
        assert scales == [SCALE] * 4 and moved == [True] * 3 and not bad
