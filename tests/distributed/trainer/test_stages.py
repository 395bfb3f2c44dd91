"""Every stage of the Trainer gives the numbers of one device: sanity check, fit, validate, test, predict, fit again."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from tests.crossing import fewer
from tests.distributed.training import (
    DP2,
    PLAIN,
    TP2,
    TP2_DP2,
    Layout,
    eval_loader,
    make_trainer,
    run_program,
    train_loader,
)
from tests.parity.variants import variant

TP2_REPLICATED = Layout(tp=2, sequence=False)
MODELS = ["tied", "swiglu_rms", "encoder"]


class Sanity(Callback):
    """Counts the batches of the sanity check."""

    def __init__(self) -> None:
        self.batches = 0

    def on_validation_batch_end(self, trainer: Any, *args: Any) -> None:
        self.batches += trainer.sanity_checking


def _all_stages(layout: Layout, model: str) -> dict[str, Any]:
    sanity = Sanity()
    trainer = make_trainer(layout, model, max_epochs=2, callbacks=[sanity], num_sanity_val_steps=2)
    module = variant(model).build()
    seen: dict[str, Any] = {}
    trainer.fit(module, train_loader(layout, 3), eval_loader(layout, 3))
    seen["fit"] = float(trainer.callback_metrics["val_loss"])
    seen["sanity"] = sanity.batches
    seen["validate"] = trainer.validate(module, eval_loader(layout, 3), verbose=False)[0]["val_loss"]
    seen["test"] = trainer.test(module, eval_loader(layout, 2), verbose=False)[0]["test_loss"]
    predictions = trainer.predict(module, eval_loader(layout, 2))
    assert predictions is not None
    seen["predict"] = torch.cat(predictions)  # type: ignore[arg-type]
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, train_loader(layout, 3), eval_loader(layout, 3))
    seen["again"] = float(trainer.callback_metrics["val_loss"])
    seen["steps"] = trainer.global_step
    return seen


@pytest.mark.parametrize(
    ("layout", "model"),
    fewer(
        itertools.product([TP2, TP2_REPLICATED, DP2, TP2_DP2], MODELS),
        extended=[(TP2, "swiglu_rms"), (TP2_REPLICATED, "swiglu_rms"), *((TP2_DP2, model) for model in MODELS)],
    ),
    ids=str,
)
def test_all_stages_are_those_of_one_device(layout: Layout, model: str) -> None:
    expected = run_program(PLAIN, _all_stages, model)[0]
    by_rank = run_program(layout, _all_stages, model)
    for found in by_rank:
        for stage in ("fit", "validate", "test", "again"):
            assert found[stage] == pytest.approx(expected[stage], abs=1e-9), stage
        assert found["sanity"] == expected["sanity"] == 2
        assert found["steps"] == expected["steps"] == 9
    parts: list[Tensor] = [found["predict"] for found in by_rank[:: layout.tp]]
    order = [i for first in range(layout.dp) for i in range(first, len(expected["predict"]), layout.dp)]
    torch.testing.assert_close(torch.cat(parts), expected["predict"][order], atol=1e-9, rtol=0)
    for found, peer in zip(by_rank[:: layout.tp], by_rank[layout.tp - 1 :: layout.tp], strict=True):
        assert torch.equal(found["predict"], peer["predict"]), "tensor peers predict the same"


def _predict_only(layout: Layout) -> Tensor:
    trainer = make_trainer(layout)
    predictions = trainer.predict(variant("untied").build(), eval_loader(layout, 2))
    return torch.cat(predictions)  # type: ignore[arg-type]


def _validate_only(layout: Layout) -> float:
    trainer = make_trainer(layout)
    return float(trainer.validate(variant("untied").build(), eval_loader(layout, 2), verbose=False)[0]["val_loss"])


@pytest.mark.parametrize("layout", [TP2, Layout(tp=4)], ids=str)
def test_a_trainer_that_never_fits(layout: Layout) -> None:
    expected = run_program(PLAIN, _predict_only)[0]
    for found in run_program(layout, _predict_only):
        torch.testing.assert_close(found, expected, atol=1e-9, rtol=0)
    assert run_program(layout, _validate_only) == pytest.approx(
        [run_program(PLAIN, _validate_only)[0]] * layout.tp, abs=1e-9
    )


def _ragged(layout: Layout) -> tuple[list[float], float]:
    """A last batch of one sample, in fit and in validation."""
    from torch.utils.data import DataLoader

    from tests.distributed.training import tokens

    trainer = make_trainer(layout, max_epochs=1)
    module = variant("untied").build()
    trainer.fit(module, DataLoader(tokens(9), batch_size=4), DataLoader(tokens(5, seed=5), batch_size=4))
    return float(trainer.callback_metrics["loss"]), float(trainer.callback_metrics["val_loss"])


def test_a_ragged_last_batch() -> None:
    expected = run_program(PLAIN, _ragged)[0]
    for found in run_program(TP2, _ragged):
        assert found == pytest.approx(expected, abs=1e-9)


def _second_trainer(layout: Layout) -> float:
    """Another Trainer goes on with the same module."""
    module = variant("tied").build()
    for _ in range(2):
        trainer = make_trainer(layout, "tied")
        trainer.fit(module, train_loader(layout, 3), eval_loader(layout, 2))
    return float(trainer.callback_metrics["val_loss"])


def test_a_second_trainer_takes_the_module_as_it_is() -> None:
    expected = run_program(PLAIN, _second_trainer)[0]
    assert run_program(TP2, _second_trainer) == pytest.approx([expected] * 2, abs=1e-9)
