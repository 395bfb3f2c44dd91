"""What people's modules do in steps, blocks and hooks is at pp > 1 what it is on one device that takes the microbatches
one by one."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

from tests.distributed.training import PLAIN, Layout, make_trainer, run_program
from tests.ranks import RankError

PP2 = Layout(pp=2, microbatches=2)
INTERLEAVED = Layout(pp=2, microbatches=2, schedule="interleaved")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Base(LightningModule):
    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(self.block() for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.net(batch["x"]), batch["y"])
        self.log("loss", loss)
        return loss

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (x - y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

    @property
    def is_last_microbatch(self) -> bool:
        """Of what one device takes for a batch."""
        done = self.trainer.fit_loop.epoch_loop.batch_progress.current.ready
        return done % self.trainer.accumulate_grad_batches == 0


class Averages(Base):
    """Of an average that no step calls, and that nobody has frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.ema = copy.deepcopy(self.net)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.is_last_microbatch:
            with torch.no_grad():
                for mean, value in zip(self.ema.parameters(), self.net.parameters(), strict=True):
                    mean.copy_(0.9 * mean + 0.1 * value)


class AveragesACritic(Base):
    """One of two networks that are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = nn.Sequential(*(Block() for _ in range(4)))
        self.target = copy.deepcopy(self.critic).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            wanted = batch["y"] + 0.9 * self.target(batch["x"])
        return self.loss(self.critic(batch["x"]), wanted) - 0.1 * self.critic(self.net(batch["x"])).mean()

    def on_train_batch_end(self, *args: Any) -> None:
        if self.is_last_microbatch:
            for mean, value in zip(self.target.parameters(), self.critic.parameters(), strict=True):
                mean.data.lerp_(value.data, 0.1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.net.parameters(), *self.critic.parameters()], lr=0.1)


class AveragesByTorch(Base):
    def __init__(self) -> None:
        super().__init__()
        self.ema = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))

    def on_train_batch_end(self, *args: Any) -> None:
        if self.is_last_microbatch:
            self.ema.update_parameters(self.net)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(self.ema(batch["x"]), batch["y"]))


class Counting(Block):
    """Counts its experts' load, whose length depends on values, under `no_grad`."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.up(x).topk(2, -1)[1]
        with torch.no_grad():
            self.load += torch.bincount(chosen.flatten(), minlength=16).to(self.load)
        return super().forward(x)


class Counts(Base):
    block = Counting


class Learning(Block):
    """Takes a gradient of its own memory at test time (Titans, TTT)."""

    def forward(self, x: Tensor) -> Tensor:
        memory = dict(self.down.named_parameters())

        def error(weights: dict[str, Tensor], row: Tensor) -> Tensor:
            return (functional_call(self.down, weights, (self.up(row),)) - row).square().mean()

        whole = grad(lambda weights: error(weights, x))(memory)["bias"]
        each = vmap(grad(error), in_dims=(None, 0))(memory, x)["bias"]
        return super().forward(x) + whole + each


class Learns(Base):
    block = Learning


class WritesBatch(Base):
    """Changes the batch's dict, and asks for a value of it before the blocks."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch["x"] = batch["x"] * 0.5 + 0.1
        if (batch["x"] > 100).any():
            batch["x"] = batch["x"].clamp(max=100)
        return super().training_step(batch, batch_idx)


class PopsBatch(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch["y"] = batch.pop("y") * 0.5
        return super().training_step(batch, batch_idx)


class SetsRates(Base):
    """Counts on its optimizer, before the blocks, and sets rates by that, and others behind the blocks."""

    def on_train_start(self) -> None:
        self.trainer.optimizers[0].calls = 0  # type: ignore[attr-defined]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.trainer.optimizers[0]
        optimizer.calls += 1
        optimizer.param_groups[0]["lr"] = 0.1 / optimizer.calls
        loss = super().training_step(batch, batch_idx)
        optimizer.param_groups[0]["momentum"] = 0.1 * optimizer.calls
        return loss


class Replaces(Base):
    """A buffer, after the last block; a callback goes by it on all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss


class RateByMean(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        if isinstance(module, Replaces) and module.is_last_microbatch:
            trainer.optimizers[0].param_groups[0]["lr"] = 0.1 * float(module.mean)


class HasNoTest(Base):
    test_step = None  # type: ignore[assignment]


class AveragesByLists(Averages):
    """Block by block, whose lists are empty on other stages."""

    @torch.no_grad()
    def on_train_batch_end(self, *args: Any) -> None:
        if self.is_last_microbatch:
            for ema, net in zip(self.ema, self.net, strict=True):
                means, values = list(ema.parameters()), list(net.parameters())
                torch._foreach_mul_(means, 0.9)
                torch._foreach_add_(means, values, alpha=0.1)


class SetsBuffer(Base):
    """Of a loss, behind the last block, by `.data` (lightly's DINOLoss)."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.Module()
        self.criterion.register_buffer("center", torch.zeros(8))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y + self.criterion.center)
        self.criterion.center.data = 0.9 * self.criterion.center + 0.1 * x.detach().mean(0)
        return loss


class MaskedTeacher(Averages):
    """What a mask keeps, on whatever stage, is another number in every microbatch, and so are shapes; the network
    that is trained comes after that."""

    def __init__(self) -> None:
        super().__init__()
        self.ema.requires_grad_(False)
        self.head, self.ema_head = nn.Linear(1, 3), nn.Linear(1, 3).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mask = batch["x"] > 0
        with torch.no_grad():
            aim = self.ema_head(self.ema(batch["x"])[mask].unsqueeze(-1))
        loss = self.loss(self.head(self.net(batch["x"])[mask].unsqueeze(-1)), aim + 1)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class MasksEarly(Base):
    """What a mask keeps of an early block, and goes on with."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mask = batch["x"].sum(-1) > -100
        mask[0] = batch["y"][0, 0] > 0
        h = self.net[0](batch["x"])
        h = torch.cat([h[~mask], h[mask, :]]) + h[..., 0][mask].sum()
        loss = self.loss(self.net[3](self.net[2](self.net[1](h))), batch["y"])
        self.log("loss", loss)
        return loss


class GrowsWithSteps(Base):
    """A curriculum: longer sequences in later steps, of batches that all look alike."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = (torch.stack([batch[key]] * 4, 1)[:, : 1 + self.progress] for key in ("x", "y"))
        loss = self.loss(self.net(x.cumsum(1)), y)
        self.log("loss", loss)
        return loss

    @property
    def progress(self) -> int:
        return min(self.global_step, 3)


class GrowsWithEpochs(GrowsWithSteps):
    @property
    def progress(self) -> int:
        return self.current_epoch


def _samples(n: int) -> list[dict[str, Tensor]]:
    def draw(seed: int) -> Tensor:
        return torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))

    return [{"x": draw(i), "y": draw(100 + i)} for i in range(n)]


def _fit(
    layout: Layout, kind: type[Base], stages: list[list[str]] | None = None
) -> tuple[dict[str, Tensor], list[float]]:
    torch.manual_seed(0)
    module, size, accumulated = kind(), 4, 1
    if layout.plain and kind is not MaskedTeacher:  # whose loss is that of the whole batch
        size, accumulated = 2, 2
    options = {
        "callbacks": [RateByMean()],
        "max_epochs": 1 + issubclass(kind, GrowsWithEpochs),
        "accumulate_grad_batches": accumulated,
        "use_distributed_sampler": False,
    }
    trainer = make_trainer(layout, strategy=None if layout.plain else {"plan": None, "stages": stages}, **options)
    loaders = [DataLoader(_samples(n), batch_size=size) for n in (16, 4)]  # type: ignore[arg-type]
    trainer.fit(module, loaders[0], loaders[1] if hasattr(module, "ema") else None)
    trainer.save_checkpoint(path := f"{layout}.ckpt")
    group = trainer.optimizers[0].param_groups[0]
    state: dict[str, Tensor] = torch.load(path, weights_only=False)["state_dict"]
    return state, [group["lr"], group["momentum"]]


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((kind, PP2) for kind in (Averages, AveragesByTorch, Counts, Learns, WritesBatch, PopsBatch, SetsRates)),
        *((kind, PP2) for kind in (Replaces, HasNoTest, MaskedTeacher, MasksEarly, AveragesByLists, SetsBuffer)),
        *((kind, PP2) for kind in (GrowsWithSteps, GrowsWithEpochs, AveragesACritic)),
        *((kind, INTERLEAVED) for kind in (WritesBatch, PopsBatch, MaskedTeacher, MasksEarly)),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_as_on_one_device(kind: type[Base], layout: Layout) -> None:
    [(expected, rates)] = run_program(PLAIN, _fit, kind)
    for found, found_rates in run_program(layout, _fit, kind):
        assert found_rates == pytest.approx(rates, rel=1e-9)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-12, msg=name)


class CountsInBuffer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        return super().training_step(batch, batch_idx)


def _said(layout: Layout, kind: type[Base], stages: list[list[str]] | None = None) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _fit(layout, kind, stages)
    return [str(x.message) for x in caught]


@pytest.mark.parametrize(("kind", "name"), [(CountsInBuffer, "calls"), (SetsRates, "optimizer.calls")])
def test_counters_are_told(kind: type[Base], name: str) -> None:
    said = run_program(PP2, _said, kind)
    assert any(f"the step counts its calls in `{name}`" in text for text in said[0])


class LogsNorm(Base):
    """Of all weights, of which a stage has some."""

    def on_train_epoch_end(self) -> None:
        self.log("norm", torch.stack([p.detach().norm() for p in self.parameters()]).square().sum())


class LogsSum(Base):
    def on_train_epoch_end(self) -> None:
        self.log("sum", sum(p.detach().abs().sum() for p in self.parameters()))


class LogsOneNorm(Base):
    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:  # the last stage
            self.last = self.net[3].down.weight.norm().item()


@pytest.mark.parametrize(("kind", "by"), [(LogsNorm, "norm"), (LogsSum, "sum"), (LogsOneNorm, "")])
def test_numbers_of_one_stage_are_told(kind: type[Base], by: str) -> None:
    said = " ".join(run_program(PP2, _said, kind)[0])
    assert (f"`on_train_epoch_end` takes a number (`{by}`) of parameters" in said) == bool(by)
    assert ("takes a number" in said) == bool(by)


def test_averages_that_are_kept_apart_are_told() -> None:
    stages = [["net.0", "net.1", "ema.2", "ema.3"], ["net.2", "net.3", "ema.0", "ema.1"]]
    said = [run_program(PP2, _said, Averages, chosen)[0] for chosen in (stages, None)]
    told = ["`ema.0` is like `net.0` and on another pipeline stage" in " ".join(texts) for texts in said]
    assert told == [True, False]


def _fit_columns(layout: Layout, column: str) -> list[str]:
    torch.manual_seed(0)
    module = Base()
    made = {
        "several": lambda rows: torch.cat([row["y"][:3] for row in rows]),
        "count": len,
    }[column]

    def collate(rows: list[dict[str, Tensor]]) -> dict[str, Any]:
        return {name: torch.stack([row[name] for row in rows]) for name in ("x", "y")} | {column: made(rows)}

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(layout, strategy={"plan": None}, use_distributed_sampler=False)
        trainer.fit(module, DataLoader(_samples(8), batch_size=4, collate_fn=collate))  # type: ignore[arg-type]
    return [str(x.message) for x in caught]


def test_columns_that_the_rule_would_not_cut() -> None:
    with pytest.raises(RankError, match=r"a tensor of shape \(9,\), 3 rows a sample") as error:
        run_program(PP2, _fit_columns, "several")
    assert len(error.value.failures) == 2
    assert any(
        "holds a number that is that of its samples" in text for text in run_program(PP2, _fit_columns, "count")[0]
    )
