"""Code that calls `block.forward(x)`, past the block's hooks."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.training import PLAIN, PP2, TP2, TP2_PP2, Layout, Losses, make_trainer, run_program


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Direct(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(32, 16), nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 32)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = self.table(batch[0])
        for block in self.blocks:
            x = block.forward(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[0].roll(1, 1).flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(layout: Layout, sequence: bool) -> list[float]:
    torch.manual_seed(0)
    module, losses = Direct().double(), Losses()
    if not sequence:
        layout = dataclasses.replace(layout, sequence=False)
    trainer = make_trainer(layout, strategy={"plan": "auto"}, callbacks=[losses], max_epochs=2)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 32, (16, 6), generator=generator)
    trainer.fit(module, DataLoader(TensorDataset(ids), batch_size=8))
    return losses.seen


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("layout", [TP2, PP2, TP2_PP2], ids=str)
def test_losses_are_those_of_one_device(layout: Layout, sequence: bool) -> None:
    (expected,) = run_program(PLAIN, _fit, sequence)
    for found in run_program(layout, _fit, sequence):
        assert found == pytest.approx(expected, rel=1e-9)
