"""A folder that all ranks write: from any layout to any other, every bit of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from tests.distributed.checkpoint.test_trainer import Losses
from tests.distributed.training import (
    DP2,
    DP2_PP2,
    PP2,
    TP2,
    TP2_DP2,
    TP2_PP2,
    WEIGHTS_ONLY,
    Layout,
    make_trainer,
    run_program,
    train_loader,
)
from tests.parity.variants import variant

ONE, TP4 = Layout(), Layout(tp=4)
ZB_V, INTERLEAVED = Layout(pp=2, schedule="zb_v"), Layout(pp=2, schedule="interleaved")
TP2_ZB_V, PP4 = Layout(tp=2, pp=2, schedule="zb_v"), Layout(pp=4, schedule="gpipe")
LAYOUTS = [ONE, TP2, PP2, DP2, ZB_V, INTERLEAVED, TP4, TP2_PP2, TP2_DP2, DP2_PP2, TP2_ZB_V, PP4]
ZERO = [
    Layout(dp=2, zero=1),
    Layout(dp=2, zero=3),
    Layout(tp=2, dp=2, zero=3),
    Layout(pp=2, dp=2, zero=1, microbatches=2),
    Layout(dp=4, zero=3, dp_replicate=2),
]
BATCHES = 5


class Saves(Callback):
    """After an epoch a folder, and a file of the same."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            save_both(trainer, self.root)


class SavesAtStart(Callback):
    """What was loaded, as a file."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def on_train_start(self, trainer: Any, module: Any) -> None:
        save_file(trainer, self.root / "loaded.ckpt")


def save_file(trainer: Any, path: Path) -> None:
    trainer.strategy.checkpoint, before = "file", trainer.strategy.checkpoint
    trainer.save_checkpoint(path)
    trainer.strategy.checkpoint = before


def save_both(trainer: Any, root: Path) -> None:
    trainer.save_checkpoint(root / "folder.ckpt")
    save_file(trainer, root / "file.ckpt")


def fit(layout: Layout, model: str, callbacks: list[Any], load: Path | None, **options: Any) -> list[float]:
    losses = Losses()
    options = {"max_epochs": 2, "strategy": {"checkpoint": "folder"}, **options}
    trainer = make_trainer(layout, model, callbacks=[losses, *callbacks], **options)
    data = train_loader(layout, BATCHES, vocab=variant(model).vocab)
    trainer.fit(variant(model).build(), data, ckpt_path=load, **WEIGHTS_ONLY)
    return losses.values


def write(layout: Layout, model: str, root: str) -> list[float]:
    """The losses of all steps, with a checkpoint in their middle."""
    here = Path(root) / str(layout)
    here.mkdir(parents=True, exist_ok=True)
    return fit(layout, model, [Saves(here)], None)


def read(layout: Layout, model: str, root: str, writer: Layout) -> tuple[list[float], bool]:
    """The losses after a writer's checkpoint, and whether what was loaded is what was saved."""
    there = Path(root) / str(writer)
    loaded = Path(root) / f"{layout} from {writer}"
    loaded.mkdir(exist_ok=True)
    losses = fit(layout, model, [SavesAtStart(loaded)], there / "folder.ckpt")
    same = True
    if torch.distributed.get_rank() == 0:
        same = equal(torch.load(loaded / "loaded.ckpt"), torch.load(there / "file.ckpt"))
    return losses, same


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Whether two checkpoints hold the same model and optimizers, bit by bit."""
    optimizers = zip(a["optimizer_states"], b["optimizer_states"], strict=True)
    return _same(a["state_dict"], b["state_dict"]) and all(_same(x, y) for x, y in optimizers)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def round_trips(model: str, writers: list[Layout], readers: list[Layout], root: Path) -> None:
    losses = {str(layout): run_program(layout, write, model, str(root))[0] for layout in writers}
    for reader in readers:
        for writer in writers:  # one by one: a call has two minutes, little on a busy machine
            for after, same in run_program(reader, read, model, str(root), writer):
                assert same, f"{reader} loads other bits than {writer} has saved"
                assert after == pytest.approx(losses[str(writer)][BATCHES:], abs=1e-9), f"{writer} -> {reader}"
                assert len(after) == BATCHES


def test_another_layout_goes_on(tmp_path: Path) -> None:
    round_trips("grouped_fused", [TP2_PP2], [DP2, ZB_V, TP4], tmp_path)


def test_divided_parameters_go_on(tmp_path: Path) -> None:
    round_trips("grouped_fused", [ZERO[2]], [ZERO[0], PP2], tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("model", ["grouped_fused", "uneven", "deep_tied"])
def test_all_pairs_of_layouts_that_divide(model: str, tmp_path: Path) -> None:
    layouts = [*ZERO, TP2_PP2, TP4]
    round_trips(model, layouts, layouts, tmp_path)


@pytest.mark.extended
@pytest.mark.parametrize("model", ["grouped_fused", "untied", "uneven", "deep_tied", "swiglu_own"])
def test_all_pairs_of_layouts(model: str, tmp_path: Path) -> None:
    round_trips(model, LAYOUTS, LAYOUTS, tmp_path)


def _other_precision(layout: Layout, root: str, writer: Layout) -> list[float]:
    path = Path(root) / str(writer) / "folder.ckpt"
    return fit(layout, "untied", [], path, precision="bf16-true" if layout.tp > 1 else "32-true")


@pytest.mark.extended
def test_another_precision_goes_on(tmp_path: Path) -> None:
    expected = run_program(TP2, write, "untied", str(tmp_path))[0][BATCHES:]
    for reader, within in ((PP2, 1e-4), (TP2, 0.1)):
        assert run_program(reader, _other_precision, str(tmp_path), TP2)[0] == pytest.approx(expected, rel=within)
