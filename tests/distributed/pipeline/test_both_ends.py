"""A small module that a model calls first and last (RevIN's norm and denorm): every stage has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.training import Layout, make_trainer, run_program

ROWS: Any = torch.randn(16, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class RevIN(nn.Module):
    """As time-series models have it: what it takes off it keeps, and adds again at the end."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.keeps = keeps
        self.weight, self.bias = nn.Parameter(torch.ones(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor, mode: str, mean: Tensor | None = None) -> Any:
        if mode == "norm":
            mean = x.mean(1, keepdim=True).detach()
            if self.keeps:
                self.mean = mean
            x = (x - mean) * self.weight + self.bias
            return x if self.keeps else (x, mean)
        mean = self.mean if self.keeps else mean
        return (x - self.bias) / (self.weight + 1e-6) + mean


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Forecaster(LightningModule):
    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.norm, self.embedding, self.keeps = RevIN(keeps), nn.Linear(8, 8), keeps
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x, *mean = (self.norm(x, "norm"),) if self.keeps else self.norm(x, "norm")
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(self.head(x), "denorm", *mean)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch) - batch.roll(1, 1)).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _fit(layout: Layout, keeps: bool) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Forecaster(keeps)
    trainer = make_trainer(layout, strategy={"plan": "auto"}, max_epochs=2, use_distributed_sampler=False)
    trainer.fit(module, DataLoader(ROWS, batch_size=4))
    state: dict[str, Tensor] = trainer.strategy.lightning_module_state_dict()
    return state


@pytest.mark.parametrize("keeps", [False, True], ids=["hands on", "keeps"])
@pytest.mark.parametrize("layout", [Layout(pp=2, microbatches=2), Layout(tp=2, pp=2, microbatches=2)], ids=str)
def test_trained_as_on_one_device(layout: Layout, keeps: bool) -> None:
    expected = run_program(Layout(plain=True), _fit, keeps)[0]
    found = run_program(layout, _fit, keeps)[0]
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=lambda text, name=name: f"{name}: {text}")
