"""SIGTERM to one rank, at any moment, ends all of them after the same batch."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.training import DP2, PP2, TP2, TP2_DP2, TP2_PP2, Layout, make_trainer, run_program

BATCHES, LAST = 100_000, 8


class Blocks(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layers(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class ByIterator(Blocks):
    """A step that fetches for itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:
        batch, _, _ = next(dataloader_iter)
        return super().training_step(batch, 0)


class Manual(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Struck(Callback):
    """Sends the signal to this process some time after training has begun, or in a given batch."""

    def __init__(self, after: float | None, at: str = "") -> None:
        self.after, self.at, self.seen = after, at, ""

    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    def on_train_start(self, *args: Any) -> None:
        if self.after is not None:
            threading.Timer(self.after, self.strike).start()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.at == "last batch" and batch_idx == LAST - 1:
            self.strike()

    def on_validation_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.at == "validation" and batch_idx == 1 and not trainer.sanity_checking:
            self.strike()

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.seen = type(exception).__name__


def _stopped(
    layout: Layout, kind: type[Blocks], victims: list[int], at: str, repeats: int
) -> list[tuple[str, int, int, bool]]:
    """What each fit ended by, after which step and validation batch, and whether it was soon."""
    found = []
    signal.signal(signal.SIGTERM, lambda *_: None)  # of several victims one may strike when the fit has ended
    for seed in range(repeats):
        plan = {"layers.*.0": "column", "layers.*.2": "row"} if layout.tp > 1 else None
        bounds: dict[str, Any] = {"limit_train_batches": LAST} if at else {}
        bounds |= {"val_check_interval": 4, "limit_val_batches": 20} if at == "validation" else {}
        trainer = make_trainer(layout, strategy={"plan": plan}, **bounds)
        struck = int(os.environ["RANK"]) in victims
        callback = Struck(None if at or not struck else random.Random(seed).uniform(0.0, 0.3), at if struck else "")
        trainer.callbacks.append(callback)
        data = DataLoader(torch.zeros(BATCHES, 8, dtype=torch.float64), batch_size=4)
        start = time.monotonic()
        with contextlib.suppress(SIGTERMException):
            trainer.fit(kind(), data, data if at == "validation" else None)
        soon = time.monotonic() - start < 15.0
        seen_in_validation = trainer.fit_loop.epoch_loop.val_loop.batch_progress.current.completed
        found.append((callback.seen, trainer.global_step, seen_in_validation, soon))
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return found


@pytest.mark.parametrize(
    ("layout", "kind", "victims", "at", "repeats"),
    [
        (TP2, Blocks, [0], "", 2),
        (TP2, Blocks, [1], "", 2),
        (DP2, Blocks, [1], "", 2),
        (TP2, Blocks, [0], "validation", 1),
        (DP2, Blocks, [0], "validation", 1),
        (DP2, Blocks, [1], "last batch", 1),
        *(
            pytest.param(layout, kind, victims, "", 10, marks=pytest.mark.extended)
            for layout, kind in [
                *((layout, Blocks) for layout in (TP2, DP2, PP2, TP2_DP2, TP2_PP2, Layout(dp=4), Layout(dp=2, zero=3))),
                *((TP2, kind) for kind in (ByIterator, Manual)),
            ]
            for victims in ([0], [1], list(range(layout.ranks)))
        ),
        pytest.param(TP2, ByIterator, [0], "last batch", 1, marks=pytest.mark.extended),
        pytest.param(TP2, Blocks, [0], "last batch", 1, marks=pytest.mark.extended),
    ],
)
def test_all_ranks_end_after_the_same_batch(
    layout: Layout, kind: type[Blocks], victims: list[int], at: str, repeats: int
) -> None:
    by_rank = run_program(layout, _stopped, kind, victims, at, repeats)
    assert all(found == by_rank[0] for found in by_rank), by_rank
    for exception, _, validated, soon in by_rank[0]:
        assert exception == "SIGTERMException"
        assert soon
        if at == "validation":  # after the next batch; data-parallel ranks may validate unequally often
            assert validated == (3 if layout.dp == 1 else 20)
