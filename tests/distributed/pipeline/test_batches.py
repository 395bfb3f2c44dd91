"""Batches after the first that a pipeline plans or weighs in another way."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.training import Layout, make_trainer, run_program
from tests.ranks import RankError


class Blocks(LightningModule):
    """Linears, and a loss of what leaves the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._loss(batch)

    def _loss(self, batch: list[Tensor]) -> Tensor:
        (x,) = batch
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _two_shapes(layout: Layout, exact: bool, validates: bool) -> list[float]:
    """The second batch is smaller: it is planned while the gradients of the first are there."""
    wide: dict[str, Any] = {} if exact else {"precision": "bf16-true"}
    strategy = {"strategy": {"plan": None, **({} if exact else {"reduce_dtype": "float32"})}}
    between = {"accumulate_grad_batches": 2, "val_check_interval": 1, "num_sanity_val_steps": 0} if validates else {}
    trainer = make_trainer(layout, **wide, **({} if layout.plain else strategy), **between)
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = DataLoader(TensorDataset(x if exact else x.bfloat16()), batch_size=8)
    module = Blocks()
    trainer.fit(module, data, data if validates else None)
    return module.losses


@pytest.mark.parametrize(("exact", "validates"), [(True, False), (False, False), (False, True)])
def test_a_batch_is_planned_without_the_gradients_of_the_last(exact: bool, validates: bool) -> None:
    expected = run_program(Layout(plain=True), _two_shapes, exact, validates)[0]
    layout = Layout(pp=2, schedule="gpipe")  # all forwards come before the first gradient of the batch
    for found in run_program(layout, _two_shapes, exact, validates):
        assert found == pytest.approx(expected, rel=1e-9 if exact else 0.02), "but for bfloat16's rounding"


def _cut_to_a_length(layout: Layout) -> list[float]:
    x = torch.randn(4, 9, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batches = [[wide[:, :8]] for wide in (x[0, :, :8], torch.cat([x[1], x[1]], 1), x[2].T.contiguous().T)]
    module = Blocks()
    make_trainer(layout, **({} if layout.plain else {"strategy": {"plan": None}})).fit(
        module, DataLoader(batches, batch_size=None, shuffle=False)
    )
    return module.losses


def test_batches_that_are_views_of_others() -> None:
    """Padded to the longest of them, and cut: each has strides of its own, which only one rank would know."""
    expected = run_program(Layout(plain=True), _cut_to_a_length)[0]
    for found in run_program(Layout(pp=2, microbatches=2), _cut_to_a_length):
        assert found == pytest.approx(expected, rel=1e-6), "but for float32's rounding in the loss"


class Bag:
    """Rows, and what was looked up of them, which is not pickled."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __getstate__(self) -> dict[str, Any]:
        return {"x": self.x}


class OfBags(Blocks):
    def training_step(self, batch: Bag, batch_idx: int) -> Tensor:  # type: ignore[override]
        return self._loss([batch.x])

    def split_batch(self, batch: Bag, microbatches: int) -> list[Bag]:
        parts = [copy.copy(batch) for _ in range(microbatches)]
        for part, x in zip(parts, batch.x.chunk(microbatches), strict=True):
            part.__dict__ = {**vars(batch), "x": x}
        return parts


def _bags(layout: Layout) -> list[float]:
    bags = [Bag(x) for x in torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)]
    bags[2].size = 4  # type: ignore[attr-defined]  # looked up
    module = OfBags()
    trainer = make_trainer(layout, **({} if layout.plain else {"strategy": {"plan": None}}))
    trainer.fit(module, DataLoader(bags, batch_size=None))  # type: ignore[arg-type]
    return module.losses


def test_what_objects_leave_out_of_pickles_makes_no_other_plan() -> None:
    """It is on the rank alone that has loaded the batch."""
    expected = run_program(Layout(plain=True), _bags)[0]
    for found in run_program(Layout(pp=2, microbatches=2), _bags):
        assert found == pytest.approx(expected, rel=1e-6), "but for float32's rounding in the loss"


class Head(nn.Module):
    """A loss of its own, unless there is nothing to learn from."""

    def __init__(self, otherwise: str) -> None:
        super().__init__()
        self.linear, self.otherwise = nn.Linear(8, 4), otherwise

    def forward(self, h: Tensor, target: Tensor) -> Tensor:
        z = self.linear(h)
        if bool((target != -100).any()):
            return F.cross_entropy(z, target)
        return z.sum() * 0 if self.otherwise == "nothing" else z.square().mean()


class WithHead(Blocks):
    def __init__(self, otherwise: str) -> None:
        super().__init__()
        self.head = Head(otherwise)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, target = batch
        for block in self.blocks:
            x = block(x)
        return self.head(x, target)


def _nothing_in_the_first(layout: Layout, otherwise: str) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    target = torch.randint(0, 4, (8,), generator=generator)
    target[:2] = -100  # all of the first microbatch
    module = WithHead(otherwise)
    strategy = {"strategy": {"plan": None, "microbatches": 4}}
    trainer = make_trainer(layout, **({} if layout.plain else strategy), max_epochs=2)
    trainer.fit(module, DataLoader(TensorDataset(x, target), batch_size=8))
    return module.losses


def test_losses_that_only_later_microbatches_average_are_seen() -> None:
    with pytest.raises(RankError, match="averages one cross-entropy in some microbatches"):
        run_program(Layout(pp=2), _nothing_in_the_first, "another")


def test_a_microbatch_that_learns_nothing_weighs_nothing() -> None:
    (expected,) = run_program(Layout(plain=True), _nothing_in_the_first, "nothing")
    for found in run_program(Layout(pp=2), _nothing_in_the_first, "nothing"):
        assert found == pytest.approx(expected, rel=1e-9)


class Rows:
    """A batch of a user's own class."""

    def __init__(self, x: Tensor, weights: Tensor, names: list[str]) -> None:
        self.x, self.weights, self.names = x, weights, names


class WithRows(Blocks):
    """Its step changes the batch in place."""

    def split_batch(self, batch: Rows, microbatches: int) -> list[Rows]:
        size = len(batch.x) // microbatches
        cut = [slice(i, i + size) for i in range(0, len(batch.x), size)]
        return [Rows(batch.x[part], batch.weights[part], batch.names[part]) for part in cut]

    def loss_weight(self, batch: Rows) -> float:
        return float(len(batch.x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch.weights.mul_(0.5)
        x = batch.x
        for block in self.blocks:
            x = block(x)
        return (x.square().mean(-1) * batch.weights).mean()


def _rows(samples: list[Tensor]) -> Rows:
    x = torch.stack(samples)
    return Rows(x, torch.ones(len(x), dtype=x.dtype), [str(row.sum()) for row in x])


def _own_class(layout: Layout) -> tuple[list[float], int, int]:
    x = torch.randn(24, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    module = WithRows()
    trainer = make_trainer(layout, **({} if layout.plain else {"strategy": {"plan": None}}))
    trainer.fit(module, DataLoader(x, batch_size=8, collate_fn=_rows))  # type: ignore[arg-type]
    gc.collect()
    kept = sum(type(held) is Rows for held in gc.get_objects())
    made = 1 if layout.plain else sum(map(len, trainer.strategy.pipeline.plans._made.values()))  # type: ignore[attr-defined]
    return module.losses, kept, made


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_batches_of_an_own_class_are_changed_once_and_let_go_of(schedule: str) -> None:
    expected, _, _ = run_program(Layout(plain=True), _own_class)[0]
    for losses, kept, made in run_program(Layout(pp=2, schedule=schedule), _own_class):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert made == 1 and kept <= 1, "one plan is for all rows, and no microbatch is its key"


class Columns:
    """The columns of a table, as pandas has them: what is looked up is kept with them, and not pickled."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.places: dict[str, int] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Columns, (self.names,)

    def place(self, name: str) -> int:
        return self.places.setdefault(name, self.names.index(name))


class OfColumns(Blocks):
    """Looks for its target behind the blocks: the last stage does."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        x = batch["x"]
        for block in self.blocks:
            x = block(x)
        return x[:, batch["columns"].place("y")].square().mean()


def _columns(layout: Layout) -> list[float]:
    columns = Columns(["x", "y"])
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loader = DataLoader(x, batch_size=4, collate_fn=lambda rows: {"x": torch.stack(rows), "columns": columns})
    module = OfColumns()
    make_trainer(layout, **({} if layout.plain else {"strategy": {"plan": None}})).fit(module, loader)
    return module.losses


def test_all_batches_may_hold_one_object_that_keeps_what_it_looks_up() -> None:
    expected = run_program(Layout(plain=True), _columns)[0]
    for losses in run_program(Layout(pp=2, microbatches=2), _columns):
        assert losses == pytest.approx(expected, rel=1e-9)


class BranchesInCheckpoints(Blocks):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, mask = batch

        def run(h: Tensor, block: nn.Module) -> Tensor:
            h = block(h)
            return h * mask[:, None] if bool((mask == 0).any()) else h

        for block in self.blocks:
            x = checkpoint(run, x, block, use_reentrant=False)
        return x.square().mean()


def _branches(layout: Layout) -> list[float]:
    gc.disable()  # what an error left open in torch 2.11 stays open
    try:
        x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        mask = torch.ones(32, dtype=torch.float64)
        mask[8:12] = 0
        module = BranchesInCheckpoints()
        trainer = make_trainer(layout, **({} if layout.plain else {"strategy": {"plan": None}}))
        trainer.fit(module, DataLoader(TensorDataset(x, mask), batch_size=8))
        return module.losses
    finally:
        gc.enable()


class CheckpointedSequentials(Blocks):
    """Blocks that are Sequentials, each of them one activation checkpoint; the costliest part is in the middle of the
    second."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8)]
        wide = [nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 8)]
        self.blocks = nn.ModuleList([nn.Sequential(*parts), nn.Sequential(*wide)])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=False)
        return x.square().mean()


def _checkpointed(layout: Layout) -> list[float]:
    torch.manual_seed(1)
    x = torch.randn(16, 8, dtype=torch.float64)
    module = CheckpointedSequentials()
    trainer = make_trainer(layout, **({} if layout.plain else {"strategy": {"plan": None}}))
    trainer.fit(module, DataLoader(TensorDataset(x), batch_size=8))
    return module.losses


def test_a_cut_is_beside_activation_checkpoints() -> None:
    expected = run_program(Layout(plain=True), _checkpointed)[0]
    for losses in run_program(Layout(pp=2, microbatches=2), _checkpointed):
        assert losses == pytest.approx(expected, rel=1e-9)


def test_a_plan_that_is_left_inside_of_an_activation_checkpoint() -> None:
    expected = run_program(Layout(plain=True), _branches)[0]
    for found in run_program(Layout(pp=2, microbatches=1), _branches):
        assert found == pytest.approx(expected, rel=1e-9)
