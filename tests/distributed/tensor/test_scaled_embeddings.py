"""Subclasses of nn.Embedding with a forward of their own around the lookup, as Gemma's and BART's: split by rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.distributed.training import PLAIN, TP2, TP2_PP2, Layout, Losses, make_trainer, run_program, train_loader

WIDTH, VOCAB = 16, 32


class Scaled(nn.Embedding):
    """As in transformers: a number, a buffer, and the weight's dtype."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width, padding_idx=1)
        self.register_buffer("scale", torch.tensor(width**0.5), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale.to(self.weight.dtype)


class Positions(nn.Embedding):
    """Other ids than it is given."""

    def forward(self, ids: Tensor, past: int = 0) -> Tensor:
        return super().forward(torch.arange(past, past + ids.shape[1], device=self.weight.device).expand(ids.shape))


class Model(LightningModule):
    """Whose head is tied to the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions = Scaled(VOCAB, WIDTH), Positions(VOCAB, WIDTH)
        self.blocks = nn.Sequential(*(_Block() for _ in range(4)))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.table.weight
        nn.init.normal_(self.table.weight, std=0.2)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x = self.blocks(self.table(batch[0]) + self.positions(batch[0], past=2))
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


BY_HAND = {"table": "vocab", "positions": "hidden", "head": "column_gather", "blocks.*.up": "column"}
BY_HAND |= {"blocks.*.down": "row"}


def train(layout: Layout, plan: Any) -> tuple[list[float], list[tuple[int, ...]], list[bool]]:
    """Losses, the shapes of the tables here, and whether they are what they were."""
    torch.manual_seed(0)
    module, losses = Model(), Losses()
    trainer = make_trainer(layout, strategy={"plan": plan}, max_epochs=2, callbacks=[losses])
    trainer.fit(module, train_loader(layout, 3))
    same = [isinstance(module.table, Scaled), isinstance(module.positions, Positions)]
    return losses.seen, [tuple(x.weight.shape) for x in (module.table, module.positions)], same


@pytest.mark.parametrize(
    ("layout", "plan"),
    [(TP2, "auto"), (Layout(tp=3, sequence=False), BY_HAND), (TP2_PP2, "auto"), (Layout(tp=2, dp=2, zero=3), "auto")],
    ids=str,
)
def test_their_tables_are_split(layout: Layout, plan: Any) -> None:
    ((expected, *_),) = run_program(PLAIN, train, plan)
    results = run_program(layout, train, plan)
    of_batches = [sum(losses) / len(results) for losses in zip(*(losses for losses, *_ in results), strict=True)]
    assert len(of_batches) == 6 and of_batches == pytest.approx(expected, rel=1e-9)
    for _, (table, positions), same in results:
        assert all(same)
        if layout == TP2:
            assert table == positions == (VOCAB // 2, WIDTH)
        if plan == BY_HAND:
            assert table[0] in (10, 11) and positions[0] == VOCAB and positions[1] in (5, 6)
