"""Steps that draw from Python's or NumPy's generators (mixup): all stages draw the same, in each microbatch another."""

from __future__ import annotations

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.training import PP2, Layout, make_trainer, run_program


class Block(nn.Module):
    """Adds nothing, but has to be run."""

    def __init__(self, draws: bool) -> None:
        super().__init__()
        self.draws, self.up, self.down = draws, nn.Linear(8, 16), nn.Linear(16, 8)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.draws and random.random() < 0.5:
            return x
        return x + self.down(self.up(x).relu())


class Mixup(LightningModule):
    """What comes out of the blocks is what went into them: a difference tells that stages have mixed otherwise."""

    def __init__(self, library: str, habit: str) -> None:
        super().__init__()
        self.library, self.habit = library, habit
        self.tok, self.head = nn.Linear(8, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList(Block(habit == "blocks draw, too") for _ in range(3))
        self.differences: list[float] = []
        self.shares: list[float] = []

    def mixed(self, x: Tensor) -> tuple[Tensor, float]:
        share = float(np.random.beta(0.4, 0.4)) if self.library == "numpy" else random.random()
        return share * x + (1 - share) * x.flip(0), share

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        mixed, share = self.mixed(batch)
        x = mixed + 0 * self.tok(batch)  # on the first stage
        for block in self.blocks:
            x = block(x)
        loss = self.head(x).square().mean()
        again = share * batch + (1 - share) * batch.flip(0)  # on the last one
        self.log("difference", (x - again).abs().max())
        self.log("share", share)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        metrics = self.trainer.callback_metrics
        self.differences.append(float(metrics["difference"]))
        self.shares.append(float(metrics["share"]))

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        x = self.tok(batch)
        for _ in range(3):  # can't be cut, so the last stage runs it alone
            for block in self.blocks:
                x = block(x)
            if self.head(x).mean().item() > 1e9:
                break
            self.mixed(x)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def _fit(layout: Layout, library: str, habit: str) -> tuple[list[float], list[float], Any]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    module = Mixup(library, habit)
    rows: Any = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(layout, strategy={"plan": None}, max_epochs=2, num_sanity_val_steps=0)
        validation = DataLoader(rows[:4], batch_size=4) if habit == "validates" else None
        trainer.fit(module, DataLoader(rows, batch_size=4), validation)
    return module.differences, module.shares, (random.random(), float(np.random.rand()))


CASES = [
    ("numpy", "", PP2),
    ("numpy", "validates", PP2),
    ("python", "blocks draw, too", PP2),
    ("python", "", Layout(pp=2, microbatches=2, schedule="interleaved")),
    *((library, "", Layout(pp=2, microbatches=2, schedule="zb_v")) for library in ("numpy", "python")),
]


@pytest.mark.parametrize(("library", "habit", "layout"), CASES, ids=str)
def test_stages_draw_the_same(library: str, habit: str, layout: Layout) -> None:
    found = run_program(layout, _fit, library, habit)
    for differences, shares, _ in found:
        assert max(differences) < 1e-12
        assert len(set(shares)) == len(shares) == 8  # no two batches alike
    assert found[0][1] == found[1][1]
    if not habit:
        assert found[0][2] == found[1][2]  # loaders and hooks of all ranks draw the same, too
