"""From a module and a pipeline to the division of their parameters over the data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from lightning_megatp.batches.example import Example
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.observed import units_in_use
from lightning_megatp.pipeline.pipeline import Pipeline
from lightning_megatp.zero.options import ZeroOptions
from lightning_megatp.zero.sharding import ZeroSharding


def divide(
    parallel: ParallelModule,
    mesh: ParallelMesh,
    options: ZeroOptions,
    pipeline: Pipeline | None,
    example: Example,
    make: Callable[[nn.Module], None],
) -> ZeroSharding | None:
    """Divide the parameters over the data-parallel ranks, as `zero` says; or go on with the division of an earlier run.

    Args:
        parallel: the module, its layers swapped, other stages' parameters gone.
        mesh: who is where.
        options: what the user chose.
        pipeline: which units are on this rank; None for all of them.
        example: a batch and a step, which tell, without a pipeline, what units are called.
        make: see `ZeroSharding`.

    Raises:
        ValueError: an earlier run has divided it otherwise.
    """
    before = parallel.sharding
    level = options.level if mesh.size("dp") > 1 else 0
    if before is not None and (before.options != options or before.mesh.shape != mesh.shape):
        raise ValueError(
            "MegaTPStrategy: this LightningModule was already divided over data-parallel ranks by an earlier"
            " Trainer, with other options or another layout. Give the same ones, or build a new module and load the"
            " checkpoint into it."
        )
    if options.level and not level and before is None:
        warn_once_per_run(
            f"zero={options.level} divides nothing at dp=1: there are no other data-parallel ranks. Give the Trainer"
            " more devices than tp * pp, or use zero=0."
        )
    if before is None and level:
        if pipeline is None:
            units, touched = units_in_use(parallel, example, mesh.device)
        else:
            units, touched = pipeline.own_units, set(pipeline.touched)
        parallel.sharding = ZeroSharding(parallel, mesh, options, units, touched, make)
    return parallel.sharding
