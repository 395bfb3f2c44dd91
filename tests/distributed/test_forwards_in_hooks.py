"""Hooks that run forwards (samples after an epoch) where zero > 0 has divided parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor

from tests.distributed.training import DP2, Layout, eval_loader, make_trainer, run_program, train_loader
from tests.parity.models import GPT
from tests.ranks import RankError

IDS = torch.arange(4).unsqueeze(0)
LAYOUTS = [
    Layout(dp=2, zero=1),
    Layout(dp=2, zero=3),
    pytest.param(Layout(dp=2, zero=2), marks=pytest.mark.extended),
    Layout(tp=2, dp=2, zero=3),
]


class Sampling(GPT):
    """Runs forwards in hooks and keeps what came out.

    Args:
        kind: of mistake, if any.
    """

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.kind, self.seen = kind, dict[str, list[float]]()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", super().training_step(batch, batch_idx), sync_dist=True)

    def keep(self, name: str, x: Tensor) -> None:
        self.seen.setdefault(name, []).append(x.double().square().sum().item())

    def on_train_start(self) -> None:
        self.keep("before any step", self.tok(IDS))

    def on_validation_epoch_end(self) -> None:
        ids = IDS
        for _ in range(3):
            h = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
            for block in self.blocks:
                h = block(h)
            logits = self.head(self.norm(h))
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        self.keep("generated", logits)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.keep("whole", self(IDS))

    def on_train_epoch_end(self) -> None:
        if self.kind == "alone":
            if self.trainer.is_global_zero:
                self(IDS)
            return
        x = self(IDS)  # with gradients enabled
        if self.kind == "backward":
            x.square().mean().backward()
        self.keep("after an epoch", x.detach())
        self.keep("weights", self.head.weight.detach().full_tensor() if self.is_divided else self.head.weight.detach())

    @property
    def is_divided(self) -> bool:
        return hasattr(self.head.weight, "full_tensor")


class Blocks(Callback):
    def on_train_batch_end(self, trainer: Any, module: Sampling, *args: Any) -> None:
        width = module.norm.weight.shape[0]
        x = torch.linspace(-1, 1, 3 * width, dtype=module.dtype).view(1, 3, width)
        module.keep("a block", module.blocks[-1](x))


def _fit(layout: Layout, accumulated: int = 1, kind: str = "") -> dict[str, list[float]]:
    torch.manual_seed(0)
    module = Sampling(kind)
    trainer = make_trainer(
        layout,
        max_epochs=2,
        callbacks=[Blocks()],
        num_sanity_val_steps=0,
        accumulate_grad_batches=accumulated,
        val_check_interval=3,
    )
    trainer.fit(module, train_loader(layout, 4), eval_loader(layout, 1))
    if layout.tp > 1:
        del module.seen["weights"]  # parts
    return {**module.seen, "val": [float(trainer.callback_metrics["val"])]}


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_forwards_are_those_of_undivided_parameters(layout: Layout, accumulated: int) -> None:
    expected = run_program(DP2, _fit, accumulated)[0]
    assert {name: len(values) for name, values in expected.items()} == {
        **{"before any step": 1, "whole": 8, "generated": 2, "a block": 8, "after an epoch": 2, "weights": 2, "val": 1}
    }
    for found in run_program(layout, _fit, accumulated):
        for name, values in found.items():
            assert values == pytest.approx(expected[name], rel=1e-9), name
        assert layout.tp > 1 or found.keys() == expected.keys()


def test_a_backward_of_such_a_forward_is_an_error() -> None:
    run_program(DP2, _fit, 1, "backward")
    with pytest.raises(RankError, match=r"`on_train_epoch_end`.*zero=3.*run without gradients"):
        run_program(Layout(dp=2, zero=3), _fit, 1, "backward")


def test_on_rank_zero_alone_is_an_error() -> None:
    run_program(DP2, _fit, 1, "alone")
    with pytest.raises(RankError, match=r"`on_train_epoch_end` calls .* on rank 0 .* left that hook without a call"):
        run_program(Layout(dp=2, zero=3), _fit, 1, "alone")
