"""A checkpoint that an earlier version saved is loaded by this one.

`tests/data/version1.ckpt` was written by `python -m tests.distributed.checkpoint.test_versions`. A later version of the
format gets a folder of its own; the old ones stay.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatp.checkpoint.convert import convert
from tests.distributed.training import TP2, WEIGHTS_ONLY, Layout, make_trainer, run_program

DATA = Path(__file__).parents[2] / "data"
PLAN = {"up": "column", "down": "row"}


class Small(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(2, 4), nn.Linear(4, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.down(self.up(batch).relu()).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.125)


def numbers(x: Tensor, plus: float) -> Tensor:
    return torch.arange(x.numel(), dtype=x.dtype).view(x.shape) / 8 + plus


def expected() -> dict[str, Any]:
    """The model and the optimizer's state that are in the data."""
    state = {name: numbers(x, 1.0) for name, x in Small().state_dict().items()}
    moments = [{"exp_avg": numbers(x, 2.0), "exp_avg_sq": numbers(x, 3.0)} for x in state.values()]
    return {"state_dict": state, "optimizer": moments}


def _fit(layout: Layout, load: str | None, save: str, form: str) -> None:
    trainer = make_trainer(layout, strategy={"plan": PLAN, "checkpoint": form}, max_steps=1, precision="32-true")
    module = Small()
    trainer.fit(module, DataLoader(torch.ones(4, 2), batch_size=4), ckpt_path=load, **WEIGHTS_ONLY)
    if load is None:
        wanted = expected()
        for (name, parameter), state in zip(module.named_parameters(), wanted["optimizer"], strict=True):
            sharded, rank = trainer.strategy.parallel.spec_of(name), trainer.strategy.mesh.rank("tp")
            take = sharded.spec(rank).take if sharded else Tensor.clone
            parameter.data.copy_(take(wanted["state_dict"][name]))
            trainer.optimizers[0].state[parameter] |= {key: take(x) for key, x in state.items()}
    trainer.save_checkpoint(save)


def _check(path: Path) -> None:
    found, wanted = torch.load(path), expected()
    assert all(torch.equal(found["state_dict"][name], x) for name, x in wanted["state_dict"].items())
    for state, moments in zip(found["optimizer_states"][0]["state"].values(), wanted["optimizer"], strict=True):
        assert state["step"] == 1
        assert all(torch.equal(state[key], x) for key, x in moments.items())


@pytest.mark.parametrize("version", [1])
def test_checkpoints_of_earlier_versions(version: int, tmp_path: Path) -> None:
    folder = DATA / f"version{version}.ckpt"
    run_program(TP2, _fit, str(folder), str(tmp_path / "loaded.ckpt"), "file")
    _check(tmp_path / "loaded.ckpt")
    convert(folder, tmp_path / "converted.ckpt", "file")
    _check(tmp_path / "converted.ckpt")


if __name__ == "__main__":
    from tests.distributed.checkpoint import test_versions as this
    from tests.ranks import pools

    run_program(TP2, this._fit, None, str(DATA / "version1.ckpt"), "folder")
    pools.close()
