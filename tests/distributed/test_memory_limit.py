"""A model that needs four times what a process may have is built, trained and saved by eight of them."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.training import Layout, make_trainer, run_program, tokens
from tests.parity.models import AdamWModule, Block, GPTConfig
from tests.parity.variants import gpt_plan

MIB = 2**20
LAYOUT = Layout(tp=2, pp=2, dp=2, zero=3, microbatches=2)
CONFIG = GPTConfig(hidden=512, heads=8, feed_forward=2048, layers=22, vocab=512, tied=False)
LIMIT = 256 * MIB
"""Of each process, over what the interpreter, torch and the process groups have."""


class Large(AdamWModule):
    """Its layers are made in `configure_model`: no process ever has them all."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tok: nn.Embedding | None = None

    def configure_model(self) -> None:
        if self.tok is not None:
            return
        c = self.config
        self.tok, self.pos = nn.Embedding(c.vocab, c.hidden), nn.Embedding(64, c.hidden)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm, self.head = nn.LayerNorm(c.hidden), nn.Linear(c.hidden, c.vocab)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        assert self.tok is not None
        x_BLD = self.tok(tokens_BL) + self.pos(torch.arange(tokens_BL.size(1), device=tokens_BL.device))
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.head(self.norm(x_BLD))


class Limit(Callback):
    """From the moment the process groups are there, before the model is made."""

    def __init__(self) -> None:
        self.before = resource.getrlimit(resource.RLIMIT_DATA)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        status = Path("/proc/self/status").read_text().splitlines()
        data = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmData"))
        resource.setrlimit(resource.RLIMIT_DATA, (data + LIMIT, self.before[1]))

    def lift(self) -> None:
        resource.setrlimit(resource.RLIMIT_DATA, self.before)


def _train(layout: Layout, config: GPTConfig, root: str, limited: bool) -> list[float]:
    torch.manual_seed(0)
    losses: list[float] = []

    class Losses(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
            losses.append(float(outputs["loss"]))

    limit = Limit()
    plan = gpt_plan(config)
    trainer = make_trainer(
        layout, callbacks=[Losses(), *([limit] if limited else [])], precision="32-true", max_steps=2,
        strategy={"plan": plan, "checkpoint": "folder"},
    )  # fmt: skip
    try:
        trainer.fit(Large(config), DataLoader(tokens(8, vocab=config.vocab), batch_size=2))
        trainer.save_checkpoint(Path(root) / "large.ckpt")
    finally:
        limit.lift()
    return losses


def _too_much(layout: Layout) -> str:
    """What the limit does to a process that takes the whole."""
    limit = Limit()
    limit.setup(None, None, "")
    try:
        torch.zeros(4 * LIMIT // 4).add_(1)
    except RuntimeError as error:
        return str(error)
    finally:
        limit.lift()
    return ""


@pytest.mark.extended
def test_four_times_what_a_process_may_have(tmp_path: Path) -> None:
    parameters = sum(p.numel() for p in Block(CONFIG).parameters()) * CONFIG.layers
    assert 16 * parameters >= 4 * LIMIT, "with gradients and AdamW's state, 16 bytes each"
    assert "alloc" in run_program(Layout(), _too_much)[0], "the limit is one"
    small = GPTConfig(**{**vars(CONFIG), "hidden": 16, "heads": 4, "feed_forward": 32, "layers": 4})
    run_program(LAYOUT, _train, small, str(tmp_path / "small"), False)  # imports, threads
    for losses in run_program(LAYOUT, _train, CONFIG, str(tmp_path), True):
        assert len(losses) == 2 and all(0 < loss < 20 for loss in losses)
    assert (tmp_path / "large.ckpt" / "megatp.json").is_file()
