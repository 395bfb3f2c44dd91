"""Adapters in blocks that are planned automatically: the numbers of one device, and little that is sent."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.tensor.test_collective_counts import Counted
from tests.distributed.training import PLAIN, TP2, TP2_PP2, Layout, eval_loader, make_trainer, run_program, train_loader
from tests.parity.models import GPT, GPTConfig, adapted
from tests.parity.variants import GLOBAL_BATCH

LENGTH = 8
CONFIG = GPTConfig(tied=False, attention="separate", gate="separate")


class Adapted(GPT):
    """Keeps its losses, and the gradients of its first step."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        adapted(self.blocks)
        self.losses: list[float] = []
        self.first: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        ours = getattr(self.trainer.strategy, "full_gradients", None)
        own = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
        self.first = self.first or {name: grad.clone() for name, grad in (ours() if ours else own).items()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def _fit(layout: Layout) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Adapted()
    trainer = make_trainer(layout, strategy={"plan": "auto"})
    trainer.fit(module, train_loader(layout, 3), eval_loader(layout, 2))
    state = trainer.strategy.lightning_module_state_dict()
    losses = [*module.losses, float(trainer.callback_metrics["val_loss"])]
    return {"losses": losses, "gradients": module.first, "state": state}


@pytest.mark.parametrize("layout", [TP2, TP2_PP2, Layout(tp=4)], ids=str)
def test_adapters_learn_what_they_do_on_one_device(layout: Layout) -> None:
    expected = run_program(PLAIN, _fit)[0]
    found = run_program(layout, _fit)
    assert all(rank["losses"] == pytest.approx(expected["losses"], rel=1e-9) for rank in found)
    for what in ("gradients", "state"):
        held = {name: x for rank in found for name, x in rank[what].items()}
        assert held.keys() == expected[what].keys()
        torch.testing.assert_close(held, expected[what], rtol=1e-8, atol=1e-10)


def _count(layout: Layout, layers: int, dropout: float) -> list[tuple[Counter[str], Counter[str]]]:
    torch.manual_seed(0)
    module = Counted(dataclasses.replace(CONFIG, layers=layers))
    adapted(module.blocks, dropout)
    trainer = make_trainer(layout, strategy={"plan": "auto"}, limit_train_batches=2)
    trainer.fit(module, train_loader(layout, 2, length=LENGTH))
    return [(counter.calls, counter.bytes) for counter in module.counters[-1]]


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("sequence", [True, False])
def test_adapters_send_their_few_features_beside_what_the_block_sends(sequence: bool, dropout: float) -> None:
    """Those of q, k, v, gate and up enter the region, those of out and down leave it."""
    layout, hidden = Layout(tp=2, sequence=sequence), GLOBAL_BATCH * LENGTH * CONFIG.hidden * 8
    three, two = (run_program(layout, _count, layers, dropout)[0] for layers in (3, 2))
    few, enter, leave = hidden * 2 // CONFIG.hidden, 5, 2
    for way, ((calls, sent), (fewer_calls, fewer_sent)) in enumerate(zip(three, two, strict=True)):
        calls.subtract(fewer_calls)
        sent.subtract(fewer_sent)
        gathers, reductions = (enter, leave) if way == 0 else (leave, enter)
        if sequence:
            assert +calls == {"all-gather": 2 + gathers, "reduce-scatter": 2 + reductions}
            assert +sent == {"all-gather": 2 * hidden + gathers * few, "reduce-scatter": 2 * hidden + reductions * few}
        else:
            assert +calls == {"all-reduce": 2 + reductions}
            assert +sent == {"all-reduce": 2 * hidden + reductions * few}
