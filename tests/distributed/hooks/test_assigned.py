"""Hooks that assign to weights and biases of all blocks what they compute of them (`layer.weight *= 0.99`)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.training import (
    PLAIN,
    PP2,
    TP2_PP2,
    Layout,
    Losses,
    make_trainer,
    run_program,
    shared_directory,
)

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Decaying(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList(Block() for _ in range(4))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = block(x)
        return F.mse_loss(x, batch[1])

    def on_train_batch_end(self, *args: Any) -> None:
        with torch.no_grad():
            for block in self.blocks:
                block.down.weight *= 0.99
                block.down.bias += 0.01

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _trained(layout: Layout, root: str) -> tuple[list[float], dict[str, Tensor]]:
    """The losses of batches, and the weights of the checkpoint."""
    torch.manual_seed(0)
    x = torch.randn(24, 2, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    losses, plan = Losses(), {"plan": "auto" if layout.tp > 1 else None}
    trainer = make_trainer(layout, strategy=plan, callbacks=[losses], use_distributed_sampler=False)
    trainer.fit(Decaying(), DataLoader(TensorDataset(x[:, 0], x[:, 1]), batch_size=8))
    path = shared_directory(layout, "assigned", root) / "last.ckpt"
    trainer.save_checkpoint(path)
    return losses.seen, torch.load(path)["state_dict"]


@pytest.mark.parametrize("layout", [PP2, TP2_PP2], ids=str)
def test_weights_that_are_assigned_in_place(layout: Layout, tmp_path: Path) -> None:
    ((losses, weights),) = run_program(PLAIN, _trained, str(tmp_path))
    assert len(losses) == 3
    for own, saved in run_program(layout, _trained, str(tmp_path)):
        assert own == pytest.approx(losses, rel=1e-9)
        torch.testing.assert_close(saved, weights, rtol=1e-9, atol=1e-12)
