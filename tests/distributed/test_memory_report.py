"""What the memory report predicts is what ranks hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_megatp.planner.report import RankMemory
from tests.distributed.training import Layout, make_trainer, run_program, train_loader
from tests.parity.models import GPT, GPTConfig


def _train(layout: Layout, strategy: dict[str, Any], options: dict[str, Any]) -> tuple[RankMemory, str]:
    torch.manual_seed(0)
    module = GPT(GPTConfig(tied=False, layers=4, hidden=32, feed_forward=96, dropout=0.1))
    trainer = make_trainer(layout, "untied", {"memory": True, **strategy}, limit_train_batches=2, **options)
    trainer.fit(module, train_loader(layout, 2))
    report = trainer.strategy.memory_report()
    assert report.table().row_count == layout.pp
    return report.of_rank(trainer.global_rank), report.problem


LAYOUTS = [
    pytest.param(Layout(tp=2), {}, {}, id="tp2"),
    pytest.param(Layout(tp=2, sequence=False), {}, {}, id="tp2-replicated"),
    pytest.param(Layout(dp=2), {"zero": 1}, {}, id="zero1"),
    pytest.param(Layout(dp=2), {"zero": 3}, {}, id="zero3"),
    pytest.param(Layout(pp=2), {}, {}, id="pp2"),
    pytest.param(Layout(dp=2), {}, {}, id="dp2", marks=pytest.mark.extended),
    pytest.param(Layout(pp=2, schedule="gpipe"), {}, {}, id="gpipe", marks=pytest.mark.extended),
    pytest.param(Layout(pp=2, schedule="interleaved"), {}, {}, id="interleaved", marks=pytest.mark.extended),
    pytest.param(Layout(tp=2, pp=2), {}, {}, id="tp2-pp2", marks=pytest.mark.extended),
    pytest.param(Layout(tp=2, dp=2), {"zero": 2}, {}, id="tp2-zero2", marks=pytest.mark.extended),
    pytest.param(Layout(dp=2, pp=2, microbatches=2), {"zero": 3}, {}, id="pp2-zero3", marks=pytest.mark.extended),
    pytest.param(Layout(tp=2), {}, {"precision": "bf16-mixed"}, id="tp2-mixed", marks=pytest.mark.extended),
]


@pytest.mark.parametrize(("layout", "strategy", "options"), LAYOUTS)
def test_predicted_is_measured(layout: Layout, strategy: dict[str, Any], options: dict[str, Any]) -> None:
    for own, problem in run_program(layout, _train, strategy, options):
        predicted, measured = own.predicted, own.measured
        assert predicted is not None and not problem, problem
        assert predicted.parameters == measured.parameters
        summed = 0.05 if layout.tp > 1 and strategy else 0  # over tp, in memory beside FSDP2's
        assert predicted.gradients == pytest.approx(measured.gradients, rel=summed, abs=0)
        assert predicted.optimizer == measured.optimizer
        assert measured.gathered == 0, "between steps nothing is gathered"
        assert measured.activations and predicted.activations == pytest.approx(measured.activations, rel=0.02)
