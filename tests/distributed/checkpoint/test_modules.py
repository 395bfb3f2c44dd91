"""Checkpoints of a LightningModule that keeps its network among its hyperparameters, or puts modules there itself."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import MeanMetric

from tests.distributed.training import QUIET
from tests.ranks import run_ranks, run_reference

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "microbatches": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero3": {"dp": 2, "zero": 3},
    "tp2-folder": {"tp": 2, "checkpoint": "folder"},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # No bias before BatchNorm: its gradient is zero but for rounding, which AdamW turns into steps of any sign.
        self.up, self.norm, self.down = nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Linear(16, 6)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight.requires_grad = False
        self.tied = self.head
        self.register_buffer("scale", torch.full((6,), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.norm(self.up(x)).relu())) * self.scale


class Holder:
    """An object of the user's with a module and a metric in it."""

    def __init__(self) -> None:
        self.part, self.metrics = nn.Linear(6, 6), {"mean": MeanMetric()}


class Lit(LightningModule):
    def __init__(self, net: nn.Module, more: dict[str, Any], width: int = 6) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is saved anyway
            self.save_hyperparameters()
        self.net, self.more, self.part = net, more["last"][0], more["holder"].part
        self.mean = more["holder"].metrics["mean"]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.part(self.more(self.net(batch))) - batch).square().mean()
        self.mean(loss.detach())
        self.log("mean", self.mean)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)

    def train_dataloader(self) -> Any:
        rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(3)).double()
        return torch.utils.data.DataLoader(rows, batch_size=4)


def save(rank: int, world_size: int, layout: dict[str, Any], folder: str) -> list[str]:
    strategy: Any = "auto"
    if layout:
        from lightning_megatp import MegaTPStrategy

        strategy = MegaTPStrategy(**{"summary": False, **layout})
    torch.manual_seed(0)
    module = Lit(Net(), {"last": [nn.Linear(6, 6)], "rate": 0.1, "holder": Holder()})
    options: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true", "use_distributed_sampler": False, **QUIET}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for run in ("first", "second"):
            trainer = Trainer(devices=world_size, strategy=strategy, max_epochs=1, **options)
            trainer.fit(module)
            trainer.save_checkpoint(Path(folder, f"{run}.ckpt"))
            if layout:
                strategy = type(strategy)(**{"summary": False, **layout})
    return [str(warning.message) for warning in caught if "hyperparam" in str(warning.message)]


def save_one() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        save(0, 1, {}, folder)
        return {run: torch.load(Path(folder, f"{run}.ckpt"), weights_only=False) for run in ("first", "second")}


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if "folder" not in layout])
def test_modules_among_hyperparameters_are_those_of_one_device(layout: str, tmp_path: Path) -> None:
    expected = run_reference(save_one)
    run_ranks(2, save, LAYOUTS[layout], str(tmp_path))
    for run in ("first", "second"):
        found = torch.load(tmp_path / f"{run}.ckpt", weights_only=False)["hyper_parameters"]
        hoped = expected[run]["hyper_parameters"]
        assert set(found) == set(hoped) == {"net", "more", "width"}
        held = found["more"]["holder"].part, hoped["more"]["holder"].part
        assert type(found["more"]["holder"].metrics["mean"]) is MeanMetric
        for ours, theirs in ((found["net"], hoped["net"]), (found["more"]["last"][0], hoped["more"]["last"][0]), held):
            assert [type(x) for x in ours.modules()] == [type(x) for x in theirs.modules()]
            assert [p.requires_grad for p in ours.parameters()] == [p.requires_grad for p in theirs.parameters()]
            assert ours.state_dict().keys() == theirs.state_dict().keys()
            if layout != "pp2":  # its BatchNorm is of microbatches
                for name, x in theirs.state_dict().items():
                    torch.testing.assert_close(ours.state_dict()[name], x, rtol=1e-9, atol=1e-12)
        assert found["net"].tied is found["net"].head
        loaded = Lit.load_from_checkpoint(tmp_path / f"{run}.ckpt", weights_only=False)
        assert torch.equal(loaded.net.up.weight, found["net"].up.weight)  # type: ignore[union-attr]
        assert loaded.eval().net(torch.ones(2, 6).double()).shape == (2, 6)


def test_a_folder_leaves_modules_out(tmp_path: Path) -> None:
    said, _ = run_ranks(2, save, LAYOUTS["tp2-folder"], str(tmp_path))
    assert any("leave out the hyperparameter `net`" in text for text in said)
    assert any("leave out the hyperparameter `more`" in text for text in said)


class Written(LightningModule):
    """As those of PyTorch Forecasting: a checkpoint has its loss, a metric, and they are taken from there."""

    def __init__(self, taken: bool) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 6))
        self.specials, self.taken = nn.ModuleDict({"mean": MeanMetric(), "loss": nn.MSELoss()}), taken

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.specials["loss"](self.net(batch), batch)
        self.specials["mean"](loss.detach(), len(batch))
        self.log("mean", self.specials["mean"], on_step=False, on_epoch=True)
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["specials"] = [dict(self.specials.items()), self.net[0]]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        (specials, _) = checkpoint["specials"]
        if self.taken:
            for name, module in specials.items():
                self.specials[name] = module

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(3)).double()
        return torch.utils.data.DataLoader(rows, batch_size=8)


def write(rank: int, world_size: int, layout: dict[str, Any], folder: str, taken: bool) -> list[float]:
    strategy: Any = "auto"
    found = []
    options: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true", "use_distributed_sampler": False, **QUIET}
    for epochs in (1, 2):
        if layout:
            from lightning_megatp import MegaTPStrategy

            strategy = MegaTPStrategy(**{"summary": False, **layout})
        torch.manual_seed(0)
        trainer = Trainer(devices=world_size, strategy=strategy, max_epochs=epochs, **options)
        path = Path(folder, f"{epochs - 1}.ckpt") if epochs > 1 else None
        trainer.fit(Written(taken), ckpt_path=path, weights_only=False)
        trainer.save_checkpoint(Path(folder, f"{epochs}.ckpt"))
        found.append(float(trainer.callback_metrics["mean"]))
    return found


def write_one(taken: bool) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        return write(0, 1, {}, folder, taken)


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero3"])
def test_modules_that_a_hook_puts_there_are_those_of_one_device(layout: str, taken: bool, tmp_path: Path) -> None:
    expected = run_reference(write_one, taken)
    found = run_ranks(2, write, LAYOUTS[layout], str(tmp_path), taken)
    assert all(x == pytest.approx(expected, rel=1e-9) for x in found), (found, expected)
    checkpoint = torch.load(tmp_path / "1.ckpt", weights_only=False)
    specials, up = checkpoint["specials"]
    assert type(specials["mean"]) is MeanMetric and type(specials["loss"]) is nn.MSELoss and type(up) is nn.Linear
    assert torch.equal(up.weight, checkpoint["state_dict"]["net.0.weight"])
