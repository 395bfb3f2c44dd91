"""From a module and a mesh to its pipeline: which units are on which stage, and what this rank keeps."""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import nn
from torchmetrics import MetricTracker

from lightning_megatp.batches.example import Example
from lightning_megatp.batches.split import check_columns, check_dense, check_rows
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.metrics import LastStageMetrics
from lightning_megatp.module import ParallelModule
from lightning_megatp.origins import is_lightnings_default
from lightning_megatp.pipeline.assignment import assign, can_be_cut, holders_of, small_among, stage_sizes, unit_costs
from lightning_megatp.pipeline.executor import Executor, Links, connect, lanes
from lightning_megatp.pipeline.loans import Loans
from lightning_megatp.pipeline.observed import observe, observed_order
from lightning_megatp.pipeline.pipeline import Pipeline
from lightning_megatp.pipeline.schedules.schedule import Schedule
from lightning_megatp.pipeline.settings import PipelineOptions, pipeline_rank, settings_of, stage_order
from lightning_megatp.pipeline.shared import Shared
from lightning_megatp.pipeline.shares import Shares
from lightning_megatp.pipeline.slicing.order import UnitsOfStep
from lightning_megatp.pipeline.slicing.slicer import Slicer
from lightning_megatp.pipeline.told.logs import Logs
from lightning_megatp.pipeline.twins import warn_of_pairs, with_twins
from lightning_megatp.plan.units import find_units, modules_around
from lightning_megatp.shim.compiler import is_compiled
from lightning_megatp.shim.lightning import default_store
from lightning_megatp.steps import StepKind
from lightning_megatp.tensor.deferred import defer_linears


def open_pipeline(
    parallel: ParallelModule, mesh: ParallelMesh, options: PipelineOptions, example: Example
) -> Pipeline | None:
    """The pipeline of a run, ready for its first batch: the module's own, of an earlier run, or a new one. None at
    pp = 1.

    Raises:
        ValueError: see `reuse_pipeline`, `check_pipelined`, `check_batches` and `build_pipeline`, whose arguments these
            are.

    Communication: see `build_pipeline`.
    """
    if parallel.pipeline is not None:
        reuse_pipeline(parallel.pipeline, mesh, options)
    elif mesh.size("pp") > 1:
        check_pipelined(parallel, options)
        check_batches(parallel, options, example)
        parallel.pipeline = build_pipeline(parallel, mesh, options, example)
    if parallel.pipeline is not None:
        parallel.pipeline.open()
    return parallel.pipeline


def build_pipeline(
    parallel: ParallelModule,
    mesh: ParallelMesh,
    options: PipelineOptions,
    example: Example,
) -> Pipeline:
    """Cut a module over the pp axis, and let go of what other stages own.

    Args:
        parallel: the module, with its layers swapped.
        mesh: pp > 1.
        options: what the user chose.
        example: a batch and a step, which tell in what order the units are called; without a batch, that of definition.

    Raises:
        ValueError: sizes, a schedule or stages that don't fit the model.

    Communication: two rendezvous over pp, four if pp > 2, two more for a schedule that goes round; and one number in
    each of these groups, see `connect`.
    """
    settings = settings_of(options, mesh)
    schedule = settings.schedule(settings.microbatches)
    module = parallel.module
    found = _units(parallel, options, schedule.stages, example, mesh.device)
    _check_compiled(module, found.order, schedule.stages, mesh)
    stage_of_unit = _placed(parallel, found, options, schedule.stages, example, mesh.device)
    warn_of_pairs(parallel, found, stage_of_unit, mesh.device)
    sizes = stage_sizes(parallel, stage_of_unit, schedule.stages)
    compiled = _put_off(parallel, found.order, schedule)
    # It intercepts what is the units' forward by now.
    slicer = Slicer(module, stage_of_unit, schedule.stages, parallel.sizes, mesh.device, tail=options.whole_loss)
    links = _connected(mesh, schedule)
    holders = holders_of(module, stage_of_unit, schedule)
    parallel.context.pipelined = True
    parallel.counted_elsewhere = {i for i, ranks in holders.items() if ranks[-1] != links.rank}
    names = {id(p): name for name, p in module.named_parameters()}
    shared = [Shared.of(names[i], parallel.names[names[i]]) for i, ranks in holders.items() if len(ranks) > 1]
    homes = {names[i]: [links.ranks[r] for r in ranks] for i, ranks in holders.items()}
    parallel.order = tuple(module.state_dict(keep_vars=True))
    slicer.ownership.free(schedule.stages_of(links.rank))
    parallel.forget_freed()
    return Pipeline(
        parallel,
        slicer,
        Executor(links, parallel.context.deferred, Shares(mesh.group("tp"))),
        mesh,
        settings,
        Logs(module, mesh.device),
        LastStageMetrics(module, mesh, default_store(), mesh.timeout or timedelta(minutes=30)),
        shared,
        Loans(slicer, parallel, mesh, homes, [links.ranks[r] for r in schedule.placement]),
        stage_of_unit,
        sizes,
        compiled,
        found.touched,
    )


def _units(
    parallel: ParallelModule, options: PipelineOptions, n_stages: int, example: Example, device: torch.device
) -> UnitsOfStep:
    """The units, as a step uses them. If too many of them need one stage, for there to be so many, the small ones that
    tie them together are none: what they do is done between units."""
    module = parallel.module
    found = observed_order(module, find_units(module), example, device, parallel.sizes, refuse=True)
    if options.stages is not None or can_be_cut(found.order, n_stages, found.together):
        return found
    rest = [unit for unit in found.order if unit not in small_among(module, found.order, found.together)]
    fewer = observe(module, rest, example, device, parallel.sizes) if rest != found.order else None
    return fewer if fewer is not None and can_be_cut(fewer.order, n_stages, fewer.together) else found


def _check_compiled(module: nn.Module, units: Sequence[str], n_stages: int, mesh: ParallelMesh) -> None:
    whole = [unit for unit in units if is_compiled(module.get_submodule(unit))]
    around = [name for name in modules_around(units) if is_compiled(module.get_submodule(name))]
    if around or (whole and len(units) < n_stages):
        names = [name or type(module).__name__ for name in around or whole]
        raise ValueError(
            f"MegaTPStrategy: `{names[0]}` is compiled as a whole, and pp={mesh.size('pp')} can't cut compiled code."
            " Compile its blocks one by one instead (`block.compile()`), or use pp=1."
        )


def _placed(
    parallel: ParallelModule,
    step: UnitsOfStep,
    options: PipelineOptions,
    n_stages: int,
    example: Example,
    device: torch.device,
) -> dict[str, int]:
    """Unit -> stage."""
    costs = unit_costs(parallel.module, step.order, parallel.whole_size) | dict.fromkeys(step.idle, 0.0)
    if options.stages is None:
        beside_twins = with_twins(parallel, step, n_stages, costs, example, device)
        if beside_twins is not None:
            return beside_twins
    return assign(step.order, n_stages, costs, options.stages, step.together)


def _connected(mesh: ParallelMesh, schedule: Schedule) -> Links:
    """This rank's connections to the others of its pipeline."""
    # NCCL would warn that messages in one group keep one order, and advise groups of their own: lanes are.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    links = Links(
        ranks=[mesh.ranks("pp")[i] for i in stage_order(schedule)],
        rank=pipeline_rank(mesh, schedule),
        groups={lane: mesh.new_group("pp") for lane in lanes(schedule)},
        device=mesh.device,
    )
    connect(links, schedule)
    return links


def _put_off(parallel: ParallelModule, units: Sequence[str], schedule: Schedule) -> Sequence[str]:
    """Let the units put weight gradients off, where the schedule does; the names of those that can't, though it was
    chosen for that."""
    compiled = defer_linears(parallel.module, units, parallel.context.deferred) if schedule.defers_weights else []
    return [] if schedule.splits_end else compiled


def reuse_pipeline(pipeline: Pipeline, mesh: ParallelMesh, options: PipelineOptions) -> None:
    """Let another Trainer go on with a pipeline: what each rank holds stays, the rest is as it asks.

    Raises:
        ValueError: it asks for other stages.
    """
    settings = settings_of(options, mesh)
    before, after = pipeline.settings.schedule(1), settings.schedule(1)
    same = before.placement == after.placement and pipeline.settings.stages == settings.stages
    same = same and pipeline.slicer.tail == options.whole_loss
    if pipeline.mesh.shape != mesh.shape or not same:
        raise ValueError(
            "MegaTPStrategy: this LightningModule was already cut into pipeline stages by an earlier Trainer, with"
            " another layout, other `stages` or another `whole_loss`. Give the same ones, or build a new module and"
            " load the checkpoint into it."
        )
    pipeline.compiled = _put_off(pipeline.parallel, list(pipeline.stage_of_unit), after)
    pipeline.use(settings)


def check_pipelined(parallel: ParallelModule, options: PipelineOptions) -> None:
    """Refuse what can't work when a step runs on several stages.

    Raises:
        ValueError: manual optimization with `whole_loss`, a step that takes an iterator, an own `backward`, a
            MetricTracker.
    """
    module = parallel.module
    steps = [getattr(module, kind.method, None) for kind in StepKind]  # `test_step = None` says that there is none
    found = None
    if not getattr(module, "automatic_optimization", True) and options.whole_loss:
        found = "manual optimization (automatic_optimization=False) and whole_loss=True", "whole_loss=False"
    elif any("dataloader_iter" in inspect.signature(step).parameters for step in filter(callable, steps)):
        found = "a step that takes `dataloader_iter`", "a step that takes a batch"
    elif (backward := getattr(type(module), "backward", None)) and not is_lightnings_default(backward):
        found = "a LightningModule with its own `backward`: the pipeline's schedule runs it", "on_before_backward"
    elif any(isinstance(x, MetricTracker) for x in module.modules()):
        found = (
            "a MetricTracker: it copies its metric as it goes, and other stages don't know these",
            "the metric itself",
        )
    if found:
        what, use = found
        raise ValueError(f"MegaTPStrategy: pp > 1 does not go together with {what}. Use {use}.")


def check_batches(parallel: ParallelModule, options: PipelineOptions, example: Example) -> None:
    """Refuse batches that would be cut elsewhere than between samples, as far as their loader tells.

    Raises:
        ValueError: see `split.check_dense`, `check_rows` and `check_columns`.
    """
    check_dense(example.batch)
    if options.microbatches != 1 and parallel.split_batch is None:
        batches = example.of_samples(2, 3)
        check_rows(batches)
        if example.batch is not None:
            check_columns(batches, example.batch)
