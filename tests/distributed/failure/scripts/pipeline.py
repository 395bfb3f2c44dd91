"""A fit at pp=2 in which one rank raises, or is killed, at a point: `pipeline.py raise|kill POINT RANK FOLDER`.

A point is "forward" or "backward" of a module, or the short name of a kind of action ("SF", "W", ...), under ZB-H1.
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatp import MegaTPStrategy
from lightning_megatp.pipeline.executor import _Batch
from lightning_megatp.pipeline.schedules.schedule import Action

WHAT, POINT, RANK, FOLDER = sys.argv[1:5]
STRIKES_AT = 7


class Block(nn.Module):
    """A unit of the pipeline, whose forward or backward strikes in the middle of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), {"forward": 0, "backward": 0}

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if type(y) is Tensor and y.requires_grad:
            self.strike("forward")
            y.register_hook(lambda _: self.strike("backward"))
        return y.relu()

    def strike(self, point: str) -> None:
        strike(point, self.calls)


def strike(point: str, calls: dict[str, int]) -> None:
    calls[point] = calls.get(point, 0) + 1
    if point == POINT and calls[point] == STRIKES_AT and int(os.environ.get("LOCAL_RANK", "0")) == int(RANK):
        if WHAT == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(f"struck in {point}")


def strike_at_actions() -> None:
    """Before an action is executed."""
    execute, calls = _Batch.execute, dict[str, int]()

    def struck(self: _Batch, action: Action) -> None:
        strike(action.kind.value, calls)
        execute(self, action)

    _Batch.execute = struck  # type: ignore[method-assign]


class Struck(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(x).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    strike_at_actions()
    schedule = "1f1b" if POINT in ("forward", "backward") else "zb_h1"
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegaTPStrategy(pp=2, microbatches=4, schedule=schedule, summary=False),
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=FOLDER,
    )
    trainer.fit(Struck(), DataLoader(torch.randn(64, 8), batch_size=8))
    print("finished")
