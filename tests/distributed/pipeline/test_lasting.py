"""Counters, running means and queues that a step changes in place between its blocks are those of one device."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.crossing import crossed
from tests.distributed.training import (
    PLAIN,
    Layout,
    Losses,
    make_trainer,
    run_program,
    shared_directory,
    train_on_microbatches,
)
from tests.ranks import RankError

WIDTH, ROWS, QUEUE = 6, 8, 12


class Scaled(nn.Linear):
    """Multiplies by a tensor that its backward needs."""

    def __init__(self, listed: bool) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.listed = [torch.ones(WIDTH, dtype=torch.float64)] if listed else []

    def forward(self, x_BD: Tensor) -> Tensor:
        h_BD: Tensor = super().forward(x_BD) * self.its_scale
        return h_BD

    @property
    def its_scale(self) -> Tensor:
        """A buffer; or where nobody finds it."""
        return self.listed[0] if self.listed else self.scale


class Keeps(LightningModule):
    """Has buffers, and a habit: what its step does to them before its blocks, and after."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit = habit
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        if habit in ("of_a_block", "converted", "for_backward"):
            self.blocks[0][0] = Scaled(habit == "for_backward")  # type: ignore[index]
        self.low = torch.full((WIDTH,), 0.5, dtype=torch.float32)
        self.table = torch.ones(WIDTH, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("ema", torch.ones(()))
        self.register_buffer("queue", torch.randn(WIDTH, QUEUE, generator=torch.Generator().manual_seed(1)))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def before(self, x_BD: Tensor) -> Tensor:
        if self.habit == "counts_early":
            self.calls += 1
            return x_BD * (1 + 1 / self.calls)
        if self.habit == "reads_early":  # the fifth microbatch, in the middle of a batch, is planned anew
            self.calls += 1
            return x_BD if self.calls < 6 else x_BD.tanh() * 2
        if self.habit == "lists_early":  # which a stage can do only if it knows of other stages' parameters
            self.calls += 1
            return x_BD if self.calls < 6 else x_BD * next(self.blocks[3].parameters()).dim()
        if self.habit in (
            "of_a_block",
            "converted",
            "for_backward",
        ):  # in the middle of the first batch, and of the second
            self.calls += 1
            if self.calls in (2, 7):
                self.blocks[0][0].its_scale.add_(1)  # type: ignore[index, operator, union-attr]
            return x_BD
        if self.habit == "normalizes":
            self.mean.lerp_(x_BD.mean(0), 0.1)
            return x_BD - self.mean
        if self.habit == "by_a_view":
            self.mean[: WIDTH // 2] += x_BD.mean(0)[: WIDTH // 2]
            return x_BD - self.mean
        if self.habit == "converted":  # as super-resolution networks do it with the means of colours
            self.low = self.low.type_as(x_BD)
            return x_BD * self.low
        if self.habit == "attribute":
            self.table.mul_(0.9)
            return x_BD * self.table
        if self.habit == "draws":
            self.mean.normal_()
            return x_BD + self.mean
        return x_BD

    def after(self, x_BD: Tensor, h_BD: Tensor, loss: Tensor) -> Tensor:
        if self.habit == "counts_late":
            self.calls += 1
            return loss * (1 + 1 / self.calls)
        if self.habit == "converted":
            return loss + F.mse_loss(h_BD + self.low, x_BD)
        if self.habit == "reads_late":
            self.calls += 1
            return loss if self.calls.item() < 6 else loss * 0.5
        if self.habit == "weighs":
            self.ema.mul_(0.9).add_(0.1 * loss.detach())
            return loss / self.ema
        if self.habit in ("queue", "queue_of_samples"):
            keys = (F.normalize(h_BD, dim=1) if self.habit == "queue" else x_BD).detach()
            loss = loss + (h_BD @ self.queue.clone().detach()).logsumexp(1).mean()
            with torch.no_grad():
                place = int(self.place)
                self.queue[:, place : place + len(keys)] = keys.T
                self.place[0] = (place + len(keys)) % QUEUE
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x_BD, y_BD = batch
        h_BD = self.blocks(self.before(x_BD))
        return self.after(x_BD, h_BD, F.mse_loss(h_BD, y_BD))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _loader(rows: int) -> DataLoader:
    x = torch.randn(4 * ROWS, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return DataLoader(TensorDataset(x, x.flip(1)), batch_size=rows)


def _keeping(layout: Layout, habit: str, root: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    module = Keeps(habit)
    trainer, losses = train_on_microbatches(layout, module, _loader, ROWS)
    path = shared_directory(layout, habit, root) / "last.ckpt"
    trainer.save_checkpoint(path)
    return losses, torch.load(path)["state_dict"], {**dict(module.named_buffers()), "table": module.table}


EARLY = [
    "counts_early",
    "reads_early",
    "lists_early",
    "of_a_block",
    "converted",
    "normalizes",
    "by_a_view",
    "attribute",
]
LATE = ["counts_late", "reads_late", "weighs", "queue", "queue_of_samples"]


LAYOUTS = [Layout(pp=2), Layout(pp=2, schedule="gpipe"), Layout(tp=2, pp=2)]


@pytest.mark.parametrize(("habit", "layout"), [*crossed(EARLY, LAYOUTS), *crossed(LATE, LAYOUTS)], ids=str)
def test_what_a_step_changes_in_place_is_what_it_is_on_one_device(layout: Layout, habit: str, tmp_path: Path) -> None:
    ((losses, state, buffers),) = run_program(PLAIN, _keeping, habit, str(tmp_path))
    for found, saved, held in run_program(layout, _keeping, habit, str(tmp_path)):
        assert found == pytest.approx(losses, abs=1e-12)
        for name, value in state.items():
            torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-12)
        for name, value in buffers.items():
            if name in held:  # one of a block is on its own stage alone
                torch.testing.assert_close(held[name], value, rtol=0, atol=1e-12)


def test_random_changes_are_alike_on_all_stages(tmp_path: Path) -> None:
    (_, saved, held), (_, _, others) = run_program(Layout(pp=2), _keeping, "draws", str(tmp_path))
    assert held["mean"].any() and torch.equal(held["mean"], others["mean"]) and torch.equal(saved["mean"], held["mean"])


class Refused(Keeps):
    """Does what stages can't all see."""

    def before(self, x_BD: Tensor) -> Tensor:
        if self.habit == "for_backward":
            return super().before(x_BD)
        if self.habit == "changed_late":
            return x_BD - self.mean
        if self.habit == "looked_at":
            return x_BD if self.calls < 3 else x_BD * 2
        if self.habit == "through_another":
            x_BD = x_BD * self.table
            self.table.copy_(self.mean)
            return x_BD
        return x_BD - self.mean.lerp_(x_BD.mean(0), 0.1) if self.habit == "virtual" else x_BD

    def after(self, x_BD: Tensor, h_BD: Tensor, loss: Tensor) -> Tensor:
        if self.habit in ("changed_late", "through_another"):
            self.mean.lerp_(x_BD.mean(0), 0.1)
        if self.habit == "by_a_view":
            self.mean.view(2, -1).add_(1)
        if self.habit == "looked_at":
            self.calls += 1
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.habit not in ("between", "by_a_view"):
            return super().training_step(batch, batch_idx)
        x_BD, y_BD = batch
        h_BD = x_BD - self.mean if self.habit == "by_a_view" else x_BD
        for block in self.blocks[:2]:
            h_BD = block(h_BD)
        if self.habit == "between":
            self.calls += 1
        for block in self.blocks[2:]:
            h_BD = block(h_BD)
        return self.after(x_BD, h_BD, F.mse_loss(h_BD, y_BD))


def _refused(layout: Layout, habit: str) -> None:
    make_trainer(layout, strategy={"plan": None}).fit(Refused(habit), _loader(ROWS))


@pytest.mark.parametrize(
    ("habit", "layout", "why"),
    [
        ("changed_late", Layout(pp=2), r"`lerp_` .* changes `mean` on pipeline stage 1, and other stages use it"),
        ("through_another", Layout(pp=2), r"`lerp_` .* changes `mean` on pipeline stage 1, and other stages use it"),
        ("by_a_view", Layout(pp=2), r"`add_` .* changes `mean` on pipeline stage 1, and other stages use it"),
        ("for_backward", Layout(pp=2), r"in between, here of 4, and the step changes .*. Change it in"),
        ("looked_at", Layout(pp=2), r"changes `calls` on pipeline stage 1, and other stages use it"),
        ("between", Layout(pp=3), r"changes `calls`, which outlives the step, between the pipeline's units"),
        ("virtual", Layout(pp=2, schedule="zb_v"), r"changes `mean` in place before its first block.*several stages"),
    ],
)
def test_what_a_stage_would_miss_is_refused(habit: str, layout: Layout, why: str) -> None:
    with pytest.raises(RankError, match=why):
        run_program(layout, _refused, habit)


class Evaluates(Keeps):
    """Validates by what training, or validation itself, changes."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x_BD, y_BD = batch
        if self.habit == "weighs":  # changed after the blocks, and used here before them
            x_BD = x_BD * self.ema
        if self.habit == "normalizes":
            self.mean.lerp_(x_BD.mean(0), 0.5)
            x_BD = x_BD - self.mean
        h_BD = self.blocks(x_BD)
        if self.habit == "normalizes_by_values" and h_BD.sum() < 1e9:  # the last stage runs such a step
            self.mean.lerp_(x_BD.mean(0), 0.5)
            h_BD = self.blocks(h_BD)
        self.log("val", F.mse_loss(h_BD, y_BD), batch_size=len(x_BD))

    def before(self, x_BD: Tensor) -> Tensor:
        return x_BD - self.mean if self.habit == "normalizes_by_values" else super().before(x_BD)


def _evaluating(layout: Layout, habit: str) -> tuple[list[float], list[float], Tensor]:
    torch.manual_seed(0)
    losses, module, values = Losses(), Evaluates(habit), []
    trainer = make_trainer(
        layout, strategy={"plan": None}, max_epochs=2, num_sanity_val_steps=2, callbacks=[losses], val_check_interval=2
    )
    module.on_validation_epoch_end = lambda: values.append(float(trainer.callback_metrics.get("val", 0)))  # type: ignore
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, _loader(ROWS), _loader(ROWS))
    return losses.seen, values, module.mean


@pytest.mark.parametrize("habit", ["weighs", "normalizes", "normalizes_by_values"])
def test_evaluation_finds_what_training_changed(habit: str) -> None:
    ((losses, values, mean),) = run_program(PLAIN, _evaluating, habit)
    for found, seen, held in run_program(Layout(pp=2, microbatches=1), _evaluating, habit):
        assert found == pytest.approx(losses, abs=1e-12)
        assert seen == pytest.approx(values, abs=1e-12)
        torch.testing.assert_close(held, mean, rtol=0, atol=1e-12)


class Decides(Keeps):
    """At the end of an epoch its hook decides by what steps have counted, and lowers the rate."""

    def __init__(self, habit: str) -> None:
        super().__init__(habit)
        self.seen: list[int] = []

    def after(self, x_BD: Tensor, h_BD: Tensor, loss: Tensor) -> Tensor:
        if self.habit == "a list":  # then the hook runs on the last stage alone
            self.seen.append(len(x_BD))
        else:
            self.calls += len(x_BD)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.calls + sum(self.seen) > ROWS:
            for group in self.optimizers().param_groups:  # type: ignore[union-attr]
                group["lr"] *= 0.1
        self.calls.zero_()
        self.seen.clear()


def _deciding(layout: Layout, habit: str) -> tuple[list[float], float]:
    torch.manual_seed(0)
    losses, module = Losses(), Decides(habit)
    apart = {"accumulate_grad_batches": layout.microbatches} if layout.plain else {}
    trainer = make_trainer(layout, strategy={"plan": None}, max_epochs=3, callbacks=[losses], **apart)
    large = mock.patch("lightning_megatp.pipeline.last_stage._SMALL", 0)
    with large if habit == "a large buffer" else contextlib.nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, _loader(ROWS // layout.microbatches if layout.plain else ROWS))
    n = layout.microbatches if layout.plain else 1
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return [sum(losses.seen[i : i + n]) for i in range(0, len(losses.seen), n)], rate


@pytest.mark.parametrize("habit", ["a buffer", "a large buffer", "a list"])
def test_hooks_decide_alike_on_all_stages(habit: str) -> None:
    ((losses, rate),) = run_program(PLAIN, _deciding, "a buffer" if habit == "a large buffer" else habit)
    assert rate == pytest.approx(1e-4)
    for found, of_stage in run_program(Layout(pp=2), _deciding, habit):
        assert of_stage == pytest.approx(rate) and found == pytest.approx(losses, abs=1e-12)


def test_options_of_optimizers_are_what_is_no_tensor() -> None:
    from lightning_megatp.pipeline.told.telling import options_of

    weight = nn.Parameter(torch.ones(2))
    ((adam,),) = options_of([torch.optim.Adam([weight], lr=0.1, betas=(0.5, 0.9))])
    assert (adam["lr"], adam["betas"], adam["amsgrad"]) == (0.1, (0.5, 0.9), False) and "params" not in adam
    ((tensors,),) = options_of([torch.optim.Adam([weight], lr=torch.tensor(0.1), foreach=False)])
    assert "lr" not in tensors
