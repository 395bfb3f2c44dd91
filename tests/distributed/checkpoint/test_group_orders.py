"""Groups that each process lists in another order, as a `set` of parameters does: states in a checkpoint go with their
weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.distributed.training import (
    PLAIN,
    PP2,
    TP2,
    Layout,
    make_trainer,
    run_program,
    shared_directory,
    train_loader,
)

WIDTH = 8


class Block(nn.Module):
    """(b, s, WIDTH) -> (b, s, WIDTH)"""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Grouped(LightningModule):
    """Its matrices come in an order of the rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(32, WIDTH), *(Block() for _ in range(4)), nn.Linear(WIDTH, 32))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        if dist.is_initialized() and dist.get_rank() % 2:
            matrices.reverse()
        vectors = [p for p in self.parameters() if p.dim() < 2]
        return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)


def saved(layout: Layout, folder: str) -> list[Tensor]:
    torch.manual_seed(0)
    trainer = make_trainer(layout, strategy={"plan": "auto"})
    trainer.fit(Grouped(), train_loader(layout, 3))
    path = Path(shared_directory(layout, "orders", folder), "saved.ckpt")
    trainer.save_checkpoint(path)
    state = torch.load(path, map_location="cpu", weights_only=False)["optimizer_states"][0]["state"]
    return [state[number]["exp_avg"] for number in sorted(state)]


@pytest.mark.parametrize("layout", [TP2, PP2], ids=str)
def test_states_go_with_their_weights(layout: Layout, tmp_path: Path) -> None:
    (expected,) = run_program(PLAIN, saved, str(tmp_path))
    found = run_program(layout, saved, str(tmp_path))[0]
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
