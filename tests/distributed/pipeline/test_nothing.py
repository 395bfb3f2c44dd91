"""Batches in which a loss or a log has nothing to average, and divides by something all the same, of steps that read
values after their network; with what such modules do in hooks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric
from torchmetrics.classification import BinaryAUROC

from tests.distributed.training import PLAIN, TP2_PP2, Layout, Losses, make_trainer, run_program

PP2 = Layout(pp=2, microbatches=2)
DIVIDED = {
    "eps": lambda x, m: (x * m).sum() / (m.sum() + 1e-8),
    "clamp": lambda x, m: (x * m).sum() / m.sum().clamp(min=1),
    "maximum": lambda x, m: (x * m).sum() / torch.maximum(m.sum(), torch.ones_like(m.sum())),
    "read": lambda x, m: (x * m).sum() / max(float(m.sum()), 1.0),
}
ROWS = 4


def _net() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)), nn.Linear(6, 3))


class Marked(LightningModule):
    """Its third batch has no marks; it ends its steps by what it reads; it keeps an average of its network."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.how, self.best, self.auc = _net(), how, MaxMetric(), BinaryAUROC()
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        x, t, m = batch
        logits = self.net(x)
        each = F.cross_entropy(logits, t, reduction="none")
        loss = DIVIDED[self.how](each, m)
        hits = (logits.argmax(-1) == t) * m
        self.log("precision", hits.sum() / (m.sum() + 1e-8))
        if m.any():
            self.log("marked", each[m.bool()].mean())
        return None if torch.isnan(loss) else loss

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for a, p in zip(self.average.parameters(), self.net.parameters(), strict=True):
                a.lerp_(p, 0.1)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, t, _ = batch
        self.auc.update(self.average(x)[:, 0].sigmoid(), t.clamp(max=1))
        self.log("auc", self.auc)

    def on_validation_epoch_end(self) -> None:
        self.best(self.auc.compute() * (0.5 if self.current_epoch else 1.0))
        self.log("best", self.best.compute())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), 0.1)


class Logged(Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def _fit(layout: Layout, how: str) -> tuple[list[float], list[dict[str, float]]]:
    generator = torch.Generator().manual_seed(1)
    x, t = torch.randn(20, 6, generator=generator).double(), torch.randint(0, 3, (20,), generator=generator)
    m = torch.ones(20).double()
    m[::3] = 0
    m[2 * ROWS : 3 * ROWS] = 0
    losses, logged = Losses(), Logged()
    trainer = make_trainer(layout, strategy={"plan": "auto"}, callbacks=[losses, logged], max_epochs=2)
    data = TensorDataset(x, t, m)
    trainer.fit(Marked(how), DataLoader(data, ROWS), DataLoader(data, ROWS))
    return losses.seen, [*logged.seen, {k: float(v) for k, v in trainer.callback_metrics.items()}]


@pytest.mark.parametrize("layout", [PP2, TP2_PP2], ids=["pp2", "tp2-pp2"])
@pytest.mark.parametrize("how", DIVIDED)
def test_batches_in_which_nothing_is_marked_are_those_of_one_device(layout: Layout, how: str) -> None:
    ((losses, logged),) = run_program(PLAIN, _fit, how)
    assert losses[2] == 0.0
    for found in run_program(layout, _fit, how):
        # each microbatch adds an epsilon of 1e-8 to its own count
        assert found[0] == pytest.approx(losses, rel=1e-7 if how == "eps" else 1e-9)
        for ours, theirs in zip(found[1], logged, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-7)
