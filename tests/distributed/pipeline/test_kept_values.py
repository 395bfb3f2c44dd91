"""Python values that blocks set on themselves in their forward: hooks find them on all stages, as on one device."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.training import PP2, Layout, make_trainer, run_program

ROWS: Any = torch.randn(24, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Scale(nn.Module):
    """Keeps what it has seen; from the fifth call on, in training."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.largest, self.history = 0, 0.0, [0.0]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.history[:] = [*self.history[-2:], float(x.detach().mean())]
        if self.calls >= 3:
            self.largest = float(x.detach().abs().amax())
        self.means = x.detach().mean(0)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.scale, self.down = nn.Linear(8, 16), Scale(), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.scale(self.up(x).relu()))


class Lit(LightningModule):
    """The rate goes by what the first block and the last one have kept."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 1)
        self.seen: list[Any] = []

    def loss(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def note(self) -> None:
        self.seen += [(s.calls, s.largest, *s.history) for s in (self.blocks[0].scale, self.blocks[3].scale)]
        self.seen += [tuple(s.means.tolist()) for s in (self.blocks[0].scale, self.blocks[3].scale)]
        self.seen += [float(x) for x in self.trainer.callback_metrics.values()]

    def on_train_batch_end(self, *args: Any) -> None:
        self.note()
        first, last = self.blocks[0].scale, self.blocks[3].scale
        for group in self.optimizers().param_groups:
            group["lr"] = 0.1 / (1 + first.calls + first.largest + last.history[-1] ** 2)

    def on_validation_batch_end(self, *args: Any) -> None:
        self.note()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Anneals(Lit):
    """What a step leaves on the module makes its hooks run on the last stage alone: what they set on blocks counts."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        for block in self.blocks:
            block.down.factor = 1.0  # type: ignore[union-attr]
            block.down.register_forward_hook(lambda layer, _, out: out * layer.factor)  # type: ignore[union-attr]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach())
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(float(self.outputs[-1]))
        for block in self.blocks:
            block.down.factor *= 0.8  # type: ignore[union-attr]

    def on_validation_batch_end(self, *args: Any) -> None:
        pass


def _anneal(layout: Layout) -> list[float]:
    torch.manual_seed(0)
    module = Anneals()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(layout, strategy={"plan": None}, use_distributed_sampler=False)
        trainer.fit(module, DataLoader(ROWS, batch_size=4))
    return module.seen


def test_blocks_find_what_hooks_of_the_last_stage_set() -> None:
    (expected,) = run_program(Layout(plain=True), _anneal)
    found = run_program(Layout(pp=2, microbatches=1), _anneal)[0]
    assert len(expected) == 6 and found == pytest.approx(expected, rel=1e-9)


def _fit(layout: Layout, rows: int = 4) -> tuple[list[Any], list[str]]:
    torch.manual_seed(0)
    module = Lit()
    trainer = make_trainer(
        layout, strategy={"plan": None}, num_sanity_val_steps=0, use_distributed_sampler=False, limit_val_batches=2
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, DataLoader(ROWS, batch_size=rows), DataLoader(ROWS, batch_size=rows))
    return module.seen, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("layout", [Layout(pp=2, microbatches=1), Layout(tp=2, pp=2, microbatches=1)], ids=str)
def test_hooks_find_what_blocks_have_kept(layout: Layout) -> None:
    expected, _ = run_program(Layout(plain=True), _fit)[0]
    for seen, _ in run_program(layout, _fit):
        assert len(seen) == len(expected)
        for found, known in zip(seen, expected, strict=True):
            assert found == pytest.approx(known, rel=1e-9)


def test_calls_of_microbatches_are_counted() -> None:
    told = [text for _, texts in run_program(PP2, _fit, 8) for text in texts]
    assert any(re.search(r"the step counts its calls in `blocks.\d.scale.calls`", text) for text in told)


class Rotary(nn.Module):
    """Keeps a table, and the length that it is for (ESM-2)."""

    def __init__(self) -> None:
        super().__init__()
        self.length: int | None = None
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        if n != self.length or self.table.device != x.device:  # type: ignore[union-attr]
            self.length, self.table = n, torch.arange(n).to(x)[:, None] / n
        return x + self.table


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary, self.linear = Rotary(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.rotary(x)).tanh()


class Labels(nn.Module):
    """In no unit: a dict of tables, and beside it the length that they are for (open_clip's ClipLoss)."""

    def __init__(self) -> None:
        super().__init__()
        self.length, self.labels = 0, dict[Any, Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        if self.length != x.shape[1] or x.device not in self.labels:
            self.labels[x.device] = torch.arange(x.shape[1], device=x.device)
            self.length = x.shape[1]
        return F.cross_entropy(x.transpose(1, 2), self.labels[x.device].expand(len(x), -1))


class Anchors(nn.Module):
    """In no unit: a list of tables, which the first forward converts (torchvision's AnchorGenerator)."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = [torch.arange(6.0), torch.arange(6.0) / 2]

    def forward(self, x: Tensor) -> Tensor:
        self.cells = [cell.to(x) for cell in self.cells]
        return torch.stack(self.cells).sum(0)


class WithTables(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head, self.labels = nn.ModuleList(Turning() for _ in range(4)), nn.Linear(8, 6), Labels()
        self.anchors = Anchors()
        self.seen: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch.unsqueeze(1).expand(-1, 6, -1)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.labels(self.head(x) + self.anchors(x))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))

    def on_train_epoch_end(self) -> None:
        self.seen += [float(x) for x in self.trainer.callback_metrics.values()]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _with_tables(layout: Layout) -> list[float]:
    torch.manual_seed(0)
    module = WithTables()
    trainer = make_trainer(layout, strategy={"plan": None}, max_epochs=3, num_sanity_val_steps=0)
    trainer.fit(module, DataLoader(ROWS, batch_size=4), DataLoader(ROWS, batch_size=4))
    return module.seen


def test_tables_are_where_their_lengths_are() -> None:
    (expected,) = run_program(Layout(plain=True), _with_tables)
    for found in run_program(PP2, _with_tables):
        assert found == pytest.approx(expected, rel=1e-9)
