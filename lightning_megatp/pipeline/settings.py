"""The schedules of a run, as the user chose them, and the ranks along them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.pipeline.schedules.check import ScheduleError, simulate
from lightning_megatp.pipeline.schedules.generators import forward_only, make_schedule, split_end
from lightning_megatp.pipeline.schedules.messages import receive_ahead
from lightning_megatp.pipeline.schedules.schedule import Schedule

_ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"


@dataclass(frozen=True)
class PipelineOptions:
    """What a user chooses.

    Args:
        microbatches: per batch; None for four per stage.
        schedule: see `pipeline.schedules.generators.NAMES`.
        virtual_stages: stages per rank; None for what the schedule needs.
        stages: the units of each stage, as names or patterns; None balances them.
        splits_end: whether the gradients of weights may be put off at the end of a batch (see `split_end`).
        whole_loss: whether the tail of a step is made once for all microbatches (see `WholeLoss`).
    """

    microbatches: int | None = None
    schedule: str = "1f1b"
    virtual_stages: int | None = None
    stages: Sequence[Sequence[str]] | None = None
    splits_end: bool = True
    whole_loss: bool = False

    def made(self, ranks: int, microbatches: int) -> Schedule:
        """The schedule of a batch.

        Raises:
            ValueError: see `make_schedule`.
        """
        schedule = make_schedule(self.schedule, ranks, microbatches, self.virtual_stages)
        return split_end(schedule) if self.splits_end and self.schedule == "1f1b" else schedule


@dataclass(frozen=True)
class Settings:
    """What a run needs to know beyond the batch.

    Args:
        microbatches: per batch, at most.
        schedule: number of microbatches -> the schedule of training.
        evaluation: the same for validation, test and predict.
        stages: the units of each stage, if the user chose them.
    """

    microbatches: int
    schedule: Callable[[int], Schedule]
    evaluation: Callable[[int], Schedule]
    stages: Sequence[Sequence[str]] | None = None


def settings_of(options: PipelineOptions, mesh: ParallelMesh) -> Settings:
    ranks = mesh.size("pp")
    placement = options.made(ranks, 1).placement
    return Settings(
        microbatches=options.microbatches or 4 * ranks,
        schedule=lambda m: on_device(options.made(ranks, m), mesh.device),
        evaluation=lambda m: on_device(forward_only(placement, m), mesh.device),
        stages=options.stages,
    )


def on_device(schedule: Schedule, device: torch.device) -> Schedule:
    """A schedule, as messages between such devices allow it.

    Raises:
        ValueError: all messages of a GPU are in one queue, and ranks would wait for each other forever.
    """
    if device.type == "cpu":
        return receive_ahead(schedule)
    if os.environ.get(_ONE_QUEUE) == "1":
        try:
            simulate(schedule, strict=True, one_queue=True)
        except ScheduleError as error:
            raise ValueError(
                f"MegaTPStrategy: with {_ONE_QUEUE}=1 a GPU takes up messages one after another, and with"
                f" schedule={schedule.name!r} and {schedule.microbatches} microbatches ranks would wait for each other"
                f" forever. Unset {_ONE_QUEUE} (nothing here needs it), or use schedule='1f1b'. ({error})"
            ) from error
    return schedule


def pipeline_rank(mesh: ParallelMesh, schedule: Schedule) -> int:
    """This rank's place in the schedule. Index 0 on the pp axis has the last stage, wherever a schedule puts that."""
    return stage_order(schedule).index(mesh.rank("pp"))


def stage_order(schedule: Schedule) -> list[int]:
    """Pipeline rank -> index on the pp axis."""
    forward = list(range(schedule.ranks))
    return forward if schedule.placement[-1] == 0 else forward[::-1]
