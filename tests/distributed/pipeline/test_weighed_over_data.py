"""Pipelines with dp > 1, where each data-parallel rank divides by its own number of targets, known in the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.training import Layout, Losses, make_trainer, run_program
from tests.ranks import RankError

PP2_DP2 = Layout(pp=2, dp=2, microbatches=2)


class Masked(LightningModule):
    """Whose targets are hidden in unequal numbers."""

    def __init__(self, tied: bool = False, frozen: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(16))
        if tied:
            self.head.weight = self.table.weight
        if frozen:
            self.blocks[1].requires_grad_(False)

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = self.table(batch[0]) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x).transpose(1, 2), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_end(self) -> None:
        state = self.trainer.strategy.lightning_module_state_dict()
        self.trained = {name: value.clone() for name, value in state.items()}


class Told(Masked):
    """Which says how many there are."""

    def loss_weight(self, batch: list[Tensor]) -> Tensor:
        return (batch[1] != -100).sum()


class Remembered(Masked):
    """Which knows only after a step."""

    targets = 1

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        self.targets = int((batch[1] != -100).sum())
        return super().training_step(batch, index)

    def loss_weight(self, batch: list[Tensor]) -> int:
        return self.targets


class ByRows(Masked):
    """A mean over rows: other numbers of these in the microbatches, not of targets."""

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x = self.table(batch[0]) * self.scale
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


KINDS: dict[str, Callable[[], Masked]] = {
    "untied": Masked,
    "tied": lambda: Masked(tied=True),
    "frozen": lambda: Masked(frozen=True),
    "told": Told,
    "rows": ByRows,
}


ALL = KINDS | {"remembered": Remembered}


def trained(
    layout: Layout, kind: str, reduce_dtype: str | None = None, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    module, (x, y), losses = ALL[kind](), torch.randint(20, (2, 20, 6)), Losses()
    for i in range(20):
        y[i, 5 - i % 4 - i % 2 :] = -100
    trainer = make_trainer(
        layout, strategy={"plan": "auto", "reduce_dtype": reduce_dtype}, max_epochs=2, callbacks=[losses], **options
    )
    trainer.fit(module, DataLoader(TensorDataset(x, y), batch_size=4))  # 4, 4, and 2 rows on each rank
    return losses.seen, module.trained


def check(layout: Layout, kind: str = "untied", **options: Any) -> None:
    """Losses are those of the two ranks without a pipeline, and so are the parameters in the end."""
    expected = run_program(Layout(dp=2), _with, kind, options)
    found = run_program(layout, _with, kind, options)
    every = [losses for losses, _ in expected]
    for losses, _ in found:
        assert any(losses == pytest.approx(other, rel=1e-9) for other in every)
    for other in every:
        assert any(other == pytest.approx(losses, rel=1e-9) for losses, _ in found)
    wanted, saved = expected[0][1], next(state for _, state in found if state)
    assert saved.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(saved[name], value, rtol=1e-7, atol=1e-9)


def _with(layout: Layout, kind: str, options: dict[str, Any]) -> Any:
    return trained(layout, kind, **options)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_divide_by_their_own_targets(kind: str, zero: int) -> None:
    check(dataclasses.replace(PP2_DP2, zero=zero), kind)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(("schedule", "microbatches"), [("zb_v", 4), ("zb_h1", 2), ("interleaved", 4), ("gpipe", 3)])
def test_in_other_orders(schedule: str, microbatches: int, zero: int) -> None:
    check(dataclasses.replace(PP2_DP2, zero=zero, schedule=schedule, microbatches=microbatches), "tied")


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_over_accumulated_batches(zero: int) -> None:
    check(dataclasses.replace(PP2_DP2, zero=zero), accumulate_grad_batches=2)


@pytest.mark.parametrize("zero", [0, 2])
def test_clipped(zero: int) -> None:
    check(dataclasses.replace(PP2_DP2, zero=zero), gradient_clip_val=0.1)


def test_weights_that_a_step_has_to_find_out() -> None:
    check(PP2_DP2, "remembered")
    with pytest.raises(RankError, match="`loss_weight` returns another number after the step"):
        run_program(dataclasses.replace(PP2_DP2, zero=2), trained, "remembered")


def _wide(layout: Layout) -> list[float]:
    return trained(layout, "tied", reduce_dtype="float32", precision="bf16-true")[0]


@pytest.mark.parametrize(("zero", "schedule"), [(1, "1f1b"), (3, "zb_v")])
def test_summed_in_float32(zero: int, schedule: str) -> None:
    every = run_program(Layout(dp=2), _wide)
    for losses in run_program(dataclasses.replace(PP2_DP2, zero=zero, schedule=schedule), _wide):
        assert any(losses == pytest.approx(other, rel=2.0**-6) for other in every)


@pytest.mark.extended  # eight ranks
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_beside_tensor_parallelism(zero: int) -> None:
    check(dataclasses.replace(PP2_DP2, tp=2, zero=zero))
