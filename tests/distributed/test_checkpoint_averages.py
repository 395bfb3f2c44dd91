"""WeightAveraging and StochasticWeightAveraging on a split model: the averages of one device, saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging

from tests.distributed.test_trainer_checkpoint import _without_random_states, assert_same
from tests.distributed.training import (
    PLAIN,
    PP2,
    TP2,
    TP2_DP2,
    Layout,
    eval_loader,
    make_trainer,
    run_program,
    train_loader,
)
from tests.parity.variants import variant
from tests.ranks import RankError

CALLBACKS = {
    "ema": lambda: EMAWeightAveraging(decay=0.8),
    "swa": lambda: StochasticWeightAveraging(1e-3, swa_epoch_start=1),
}


def _averaged(layout: Layout, kind: str, form: str, root: str, model: str) -> dict[str, Any]:
    """Three epochs at once, and one, then the other two. What is saved half-way and what is left in the end."""
    strategy = {} if layout.plain else {"plan": variant(model).plan, "checkpoint": form}
    path = Path(root) / f"{layout}-{kind}-{form}-{model}.ckpt"
    found = {}
    for name, epochs, load in (("whole", 3, None), ("first", 2, None), ("second", 3, path)):
        options = {"strategy": strategy, "max_epochs": epochs}
        trainer = make_trainer(layout, model, callbacks=[CALLBACKS[kind]()], **options)
        module = variant(model).build().double()
        trainer.fit(module, train_loader(layout, 3), eval_loader(layout, 1), ckpt_path=load, weights_only=True)
        found[name] = float(trainer.callback_metrics["val_loss"])
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
        (TP2, "ema", "folder", "regularised"),
        *(
            pytest.param(*case, marks=pytest.mark.extended)
            for case in [
                (TP2, "swa", "folder", "grouped_fused"),
                (TP2, "ema", "file", "grouped_fused"),
                (TP2, "swa", "file", "untied"),
                (TP2_DP2, "ema", "folder", "grouped_fused"),
            ]
        ),
    ],
    ids=str,
)
def test_averages_are_those_of_one_device(layout: Layout, kind: str, form: str, model: str, tmp_path: Path) -> None:
    expected = run_program(PLAIN, _averaged, kind, form, str(tmp_path), model)[0]
    for found in run_program(layout, _averaged, kind, form, str(tmp_path), model):
        assert found == pytest.approx(expected, abs=1e-9)
    for name in ("whole", "second"):
        files = [tmp_path / f"{where}-{kind}-{form}-{model}.{name}.ckpt" for where in (layout, PLAIN)]
        ours, plain = (_read(layout, file) for file in files)
        for key in ("state_dict", "optimizer_states", "current_model_state"):
            if key in plain:
                assert_same(_ordered(ours[key]), _ordered(plain[key]), f"{name}: {key}")


def test_averages_are_refused_on_stages(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"EMAWeightAveraging averages a copy of the whole model, and pp > 1 cuts"):
        run_program(PP2, _averaged, "ema", "file", str(tmp_path), "tied")
