"""A checkpoint is a plain Trainer's, whatever wrote it, and any layout goes on from it."""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from tests.crossing import crossed
from tests.distributed.training import (
    DP2,
    LIGHTNING_2_6,
    PLAIN,
    TP2,
    TP2_DP2,
    WEIGHTS_ONLY,
    Layout,
    eval_loader,
    make_trainer,
    run_program,
    shared_directory,
    train_loader,
)
from tests.parity.variants import variant
from tests.ranks import RankError

TP4 = Layout(tp=4)
MODELS = ["tied", "grouped_fused", "uneven", "regularised", "manual", "configured"]


class Losses(Callback):
    """Keeps the mean loss of each batch."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.values.append(float(trainer.strategy.reduce(outputs["loss"], reduce_op="mean")))


def _train(layout: Layout, model: str, save: str, load: str | None, epochs: int) -> list[float]:
    """Train to `epochs` epochs of 4 batches, from a checkpoint or from the start, and save."""
    losses = Losses()
    trainer = make_trainer(layout, model, callbacks=[losses], max_epochs=epochs)
    # Lightning restores a float32 module before it makes it float64: only a float64 one restores every bit.
    module = variant(model).build().double()
    trainer.fit(module, train_loader(layout, 4), ckpt_path=load, **WEIGHTS_ONLY)
    trainer.save_checkpoint(save)
    return losses.values


def _read(path: str) -> dict[str, Any]:
    """With weights_only: a checkpoint holds no class of anyone's. In the process that can't import this package."""
    content: dict[str, Any] = torch.load(path, weights_only=True)
    assert not any(name.split(".")[0] == "lightning_megatp" for name in sys.modules)
    return content


def _save(layout: Layout, model: str, root: Path) -> str:
    path = str(shared_directory(layout, model, str(root)) / "first.ckpt")
    run_program(layout, _train, model, path, None, 1)
    return path


def assert_same(a: Any, b: Any, where: str = "checkpoint") -> None:
    """Equal structure, names and shapes; tensors within 1e-9."""
    if isinstance(a, dict) and isinstance(b, dict):
        assert list(a) == list(b), f"{where}: {list(a)} and {list(b)}"
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]")
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b) and len(a) == len(b), f"{where}: {a!r} and {b!r}"
        for index, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{index}]")
    elif isinstance(a, Tensor):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{where}: {a.shape} {a.dtype} and {b.shape} {b.dtype}"
        assert float((a.double() - b.double()).abs().max()) <= 1e-9 if a.numel() else True, where
    elif isinstance(a, float):
        assert a == pytest.approx(b, abs=1e-9), where
    else:
        assert a == b, f"{where}: {a!r} and {b!r}"


@pytest.mark.parametrize(
    ("model", "layout"), crossed(MODELS, [TP2, TP4, TP2_DP2], extended=[("uneven", TP2_DP2)]), ids=str
)
def test_the_file_is_that_of_a_plain_trainer(layout: Layout, model: str, tmp_path: Path) -> None:
    ours, plain = (run_program(PLAIN, _just_read, _save(where, model, tmp_path))[0] for where in (layout, PLAIN))
    assert_same(ours, plain)


def _without_random_states(content: dict[str, Any]) -> dict[str, Any]:
    """What Lightning itself does not save: with it, the same layout resumes bit-equal."""
    return {key: value for key, value in content.items() if key != "random_states"}


def _just_read(layout: Layout, path: str) -> dict[str, Any]:
    return _without_random_states(_read(path))


CHANGES = [(TP2, PLAIN), (PLAIN, TP2), (TP2, TP4), (TP4, DP2), (TP2_DP2, TP2), (DP2, TP2_DP2)]


@pytest.mark.parametrize(("model", "change"), crossed(MODELS, CHANGES, extended=[*product(MODELS, CHANGES[3:])]))
def test_another_layout_goes_on(change: tuple[Layout, Layout], model: str, tmp_path: Path) -> None:
    writer, reader = change
    expected = run_program(PLAIN, _train, model, str(tmp_path / "whole.ckpt"), None, 2)[0]
    path = _save(writer, model, tmp_path)
    second = str(tmp_path / "second.ckpt")
    for losses in run_program(reader, _train, model, second, path, 2):
        assert losses == pytest.approx(expected[4:], abs=1e-9), "goes on with the optimizer's state"
    assert_same(*(run_program(PLAIN, _just_read, file)[0] for file in (second, str(tmp_path / "whole.ckpt"))))


@pytest.mark.skipif(not LIGHTNING_2_6, reason="Lightning 2.5 starts a resumed epoch's loader twice")
def test_the_same_layout_resumes_bit_equal_with_dropout(tmp_path: Path) -> None:
    whole = run_program(TP2, _seeded, "both_dropouts", str(tmp_path / "whole.ckpt"), None, 2)
    run_program(TP2, _seeded, "both_dropouts", str(tmp_path / "first.ckpt"), None, 1)
    resumed = run_program(TP2, _seeded, "both_dropouts", str(tmp_path / "second.ckpt"), str(tmp_path / "first.ckpt"), 2)
    assert [losses[4:] for losses in whole] == resumed


def _seeded(layout: Layout, *args: Any) -> list[float]:
    """A resumed program starts with another state of the random generator."""
    torch.manual_seed(5 if args[2] is None else 6)
    return _train(layout, *args)


def _best_and_last(layout: Layout, root: str) -> list[float]:
    """What users do with ModelCheckpoint: test the best, resume the last."""
    directory = shared_directory(layout, "best", root)
    keep = ModelCheckpoint(directory, monitor="val_loss", save_last=True)
    trainer = make_trainer(layout, callbacks=[keep], enable_checkpointing=True, max_epochs=2)
    trainer.fit(variant("untied").build(), train_loader(layout, 3), eval_loader(layout, 2))
    best = trainer.test(dataloaders=eval_loader(layout, 2), ckpt_path="best", verbose=False)[0]["test_loss"]
    again = make_trainer(layout, max_epochs=3)
    again.fit(
        variant("untied").build(), train_loader(layout, 3), eval_loader(layout, 2), ckpt_path=directory / "last.ckpt"
    )
    return [best, float(again.callback_metrics["val_loss"])]


@pytest.mark.parametrize("layout", [TP2, pytest.param(TP2_DP2, marks=pytest.mark.extended)], ids=str)
def test_best_and_last_checkpoints(layout: Layout, tmp_path: Path) -> None:
    expected = run_program(PLAIN, _best_and_last, str(tmp_path))[0]
    for found in run_program(layout, _best_and_last, str(tmp_path)):
        assert found == pytest.approx(expected, abs=1e-9)


def _load(layout: Layout, path: str) -> None:
    trainer = make_trainer(layout)
    trainer.fit(variant("untied").build(), train_loader(layout, 1), ckpt_path=path)


def _damage(layout: Layout, path: str, how: str) -> None:
    content = torch.load(path)
    state = content["state_dict"]
    if how == "missing":
        del state["blocks.0.attn.qkv.weight"]
    elif how == "unexpected":
        state["blocks.0.other"] = torch.zeros(1)
    else:
        state["blocks.0.attn.qkv.weight"] = state["blocks.0.attn.qkv.weight"][:-1]
    torch.save(content, path)


@pytest.mark.parametrize("how", ["missing", "unexpected", "shape"])
def test_a_checkpoint_that_does_not_fit(how: str, tmp_path: Path) -> None:
    path = _save(PLAIN, "untied", tmp_path)
    run_program(PLAIN, _damage, path, how)
    with pytest.raises(RankError) as error:
        run_program(TP2, _load, path)
    assert [failure.rank for failure in error.value.failures] in ([0, 1], [1, 0]), "every rank says so"
    for failure in error.value.failures:
        assert "Timeout" not in failure.type_name
        assert "blocks.0.other" if how == "unexpected" else "blocks.0.attn.qkv.weight" in failure.message
        if how == "shape":
            assert "47, 16" in failure.message and "48, 16" in failure.message


def test_a_checkpoint_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"FileNotFoundError.*nothing\.ckpt"):
        run_program(TP2, _load, str(tmp_path / "nothing.ckpt"))
