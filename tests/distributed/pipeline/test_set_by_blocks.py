"""What blocks set on themselves, or read on the host, in each forward: what hooks find of it, and what is said."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.distributed.training import PLAIN, PP2, Layout, Losses, eval_loader, make_trainer, run_program, train_loader

WIDTH = 16


class Squash(nn.Module):
    """(b, s, n) -> (b, s, n)"""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class Block(nn.Module):
    """Notes something of its tokens in one of several ways. (b, s, WIDTH) -> (b, s, WIDTH)"""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.squash = way, Squash()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.noted: Any = torch.zeros(WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down(self.squash(self.up(x)))
        found = (y > 0).sum((0, 1)).double()
        match self.way:
            case "sets":
                self.noted = found
            case "sets a number":
                self.noted = float(found.sum())
            case "table":
                self.noted = torch.arange(x.shape[1], dtype=torch.float64)
            case "reads":
                y = y * (len(found.tolist()) / WIDTH)
        return y


class Adding(Block):
    """Adds up what its hook clears."""

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down(self.squash(self.up(x)))
        self.noted += (y > 0).sum((0, 1)).double()
        return y


class Noting(LightningModule):
    """Its hook moves a scale by what the blocks have noted."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList((Adding if way == "adds up" else Block)(way) for _ in range(4))
        self.head = nn.Linear(WIDTH, 32)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.embedding(batch[0])
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())
        if self.blocks[0].way == "reads":
            self.log("perplexity", loss.exp())
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for block in self.blocks if self.blocks[0].way == "adds up" else ():
                block.down.bias += 1e-3 * block.noted[:WIDTH]
                block.noted.zero_()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def noted(layout: Layout, way: str) -> tuple[list[float], list[str]]:
    torch.manual_seed(0)
    losses = Losses()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(layout, strategy={"plan": "auto"}, callbacks=[losses])
        trainer.fit(Noting(way), train_loader(layout, 3))
    return losses.seen, [str(w.message) for w in caught]


@pytest.mark.parametrize("way", ["sets", "sets a number", "adds up", "table"])
def test_hooks_are_told_whose_values_they_find(way: str) -> None:
    """Values that each microbatch sets anew are those of the last one; sums over all of them are the batch's."""
    ((expected, _),) = run_program(PLAIN, noted, way)
    (losses, said), *_ = run_program(PP2, noted, way)
    assert losses == pytest.approx(expected, rel=1e-9)
    assert any("the hook finds the last microbatch's" in text for text in said) == way.startswith("sets")


def test_what_reads_on_the_host_is_compared_with_one_device() -> None:
    (_, said), *_ = run_program(PP2, noted, "reads")
    assert any("`perplexity`" in text and "on one device than its" in text for text in said)


class Turning(LightningModule):
    """Keeps angles of positions for as many tokens as there were, and continues rows in validation."""

    def __init__(self, kept: str) -> None:
        super().__init__()
        self.kept = kept
        self.embedding = nn.Embedding(32, WIDTH)
        self.blocks = nn.ModuleList(Block("") for _ in range(4))
        self.head = nn.Linear(WIDTH, 32)
        self.angles: Tensor | None = None
        self.length = 0

    def forward(self, ids: Tensor) -> Tensor:
        n = ids.shape[1]
        if (self.length if self.kept == "by length" else -1 if self.angles is None else len(self.angles)) < n:
            self.length = n
            self.angles = torch.outer(torch.arange(n), torch.linspace(0, 1, WIDTH)).double().cos()
        assert self.angles is not None
        x = self.embedding(ids) * self.angles[:n]
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), batch[1].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        ids = batch[0][:, :3]
        for _ in range(7):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        self.log("mean", ids.double().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def turned(layout: Layout, kept: str) -> tuple[list[float], float]:
    torch.manual_seed(0)
    losses = Losses()
    trainer = make_trainer(layout, strategy={"plan": "auto"}, callbacks=[losses], max_epochs=2)
    trainer.fit(Turning(kept), train_loader(layout, 2), eval_loader(layout, 1))
    return losses.seen, float(trainer.callback_metrics["mean"])


@pytest.mark.parametrize("kept", ["by length", "as long as needed"])
@pytest.mark.filterwarnings("ignore:.*can't be cut into pipeline stages", "ignore:.*learn after the batch")
def test_tables_that_the_last_stage_made_alone_are_on_all(kept: str) -> None:
    ((expected, mean),) = run_program(PLAIN, turned, kept)
    for losses, found in run_program(PP2, turned, kept):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert found == mean
