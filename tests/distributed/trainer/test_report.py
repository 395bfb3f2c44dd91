"""What is printed at set-up is what is so."""

from __future__ import annotations

import contextlib
import io
import os
import re

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader

from tests.distributed.training import DP2, PP2, TP2, Layout, make_trainer, run_program, train_loader
from tests.parity.variants import variant

UNDIVIDED = "Every rank holds the whole model, as under DDP"


def _printed(layout: Layout) -> tuple[str, int, int]:
    """The text, the parameters of the unsplit model, and those that this rank holds."""
    os.environ["COLUMNS"], text, module = "160", io.StringIO(), variant("untied").build()
    whole = sum(parameter.numel() for parameter in module.parameters())
    trainer = make_trainer(layout, strategy={"summary": True}, max_steps=1, enable_model_summary=True)
    with contextlib.redirect_stdout(text):
        trainer.fit(module, train_loader(layout, 4))
    held = {id(parameter): parameter.numel() for _, parameter in trainer.strategy.parallel.named_held()}
    return text.getvalue(), whole, sum(held.values())


@pytest.mark.parametrize("layout", [TP2, PP2, DP2, Layout(dp=2, zero=1)], ids=str)
def test_the_tables_say_what_each_rank_holds(layout: Layout) -> None:
    (text, whole, held), *others = run_program(layout, _printed)
    assert all(UNDIVIDED not in other and "Parameters" not in other for other, *_ in others), "one rank speaks for all"
    assert re.search(r"│ stage 0 +│ dp 1 +│" if layout.dp > 1 else "Who is where", text)
    assert ("Lightning's model summary, below, counts what rank 0 holds" in text) == (layout.tp * layout.pp > 1)
    assert text.index("Who is where") < text.index("Lightning's model summary") if layout.tp > 1 else True
    own = re.search(r"│ all +│ +([\d,]+) │ +([\d,]+) \(", text)
    unsplit, mine = (int(number.replace(",", "")) for number in own.groups())
    assert mine == held if not layout.zero else mine == whole
    assert unsplit == whole if layout.pp == 1 else unsplit < whole and f"{whole:,}" in text
    assert (UNDIVIDED in text) == (layout == DP2)
    assert ("What is split over tp=2" in text and "column" in text) == (layout.tp > 1)
    assert ("optimized here (zero=1, over 2 ranks)" in text) == bool(layout.zero)


class OwnLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight * self.weight.abs().mean(), self.bias)


class Unsplit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(OwnLinear(8, 64), nn.GELU(), weight_norm(nn.Linear(64, 8))) for _ in range(2)
        )
        self.usual = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = batch + block(batch)
        return self.usual(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _printed_why(layout: Layout) -> str:
    os.environ["COLUMNS"], text = "160", io.StringIO()
    rows = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    trainer = make_trainer(layout, strategy={"summary": True, "plan": "auto"}, max_steps=1)
    with contextlib.redirect_stdout(text):
        trainer.fit(Unsplit(), DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
    return text.getvalue()


def test_the_tables_say_why_layers_stay_whole() -> None:
    text = " ".join(run_program(TP2, _printed_why)[0].split())
    assert "blocks.*.0.weight (2 of them, 512 each): `OwnLinear` has a forward of its own" in text
    computed = "its layer's weight is computed from it (a parametrization)"
    assert f"blocks.*.2.parametrizations.weight.original1 (2 of them, 512 each): {computed}" in text


class Pairs(LightningModule):
    """Pairs of layers in an nn.Sequential, whose names differ in numbers only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.GELU(), nn.Linear(2, 256)) for _ in range(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return sum(block(batch[:, :2]).square().mean() for block in self.blocks)  # type: ignore[return-value]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _printed_pairs(layout: Layout, columns: str) -> str:
    os.environ["COLUMNS"], text = columns, io.StringIO()
    rows = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plan = {"blocks.*.0": "column", "blocks.*.2": "row"}
    trainer = make_trainer(layout, strategy={"summary": True, "plan": plan}, max_steps=1)
    with contextlib.redirect_stdout(text):
        trainer.fit(Pairs(), DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
    return text.getvalue()


@pytest.mark.parametrize("columns", ["160", "80"])
def test_layers_share_a_row_only_if_they_are_alike(columns: str) -> None:
    text = run_program(TP2, _printed_pairs, columns)[0]
    assert re.search(r"│ blocks\.\*\.0 \(x3\) +│ column +│ 1 of 2: \[0:1\] ", text)
    assert re.search(r"│ blocks\.\*\.2 \(x3\) +│ row +│ 1 of 2: \[0:1\] ", text)
    said = " ".join(text.split())
    assert "blocks.*.2.bias (3 of them, 256 each): bias of a row layer: added once, after the sum" in said
    assert "RowParallelLinear" not in text
