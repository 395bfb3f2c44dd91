"""Random numbers of Python and NumPy by generators that a module keeps, and arrays that say how they are drawn: all
stages draw the same."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.training import PLAIN, Layout, Losses, make_trainer, run_program

GENERATORS: dict[str, Any] = {
    "numpy": lambda: np.random.default_rng(0),
    "numpy, old": lambda: np.random.RandomState(0),
    "python": lambda: random.Random(0),
}
DRAWN: list[list[int]] = []
"""In this process, what was drawn before the blocks, by step."""


class Noisy(LightningModule):
    """Learns what noise was put on its samples, of a level that it draws.

    Args:
        kind: of generator.
        late: it draws a weight for each sample, too, after its blocks; "validate": there alone, and in training not.
    """

    def __init__(self, kind: str, late: str) -> None:
        super().__init__()
        self.late, self.generators = late, [GENERATORS[kind]()]
        self.level, self.head = nn.Embedding(10, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4))

    def draw(self, n: int) -> list[int]:
        generator = self.generators[0]
        if isinstance(generator, random.Random):
            return [generator.randrange(10) for _ in range(n)]
        return list(getattr(generator, "integers", getattr(generator, "randint", None))(0, 10, n))  # type: ignore[misc]

    def loss(self, x: Tensor, late: bool) -> Tensor:
        level = torch.tensor(self.draw(len(x)))
        DRAWN.append(level.tolist())
        h = x * (level / 10)[:, None] + self.level(level)
        for block in self.blocks:
            h = h + block(h)
        losses = (self.head(h) - x).square().mean(1) * (1 + level)
        return (losses * torch.tensor(self.draw(len(x))) if late else losses).mean()

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.loss(x, self.late == "train")

    def validation_step(self, x: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(x, self.late != ""))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _fit(layout: Layout, module: LightningModule) -> list[float]:
    DRAWN.clear()
    losses, rows = Losses(), torch.randn(20, 8, generator=torch.Generator().manual_seed(1))
    strategy = {} if layout.plain else {"plan": None}
    trainer = make_trainer(layout, strategy=strategy, callbacks=[losses], max_epochs=2, num_sanity_val_steps=0)
    trainer.fit(module, DataLoader(rows[:12], batch_size=4), DataLoader(rows[12:], batch_size=4))
    return losses.seen


def _draw(layout: Layout, kind: str, late: str) -> tuple[list[float], list[list[int]]]:
    """Losses, and what was drawn for microbatches: the last stage also looks at what a whole batch would do."""
    torch.manual_seed(0)
    losses, rows = _fit(layout, Noisy(kind, late)), 4 // layout.microbatches
    return losses, [levels for levels in DRAWN if len(levels) == rows]


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("late", ["", "train", "validate"])
@pytest.mark.parametrize("kind", GENERATORS)
def test_stages_draw_the_same(kind: str, late: str, microbatches: int) -> None:
    (_, last), (_, first) = run_program(Layout(pp=2, microbatches=microbatches), _draw, kind, late)
    assert first == last
    assert len({tuple(levels) for levels in last}) > 3


@pytest.mark.parametrize("kind", GENERATORS)
def test_numbers_drawn_before_the_blocks_are_those_of_one_device(kind: str) -> None:
    ((losses, _),) = run_program(PLAIN, _draw, kind, "")
    for seen, _ in run_program(Layout(pp=2, microbatches=1), _draw, kind, ""):
        assert seen == pytest.approx(losses, rel=1e-9)


class Resamples(Noisy):
    """Draws levels by the losses that it has seen at each (improved-diffusion's samplers)."""

    def __init__(self) -> None:
        super().__init__("numpy", "")
        self.history, self.counts = np.ones(10), np.zeros(10, dtype=np.int64)

    def draw(self, n: int) -> list[int]:
        drawn = np.random.RandomState(int(self.counts.sum())).choice(10, n, p=self.history / self.history.sum())
        return [int(level) for level in drawn]

    def loss(self, x: Tensor, late: bool) -> Tensor:
        loss = super().loss(x, late)
        self.counts[DRAWN[-1]] += 1
        self.history[DRAWN[-1]] = 1 + self.counts[DRAWN[-1]]
        return loss


def _resample(layout: Layout) -> tuple[list[float], list[int]]:
    torch.manual_seed(0)
    module = Resamples()
    return _fit(layout, module), module.counts.tolist()


def test_arrays_that_a_step_changes_are_told_and_put_back_after_dry_runs() -> None:
    (expected,) = run_program(PLAIN, _resample)
    for found in run_program(Layout(pp=2, microbatches=1), _resample):
        assert found == (pytest.approx(expected[0], rel=1e-9), expected[1])
