"""A fit at pp=2 in which one rank raises, or is killed, at a point: `pipeline.py raise|kill POINT RANK FOLDER`."""

from __future__ import annotations

import os
import signal
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatp import MegaTPStrategy

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
        self.calls[point] += 1
        if point == POINT and self.calls[point] == STRIKES_AT and int(os.environ.get("LOCAL_RANK", "0")) == int(RANK):
            if WHAT == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(f"struck in {point}")


class Struck(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(x).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegaTPStrategy(pp=2, microbatches=4, summary=False),
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=FOLDER,
    )
    trainer.fit(Struck(), DataLoader(torch.randn(64, 8), batch_size=8))
    print("finished")
