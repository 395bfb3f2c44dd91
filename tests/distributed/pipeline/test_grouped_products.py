"""Experts by one grouped product, as transformers runs them by default: torch refuses it without data in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.distributed.training import PLAIN, PP2, TP2, TP2_PP2, Layout, Losses, make_trainer, run_program, train_loader

WIDTH, INSIDE, EXPERTS, VOCAB = 16, 32, 4, 32


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INSIDE) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, INSIDE, WIDTH) / INSIDE**0.5)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        weights, chosen = self.router(rows).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        ends = torch.bincount(chosen, minlength=EXPERTS).cumsum(0).int()
        inner = F.gelu(F.grouped_mm(rows[order], self.up, offs=ends))
        y = F.grouped_mm(inner, self.down, offs=ends)[order.argsort()] * weights[:, None]
        return y.view_as(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(WIDTH), Experts()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.norm(x))


class Mixture(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return F.cross_entropy(self.head(self.blocks(self.table(batch[0]))).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(layout: Layout) -> tuple[list[float], int]:
    """The losses of three steps, and elements of the experts on this rank."""
    torch.manual_seed(0)
    module, losses = Mixture(), Losses()
    trainer = make_trainer(layout, strategy={"plan": "auto"}, precision="32-true", callbacks=[losses])
    trainer.fit(module, train_loader(layout, 3))
    return losses.seen, sum(p.numel() for name, p in module.named_parameters() if "up" in name or "down" in name)


@pytest.mark.parametrize("layout", [PP2, TP2, TP2_PP2], ids=str)
def test_grouped_products_in_float32(layout: Layout) -> None:
    ((expected, whole),) = run_program(PLAIN, train)
    results = run_program(layout, train)
    for losses, held in results:
        assert losses == pytest.approx(expected, rel=1e-5), "float32"
        assert held * layout.tp * layout.pp == whole
