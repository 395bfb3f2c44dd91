"""Mixup in a step mixes samples of a microbatch, which is said; before the step it mixes those of the batch, as on one
device. Some of the samples, which a step takes by number, are some of a microbatch, too."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.training import PLAIN, PP2, TP2_PP2, Layout, Losses, make_trainer, run_program


class Mixup(LightningModule):
    def __init__(self, in_step: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.in_step = in_step
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def mixed(self, batch: list[Tensor]) -> list[Tensor]:
        x, y = batch
        share, order = float(torch.rand(())), torch.randperm(len(x))
        classes = F.one_hot(y, 4).to(x)
        return [share * x + (1 - share) * x[order], share * classes + (1 - share) * classes[order]]

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        return batch if self.in_step else self.mixed(batch)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, classes = self.mixed(batch) if self.in_step else batch
        return F.cross_entropy(self.net(x), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _fit(layout: Layout, in_step: bool) -> tuple[list[float], list[str]]:
    module, losses = Mixup(in_step), Losses()
    generator = torch.Generator().manual_seed(2)
    data = TensorDataset(
        torch.randn(24, 8, dtype=torch.float64, generator=generator), torch.randint(0, 4, (24,), generator=generator)
    )
    torch.manual_seed(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(layout, strategy={"plan": None}, max_epochs=2, callbacks=[losses])
        trainer.fit(module, DataLoader(data, batch_size=8))
    return losses.seen, [str(w.message) for w in caught if "as mixup does" in str(w.message)]


@pytest.mark.parametrize("layout", [PP2, TP2_PP2], ids=str)
def test_mixing_before_the_step_is_that_of_one_device(layout: Layout) -> None:
    ((expected, _),) = run_program(PLAIN, _fit, False)
    for losses, said in run_program(layout, _fit, False):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert not said


@pytest.mark.parametrize("layout", [PP2, Layout(pp=2, microbatches=1)], ids=str)
def test_mixing_in_the_step_is_said(layout: Layout) -> None:
    said = [text for _, texts in run_program(layout, _fit, True) for text in texts]
    if layout.microbatches == 1:
        assert not said
    else:
        assert said
        assert all("by `add` (" in text and "on_after_batch_transfer" in text for text in said)


Cut = Callable[[Tensor], "list[Tensor]"]
SOME: dict[str, Cut] = {
    "halves": lambda x: [*x.chunk(2)],
    "the first and the others": lambda x: [x[:4] * 2, x[4:]],
    "half, by how many there are": lambda x: [x[: len(x) // 2]],
    "parts of eight": lambda x: [*x.split(8)],
    "ranges": lambda x: [x[i : i + 8] for i in range(0, len(x), 8)],
}
ALL: dict[str, Cut] = {
    "neighbours": lambda x: [x[::2], x[1::2]],
    "each": lambda x: [x[i : i + 1] for i in range(len(x))],
    "each, of a split": lambda x: [*x.split(1)],
    "all": lambda x: [x[:], x[: len(x)], x[0:]],
    "features": lambda x: [torch.cat([y, y], 1) for y in x.chunk(2, 1)],
}


class Parts(LightningModule):
    """Learns of parts of a batch, one after the other."""

    def __init__(self, cut: Cut, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cut, self.automatic_optimization = cut, not by_hand
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def losses(self, x: Tensor) -> Iterator[Tensor]:
        with torch.no_grad():
            self.net(x[:2])  # to be shown, not to learn of
        for part in self.cut(x):
            yield self.net(part).square().sum() / max(len(part), 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        (x,) = batch
        if self.automatic_optimization:
            return sum(self.losses(x), torch.zeros(()))
        for loss in self.losses(x):
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _parts(layout: Layout, names: list[str], by_hand: bool) -> dict[str, list[str]]:
    found = {}
    for name in names:
        x = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer = make_trainer(layout, strategy={"plan": None})
            trainer.fit(Parts((SOME | ALL)[name], by_hand), DataLoader(TensorDataset(x), batch_size=16))
        found[name] = [str(w.message) for w in caught if "takes some of its samples by" in str(w.message)]
    return found


@pytest.mark.parametrize("by_hand", [False, True])
def test_some_of_the_samples_are_said(by_hand: bool) -> None:
    found = run_program(PP2, _parts, [*SOME, *ALL], by_hand)
    for name in SOME | ALL:
        assert any(of_rank[name] for of_rank in found) == (name in SOME), (name, found)
