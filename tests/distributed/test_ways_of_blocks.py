"""Blocks of one kind that compute in several ways, of which a step's first call shows one: each is proven."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.training import PLAIN, TP2, Layout, Losses, make_trainer, run_program


class Block(nn.Module):
    """Some ways couple the features of the hidden layer."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor, depth: int = 0, couple: bool = False, how: str = "", own: bool = False) -> Tensor:
        h = F.gelu(self.up(self.norm(x)))
        if depth == 2 or couple or how == "norm" or (own and self.index == 1):
            h = F.layer_norm(h, h.shape[-1:])
        return x + self.down(h)


class Model(LightningModule):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.tok, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.blocks = nn.ModuleList(map(Block, range(3)))

    def body(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if self.way == "depth":
                x = block(x, i)
            elif self.way == "keyword":
                x = block(x, couple=i > 0)
            elif self.way == "text":
                x = block(x, how="norm" if i == 1 else "")
            else:
                x = block(x, own=self.way == "own number")
        if self.way == "twice":
            y = x.tanh()
            for block in self.blocks:
                y = block(y, couple=True)
            x = x + y
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.head(self.body(self.tok(batch[:, :-1])))
        return F.cross_entropy(x.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def _fit(layout: Layout, way: str) -> tuple[list[float], int]:
    torch.manual_seed(0)
    module, losses = Model(way), Losses()
    ids: Any = torch.randint(0, 16, (12, 7), generator=torch.Generator().manual_seed(1))
    strategy = None if layout.plain else {"plan": "auto"}
    make_trainer(layout, strategy=strategy, callbacks=[losses]).fit(module, DataLoader(ids, batch_size=4))
    return losses.seen, module.blocks[0].up.weight.numel()


@pytest.mark.parametrize("way", ["plain", "depth", "keyword", "text", "own number", "twice"])
def test_as_on_one_device(way: str) -> None:
    ((expected, whole),) = run_program(PLAIN, _fit, way)
    for losses, own in run_program(TP2, _fit, way):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert own < whole
