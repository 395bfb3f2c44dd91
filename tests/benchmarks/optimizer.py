"""The optimizer's step and clipping on the parameters of a tp=2 model, beside the same on plain tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from lightning_megatp.shim.torch import DisableTorchFunction
from tests.benchmarks.models import Endless, trainer
from tests.benchmarks.ratios import OURS, Row, compare
from tests.benchmarks.turns import Program, Taken, alternate, loop
from tests.ranks import run_ranks

PLAIN, CLIP = "plain tensors", 1.0
KINDS: dict[str, dict[str, Any]] = {"AdamW, foreach": {"foreach": True}, "AdamW, fused": {"fused": True}, "clip": {}}


class Layers(LightningModule):
    """Many small layers: four parameters each."""

    def __init__(self, layers: int, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.ups = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(layers))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            batch = batch + down(up(batch).relu())
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **KINDS[self.kind])


class _InPlaceOfSteps(Callback):
    """Calls only the optimizer, or only clipping, of a strategy that has been set up. Hooks are watched for what they
    make of weights, and steps of the optimizer, which are in no hook, are not: nothing is watched here."""

    def __init__(self, program: Program, kind: str) -> None:
        self.program, self.kind = program, kind

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        optimizer, generator = trainer.optimizers[0], torch.Generator().manual_seed(trainer.global_rank)
        for p in module.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        self.program.pause()
        while not self.program.stopped:
            with DisableTorchFunction():
                if self.kind == "clip":
                    trainer.precision_plugin.clip_gradients(optimizer, CLIP)
                else:
                    optimizer.step()
            self.program.pause()
        trainer.should_stop = True


def measure(rank: int, world_size: int, parameters: int, width: int, kind: str, steps: int) -> dict[str, Taken]:
    """One round on one rank."""

    def ours(program: Program) -> None:
        from torch.utils.data import DataLoader

        from lightning_megatp import MegaTPStrategy

        strategy = MegaTPStrategy(tp=world_size, plan={"ups.*": "column", "downs.*": "row"}, summary=False)
        fitted = trainer(strategy, world_size, _InPlaceOfSteps(program, kind))
        data = DataLoader(Endless((torch.randn(2, width),)), batch_size=None)  # type: ignore[arg-type]
        fitted.fit(Layers(parameters // 4, width, kind), data)

    def plain() -> Callable[[], None]:
        shapes = [(width, width), (width,), (width, width), (width,)] * (parameters // 4)
        generator = torch.Generator().manual_seed(rank)
        held = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
        for p in held:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer = torch.optim.AdamW(held, **KINDS[kind])
        if kind != "clip":
            return optimizer.step

        def clip() -> None:
            clip_grad_norm_(held, CLIP)

        return clip

    return alternate({OURS: ours, PLAIN: loop(plain())}, steps)


def rows(parameters: int, width: int, tp: int, rounds: int, steps: int) -> Iterator[Row]:
    for kind in KINDS:
        found = [run_ranks(tp, measure, parameters, width, kind, steps, timeout=300) for _ in range(rounds)]
        what = f"tp={tp}, {parameters} parameters of at most {width} x {width}: {kind}"
        yield from compare("optimizer", what, found, {PLAIN: 1.05})
