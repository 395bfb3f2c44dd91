"""A script as a user starts theirs, with a plan that doesn't fit the model."""

from __future__ import annotations

from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_megatp import MegaTPStrategy

if __name__ == "__main__":
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=MegaTPStrategy(tp=2, plan={"layre": "column_gather"}),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(BoringModel())
