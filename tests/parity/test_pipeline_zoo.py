"""Models of many shapes through a pipeline, on real ranks: losses, gradients and parameters of one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from tests.devices import placed
from tests.parity.compare import compare
from tests.parity.parallel import whole_gradients
from tests.parity.running import Recorder, Run, gradients_of
from tests.parity.zoo import ZOO, couples_samples
from tests.ranks import run_ranks, run_reference

STEPS, ROWS = 8, 4
IN_FLOAT32 = {"llama", "gpt2", "t5"}
"""Models of transformers that compute their loss, or their norms, in float32 whatever their parameters are."""


def _fit(name: str, strategy: Any, devices: int, accumulate: int, gradients: Any) -> Run:
    entry = ZOO[name]
    module, recorder = entry.build(), Recorder(gradients)
    trainer = Trainer(
        **placed(devices), strategy=strategy, precision="64-true", max_epochs=1, logger=False,
        accumulate_grad_batches=accumulate, callbacks=[recorder], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, entry.loader(STEPS * ROWS, ROWS // accumulate))
    return recorder.run


def _reference(name: str, microbatches: int) -> Run:
    """One device; over the same microbatches, where samples of a batch depend on each other."""
    return _fit(name, "auto", 1, microbatches, gradients_of)


def _pipelined(rank: int, world_size: int, name: str, schedule: str, microbatches: int) -> Run:
    from lightning_megatp import MegaTPStrategy

    strategy = MegaTPStrategy(pp=world_size, schedule=schedule, microbatches=microbatches, summary=False)
    return _fit(name, strategy, world_size, 1, whole_gradients)


FEW = ("unet", "t5")
CASES = [
    *((name, 2, "1f1b", 2) for name in ZOO),
    *((name, 4, "gpipe", 4) for name in FEW),
    *((name, 2, "zb_h1", 3) for name in ("sequential", "two_inputs", "bert")),
    *(pytest.param(name, 4, "gpipe", 4, marks=pytest.mark.extended) for name in ZOO if name not in FEW),
]


@pytest.mark.parametrize(("name", "pp", "schedule", "microbatches"), CASES)
def test_models_of_many_shapes(name: str, pp: int, schedule: str, microbatches: int) -> None:
    pytest.importorskip("transformers")
    coupled = couples_samples(name)
    if coupled and ROWS % microbatches:
        microbatches = 2  # equal microbatches, as one device can have them
    expected = run_reference(_reference, name, microbatches if coupled else 1)
    runs = run_ranks(pp, _pipelined, name, schedule, microbatches)
    if coupled:
        sums = torch.tensor(expected.losses, dtype=torch.float64).view(-1, microbatches).sum(1)
        expected = dataclasses.replace(expected, losses=sums.tolist())  # Lightning has divided them already
    compare(expected, runs, 1, "32-true" if name in IN_FLOAT32 else "64-true")
