"""Buffers that steps change, at dp > 1: every rank's are what Lightning's DDP makes of them."""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Trainer, callbacks
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.training import LIGHTNING_2_6, QUIET
from tests.ranks import RankError, run_ranks

WIDTH, BATCHES, PER_RANK = 6, 7, 4


class Codebook(nn.Module):
    """Follows averages of what is nearest to its entries, assigned anew; computes with them in the next step."""

    def __init__(self, late: int = 0) -> None:
        super().__init__()
        self.late = late
        self.register_buffer("codes", torch.randn(5, WIDTH, dtype=torch.float64))
        self.register_buffer("used", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int32))
        self.register_buffer("never", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        nearest = torch.cdist(x, self.codes).argmin(1)
        if self.training:
            self.calls += 1
            if self.calls > self.late:
                hits = nn.functional.one_hot(nearest, 5).to(x)
                means = hits.T @ x.detach() / hits.sum(0).clamp(min=1)[:, None]
                hit = hits.sum(0) > 0
                self.codes = torch.where(hit[:, None], 0.5 * self.codes + 0.5 * means, self.codes)
                self.used |= hit
        return self.codes[nearest]


class Silent(nn.Module):
    """A batch norm as some libraries write it: the kernel changes the statistics, and no version tells."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.mean, self.variance, training=self.training)


class Growing(nn.Module):
    """Keeps rows of the batches that it has seen."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after, self.calls = after, 0
        self.register_buffer("seen", torch.zeros(1, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            kept = [self.seen, x[:1].detach()] if self.calls > self.after else [x[:1].detach()]
            self.seen = torch.cat(kept)
        return x + self.seen.mean(0)


class Head(nn.Module):
    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.between, self.linear = between, nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + self.between(x)).squeeze(1)


class Statistics(pl.LightningModule):
    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), Silent())
        self.head = Head(between)
        self.losses: list[float] = []
        self.evaluated: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = (self(batch[0]) - batch[1]).square().mean()
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.evaluated.append({"out": self(batch[0])})

    def on_validation_end(self) -> None:
        if self.evaluated:  # by the last pipeline stage
            self.evaluated[-1] |= {name: x.detach().clone() for name, x in self.named_buffers()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def _data(batches: int, seed: int) -> DataLoader:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batches * PER_RANK * 2, WIDTH, generator=generator, dtype=torch.float64)
    x[::2] += 3  # the sampler gives these to rank 0, so that the ranks' statistics differ
    return DataLoader(TensorDataset(x, x.sum(1)), batch_size=PER_RANK, shuffle=False)


def _fit(rank: int, world_size: int, ours: dict[str, Any] | None, options: dict[str, Any], kind: Any) -> Any:
    torch.manual_seed(1)
    module = Statistics(kind[0](*kind[1:]))
    if ours is None:
        strategy: Any = DDPStrategy(process_group_backend="gloo")
    else:
        from lightning_megatp import MegaTPStrategy

        strategy = MegaTPStrategy(summary=False, **ours)
    settings = {"max_epochs": 2, "accelerator": "cpu", "precision": "64-true", **QUIET, **options}
    if settings.pop("averaged", False):
        settings["callbacks"] = [callbacks.EMAWeightAveraging(decay=0.5)]
    trainer = Trainer(devices=world_size, strategy=strategy, **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, _data(BATCHES, 2), _data(2, 3))
    told = [str(one.message) for one in caught if "buffers" in str(one.message)]
    state = trainer.strategy.lightning_module_state_dict()
    weights = {name: torch.as_tensor(x).clone() for name, x in state.items()}
    return {"losses": module.losses, "evaluated": module.evaluated, "state": weights, "told": told}


LAYOUTS = {
    "dp2": {"dp": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero3": {"dp": 2, "zero": 3},
    "tp2": {"tp": 2, "dp": 2, "plan": {"inner.0": "column_gather"}},
    "pp2": {"pp": 2, "dp": 2, "microbatches": 1, "stages": [["inner.*"], ["head"]]},
}
WAYS = {
    "plainly": {},
    "accumulated": {"accumulate_grad_batches": 3},
    "mid-epoch": {"val_check_interval": 3},
}


@pytest.mark.parametrize(
    ("layout", "way"),
    [("dp2", way) for way in WAYS] + [(layout, "plainly") for layout in LAYOUTS if layout != "dp2"],
)
def test_as_under_ddp(layout: str, way: str) -> None:
    want = run_ranks(2, _fit, None, WAYS[way], (Codebook,))
    ours = LAYOUTS[layout]
    tp, pp = ours.get("tp", 1), ours.get("pp", 1)
    got = run_ranks(2 * tp * pp, _fit, ours, WAYS[way], (Codebook,))
    for number, found in enumerate(got[: 2 * tp]):  # the last stage's, whose losses and evaluations tell of the first's
        expected = want[number // tp]
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=1e-10, atol=1e-12)
        for mine, theirs in zip(found["evaluated"], expected["evaluated"], strict=True):
            assert layout == "pp2" or mine.keys() == theirs.keys()
            for name in ("out",) if layout == "pp2" else theirs:
                torch.testing.assert_close(mine[name], theirs[name], rtol=1e-10, atol=1e-12, msg=name)
    for name, x in want[0]["state"].items():
        torch.testing.assert_close(got[0]["state"][name], x, rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.skipif(not LIGHTNING_2_6, reason="Lightning 2.5 has no EMAWeightAveraging")
@pytest.mark.parametrize("layout", ["dp2", "zero1", "tp2", "pp2"])
def test_averages_that_a_callback_puts_in_for_an_evaluation(layout: str) -> None:
    """All ranks evaluate with the first one's. (In the step after that, DDP's have each their own: its forwards without
    a gradient tell it that there is nothing to send.)"""
    options, ours = {"averaged": True, "max_epochs": 1}, LAYOUTS[layout]
    want = run_ranks(2, _fit, None, options, (Codebook,))
    tp, pp = ours.get("tp", 1), ours.get("pp", 1)
    for number, found in enumerate(run_ranks(2 * tp * pp, _fit, ours, options, (Codebook,))[: 2 * tp]):
        for mine, theirs in zip(found["evaluated"], want[number // tp]["evaluated"], strict=True):
            torch.testing.assert_close(mine["out"], theirs["out"], rtol=1e-10, atol=1e-12)


def test_changed_late() -> None:
    """First after the ranks told each other of steps 1, 2 and 4: told before the validation."""
    ranks = run_ranks(2, _fit, {"dp": 2}, {"max_epochs": 1}, (Codebook, 5))
    first, second = (rank["evaluated"][-1] for rank in ranks)
    assert first["head.between.used"].any()
    for name in ("codes", "used", "calls", "never"):
        assert torch.equal(first[f"head.between.{name}"], second[f"head.between.{name}"]), name


def test_shapes_that_change() -> None:
    """Known after the first step: each rank keeps its own, and the batch norm's are still sent."""
    got = run_ranks(2, _fit, {"dp": 2}, {"max_epochs": 1}, (Growing, 0))
    assert "each data-parallel rank keeps its own" in got[0]["told"][0] and "head.between.seen" in got[0]["told"][0]
    ours, theirs = (rank["evaluated"][-1] for rank in got)
    torch.testing.assert_close(ours["inner.1.running_mean"], theirs["inner.1.running_mean"], rtol=0, atol=0)
    assert ours["head.between.seen"].shape == (1 + BATCHES, WIDTH)
    assert not torch.equal(ours["head.between.seen"], theirs["head.between.seen"])


def test_a_shape_that_changes_late() -> None:
    with pytest.raises(RankError, match=r"`head.between.seen`.* was \(1, 6\) torch.float64 and is \(2, 6\)"):
        run_ranks(2, _fit, {"dp": 2}, {"max_epochs": 1}, (Growing, 3))
