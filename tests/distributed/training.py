"""Small training programs that run the same way on one plain device and on the ranks of a layout."""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.devices import placed
from tests.parity.variants import GLOBAL_BATCH, variant
from tests.ranks import run_ranks, run_reference

LIGHTNING_2_6 = "weights_only" in signature(Trainer.fit).parameters
"""Or newer. 2.5 has no averages of weights but StochasticWeightAveraging's, and no `save_on_exception`."""
WEIGHTS_ONLY: dict[str, bool] = {"weights_only": True} if LIGHTNING_2_6 else {}
"""For a fit from a checkpoint, which shall hold no class of anyone's. Lightning 2.5 can't be told so."""
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where a program runs."""

    tp: int = 1
    dp: int = 1
    sequence: bool = True
    plain: bool = False
    """One device, strategy auto, in a process that does not know this package."""
    pp: int = 1
    microbatches: int = 4
    schedule: str = "1f1b"
    zero: int = 0
    dp_replicate: int = 1

    def __str__(self) -> str:
        if self.plain:
            return "plain"
        pipeline = f"-pp{self.pp}-{self.schedule}{self.microbatches}" if self.pp > 1 else ""
        zero = f"-zero{self.zero}x{self.dp_replicate}" if self.zero else ""
        return f"tp{self.tp}-dp{self.dp}-{'sequence' if self.sequence else 'replicated'}{pipeline}{zero}"

    @property
    def ranks(self) -> int:
        return self.tp * self.dp * self.pp


PLAIN = Layout(plain=True)
TP2 = Layout(tp=2)
TP2_DP2 = Layout(tp=2, dp=2)
DP2 = Layout(dp=2)
PP2 = Layout(pp=2)
TP2_PP2 = Layout(tp=2, pp=2)
DP2_PP2 = Layout(dp=2, pp=2, microbatches=2)


def run_program(layout: Layout, program: Callable[..., Any], *args: Any) -> list[Any]:
    """`program(layout, *args)` on each rank of the layout; the results by rank."""
    if layout.plain:
        return [run_reference(program, layout, *args)]
    return run_ranks(layout.ranks, _on_rank, program, layout, args)


def make_trainer(
    layout: Layout, model: str = "untied", strategy: dict[str, Any] | None = None, **options: Any
) -> Trainer:
    """A quiet float64 Trainer of the layout, with the plan of a variant."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    options = {**placed(layout.ranks), "precision": "64-true", "max_epochs": 1, **QUIET, **options}
    if layout.plain:
        return Trainer(**options)
    from lightning_megatp import MegaTPStrategy

    arguments: dict[str, Any] = {"plan": variant(model).plan, "summary": False}
    if layout.pp > 1:
        arguments |= {"pp": layout.pp, "microbatches": layout.microbatches, "schedule": layout.schedule}
    if layout.zero:
        arguments |= {"zero": layout.zero, "dp_replicate": layout.dp_replicate}
    arguments |= strategy or {}
    chosen = MegaTPStrategy(tp=layout.tp, dp=layout.dp, sequence_parallel=layout.sequence, **arguments)
    return Trainer(strategy=chosen, **options)


def tokens(samples: int, length: int = 6, vocab: int = 32, seed: int = 3) -> TensorDataset:
    """Inputs and targets of a language model."""
    ids = torch.randint(0, vocab, (samples, length + 1), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(ids[:, :-1], ids[:, 1:])


def train_loader(layout: Layout, batches: int, **options: Any) -> DataLoader:
    """The same batches in every layout: one device takes the order that Lightning's sampler gives all dp ranks."""
    data = tokens(batches * GLOBAL_BATCH, **options)
    sampler = None if layout.dp > 1 else DistributedSampler(data, 1, 0, shuffle=True, seed=0)
    return DataLoader(data, batch_size=GLOBAL_BATCH // layout.dp, sampler=sampler)


def eval_loader(layout: Layout, batches: int, **options: Any) -> DataLoader:
    """Not shuffled: evaluation keeps the order."""
    return DataLoader(tokens(batches * GLOBAL_BATCH, seed=4, **options), batch_size=GLOBAL_BATCH // layout.dp)


def shared_directory(layout: Layout, name: str, root: str) -> Path:
    """A directory all ranks of a layout see, and no other layout uses."""
    path = Path(root) / str(layout) / name
    path.mkdir(parents=True, exist_ok=True)
    return path


class Losses(Callback):
    """What each step returned as its loss."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.seen.append(float(outputs["loss"]))


def train_on_microbatches(
    layout: Layout, module: LightningModule, loader: Callable[[int], DataLoader], rows: int, **strategy: Any
) -> tuple[Trainer, list[float]]:
    """Two epochs without a plan, and the losses of batches. One device takes the microbatches one by one, and
    accumulates their gradients.

    Args:
        loader: of so many rows a batch.
        rows: of a batch.
    """
    losses, n = Losses(), layout.microbatches if layout.plain else 1
    options = {"max_epochs": 2, "callbacks": [losses], "accumulate_grad_batches": n}
    trainer = make_trainer(layout, strategy={"plan": None, **strategy}, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(changes `|does not have many workers)")
        trainer.fit(module, loader(rows // n))
    # Lightning has divided them, to be accumulated.
    return trainer, [sum(losses.seen[i : i + n]) for i in range(0, len(losses.seen), n)]


def _on_rank(rank: int, world_size: int, program: Callable[..., Any], layout: Layout, args: tuple[Any, ...]) -> Any:
    return program(layout, *args)
