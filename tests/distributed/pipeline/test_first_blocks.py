"""Blocks that are given the batch itself, without an embedding before them: in a dry run it has its values, while what
later blocks are given has none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.pipeline.test_filled import MLP, ROWS, TOKENS, WIDTH
from tests.distributed.training import PLAIN, PP2, TP2_PP2, Layout, Losses, make_trainer, run_program


class Net(LightningModule):
    """Its residuals are around its blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(MLP() for _ in range(4)), nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(self.head(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


def _losses(layout: Layout, options: dict[str, Any]) -> list[float]:
    x = torch.randn(3 * ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    seen = Losses()
    trainer = make_trainer(layout, strategy={"plan": "auto", **options}, callbacks=[seen])
    trainer.fit(Net(), DataLoader(TensorDataset(x, x.flip(0)), batch_size=ROWS))
    return seen.seen


@pytest.mark.parametrize(
    ("layout", "options"),
    [(PP2, {}), (TP2_PP2, {}), (TP2_PP2, {"recompute": "full"}), (TP2_PP2, {"recompute": "selective"})],
    ids=str,
)
def test_first_blocks_may_read_the_batch(layout: Layout, options: dict[str, Any]) -> None:
    (plain,) = run_program(PLAIN, _losses, {})
    for losses in run_program(layout, _losses, options):
        assert losses == pytest.approx(plain, rel=1e-12)
