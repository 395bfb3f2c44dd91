"""A criterion that has the head, and uses its weight, which is the embedding's, by a function, as Transformer-XL's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.pipeline.test_direct_forwards import Block
from tests.distributed.training import PLAIN, TP2, Layout, Losses, make_trainer, run_program


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 64)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, self.layers[0].weight, self.layers[0].bias), y)


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Embedding(64, 16)])

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers[0](ids) * 4.0


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.blocks = Embeddings(), nn.ModuleList(Block() for _ in range(2))
        self.criterion = Criterion()
        self.criterion.layers[0].weight = self.embeddings.layers[0].weight

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = self.embeddings(batch[0])
        for block in self.blocks:
            x = block(x)
        return self.criterion(x.flatten(0, 1), batch[0].roll(1, 1).flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _fit(layout: Layout) -> tuple[list[float], int]:
    torch.manual_seed(0)
    module, losses = Lit().double(), Losses()
    trainer = make_trainer(layout, strategy={"plan": "auto"}, callbacks=[losses], max_epochs=2)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (16, 6), generator=generator)
    trainer.fit(module, DataLoader(TensorDataset(ids), batch_size=8))
    return losses.seen, module.blocks[0].up.weight.numel()


def test_losses_are_those_of_one_device() -> None:
    ((expected, whole),) = run_program(PLAIN, _fit)
    for found, held in run_program(TP2, _fit):
        assert found == pytest.approx(expected, rel=1e-9)
        assert held == whole // 2, "its blocks are split"
