"""Hooks that draw random numbers in turn with the blocks that they call: afterwards, all stages have drawn the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.training import PLAIN, PP2, Layout, make_trainer, run_program

WIDTH = 8
RUNS: list[int] = []
"""Of the hook, in this process."""


class Block(nn.Module):
    """Draws in evaluation. (b, WIDTH) -> (b, WIDTH)"""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down(torch.tanh(self.up(x)))
        return y if self.training else y + 0.1 * torch.randn_like(y)


class Sampling(LightningModule):
    """Samples after an evaluation. Which microbatches its steps draw for is left out, by a seed.

    Args:
        leaves: whether steps of evaluation leave a number for the hook.
    """

    def __init__(self, leaves: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(WIDTH, WIDTH))
        self.leaves = leaves
        self.left: list[float] = []
        self.sample = 0.0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", F.mse_loss(self.net(batch[0]), batch[1]))
        if self.leaves:
            self.left.append(1.0)

    def on_validation_epoch_end(self) -> None:
        RUNS.append(self.trainer.global_rank)
        torch.manual_seed(2)
        for _ in range(3):
            x = self.net(torch.randn(2, WIDTH, dtype=torch.float64))
        self.sample = x.square().sum().item()
        self.left.clear()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _sampled(layout: Layout, leaves: bool) -> dict[str, Any]:
    RUNS.clear()
    torch.manual_seed(0)
    module = Sampling(leaves)
    x = torch.randn(16, 2, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    train, val = (DataLoader(TensorDataset(x[:, 0], x[:, 1]), batch_size=8) for _ in range(2))
    trainer = make_trainer(layout, strategy={"plan": None}, use_distributed_sampler=False, num_sanity_val_steps=0)
    trainer.fit(module, train, val)
    return {"sample": module.sample, "next": torch.rand(1).item(), "runs": len(RUNS)}


def test_samples_are_those_of_one_device() -> None:
    [expected] = run_program(PLAIN, _sampled, False)
    assert expected["runs"] == 1
    for found in run_program(PP2, _sampled, False):
        assert found == pytest.approx(expected, rel=1e-9)


def test_where_the_last_stage_runs_the_hook_alone() -> None:
    """What it draws there is not what one device does. (Steps have left something.)"""
    last, first = run_program(PP2, _sampled, True)
    assert (last.pop("runs"), first.pop("runs")) == (1, 0)
    assert first == last and last["sample"] > 0
