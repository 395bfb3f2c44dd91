"""One rank, in a process of its own whose memory is limited: `python -m tests.distributed.memory.limited ARGUMENTS`.

ARGUMENTS are JSON. It prints the losses as a line of JSON, `RESULT [...]`.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor

from tests.distributed.training import Layout, make_trainer, train_loader
from tests.parity.models import GPT, AdamWModule, GPTConfig
from tests.parity.variants import gpt_plan

BYTES_PER_PARAMETER = 16
"""Float32 values and gradients, and AdamW's two moments."""


class Late(AdamWModule):
    """A GPT created in `configure_model`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.gpt: GPT | None = None

    def configure_model(self) -> None:
        if self.gpt is None:
            self.gpt = GPT(self.config)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        assert self.gpt is not None
        return self.gpt.loss(batch)


class Phases(Callback):
    """Losses, and MiB at most in each phase of a run: printed, since a test that fails needs them."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def tell(self, phase: str) -> None:
        print(f"{phase:10} {_status('RssAnon') >> 20:5} MiB, at most {_status('VmHWM') >> 20:5}", flush=True)
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew

    def setup(self, *args: Any, **kwargs: Any) -> None:
        self.tell("before")

    def on_fit_start(self, *args: Any) -> None:
        self.tell("set-up")

    def on_after_backward(self, *args: Any) -> None:
        self.tell("backward")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.tell("optimizer")
        self.losses.append(float(outputs["loss"]))


def config_of(layers: int, hidden: int) -> GPTConfig:
    return GPTConfig(layers=layers, hidden=hidden, feed_forward=4 * hidden, heads=8, tied=False)


def full_size(config: GPTConfig) -> int:
    """Bytes of parameters, gradients and optimizer's state of the whole model."""
    with torch.device("meta"):
        return BYTES_PER_PARAMETER * sum(p.numel() for p in GPT(config).parameters())


def train_and_save(layout: Layout, config: GPTConfig, path: Path) -> list[float]:
    phases = Phases()
    torch.manual_seed(5)
    strategy = None if layout.plain else {"plan": gpt_plan(config, "gpt."), "checkpoint": "folder"}
    trainer = make_trainer(layout, strategy=strategy, precision="32-true", callbacks=[phases])
    trainer.fit(Late(config), train_loader(layout, 2))
    trainer.save_checkpoint(path)
    phases.tell("saved")
    return phases.losses


def _status(what: str) -> int:
    return int(re.findall(rf"{what}:\s*(\d+)", Path("/proc/self/status").read_text())[0]) << 10


def main() -> None:
    arguments = json.loads(sys.argv[1])
    layout, folder = Layout(**arguments["layout"]), Path(arguments["folder"])
    config = config_of(**arguments["config"])
    torch.set_num_threads(1)
    train_and_save(layout, config_of(layers=4, hidden=16), folder / "small")  # all is imported, and every thread runs
    if arguments["share"]:
        limit = int(_status("VmData") + arguments["share"] * full_size(config))
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    print("RESULT", json.dumps(train_and_save(layout, config, folder / "large")), flush=True)


if __name__ == "__main__":
    main()
