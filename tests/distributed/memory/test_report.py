"""What the memory report predicts is what ranks hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatp.planner.report import RankMemory
from tests.distributed.training import Layout, make_trainer, run_program, train_loader
from tests.parity.models import GPT, GPTConfig


def _train(layout: Layout, strategy: dict[str, Any], options: dict[str, Any]) -> tuple[RankMemory, str]:
    torch.manual_seed(0)
    plain = 0.1 if "recompute" in strategy else 0.0  # a CPU's attention then keeps its scores
    config = GPTConfig(tied=False, layers=4, hidden=32, feed_forward=96, dropout=0.1, attention_dropout=plain)
    module = GPT(config)
    trainer = make_trainer(layout, "untied", {"memory": True, **strategy}, limit_train_batches=2, **options)
    trainer.fit(module, train_loader(layout, 2))
    report = trainer.strategy.memory_report()
    assert report.table().row_count == 2 * layout.pp, "predicted and measured"
    return report.ranks[trainer.global_rank], report.problem


LAYOUTS = [
    pytest.param(Layout(tp=2), {}, {}, id="tp2"),
    pytest.param(Layout(tp=2, sequence=False), {}, {}, id="tp2-replicated"),
    pytest.param(Layout(dp=2), {"zero": 1}, {}, id="zero1"),
    pytest.param(Layout(dp=2), {"zero": 3}, {}, id="zero3"),
    pytest.param(Layout(pp=2), {}, {}, id="pp2"),
    pytest.param(Layout(tp=2, sequence=False), {"recompute": "full"}, {}, id="tp2-full"),
    pytest.param(Layout(pp=2), {"recompute": "selective"}, {}, id="pp2-selective"),
    pytest.param(Layout(pp=2), {"recompute": {"blocks": 1}}, {}, id="pp2-blocks", marks=pytest.mark.extended),
    pytest.param(Layout(tp=2), {"recompute": "full"}, {}, id="tp2-sequence-full", marks=pytest.mark.extended),
    pytest.param(Layout(tp=2), {"recompute": "selective"}, {}, id="tp2-selective", marks=pytest.mark.extended),
    pytest.param(Layout(dp=2), {"zero": 3, "recompute": "full"}, {}, id="zero3-full", marks=pytest.mark.extended),
    pytest.param(Layout(dp=2), {}, {}, id="dp2", marks=pytest.mark.extended),
    pytest.param(Layout(pp=2, schedule="gpipe"), {}, {}, id="gpipe", marks=pytest.mark.extended),
    pytest.param(Layout(pp=2, schedule="interleaved"), {}, {}, id="interleaved", marks=pytest.mark.extended),
    pytest.param(Layout(pp=2, schedule="zb_h1"), {}, {}, id="zb_h1", marks=pytest.mark.extended),
    pytest.param(Layout(pp=2, schedule="zb_v"), {}, {}, id="zb_v", marks=pytest.mark.extended),
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
        summed = 0.05 if layout.tp > 1 and "zero" in strategy else 0  # over tp, in memory beside FSDP2's
        assert predicted.gradients == pytest.approx(measured.gradients, rel=summed, abs=0)
        assert predicted.optimizer == measured.optimizer
        assert measured.gathered == 0, "between steps nothing is gathered"
        assert measured.activations and predicted.activations
        if layout.schedule == "zb_h1":  # keeps the inputs of weight gradients beside what autograd saves
            assert predicted.activations >= measured.activations
            continue
        assert predicted.activations == pytest.approx(measured.activations, rel=0.02)


class Literal(nn.Module):
    """A block with the number of heads in its code."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x_BLD: Tensor) -> Tensor:
        q, k, v = self.qkv(x_BLD).view(*x_BLD.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        y_BHLK = F.scaled_dot_product_attention(q, k, v)
        return x_BLD + self.out(y_BHLK.transpose(1, 2).reshape(*x_BLD.shape))


def _train_literal(layout: Layout) -> RankMemory:
    torch.manual_seed(0)
    module = GPT(GPTConfig(tied=False))
    module.blocks = nn.ModuleList(Literal() for _ in range(2))
    trainer = make_trainer(layout, strategy={"memory": True, "plan": "auto"}, limit_train_batches=2)
    trainer.fit(module, train_loader(layout, 2))
    assert trainer.strategy.parallel.plan.layers["blocks.0.qkv"].global_sizes
    own: RankMemory = trainer.strategy.memory_report().ranks[trainer.global_rank]
    return own


def test_regions_whose_code_needs_the_sizes_of_the_whole() -> None:
    for own in run_program(Layout(tp=2), _train_literal):
        assert own.predicted is not None
        # torch 2.11 foresees float32 for the log-sum-exp of float64 attention on a CPU, which is float64
        assert own.predicted.activations == pytest.approx(own.measured.activations, rel=0.02)


def _train_without(layout: Layout) -> tuple[RankMemory, str]:
    trainer = make_trainer(layout, limit_train_batches=1)
    trainer.fit(GPT(GPTConfig(tied=False)), train_loader(layout, 1))
    report = trainer.strategy.memory_report()
    return report.ranks[trainer.global_rank], report.problem


def test_without_memory_parameters_gradients_and_optimizer_are_measured() -> None:
    for own, problem in run_program(Layout(tp=2), _train_without):
        assert own.predicted is None and own.measured.activations is None and "memory=True" in problem
        assert own.measured.gradients == own.measured.parameters > 0 and own.measured.optimizer
