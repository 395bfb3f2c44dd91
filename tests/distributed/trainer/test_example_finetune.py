"""The example of fine-tuning, through its YAML: the logged losses at tp=2 x pp=2 are those of one device."""

from __future__ import annotations

import csv
import runpy
import sys
from pathlib import Path

import pytest

from tests.fork_server import REPOSITORY
from tests.ranks import run_ranks

EXAMPLE = REPOSITORY / "examples" / "hf_finetune"
STEPS = 12
COMMON = ["--trainer.accelerator", "cpu", "--trainer.precision", "64-true", "--trainer.max_steps", str(STEPS),
          "--trainer.log_every_n_steps", "1", "--trainer.enable_progress_bar", "false", "--data.length", "32",
          "--trainer.limit_val_batches", "2"]  # fmt: skip
ONE_DEVICE = ["--trainer.devices", "1", "--trainer.strategy", "auto"]


def _fit(rank: int, world_size: int, folder: str) -> list[dict[str, float]]:
    """The example with its own YAML, shortened; what its CSVLogger wrote."""
    arguments = ["fit", "--config", str(EXAMPLE / "tp2_pp2.yaml"), *COMMON, "--trainer.logger.save_dir", folder]
    before, sys.argv = sys.argv, ["finetune.py", *arguments, *(ONE_DEVICE if world_size == 1 else [])]
    try:
        runpy.run_path(str(EXAMPLE / "finetune.py"), run_name="__main__")
    finally:
        sys.argv = before
    (table,) = Path(folder).rglob("metrics.csv")
    with table.open() as file:
        rows = [{key: float(x) for key, x in row.items() if x and key != "epoch"} for row in csv.DictReader(file)]
    return [row for row in rows if {"train_loss", "val_loss"} & row.keys()]


@pytest.mark.extended
def test_the_losses_of_the_finetuning_example(tmp_path: Path) -> None:
    expected = run_ranks(1, _fit, str(tmp_path / "one"))[0]
    found = run_ranks(4, _fit, str(tmp_path / "four"))[0]
    assert len(found) == len(expected) >= STEPS
    for own, one in zip(found, expected, strict=True):
        assert own == pytest.approx(one, rel=1e-6), f"{own} and {one}"  # the model computes losses in float32
