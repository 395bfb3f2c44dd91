"""Weights that hooks put into checkpoints themselves."""

from __future__ import annotations

import io
import tempfile
import warnings
from collections import namedtuple
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from safetensors.torch import save as save_safetensors
from torch import Tensor, nn

from tests.distributed.training import QUIET
from tests.ranks import RankError, run_ranks, run_reference

PLAN = {"blocks.*.0": "column", "blocks.*.2": "row"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "plan": PLAN},
    "pp2": {"pp": 2, "microbatches": 2},
    "tp2-pp2": {"tp": 2, "pp": 2, "microbatches": 2, "plan": PLAN},
    "zero3": {"dp": 2, "zero": 3},
    "tp2-folder": {"tp": 2, "plan": PLAN, "checkpoint": "folder"},
}
Pair = namedtuple("Pair", "first second")


class Lit(LightningModule):
    """Residual blocks, of which the last are adapters, say.

    Args:
        habit: what it saves.
    """

    def __init__(self, habit: str) -> None:
        super().__init__()
        self.habit = habit
        self.start, self.end = nn.Linear(6, 8), nn.Linear(8, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(4))
        for block in self.blocks:
            block.register_buffer("scale", torch.rand(8))  # type: ignore[operator]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.start(batch)
        for block in self.blocks:
            x = x + block(x)
        return (self.end(x) - batch).square().mean()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.habit == "beside":
            checkpoint["module"] = self.state_dict()
            checkpoint["half"] = {"inner": [{name: x.cpu().half() for name, x in self.blocks.state_dict().items()}]}
            checkpoint["list"] = [p.data for p in self.parameters()]
            checkpoint["one"] = self.blocks[1][0].weight.detach().clone()  # type: ignore[index]
            checkpoint["pair"] = Pair(self.blocks[0][2].weight, "text")  # type: ignore[index]
            checkpoint["state_dict"]["again"] = self.blocks[3][0].weight.detach()  # type: ignore[index]
        elif self.habit == "turned":
            checkpoint["turned"] = [p.detach() for p in (*self.blocks.parameters(), *self.end.parameters())]
            self.end.weight.data = self.end.weight.data.clone()  # what is no copy of a weight has no name
            assert isinstance(self.end.weight.type(), str)
        elif self.habit == "computed":
            checkpoint["turned"] = self.blocks[3][0].weight.detach().t()  # type: ignore[index]
        elif self.habit == "computed elsewhere":
            checkpoint["turned"] = self.blocks[0][0].weight.detach().t()  # type: ignore[index]
        elif self.habit == "adapters alone":
            checkpoint["state_dict"] = {name: x for name, x in self.state_dict().items() if "blocks.3" in name}
        elif self.habit == "writes" and self.trainer.is_global_zero:
            torch.save(self.blocks.state_dict(), io.BytesIO())
        elif self.habit == "filtered":
            checkpoint["state_dict"] = {name: x for name, x in checkpoint["state_dict"].items() if "start" not in name}
            checkpoint["extra"] = self.blocks.state_dict()
        elif self.habit == "writes safetensors":
            save_safetensors(dict(self.blocks.state_dict()))
        elif self.habit == "pickles":
            torch.save(self.blocks, io.BytesIO())
        elif self.habit == "rank zero" and self.trainer.is_global_zero:
            checkpoint["module"] = self.state_dict()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        rows = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
        return torch.utils.data.DataLoader(rows, batch_size=4)


class Keeps(Callback):
    """Its state is about weights."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.module = pl_module

    def state_dict(self) -> dict[str, Any]:
        return {"blocks": dict(self.module.blocks.state_dict()) if hasattr(self, "module") else {}}  # type: ignore[union-attr, operator]


class Counts(Callback):
    """Its state is nothing of weights, and global rank 0 alone shows it."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.shown = self.state_dict() if trainer.is_global_zero else {}

    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}


class KeepsHere(Keeps):
    """Some ranks have it."""


def save_alone(rank: int, world_size: int, layout: dict[str, Any], folder: str) -> str:
    from lightning_megatp import MegaTPStrategy

    torch.manual_seed(0)
    strategy = MegaTPStrategy(summary=False, timeout=timedelta(seconds=20), **layout)
    options: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true", "use_distributed_sampler": False, **QUIET}
    callbacks = [*([KeepsHere()] if rank == 0 else []), Counts(), Keeps()]
    trainer = Trainer(devices=world_size, strategy=strategy, callbacks=callbacks, max_epochs=1, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Lit("nothing"))
        trainer.save_checkpoint(Path(folder, "saved.ckpt"))
    return " ".join(str(warning.message) for warning in caught)


def save(rank: int, world_size: int, habit: str, layout: dict[str, Any], folder: str) -> str:
    strategy: Any = "auto"
    if layout:
        from lightning_megatp import MegaTPStrategy

        strategy = MegaTPStrategy(**{"plan": None, "summary": False, **layout})
    torch.manual_seed(0)
    options: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true", "use_distributed_sampler": False, **QUIET}
    trainer = Trainer(devices=world_size, strategy=strategy, callbacks=[Keeps()], max_epochs=1, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = Lit(habit)
        trainer.fit(module)
        trainer.save_checkpoint(Path(folder, "saved.ckpt"))
        if habit == "whole parameters":
            with trainer.strategy.whole_parameters():  # type: ignore[attr-defined]
                assert module.state_dict()["blocks.0.0.weight"].shape == (8, 8)
        elif habit == "asks":
            module.blocks.state_dict()
    return " ".join(str(warning.message) for warning in caught if "checkpoint" in str(warning.message))


def save_one(habit: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        save(0, 1, habit, {}, folder)
        return torch.load(Path(folder, "saved.ckpt"), weights_only=False)


def assert_same(found: Any, expected: Any, at: str = "") -> None:
    assert type(found) is type(expected) or isinstance(expected, (dict, Tensor)), at
    if isinstance(expected, dict):
        assert list(found) == list(expected), at
    items = expected.items() if isinstance(expected, dict) else enumerate(expected)
    if isinstance(expected, Tensor):
        assert torch.allclose(found, expected, rtol=1e-9 if found.dtype == torch.float64 else 1e-3), at
    elif isinstance(expected, (dict, list, tuple)):
        assert len(found) == len(expected), at
        for key, value in items:
            assert_same(found[key], value, f"{at}.{key}")
    else:
        assert found == expected, at


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if "folder" not in layout])
@pytest.mark.parametrize("habit", ["beside", "adapters alone", "filtered"])
def test_weights_in_a_file_are_whole(habit: str, layout: str, tmp_path: Path) -> None:
    expected = run_reference(save_one, habit)
    run_ranks(4 if layout == "tp2-pp2" else 2, save, habit, LAYOUTS[layout], str(tmp_path))
    found = torch.load(tmp_path / "saved.ckpt", weights_only=False)
    for key in ("state_dict", "module", "half", "list", "one", "pair"):
        if key in expected:
            assert_same(found[key], expected[key], key)
    assert_same(found["callbacks"]["Keeps"], expected["callbacks"]["Keeps"])


def test_weights_in_a_folder_are_whole(tmp_path: Path) -> None:
    from lightning_megatp.checkpoint.folder import Folder

    expected = run_reference(save_one, "beside")
    run_ranks(2, save, "beside", LAYOUTS["tp2-folder"], str(tmp_path))
    found = Folder(tmp_path / "saved.ckpt").meta(False)
    for key in ("module", "half", "list", "one", "pair"):
        assert_same(found[key], expected[key], key)


def test_what_one_rank_alone_saves_is_said(tmp_path: Path) -> None:
    said = run_ranks(2, save, "rank zero", LAYOUTS["tp2"], str(tmp_path))
    assert "on some ranks only" in said[0]


@pytest.mark.parametrize("layout", ["tp2", "zero3"])
def test_what_a_hook_writes_to_a_file_of_its_own_is_said(layout: str, tmp_path: Path) -> None:
    said = run_ranks(2, save, "writes", LAYOUTS[layout], str(tmp_path))
    assert "`on_save_checkpoint` writes `blocks.0.0.weight`, of which each rank holds a part" in said[0]


def test_divided_weights_as_safetensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RankError, match="`on_save_checkpoint` writes parameters to a file, of which each data-parallel"
    ):
        run_ranks(2, save, "writes safetensors", LAYOUTS["zero3"], str(tmp_path))


@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero3"])
def test_a_pickled_module_is_refused(layout: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"`trainer.save_checkpoint\(path, weights_only=True\)`, on all ranks, writes"):
        run_ranks(2, save, "pickles", LAYOUTS[layout], str(tmp_path))


def test_one_rank_may_call_hooks_or_have_callbacks_of_its_own(tmp_path: Path) -> None:
    expected = run_reference(save_one, "nothing")
    said = run_ranks(2, save_alone, LAYOUTS["tp2"], str(tmp_path))
    found = torch.load(tmp_path / "saved.ckpt", weights_only=False)
    assert found["callbacks"]["Counts"] == {"count": 1}
    assert_same(found["callbacks"]["Keeps"], expected["callbacks"]["Keeps"])
    assert "`state_dict` puts weights into the checkpoint on some ranks only" in said[0]


def test_what_is_computed_of_parts_is_said(tmp_path: Path) -> None:
    said = run_ranks(2, save, "computed", LAYOUTS["tp2"], str(tmp_path))
    assert "computes of `blocks.3.0.weight`, of which each rank holds a part" in said[0]
    with pytest.raises(RankError, match="computes of weights of other pipeline stages"):
        run_ranks(2, save, "computed elsewhere", LAYOUTS["pp2"], str(tmp_path))


def test_another_order_of_weights_is_said(tmp_path: Path) -> None:
    said = run_ranks(2, save, "turned", LAYOUTS["pp2"], str(tmp_path))
    assert "`turned` has weights of several pipeline stages in another order" in said[0]
    assert "after a run" not in said[0]  # hooks that save may ask for what is completed


@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero3"])
def test_a_state_dict_of_parts_after_a_run_is_said(layout: str, tmp_path: Path) -> None:
    said = run_ranks(2, save, "asks", LAYOUTS[layout], str(tmp_path))
    assert "`state_dict()` after a run has the part" in said[0]
    assert ("whole_parameters" in said[0]) == (layout == "tp2")


def test_a_state_dict_of_whole_parameters_is_whole(tmp_path: Path) -> None:
    assert not any(run_ranks(2, save, "whole parameters", LAYOUTS["tp2"], str(tmp_path)))
