"""Blocks that change their own buffers in each forward: backward finds the values that this microbatch's forward used,
as on one device, and not those of a later microbatch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.crossing import fewer
from tests.distributed.training import (
    PLAIN,
    Layout,
    make_trainer,
    run_program,
    shared_directory,
    train_on_microbatches,
)

WIDTH, ROWS = 6, 8


class Normed(nn.Module):
    """A spectral norm by one step of power iteration, whose vector each forward moves on, in one of several ways; or a
    division by a running mean."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit = habit
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls = 0
        vector = F.normalize(torch.randn(WIDTH), dim=0)
        self.register_buffer("scale", torch.ones(WIDTH))
        if habit == "plain attribute":
            self.vector = vector.double()
        elif habit == "frozen parameter":
            self.vector = nn.Parameter(vector, requires_grad=False)
        else:
            self.register_buffer("vector", vector)

    def moved(self, x_BD: Tensor) -> None:
        """The vector, after its step."""
        with torch.no_grad():
            new_D = F.normalize(self.linear.weight.mv(self.vector) + x_BD.mean(0), dim=0)
        match self.habit:
            case "in place":
                with torch.no_grad():
                    self.vector.copy_(new_D)
            case "data in place":
                self.vector.data.copy_(new_D)
            case "late":  # from the second batch on
                self.calls += 1
                if self.calls > 4:
                    self.vector.data.copy_(new_D)
            case _:
                self.vector.data = new_D

    def forward(self, x_BD: Tensor) -> Tensor:
        if self.habit == "after use":
            h_BD = self.linear(x_BD) / self.scale
            self.scale.data.lerp_(x_BD.detach().abs().mean(0) + 0.5, 0.3)
            return h_BD.tanh()
        if self.habit == "queue":  # by a view, and used by an operation that keeps a view
            h_BD = self.linear(x_BD)
            self.vector.data[:2] = x_BD.detach().mean(0)[:2]
            return (h_BD * self.vector.view(1, -1).expand(len(x_BD), -1)).tanh()
        self.moved(x_BD)
        sigma = self.vector.dot(self.linear.weight.mv(self.vector))
        return F.linear(x_BD, self.linear.weight / sigma, self.linear.bias).tanh()


class Model(LightningModule):
    def __init__(self, habit: str) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Normed(habit) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x_BD, y_BD = batch
        return F.mse_loss(self.blocks(x_BD), y_BD)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _loader(rows: int) -> DataLoader:
    x = torch.randn(4 * ROWS, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.flip(1)), batch_size=rows)


def _trained(layout: Layout, habit: str, options: dict[str, Any], root: str) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(0)
    module = Model(habit)
    trainer, losses = train_on_microbatches(layout, module, _loader, ROWS, **options)
    path = shared_directory(layout, habit, root) / "last.ckpt"
    trainer.save_checkpoint(path)
    return losses, torch.load(path)["state_dict"]


HABITS = ["in place", "data in place", "replaced", "frozen parameter", "plain attribute", "after use", "queue"]


CASES = [
    *((habit, Layout(pp=2), {}) for habit in HABITS),
    *(("data in place", Layout(pp=2, schedule=schedule), {}) for schedule in ("gpipe", "zb_v")),
    *((habit, Layout(pp=2), {"recompute": "full"}) for habit in ("replaced", "frozen parameter", "plain attribute")),
]


@pytest.mark.parametrize(("habit", "layout", "options"), fewer(CASES, extended=CASES[1::3]), ids=str)
def test_backward_finds_what_its_forward_used(
    habit: str, layout: Layout, options: dict[str, Any], tmp_path: Path
) -> None:
    _compare(layout, options, habit, tmp_path)


def test_changes_that_begin_with_the_second_batch_are_found(tmp_path: Path) -> None:
    _compare(Layout(pp=2), {}, "late", tmp_path)


class Coupled(Model):
    def __init__(self, norm: bool) -> None:
        super().__init__("in place")
        if norm:
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in "abc"))


def _said(layout: Layout, norm: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(layout, strategy={"plan": None}).fit(Coupled(norm), _loader(ROWS))
    return [str(w.message) for w in caught if "one by one" in str(w.message)]


@pytest.mark.parametrize("norm", [True, False], ids=["batch norm", "in place"])
def test_blocks_that_couple_samples_are_said(norm: bool) -> None:
    for stage, texts in enumerate(run_program(Layout(pp=2, microbatches=2), _said, norm)):
        assert len(texts) == 1, (stage, texts)
        assert ("normalises over the samples of a microbatch" if norm else "changes `blocks.") in texts[0]


def _compare(layout: Layout, options: dict[str, Any], habit: str, tmp_path: Path) -> None:
    ((losses, state),) = run_program(PLAIN, _trained, habit, {}, str(tmp_path))
    for found, saved in run_program(layout, _trained, habit, options, str(tmp_path)):
        assert found == pytest.approx(losses, abs=1e-12)
        for name, value in state.items():
            torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-12)
