"""Metrics that are given losses, or other averages, under a pipeline: a batch counts once, by its own average."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, MinMetric, RunningMean, SumMetric

from tests.distributed.training import PLAIN, Layout, make_trainer, run_program

KINDS = {"mean": MeanMetric, "sum": SumMetric, "max": MaxMetric, "min": MinMetric}


class Masked(LightningModule):
    """Whose targets are hidden in unequal numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
        for kind in ("mean", "sum", "max", "min"):
            setattr(self, kind, KINDS[kind]().set_dtype(torch.float64))
        self.called, self.rows = (MeanMetric().set_dtype(torch.float64) for _ in range(2))
        self.right = SumMetric().set_dtype(torch.float64)

    def forward(self, x: Tensor) -> Any:
        x = self.table(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.called(loss)
        self.log("called", self.called, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        loss = self.loss(batch)
        for kind in KINDS:
            getattr(self, kind).update(loss)
            self.log(kind, getattr(self, kind))
        scores = self(batch[0])
        self.rows.update(scores.mean((1, 2)))
        self.right.update((scores.argmax(-1) == batch[1]).sum().double())
        self.log("rows", self.rows)
        self.log("right", self.right)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]).transpose(1, 2), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(layout: Layout) -> dict[str, float]:
    torch.manual_seed(0)
    module, (x, y) = Masked(), torch.randint(20, (2, 10, 6))
    for i in range(10):
        y[i, 5 - i % 4 - i % 2 :] = -100
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    trainer = make_trainer(layout, strategy={"plan": "auto"}, max_epochs=2)
    trainer.fit(module, loader, loader)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("microbatches", [2, 3])
def test_a_batch_counts_once(microbatches: int) -> None:
    """The last batch has two rows, and so other microbatches. Metrics round what they are given to float32."""
    (expected,) = run_program(PLAIN, run)
    assert {*KINDS, "rows", "right", "called_epoch"} <= expected.keys()
    for found in run_program(Layout(pp=2, microbatches=microbatches), run):
        assert found == pytest.approx(expected, rel=1e-6)


class History:
    def __init__(self) -> None:
        self.kept = list[Tensor]()


class Listed(Masked):
    """Args:
    rows: what it appends has a row for each sample; else it is a loss.
    on_object: the list is that of an object.
    """

    def __init__(self, rows: bool, on_object: bool) -> None:
        super().__init__()
        self.kept_rows, self.history, self.kept = rows, History(), list[Tensor]()
        self.on_object = on_object

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        loss = self.loss(batch)
        kept = self.history.kept if self.on_object else self.kept
        kept.append(batch[0].double().mean(1) if self.kept_rows else loss)
        self.log("loss", loss)


def said(layout: Layout, rows: bool, on_object: bool = False) -> list[str]:
    x, y = torch.randint(20, (2, 8, 6))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(layout, strategy={"plan": "auto"})
        trainer.validate(Listed(rows, on_object), DataLoader(TensorDataset(x, y), batch_size=4), verbose=False)
    return [str(x.message) for x in caught if "appends a number" in str(x.message)]


def test_losses_in_a_list_are_those_of_microbatches_which_is_said() -> None:
    layout = Layout(pp=2, microbatches=2)
    for on_object, name in ((False, "kept"), (True, "history.kept")):
        last, _ = run_program(layout, said, False, on_object)
        assert any(f"the list `{name}`" in text and "here 2 times a batch" in text for text in last)
    assert run_program(layout, said, True) == [[], []], "of rows there are as many as on one device"


class Returned(Masked):
    def validation_step(self, batch: list[Tensor], index: int) -> dict[str, Any]:
        scores, marked = self(batch[0]), batch[1] != -100
        entropies = F.cross_entropy(scores.transpose(1, 2), batch[1], reduction="none")
        right = (scores.argmax(-1) == batch[1])[marked].double()
        return {
            "mean": (entropies * marked).sum() / marked.sum().clamp(min=1),
            "all": F.cross_entropy(scores.transpose(1, 2), batch[1], reduction="sum"),
            "right": right.mean().item(),
            "of samples": entropies.mean(),
            "both": [right.mean()],
        }


class Sees(Callback):
    def __init__(self) -> None:
        self.seen: list[list[float]] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.seen.append([float(x) for name, x in outputs.items() if name != "both"])


def returned(layout: Layout) -> list[list[float]]:
    torch.manual_seed(0)
    module, sees, (x, y) = Returned(), Sees(), torch.randint(20, (2, 10, 6))
    for i in range(10):
        y[i, max(4 - 2 * (i % 4), 0) :] = -100  # of four rows two have none
    trainer = make_trainer(layout, strategy={"plan": "auto"}, callbacks=[sees])
    trainer.validate(module, DataLoader(TensorDataset(x, y), batch_size=4), verbose=False)
    return sees.seen


def test_returned_numbers_are_the_batchs() -> None:
    (expected,) = run_program(PLAIN, returned)
    for found in run_program(Layout(pp=2, microbatches=3), returned):
        for batch, wanted in zip(found, expected, strict=True):
            assert batch == pytest.approx(wanted, rel=1e-9, nan_ok=True)


class Windowed(Masked):
    def __init__(self) -> None:
        super().__init__()
        self.recent = RunningMean(window=2)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.loss(batch)
        self.recent.update(loss.detach())
        return loss


def _windowed(layout: Layout) -> list[str]:
    torch.manual_seed(1)
    data = TensorDataset(*torch.randint(0, 20, (2, 8, 6), generator=torch.Generator().manual_seed(2)))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        make_trainer(layout, strategy={"plan": None}).fit(Windowed(), DataLoader(data, batch_size=4))
    return [str(x.message) for x in said if "window of updates" in str(x.message)]


def test_windows_of_updates_are_told_what_they_count() -> None:
    found = run_program(Layout(pp=2, microbatches=2), _windowed)
    assert len(found[0]) == 1 and "`recent`" in found[0][0] and "(2 of a batch)" in found[0][0]
    assert run_program(Layout(pp=2, microbatches=1), _windowed) == [[], []]
