"""Hooks that deal with samples, as projects for DDP have them: they gather over ranks, share out work, run forwards."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.training import DP2, PLAIN, PP2, TP2, TP2_DP2, Layout, make_trainer, run_program


@torch.jit.script
def modulate(x: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale)


class Normalise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        norm = x.square().mean(-1, keepdim=True).add(1e-3).sqrt()
        ctx.save_for_backward(norm)
        return x / norm

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (norm,) = ctx.saved_tensors
        return gradient / norm


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.scale = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(Normalise.apply(self.up(modulate(x, self.scale(x)))))


class Model(LightningModule):
    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit, self.losses = habit, []  # type: ignore[var-annotated]
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 1)
        # As vector quantisers for DDP have it, that are made when the processes are there.
        adds_up: Any = dist.all_reduce if dist.is_initialized() else torch.clone
        self.adds_up = {"keeps a function": adds_up, "keeps a partial": functools.partial(adds_up)}.get(habit)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.habit == "noise":
            noise = torch.rand(2 * self.trainer.num_devices, 8, generator=torch.Generator().manual_seed(batch_idx))
            batch = batch + noise.chunk(self.trainer.num_devices)[self.trainer.local_rank][0]
        loss = self(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.losses.append(self(batch).square().sum().item())

    def gathered(self, values: list[float]) -> list[float]:
        if self.trainer.world_size == 1:
            return values
        found: list[Any] = [None] * self.trainer.world_size
        dist.all_gather_object(found, values)
        return [x for part in found for x in part]

    def on_validation_epoch_end(self) -> None:
        if self.habit == "gathers":
            losses = self.gathered(self.losses)
            self.log("result", sum(losses))
        elif self.habit == "sums":
            total = torch.tensor([sum(self.losses), 1.0])
            if dist.is_available() and dist.is_initialized():
                dist.all_reduce(total)
            self.log("result", total[0] / total[1])
        elif self.adds_up is not None:
            total = torch.tensor([sum(self.losses), 1.0])
            self.adds_up(total)
            self.log("result", total[0])
        elif self.habit == "shares out":
            with torch.no_grad():
                total = sum(
                    self(torch.full((1, 8), float(i), dtype=self.dtype)).sum()
                    for i in range(self.global_rank, 4, self.trainer.world_size)
                )
            if self.trainer.world_size > 1:
                dist.all_reduce(total)
            self.log("result", total)
        elif self.habit == "transforms":
            self.log("result", torch.func.vmap(lambda x: x.square().sum())(torch.ones(3, 4)).sum())
        self.losses.clear()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _results(layout: Layout, habit: str) -> dict[str, float]:
    torch.manual_seed(0)
    module = Model(habit)
    rows = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    trainer = make_trainer(
        layout,
        strategy=None if layout.plain else {"plan": "auto" if layout.tp > 1 else None},
        use_distributed_sampler=False,
        max_epochs=1,
    )
    own = rows if layout.dp == 1 else rows.view(8, 2, 8)[:, trainer.strategy.global_rank // layout.tp]
    size = 4 // layout.dp
    trainer.fit(module, DataLoader(own, batch_size=size), DataLoader(own, batch_size=size))  # type: ignore[arg-type]
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


CASES = [
    *((habit, layout) for habit in ("gathers", "sums") for layout in (TP2, PP2, TP2_DP2)),
    *(("keeps a function", layout) for layout in (TP2, PP2, TP2_DP2)),
    ("keeps a partial", TP2),
    *(("shares out", layout) for layout in (TP2, TP2_DP2)),
    *(("noise", layout) for layout in (TP2, PP2)),
    *(("transforms", layout) for layout in (TP2, Layout(dp=2, zero=3))),
]


@pytest.mark.parametrize(("habit", "layout"), CASES, ids=str)
def test_as_on_copies_of_the_model(habit: str, layout: Layout) -> None:
    """What ranks see of the same samples counts once."""
    expected = run_program(DP2 if layout.dp > 1 else PLAIN, _results, habit)[0]
    for found in run_program(layout, _results, habit):
        assert found == pytest.approx(expected, rel=1e-9)


class Data(LightningDataModule):
    """A batch size for all devices, as in the Hydra template; the part of the samples that belongs to a device."""

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        rows = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        self.batch_size_per_device = 4 // self.trainer.world_size
        self.rows = rows[self.trainer.global_rank :: dist.get_world_size() if dist.is_initialized() else 1]

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.rows, batch_size=self.batch_size_per_device)  # type: ignore[arg-type]


class Scales(Callback):
    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        module.rate = 0.05 * trainer.num_devices


class SetUp(Model):
    written = -1

    def __init__(self) -> None:
        super().__init__("")
        del self.blocks

    def setup(self, stage: str) -> None:
        self.scale = 1 / self.trainer.world_size

    def configure_model(self) -> None:
        if not hasattr(self, "blocks"):
            self.blocks = nn.ModuleList(Block() for _ in range(2 * self.trainer.world_size))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx) * self.scale
        self.log("seen", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate)


class OneFileEach(Callback):
    """Asks for no number of ranks: its rank is the process's."""

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        module.written = trainer.global_rank


def _set_up(layout: Layout) -> dict[str, Any]:
    torch.manual_seed(0)
    module, data = SetUp(), Data()
    trainer = make_trainer(
        layout,
        strategy=None if layout.plain else {"plan": "auto" if layout.tp > 1 else None},
        use_distributed_sampler=False,
        callbacks=[Scales(), OneFileEach()],
    )
    trainer.fit(module, data)
    assert not {"setup", "configure_model"} & {*vars(data)} and "configure_model" not in vars(module)
    seen = {"steps": trainer.global_step, "loss": float(trainer.callback_metrics["seen"])}
    return {**seen, "rate": trainer.optimizers[0].param_groups[0]["lr"], "written": module.written}


@pytest.mark.parametrize("layout", [TP2, PP2, TP2_DP2], ids=str)
def test_set_up_counts_copies(layout: Layout) -> None:
    """Batch sizes, rates and parts of the data that are taken in `setup`, and layers made by number."""
    expected = run_program(DP2 if layout.dp > 1 else PLAIN, _set_up)[0]
    del expected["written"]
    found = run_program(layout, _set_up)
    assert [result.pop("written") for result in found] == list(range(layout.ranks))
    for result in found:
        assert result == pytest.approx(expected, rel=1e-9)
