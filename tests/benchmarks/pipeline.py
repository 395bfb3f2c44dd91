"""One training step through a pipeline, beside torch's own pipelining and the ideal.

    python -m tests.benchmarks.pipeline [--rounds 5] [--microbatches 4 16]

Two processes, gloo, one thread each. Every round runs in turn (A B A B):

- ours: a LightningModule's own training_step under `Trainer(strategy=MegaTPStrategy(pp=2))`, everything included;
- torch: the same layers cut by hand into two `torch.distributed.pipelining` stages under Schedule1F1B, no Lightning;
- ideal: (m + p - 1) times the slower stage's forward and backward of one microbatch, alone in its process.

Printed are the medians of a step in milliseconds and their ratios, each with its spread over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks import pools, run_ranks

VOCAB, HIDDEN, HEADS, LAYERS, LENGTH, ROWS = 256, 256, 8, 8, 128, 2
WARM_UP, STEPS = 2, 6


class Layer(nn.TransformerEncoderLayer):
    """A pre-norm block."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, HEADS, 4 * HIDDEN, dropout=0.0, batch_first=True, norm_first=True)


class Model(LightningModule):
    """A small language model."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCAB)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        h = self.tok(batch[0])
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Clock(Callback):
    """Seconds of each batch."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        self.seconds.append(time.perf_counter() - self.start)


def _batch(microbatches: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, VOCAB, (ROWS * microbatches, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def ours(rank: int, world_size: int, microbatches: int, schedule: str) -> float:
    """Median seconds of a step."""
    from lightning_megatp import MegaTPStrategy

    torch.manual_seed(0)
    x, y = _batch(microbatches)
    data = TensorDataset(x.repeat(WARM_UP + STEPS, 1), y.repeat(WARM_UP + STEPS, 1))
    strategy = MegaTPStrategy(pp=world_size, microbatches=microbatches, schedule=schedule, summary=False)
    clock = Clock()
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, max_epochs=1, logger=False, callbacks=[clock],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Model(), DataLoader(data, batch_size=len(x)))
    return statistics.median(clock.seconds[WARM_UP:])


class First(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.tok, self.blocks = model.tok, model.blocks[: LAYERS // 2]

    def forward(self, x: Tensor) -> Tensor:
        h = self.tok(x)
        for block in self.blocks:
            h = block(h)
        return h


class Second(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.blocks, self.head = model.blocks[LAYERS // 2 :], model.head

    def forward(self, h: Tensor) -> Tensor:
        for block in self.blocks:
            h = block(h)
        return self.head(h)


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def torchs(rank: int, world_size: int, microbatches: int) -> float:
    """Median seconds of a step under torch.distributed.pipelining."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.manual_seed(0)
    model = Model()
    part = (First if rank == 0 else Second)(model)
    stage = PipelineStage(part, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=_loss)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)
    x, y = _batch(microbatches)
    seconds = []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        schedule.step(x) if rank == 0 else schedule.step(target=y)
        optimizer.step()
        dist.barrier()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UP:])


def slot(rank: int, world_size: int, microbatches: int) -> float:
    """Median seconds of one stage's forward and backward of one microbatch, and of its optimizer step."""
    torch.manual_seed(0)
    model = Model()
    part = (First if rank == 0 else Second)(model)
    x, y = (t[:ROWS] for t in _batch(1))
    h = torch.randn(ROWS, LENGTH, HIDDEN)
    optimizer = torch.optim.AdamW(part.parameters(), lr=1e-3)

    def once() -> None:
        if rank == 0:
            out = part(x)
            out.backward(h)
        else:
            leaf = h.clone().requires_grad_()
            _loss(part(leaf), y).backward()

    passes, steps = _median(once), _median(optimizer.step)
    return passes * (microbatches + world_size - 1) + steps


def _median(call: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(WARM_UP + STEPS):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UP:])


def compare(microbatches: int, rounds: int) -> None:
    """Print the rows of one number of microbatches."""
    kinds: dict[str, Callable[[], list[float]]] = {
        "ours, 1f1b": lambda: run_ranks(2, ours, microbatches, "1f1b"),
        "torch, 1f1b": lambda: run_ranks(2, torchs, microbatches),
        "ideal slots": lambda: run_ranks(2, slot, microbatches),
        "ours, zb_h1": lambda: run_ranks(2, ours, microbatches, "zb_h1"),
    }
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(rounds):
        for name, run in kinds.items():
            found[name].append(max(run()) * 1e3)
    print(f"pp=2, m={microbatches}, {LAYERS} layers of {HIDDEN}, {ROWS} x {LENGTH} tokens per microbatch, float32")
    for name, times in found.items():
        ratios = [a / b for a, b in zip(found["ours, 1f1b"], times, strict=True)]
        spread = f"{min(ratios):.2f}..{max(ratios):.2f}"
        print(
            f"  {name:14s} {statistics.median(times):8.1f} ms ({min(times):.1f}..{max(times):.1f})"
            f"   ours / this: {statistics.median(ratios):.2f} ({spread})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 16])
    arguments = parser.parse_args()
    for microbatches in arguments.microbatches:
        compare(microbatches, arguments.rounds)
    pools.close()


if __name__ == "__main__":
    from tests.benchmarks import pipeline  # what the ranks get is pickled by the module's name, not as __main__'s

    pipeline.main()
