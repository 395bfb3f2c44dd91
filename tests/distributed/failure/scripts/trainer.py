"""A fit at tp=2 in which one rank raises, or is killed, at a point: `trainer.py raise|kill POINT RANK FOLDER [FORM]`.
With a form of checkpoints, one shall be saved on an exception."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatp import MegaTPStrategy

WHAT, POINT, RANK, FOLDER, *FORM = sys.argv[1:]


def strike(point: str) -> None:
    if point == POINT and int(os.environ.get("LOCAL_RANK", "0")) == int(RANK):
        if WHAT == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError(f"struck in {point}")


class Struck(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def setup(self, stage: str) -> None:
        strike("setup")

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            strike("training_step")
        return self.down(self.up(x).relu()).pow(2).mean()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        strike("save")

    def on_train_end(self) -> None:
        strike("on_train_end")

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


if __name__ == "__main__":
    saving = {"checkpoint": FORM[0], "async_save": FORM[0] == "folder"} if FORM else {}
    also = {"save_on_exception": True} if FORM else {}  # Lightning 2.5 has none
    keep = ModelCheckpoint(FOLDER, every_n_train_steps=2, save_top_k=-1, save_last=True, **also)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegaTPStrategy(tp=2, plan={"up": "column", "down": "row"}, summary=False, **saving),
        callbacks=[keep] if FORM else [],
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=FOLDER,
    )
    trainer.fit(Struck(), DataLoader(torch.randn(64, 8), batch_size=8))
    print("finished")
