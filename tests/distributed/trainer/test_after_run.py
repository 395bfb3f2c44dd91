"""What may be done with a model in parts after a run, and what may not."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.training import PLAIN, PP2, TP2, Layout, make_trainer, run_program

ZERO3 = Layout(dp=2, zero=3)


class Lit(LightningModule):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch
        for block in self.blocks:
            x = x + block(x)
        return (x - 1).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


def _loader() -> DataLoader[Tensor]:
    return DataLoader(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), batch_size=4)  # type: ignore[arg-type]


def _trainer(layout: Layout) -> Trainer:
    trainer: Trainer = make_trainer(layout, strategy=None if layout.plain else {"plan": "auto"})
    return trainer


def _train_by_another(layout: Layout) -> tuple[str, float, float]:
    trainer, module = _trainer(layout), Lit()
    trainer.fit(module, _loader())
    [before] = trainer.validate(module, _loader(), verbose=False)
    try:
        Trainer(accelerator="cpu", devices=1, max_epochs=1, logger=False, barebones=True).fit(module, _loader())
        said = ""
    except RuntimeError as error:
        said = str(error)
    [after] = trainer.validate(module, _loader(), verbose=False)
    return said, before["val"], after["val"]


@pytest.mark.parametrize("layout", [TP2, PP2, ZERO3], ids=str)
def test_no_other_strategy_trains_a_part(layout: Layout) -> None:
    for said, before, after in run_program(layout, _train_by_another):
        assert "has split this Lit" in said and "SingleDeviceStrategy would train" in said
        assert before == after


def _pickle(layout: Layout) -> list[str]:
    trainer, module = _trainer(layout), Lit()
    trainer.fit(module, _loader())
    said = []
    for part in (module, module.blocks[0]):
        try:
            pickle.dumps(part)
        except RuntimeError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("layout", [TP2, PP2, ZERO3, Layout(dp=2, zero=1)], ids=str)
def test_no_part_is_pickled(layout: Layout) -> None:
    for said in run_program(layout, _pickle):
        assert len(said) == 2 and all("is pickled whole" in text for text in said)


def _validate_from_a_file(layout: Layout, path: str) -> list[str]:
    trainer, module = _trainer(layout), Lit()
    trainer.fit(module, _loader())
    trainer.save_checkpoint(path)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.validate(module, _loader(), ckpt_path=path, verbose=False)
        loaded = [str(x.message) for x in said if "after a run" in str(x.message)]
        module.state_dict()
    return [*loaded, *(str(x.message) for x in said if "`state_dict()` after a run" in str(x.message))]


@pytest.mark.parametrize("layout", [TP2, PP2, ZERO3], ids=str)
def test_loading_after_a_run_asks_for_parts(layout: Layout, tmp_path: Path) -> None:
    said = run_program(layout, _validate_from_a_file, str(tmp_path / "a.ckpt"))
    assert [len(texts) for texts in said] == [1, 0], "the user's own call alone is told, on rank 0"


def _save_after_another(layout: Layout, path: str) -> None:
    trainer = _trainer(layout)
    trainer.fit(Lit(), _loader())
    trainer.validate(Lit(seed=1), _loader(), verbose=False)
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("layout", [TP2, PP2, ZERO3], ids=str)
def test_a_checkpoint_after_another_module_was_validated(layout: Layout, tmp_path: Path) -> None:
    saved = []
    for each in (PLAIN, layout):
        run_program(each, _save_after_another, str(path := tmp_path / f"{each}.ckpt"))
        saved.append(torch.load(path, weights_only=False))
    expected, found = saved
    torch.testing.assert_close(found["state_dict"], expected["state_dict"])
    shapes = [[tuple(state["exp_avg"].shape) for state in x["optimizer_states"][0]["state"].values()] for x in saved]
    assert shapes[0] == shapes[1]
    if layout.dp == 1:
        torch.testing.assert_close(found["optimizer_states"], expected["optimizer_states"])
