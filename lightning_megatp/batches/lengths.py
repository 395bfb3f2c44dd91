"""How many batches ranks have: those with more would wait for the others."""

from __future__ import annotations

import math
from typing import Any

from lightning_megatp.mesh import AXES, ParallelMesh
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.steps import StepKind


def warn_of_lengths(trainer: Any, mesh: ParallelMesh) -> None:
    """Say so where ranks would wait for others whose data has ended, unless `max_steps` ends all before.

    Args:
        trainer: about to train; its loader may not tell how many batches it has.
        mesh: all ranks.

    Communication: one object all-gather over the world.
    """
    found = mesh.exchange(trainer.num_training_batches, *AXES)
    least, most = min(found), max(found)
    if least < most and least < _batches_left(trainer):
        warn_once_per_run(
            f"rank {found.index(least)} has {least} training batches in an epoch, and rank {found.index(most)} has"
            f" {most}. Ranks with more will wait for those with fewer until the timeout of {mesh.timeout}. Let all"
            " loaders have the same length (as many samples on each rank), or use"
            f" Trainer(limit_train_batches={least})."
        )


def refuse_lengths(kind: StepKind, batches: list[int | float], zero: int, mesh: ParallelMesh) -> None:
    """Where every batch gathers parameters over the data-parallel ranks, all of them need as many batches.

    Args:
        kind: of the steps, ones of evaluation.
        batches: of each loader, on this rank.

    Raises:
        ValueError: they have not.

    Communication: one object all-gather over dp.
    """
    found = [sum(each) for each in mesh.exchange(batches, "dp")]
    least, most = min(found), max(found)
    if least < most:
        ranks = mesh.ranks("dp")
        limit = f"limit_{'val' if kind is StepKind.VALIDATE else kind}_batches"
        raise ValueError(
            f"MegaTPStrategy: rank {ranks[found.index(least)]} has {least} {kind.noun} batches, and rank"
            f" {ranks[found.index(most)]} has {most}. With zero={zero} every batch gathers parameters over the"
            " data-parallel ranks, so that all of them need as many. Let the number of samples be a multiple of the"
            f" batch size times {len(found)}, use Trainer({limit}={least}), or zero=0."
        )


def _batches_left(trainer: Any) -> float:
    """How far into this epoch `max_steps` lets the Trainer go; inf where batches per step aren't known."""
    automatic = trainer.lightning_module.automatic_optimization
    scheduled = any(hasattr(callback, "get_accumulate_grad_batches") for callback in trainer.callbacks)
    if trainer.max_steps < 0 or not automatic or scheduled:
        return math.inf
    done: int = trainer.fit_loop.batch_idx + 1  # of an epoch that is resumed
    return done + trainer.accumulate_grad_batches * (trainer.max_steps - trainer.global_step)
