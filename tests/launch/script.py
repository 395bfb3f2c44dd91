"""A user's script, in either namespace of Lightning: `script.py <namespace> <how> [arguments of the CLI]`.

It trains a tiny model for two steps. Each rank prints one line of JSON, `RESULT {...}`.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

namespace, how, *arguments = sys.argv[1:]
L = importlib.import_module(namespace)
PLAN = {"up": "column", "down": "row"}
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Net(L.LightningModule):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(4, width), nn.Linear(width, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.down(torch.tanh(self.up(batch[0]))).pow(2).mean()
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> DataLoader:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).double()
        return DataLoader(TensorDataset(x), batch_size=4)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        mesh = getattr(strategy, "mesh", None)  # of processes; Trainer and strategy count copies of the model here
        result = {
            "rank": 0 if mesh is None else mesh.global_rank,
            "world_size": 1 if mesh is None else mesh.shape.world_size,
            "strategy": type(strategy).__module__ + "." + type(strategy).__name__,
            "environment": type(getattr(strategy, "cluster_environment", None)).__name__,
            "rows": self.up.weight.shape[0],
            "parameters": sum(p.numel() for p in self.parameters()),
            "loss": float(self.trainer.callback_metrics["loss"]),
        }
        sys.stdout.write(f"RESULT {json.dumps(result)}\n")  # one write: the ranks share the pipe
        sys.stdout.flush()


def strategy_class() -> Any:
    if namespace == "pytorch_lightning":
        from lightning_megatp.pytorch_lightning import MegaTPStrategy
    else:
        from lightning_megatp import MegaTPStrategy
    return MegaTPStrategy


def fit(**options: Any) -> None:
    trainer = L.Trainer(accelerator="cpu", precision="64-true", max_epochs=1, **QUIET, **options)
    trainer.fit(Net())


def alone() -> None:
    """What one process can try: the reference, the name `megatp`, and what is refused."""
    fit(devices=1)
    own = strategy_class()
    fit(devices=1, strategy="megatp")
    other = "lightning_megatp" if namespace == "pytorch_lightning" else "lightning_megatp.pytorch_lightning"
    refused(lambda: fit(devices=1, strategy=importlib.import_module(other).MegaTPStrategy()))
    refused(lambda: fit(devices=3, strategy=own(tp=2)))
    os.environ.update(SLURM_NTASKS="2", SLURM_NTASKS_PER_NODE="2", SLURM_PROCID="0", SLURM_LOCALID="0")
    os.environ.update(SLURM_NODEID="0", SLURM_JOB_NAME="train")
    refused(lambda: fit(devices=4, strategy=own(tp=2)))


def refused(attempt: Any) -> None:
    try:
        attempt()
    except Exception as error:
        sys.stdout.write(f"RESULT {json.dumps({'error': type(error).__name__, 'message': str(error)})}\n")
    else:
        raise AssertionError("not refused")


if __name__ == "__main__":
    if how == "alone":
        alone()
    elif how == "cli":
        cli = importlib.import_module(f"{namespace}.cli").LightningCLI
        cli(Net, args=arguments, save_config_callback=None)
    elif how == "stages":
        fit(devices=1, num_nodes=2, strategy=strategy_class()(pp=2, microbatches=2, summary=False))
    else:
        nodes = int(how)
        fit(devices=2 // nodes, num_nodes=nodes, strategy=strategy_class()(tp=2, plan=PLAN, summary=False))
