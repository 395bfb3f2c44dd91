"""WeightAveraging and StochasticWeightAveraging in every layout: the averages of one device, saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, callbacks
from lightning.pytorch.callbacks import LearningRateFinder, StochasticWeightAveraging

from tests.distributed.checkpoint.test_trainer import _without_random_states, assert_same
from tests.distributed.training import (
    LIGHTNING_2_6,
    PLAIN,
    PP2,
    TP2,
    TP2_DP2,
    TP2_PP2,
    WEIGHTS_ONLY,
    Layout,
    eval_loader,
    make_trainer,
    run_program,
    train_loader,
)
from tests.parity.models import GPT, GPTConfig, HeadOutside
from tests.parity.variants import variant
from tests.ranks import RankError

ZERO1, ZERO3 = Layout(dp=2, zero=1), Layout(dp=2, zero=3)
ZERO3_TP2, ZERO3_PP2 = Layout(tp=2, dp=2, zero=3), Layout(pp=2, dp=2, zero=3, microbatches=2)
CALLBACKS = {
    "ema": lambda: callbacks.EMAWeightAveraging(decay=0.8),
    "ema_amid": lambda: callbacks.EMAWeightAveraging(decay=0.8),  # validation between accumulated batches
    "swa": lambda: StochasticWeightAveraging(1e-3, swa_epoch_start=1),
}


def _skip_without(kind: str) -> None:
    if kind != "swa" and not LIGHTNING_2_6:
        pytest.skip("Lightning 2.5 has no EMAWeightAveraging")


class ValidationLosses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.values.append(float(trainer.callback_metrics["val_loss"]))


def _averaged(layout: Layout, kind: str, form: str, root: str, model: str) -> dict[str, Any]:
    """Three epochs at once, and one, then the other two. What is saved half-way and what is left in the end."""
    strategy = {} if layout.plain else {"plan": variant(model).plan, "checkpoint": form}
    path = Path(root) / f"{layout}-{kind}-{form}-{model}.ckpt"
    amid = {"accumulate_grad_batches": 2, "val_check_interval": 1} if kind == "ema_amid" else {}
    found = {}
    for name, epochs, load in (("whole", 3, None), ("first", 2, None), ("second", 3, path)):
        options = {"strategy": strategy, "max_epochs": epochs, **amid}
        losses = ValidationLosses()
        trainer = make_trainer(layout, model, callbacks=[CALLBACKS[kind](), losses], **options)
        module = variant(model).build().double()
        trainer.fit(module, train_loader(layout, 3), eval_loader(layout, 1), ckpt_path=load, **WEIGHTS_ONLY)
        found[name] = losses.values
        if name == "first":
            trainer.save_checkpoint(path)
        else:
            trainer.strategy.checkpoint = "file"
            trainer.save_checkpoint(path.with_suffix(f".{name}.ckpt"))
    if form == "folder":
        assert path.is_dir() != layout.plain
    return found


def _read(layout: Layout, path: Path) -> dict[str, Any]:
    return _without_random_states(torch.load(path, weights_only=False))


def _ordered(value: Any) -> Any:
    """A folder does not keep in which order an optimizer made the states of a parameter."""
    if isinstance(value, list):
        return list(map(_ordered, value))
    return {key: _ordered(value[key]) for key in sorted(value, key=str)} if isinstance(value, dict) else value


@pytest.mark.parametrize(
    ("layout", "kind", "form", "model"),
    [
        (ZERO3, "swa", "file", "grouped_fused"),
        *(
            pytest.param(*case, marks=pytest.mark.extended)
            for case in [
                (TP2_PP2, "ema", "folder", "grouped_fused"),
                (TP2, "ema", "folder", "regularised"),
                (TP2, "swa", "folder", "grouped_fused"),
                (TP2, "ema", "file", "grouped_fused"),
                (TP2, "swa", "file", "untied"),
                (TP2_DP2, "ema", "folder", "grouped_fused"),
                (PP2, "ema", "file", "head_outside"),
                (PP2, "ema", "file", "configured"),
                (PP2, "swa", "folder", "tied"),
                (TP2_PP2, "swa", "file", "grouped_fused"),
                (ZERO1, "ema", "file", "grouped_fused"),
                (ZERO1, "ema_amid", "file", "tied"),
                (ZERO3, "ema_amid", "file", "tied"),
                (PP2, "ema_amid", "file", "tied"),
                (ZERO1, "swa", "folder", "tied"),
                (ZERO3, "ema", "folder", "uneven"),
                (ZERO3_PP2, "ema", "file", "grouped_fused"),
                (ZERO3_TP2, "swa", "folder", "grouped_fused"),
            ]
        ),
    ],
    ids=str,
)
def test_averages_are_those_of_one_device(layout: Layout, kind: str, form: str, model: str, tmp_path: Path) -> None:
    _skip_without(kind)
    expected = run_program(PLAIN, _averaged, kind, form, str(tmp_path), model)[0]
    for found in run_program(layout, _averaged, kind, form, str(tmp_path), model):
        for run, losses in expected.items():
            assert found[run] == pytest.approx(losses, abs=1e-9), run
    for name in ("whole", "second"):
        files = [tmp_path / f"{where}-{kind}-{form}-{model}.{name}.ckpt" for where in (layout, PLAIN)]
        ours, plain = (_read(layout, file) for file in files)
        for key in ("state_dict", "optimizer_states", "current_model_state"):
            if key in plain:
                assert_same(_ordered(ours[key]), _ordered(plain[key]), f"{name}: {key}")


class Searched(GPT):
    lr = 1e-3

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.lr)


class SearchedOutside(Searched, HeadOutside):
    """In a pipeline its embedding is lent to the last stage."""


def _loaded_once_split(layout: Layout, kind: str, form: str, root: str, kept: type[Searched]) -> list[float]:
    """The averages are loaded when the module is split already: after a search for a learning rate, in the middle of a
    run, and by a second Trainer that goes on with the module of the first."""
    strategy = {} if layout.plain else {"strategy": {"checkpoint": form}}
    path = Path(root) / f"{layout}-{kind}-{form}.ckpt"
    torch.manual_seed(3)
    module, losses = kept(GPTConfig(tied=False, layers=4)).double(), ValidationLosses()
    for epochs, load in ((2, None), (3, path)):
        search = [LearningRateFinder(1e-3, 1e-1, num_training_steps=3, early_stop_threshold=None)] if not load else []
        watching = [CALLBACKS[kind](), *search, losses]
        model = "untied" if kept is Searched else "head_outside"
        trainer = make_trainer(layout, model, callbacks=watching, default_root_dir=root, max_epochs=epochs, **strategy)
        trainer.fit(module, train_loader(layout, 3), eval_loader(layout, 1), ckpt_path=load, **WEIGHTS_ONLY)
        if not load:
            trainer.save_checkpoint(path)
            with torch.no_grad():  # what is loaded is not what is there
                for parameter in module.parameters():
                    parameter.mul_(0.5)
    if not layout.plain:
        trainer.strategy.checkpoint = "file"
    trainer.save_checkpoint(path.with_suffix(".end.ckpt"))
    return losses.values


@pytest.mark.parametrize(
    ("layout", "kind", "form", "model"),
    [
        (TP2_PP2, "ema", "file", Searched),
        (ZERO3, "ema", "folder", Searched),
        (PP2, "ema", "folder", SearchedOutside),
        *(
            pytest.param(*case, marks=pytest.mark.extended)
            for case in [
                (TP2, "ema", "file", Searched),
                (TP2, "swa", "folder", Searched),
                (PP2, "swa", "file", Searched),
                (ZERO1, "ema", "file", Searched),
                (ZERO3, "swa", "file", Searched),
                (ZERO3_PP2, "ema", "file", Searched),
                (ZERO3_TP2, "ema", "folder", Searched),
                (ZERO3_TP2, "swa", "file", Searched),
                (TP2_DP2, "ema", "file", Searched),
            ]
        ),
    ],
    ids=str,
)
def test_averages_are_loaded_into_a_split_module(
    layout: Layout, kind: str, form: str, model: Any, tmp_path: Path
) -> None:
    _skip_without(kind)
    expected = run_program(PLAIN, _loaded_once_split, kind, form, str(tmp_path), model)[0]
    for found in run_program(layout, _loaded_once_split, kind, form, str(tmp_path), model):
        assert found == pytest.approx(expected, abs=1e-9)
    ours, plain = (_read(layout, tmp_path / f"{where}-{kind}-{form}.end.ckpt") for where in (layout, PLAIN))
    for key in ("state_dict", "optimizer_states", "current_model_state"):
        if key in plain:
            assert_same(_ordered(ours[key]), _ordered(plain[key]), key)


def _refused(layout: Layout, model: str, norms: bool) -> None:
    trainer = make_trainer(layout, model, callbacks=[CALLBACKS["swa"]()])
    module = variant(model).build()
    if norms:
        module.unused = torch.nn.BatchNorm1d(2)
    trainer.fit(module, train_loader(layout, 1))


@pytest.mark.parametrize(
    ("model", "norms", "message"),
    [
        (
            "tied",
            True,
            "StochasticWeightAveraging runs an epoch without backward to renew the statistics of batch norms",
        ),
        (
            "configured",
            False,
            r"StochasticWeightAveraging copied 0 tensors on this rank.*Create all layers in `__init__`",
        ),
    ],
)
def test_what_cannot_be_averaged(model: str, norms: bool, message: str) -> None:
    with pytest.raises(RankError, match=message) as error:
        run_program(PP2, _refused, model, norms)
    assert len(error.value.failures) == 2, "on every rank"
