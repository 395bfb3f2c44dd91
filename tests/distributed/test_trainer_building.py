"""Layers created in `configure_model` have, over all ranks, the values of one device, and train as there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from tests.distributed.training import (
    PLAIN,
    PP2,
    TP2,
    TP2_PP2,
    Layout,
    make_trainer,
    run_program,
    train_loader,
)
from tests.late_models import Late

EXTENDED = pytest.mark.extended


class Start(Callback):
    """The model and the random state as training finds them."""

    def __init__(self) -> None:
        self.state: dict[str, Tensor] = {}
        self.drawn = torch.empty(0)
        self.on_meta: list[str] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        self.state = {name: value.clone() for name, value in state.items()}
        self.on_meta = [name for name, p in module.named_parameters() if p.is_meta]
        with torch.random.fork_rng([]):
            self.drawn = torch.rand(3)


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))


def _train(layout: Layout, kind: str, *args: Any) -> tuple[list[float], dict[str, Tensor], Tensor]:
    start, losses = Start(), Losses()
    trainer = make_trainer(layout, callbacks=[start, losses], strategy=None if layout.plain else {"plan": "auto"})
    torch.manual_seed(5)
    trainer.fit(Late(kind, *args), train_loader(layout, 2))
    assert not start.on_meta
    return losses.losses, start.state, start.drawn


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("nano", TP2),
        ("nano", TP2_PP2),
        pytest.param("nano", PP2, marks=EXTENDED),
        *(pytest.param(kind, layout, marks=EXTENDED) for kind in ("tied", "pixels", "llama") for layout in (TP2, PP2)),
    ],
    ids=str,
)
def test_values_and_training_are_those_of_one_device(kind: str, layout: Layout) -> None:
    expected_losses, expected, drawn = run_program(PLAIN, _train, kind)[0]
    by_rank = run_program(layout, _train, kind)
    _, state, _ = by_rank[0]
    assert state.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(state[name], expected[name])] == []
    for losses, _, drawn_there in by_rank:
        assert losses == pytest.approx(expected_losses, rel=1e-9)
        assert torch.equal(drawn_there, drawn)
