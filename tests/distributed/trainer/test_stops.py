"""`trainer.should_stop` on one rank ends the run on all of them, after the same batch."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer

from tests.distributed.training import DP2, PLAIN, PP2, TP2, Layout, make_trainer, run_program, train_loader
from tests.parity.models import GPT
from tests.parity.variants import variant


def stop(trainer: Trainer) -> None:
    """As if one process's clock were ahead."""
    if int(os.environ.get("RANK", 0)) == int(os.environ.get("WORLD_SIZE", 1)) - 1:
        trainer.should_stop = True


class Stops(Callback):
    """In a hook, by a function that a method calls."""

    def __init__(self, hook: str, at: int) -> None:
        self.at = at
        setattr(self, hook, self.look)

    def look(self, trainer: Trainer, *args: Any) -> None:
        if trainer.global_step >= self.at and not trainer.sanity_checking:
            stop(trainer)


def _steps(layout: Layout, hook: str) -> int:
    torch.manual_seed(0)
    module: GPT = variant("untied").build()
    trainer = make_trainer(layout, max_epochs=4, callbacks=[Stops(hook, 3)], val_check_interval=2)
    trainer.fit(module, train_loader(layout, 4), train_loader(layout, 1))
    return trainer.global_step


HOOKS = ["on_train_batch_end", "on_train_batch_start", "on_validation_end", "on_train_epoch_end", "on_before_zero_grad"]


@pytest.mark.parametrize("layout", [TP2, PP2, DP2], ids=str)
@pytest.mark.parametrize("hook", HOOKS)
def test_one_rank_stops_all(hook: str, layout: Layout) -> None:
    expected = run_program(PLAIN, _steps, hook)[0]
    assert run_program(layout, _steps, hook) == [expected] * 2
