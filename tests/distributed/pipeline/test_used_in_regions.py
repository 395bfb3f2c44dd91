"""Values that an earlier stage made and a later stage uses inside of a tensor region, each rank its heads' part: what
is sent back of their gradient is the sum over the tensor ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.distributed.training import (
    PLAIN,
    TP2_PP2,
    Layout,
    Losses,
    make_trainer,
    run_program,
    shared_directory,
    train_loader,
)

WIDTH, HEADS = 16, 4
TWO_ROWS = Layout(tp=2, pp=2, microbatches=2)
"""Each microbatch has several samples, of which every rank holds its own heads."""


class Attention(nn.Module):
    """Adds a bias to the scores of all heads. (b, s, WIDTH), (b, HEADS, s, s) -> (b, s, WIDTH)"""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = (q @ k.transpose(-1, -2) + bias).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """(b, s, WIDTH), (b, HEADS, s, s) -> (b, s, WIDTH)"""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x), bias)
        return x + self.down(torch.tanh(self.up(x)))


class Biased(LightningModule):
    """One bias of positions, made of the tokens too, for all blocks."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.whole = whole
        self.embedding, self.relative = nn.Embedding(32, WIDTH), nn.Embedding(32, HEADS)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 32)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch[0]
        bias = self.relative((ids[:, :, None] + ids[:, None]) % 32).permute(0, 3, 1, 2)
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, bias)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())
        return loss + 0.1 * bias.square().mean() if self.whole else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 1.0)


def trained(layout: Layout, whole: bool, folder: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    losses, module = Losses(), Biased(whole)
    trainer = make_trainer(layout, strategy={"plan": "auto"}, callbacks=[losses])
    trainer.fit(module, train_loader(layout, 4))
    path = shared_directory(layout, "regions", folder) / "saved.ckpt"
    trainer.save_checkpoint(path)
    return losses.seen, torch.load(path, weights_only=False)["state_dict"]


@pytest.mark.parametrize("whole", [False, True], ids=["in regions", "whole, too"])
@pytest.mark.parametrize(
    "layout",
    [
        TWO_ROWS,
        TP2_PP2,
        Layout(tp=2, pp=4, microbatches=2),
        Layout(tp=2, pp=2, microbatches=2, schedule="zb_v"),
        Layout(tp=2, pp=2, microbatches=4, schedule="zb_h1", sequence=False),
    ],
    ids=str,
)
def test_gradients_of_what_regions_use_in_part_are_summed(layout: Layout, whole: bool, tmp_path: Path) -> None:
    ((expected, weights),) = run_program(PLAIN, trained, whole, str(tmp_path))
    losses, found = run_program(layout, trained, whole, str(tmp_path))[0]
    assert losses == pytest.approx(expected, rel=1e-9)
    torch.testing.assert_close(found, weights, rtol=1e-9, atol=1e-12)
