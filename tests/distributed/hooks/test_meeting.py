"""Forwards in hooks that ask for rank 0, and checkpoints: all ranks of a copy have to call them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import rank_zero_only

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
from tests.parity.models import GPT
from tests.ranks import RankError

IDS = torch.arange(4).unsqueeze(0)


class Sampling(GPT):
    """Looks at samples after some hooks.

    Args:
        kind: how.
        path: of a checkpoint that it saves instead.
    """

    def __init__(self, kind: str, path: str = "") -> None:
        super().__init__()
        self.kind, self.path, self.samples = kind, path, list[float]()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", super().training_step(batch, batch_idx))

    def on_validation_end(self) -> None:
        if self.kind == "alone" and self.trainer.is_global_zero:
            self.sample()
        if self.kind == "all":
            self.sample()
            if self.trainer.is_global_zero:
                print(self.samples)

    def on_validation_epoch_end(self) -> None:
        if self.kind == "all save" or (self.kind == "one saves" and self.trainer.is_global_zero):
            self.trainer.save_checkpoint(self.path)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.kind == "decorated":
            self.decorated()

    @rank_zero_only
    def decorated(self) -> None:
        self.sample()

    def sample(self) -> None:
        with torch.no_grad():
            self.samples.append(self(IDS.to(self.device)).sum().item())


class Samples(Callback):
    def on_train_epoch_end(self, trainer: Any, module: Sampling) -> None:
        if trainer.is_global_zero:
            module.sample()


def _fit(layout: Layout, kind: str, path: str = "") -> list[float]:
    torch.manual_seed(0)
    module = Sampling(kind, path)
    callbacks = [Samples()] if kind == "callback" else []
    for _ in range(2):  # the second run meets anew
        trainer = make_trainer(layout, max_epochs=2, limit_train_batches=2, callbacks=callbacks)
        trainer.fit(module, train_loader(layout, 2), eval_loader(layout, 1))
    return module.samples


@pytest.mark.parametrize("layout", [TP2, TP2_DP2], ids=str)
def test_a_forward_on_all_ranks_is_that_of_one_device(layout: Layout) -> None:
    [expected] = run_program(PLAIN, _fit, "all")
    assert len(expected) == 6
    for samples in run_program(layout, _fit, "all"):
        assert samples[0] == pytest.approx(expected[0], rel=1e-9)
        assert len(samples) == 6
        if layout.dp == 1:
            assert samples == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "hook"),
    [("alone", "on_validation_end"), ("decorated", "on_train_batch_end"), ("callback", "on_train_epoch_end")],
)
@pytest.mark.parametrize("layout", [TP2, pytest.param(TP2_DP2, marks=pytest.mark.extended)], ids=str)
def test_a_forward_on_rank_zero_alone_is_an_error(kind: str, hook: str, layout: Layout) -> None:
    """One device runs it. Ranks that waited for each other's collectives would do so until these time out, and fail in
    another way."""
    assert run_program(PLAIN, _fit, kind)
    with pytest.raises(
        RankError,
        match=rf"`{hook}` calls `.*` on rank 0 .* left that hook without a call .*on all ranks",
    ) as error:
        run_program(layout, _fit, kind)
    assert error.value.failures[0].rank == 0


@pytest.mark.parametrize("layout", [TP2, PP2], ids=str)
def test_a_checkpoint_on_rank_zero_alone_is_an_error(layout: Layout, tmp_path: Path) -> None:
    run_program(layout, _fit, "all save", str(tmp_path / "all.ckpt"))
    with pytest.raises(
        RankError, match=r"calls `trainer.save_checkpoint` on rank 0 .* left that hook without"
    ) as error:
        run_program(layout, _fit, "one saves", str(tmp_path / "one.ckpt"))
    assert error.value.failures[0].rank == 0
    assert [path.name for path in tmp_path.iterdir()] == ["all.ckpt"]
