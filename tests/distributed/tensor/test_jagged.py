"""Jagged batches (`torch.nested`): sequences of several lengths, without padding."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nested import nested_tensor_from_jagged
from torch.utils.data import DataLoader

from tests.distributed.training import PLAIN, TP2, Layout, Losses, make_trainer, run_program

WIDTH, HEADS = 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = (layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(*heads)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Jagged(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        ids = torch.cat(batch)
        offsets = torch.tensor([0, *(len(x) for x in batch)]).cumsum(0)
        x = nested_tensor_from_jagged(self.tok(ids), offsets)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).values(), ids.roll(1))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def as_they_are(rows: list[Tensor]) -> list[Tensor]:
    return rows


def train(layout: Layout) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(1)
    draw, losses = torch.Generator().manual_seed(2), Losses()
    rows = [torch.randint(0, 9, (2 + i % 5,), generator=draw) for i in range(16)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(.*does not have many workers|.*nested tensors)")
        trainer = make_trainer(layout, strategy={"plan": "auto"}, callbacks=[losses])
        loader: Any = DataLoader(rows, batch_size=4, collate_fn=as_they_are)  # type: ignore[arg-type]
        trainer.fit(Jagged(), loader)
    return losses.seen, {name: x.clone() for name, x in trainer.strategy.lightning_module_state_dict().items()}


@pytest.mark.parametrize("layout", [TP2, Layout(tp=2, sequence=False), Layout(dp=2, zero=3)], ids=str)
def test_trains_as_on_one_device(layout: Layout) -> None:
    expected = [run_program(PLAIN, train)[0]] if layout.dp == 1 else run_program(Layout(dp=2), train)
    for (losses, weights), (found, held) in zip(expected, run_program(layout, train), strict=False):
        assert found == pytest.approx(losses, abs=1e-9)
        for name, x in held.items():
            torch.testing.assert_close(x, weights[name], rtol=1e-8, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
