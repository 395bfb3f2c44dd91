"""A step leaves no tensor to Python's garbage collector, which comes when it likes: in a cycle of references it would
keep its memory for many steps more."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from tests.crossing import fewer
from tests.distributed.training import (
    DP2,
    PLAIN,
    PP2,
    TP2,
    TP2_PP2,
    Layout,
    eval_loader,
    make_trainer,
    run_program,
    train_loader,
)
from tests.parity.models import GPT, GPTConfig

LAYOUTS = [
    PLAIN,
    TP2,
    Layout(tp=2, sequence=False),
    DP2,
    Layout(dp=2, zero=1),
    Layout(dp=2, zero=3),
    Layout(tp=2, dp=2, zero=3),
    PP2,
    Layout(pp=2, schedule="zb_h1"),
    Layout(pp=2, schedule="gpipe"),
    TP2_PP2,
    Layout(pp=2, dp=2, zero=3),
]


class Left(Callback):
    """The tensors in cycles that were left since the last batch began."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self._look()

    def on_validation_batch_start(self, *args: Any) -> None:
        self._look()

    def on_train_end(self, *args: Any) -> None:
        self._look()
        self._forget()
        gc.enable()

    def _look(self) -> None:
        gc.collect()
        gc.disable()
        if gc.get_debug() == gc.DEBUG_SAVEALL:
            self.shapes += [
                tuple(x.shape) for x in gc.garbage if isinstance(x, Tensor) and not isinstance(x, FakeTensor)
            ]
            self._forget()
        gc.set_debug(gc.DEBUG_SAVEALL)

    @staticmethod
    def _forget() -> None:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.collect()


class ByHand(GPT):
    """Steps its optimizer by hand."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def _left(layout: Layout, kind: type[GPT], strategy: dict[str, Any]) -> list[tuple[int, ...]]:
    torch.manual_seed(0)
    left = Left()
    module = kind(GPTConfig(tied=False))
    options: dict[str, Any] = {} if kind is ByHand else {"gradient_clip_val": 1.0}
    trainer = make_trainer(layout, strategy=strategy, callbacks=[left], val_check_interval=3, **options)
    trainer.fit(module, train_loader(layout, 5), eval_loader(layout, 2))
    return left.shapes


@pytest.mark.parametrize("kind", [GPT, ByHand])
@pytest.mark.parametrize("layout", fewer(LAYOUTS, extended=LAYOUTS[1::2]), ids=str)
def test_steps_leave_no_tensor_to_the_collector(layout: Layout, kind: type[GPT]) -> None:
    for shapes in run_program(layout, _left, kind, {}):
        assert not shapes


@pytest.mark.parametrize("options", [{"whole_loss": True}, {"recompute": "full"}, {"recompute": "selective"}], ids=str)
def test_options_leave_none_either(options: dict[str, Any]) -> None:
    for shapes in run_program(PP2, _left, GPT, options):
        assert not shapes
