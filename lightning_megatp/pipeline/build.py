"""From a module and a mesh to its pipeline: which units are on which stage, and what this rank keeps."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from rich.table import Table
from torch import Tensor, nn
from torchmetrics import MetricTracker

from lightning_megatp.example import Example
from lightning_megatp.hooks.users import HOOKS, is_users, mentions
from lightning_megatp.mesh import ParallelMesh, alone
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.metrics import LastStageMetrics
from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.executor import Executor, Links, connect, lanes
from lightning_megatp.pipeline.loans import Loans
from lightning_megatp.pipeline.pipeline import Pipeline, Settings
from lightning_megatp.pipeline.schedules.check import ScheduleError, simulate
from lightning_megatp.pipeline.schedules.generators import forward_only, make_schedule, split_end
from lightning_megatp.pipeline.schedules.messages import receive_ahead
from lightning_megatp.pipeline.schedules.schedule import Schedule
from lightning_megatp.pipeline.shared import Shared
from lightning_megatp.pipeline.shares import Shares
from lightning_megatp.pipeline.slicing.order import UnitsOfStep, units_of_step
from lightning_megatp.pipeline.slicing.plan import KindError, SliceError
from lightning_megatp.pipeline.slicing.slicer import Slicer
from lightning_megatp.pipeline.slicing.state.ownership import Sizes
from lightning_megatp.pipeline.slicing.units import (
    assign,
    can_be_cut,
    find_units,
    frozen_twins,
    modules_around,
    small_among,
)
from lightning_megatp.pipeline.split import check_columns, check_rows
from lightning_megatp.pipeline.told.logs import Logs
from lightning_megatp.shim.compiler import is_compiled
from lightning_megatp.shim.lightning import default_store, trainer_of
from lightning_megatp.tables import Folded, Titled, numbers
from lightning_megatp.tensor.deferred import defer_linears

_ONE_QUEUE = "CUDA_DEVICE_MAX_CONNECTIONS"
_KINDS = ("training", "validation", "test", "predict")


@dataclass(frozen=True)
class PipelineOptions:
    """What a user chooses.

    Args:
        microbatches: per batch; None for four per stage.
        schedule: see `pipeline.schedules.generators.NAMES`.
        virtual_stages: stages per rank; None for what the schedule needs.
        stages: the units of each stage, as names or patterns; None balances them.
        splits_end: whether the gradients of weights may be put off at the end of a batch (see `split_end`).
    """

    microbatches: int | None = None
    schedule: str = "1f1b"
    virtual_stages: int | None = None
    stages: Sequence[Sequence[str]] | None = None
    splits_end: bool = True

    def made(self, ranks: int, microbatches: int) -> Schedule:
        """The schedule of a batch.

        Raises:
            ValueError: see `make_schedule`.
        """
        schedule = make_schedule(self.schedule, ranks, microbatches, self.virtual_stages)
        return split_end(schedule) if self.splits_end and self.schedule == "1f1b" else schedule


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
        check_pipelined(parallel)
        check_batches(parallel, options, example)
        parallel.pipeline = build_pipeline(parallel, mesh, options, example)
    pipeline: Pipeline | None = parallel.pipeline
    if pipeline is not None:
        pipeline.open()
    return pipeline


def build_pipeline(
    parallel: ParallelModule,
    mesh: ParallelMesh,
    options: PipelineOptions,
    example: Example | None = None,
) -> Pipeline:
    """Cut a module over the pp axis, and let go of what other stages own.

    Args:
        parallel: the module, with its layers swapped.
        mesh: pp > 1.
        options: what the user chose.
        example: a batch and a step, which tell in what order the units are called; without one, that of definition.

    Raises:
        ValueError: sizes, a schedule or stages that don't fit the model.

    Communication: two rendezvous over pp, four if pp > 2, two more for a schedule that goes round; and one number in
    each of these groups, see `connect`.
    """
    ranks = mesh.size("pp")
    settings = _settings(options, mesh)
    schedule = settings.schedule(settings.microbatches)
    module = parallel.module
    found = _in_order(module, find_units(module), example, mesh.device, parallel.sizes, refuse=True)
    if options.stages is None and not can_be_cut(found.order, schedule.stages, found.together):
        rest = [unit for unit in found.order if unit not in small_among(module, found.order, found.together)]
        opened = _looked_at(module, rest, example, mesh.device, parallel.sizes) if rest != found.order else None
        if opened is not None and can_be_cut(opened.order, schedule.stages, opened.together):
            found = opened
    units = found.order
    whole = [unit for unit in units if is_compiled(parallel.module.get_submodule(unit))]
    around = [name for name in modules_around(units) if is_compiled(parallel.module.get_submodule(name))]
    if around or (whole and len(units) < schedule.stages):
        whole = [name or type(parallel.module).__name__ for name in around or whole]
        raise ValueError(
            f"MegaTPStrategy: `{whole[0]}` is compiled as a whole, and pp={ranks} can't cut compiled code. Compile its"
            " blocks one by one instead (`block.compile()`), or use pp=1."
        )
    costs = unit_costs(parallel.module, units, parallel.whole_size) | dict.fromkeys(found.idle, 0.0)
    stage_of_unit = None
    if options.stages is None:
        stage_of_unit = _with_twins(parallel, found, schedule.stages, costs, example, mesh.device)
    if stage_of_unit is None:
        stage_of_unit = assign(units, schedule.stages, costs, options.stages, found.together)
    _warn_of_pairs(parallel, found, stage_of_unit)
    sizes = _stage_sizes(parallel, stage_of_unit, schedule.stages)
    deferred = parallel.context.deferred
    compiled = _put_off(parallel, units, schedule)
    # It intercepts what is the units' forward by now.
    slicer = Slicer(parallel.module, stage_of_unit, schedule.stages, parallel.sizes, mesh.device)
    rank = pipeline_rank(mesh, schedule)
    # NCCL would warn that messages in one group keep one order, and advise groups of their own: lanes are.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    links = Links(
        ranks=[mesh.ranks("pp")[i] for i in _order(schedule)],
        rank=rank,
        groups={lane: mesh.new_group("pp") for lane in lanes(schedule)},
        device=mesh.device,
    )
    connect(links, schedule)
    holders = holders_of(parallel.module, stage_of_unit, schedule)
    parallel.context.pipelined = True
    parallel.counted_elsewhere = {i for i, ranks_of in holders.items() if ranks_of[-1] != rank}
    names = {id(p): name for name, p in parallel.module.named_parameters()}
    shared = [Shared.of(names[i], parallel.names[names[i]]) for i, ranks_of in holders.items() if len(ranks_of) > 1]
    homes = {names[i]: [links.ranks[r] for r in ranks_of] for i, ranks_of in holders.items()}
    parallel.order = tuple(parallel.module.state_dict(keep_vars=True))
    slicer.free(schedule.stages_of(rank))
    parallel.forget_freed()
    logs = Logs(parallel.module, mesh.device)
    metrics = LastStageMetrics(parallel.module, mesh, default_store(), mesh.timeout or timedelta(minutes=30))
    return Pipeline(
        parallel,
        slicer,
        Executor(links, deferred, Shares(mesh.group("tp"))),
        mesh,
        settings,
        logs,
        metrics,
        shared,
        Loans(slicer, parallel, mesh, homes, [links.ranks[r] for r in schedule.placement]),
        stage_of_unit,
        sizes,
        compiled,
        found.touched,
    )


def _put_off(parallel: ParallelModule, units: Sequence[str], schedule: Schedule) -> Sequence[str]:
    """Let the units put weight gradients off, where the schedule does; the names of those that can't, though it was
    chosen for that."""
    compiled = defer_linears(parallel.module, units, parallel.context.deferred) if schedule.defers_weights else []
    return [] if schedule.splits_end else compiled


def units_in_use(parallel: ParallelModule, example: Example | None, device: torch.device) -> tuple[list[str], set[str]]:
    """The units that a step calls, as far as that can be found out; and the names of their parameters that it also uses
    beside them."""
    found = _in_order(parallel.module, find_units(parallel.module), example, device, parallel.sizes)
    return found.order, found.touched


def _with_twins(
    parallel: ParallelModule,
    step: UnitsOfStep,
    n_stages: int,
    costs: Mapping[str, float],
    example: Example | None,
    device: torch.device,
) -> dict[str, int] | None:
    """Unit -> stage, in the order of the units; averaged copies beside what they are copies of. None if there are none:
    frozen units of the same shapes may also be what the trained ones read, and then data would flow backward."""
    units = step.order
    twins = frozen_twins(parallel.module, units, step.untrained, parallel.whole_shape)
    leaders = [unit for unit in units if unit not in twins]
    if not twins or len(leaders) < n_stages:
        return None
    both = {unit: costs[unit] + sum(costs[twin] for twin in twins if twins[twin] == unit) for unit in leaders}
    together = [pair for pair in step.together if twins.keys().isdisjoint(pair)]
    found = assign(leaders, n_stages, both, together=together)
    stage_of_unit = {unit: found[twins.get(unit, unit)] for unit in units}
    return stage_of_unit if _flows_forward(parallel, stage_of_unit, n_stages, example, device) else None


def _warn_of_pairs(parallel: ParallelModule, step: UnitsOfStep, stage_of_unit: Mapping[str, int]) -> None:
    """Of averaged copies on other stages than what they are copies of, where a hook may go over both."""
    twins = frozen_twins(parallel.module, step.order, step.untrained, parallel.whole_shape)
    apart = [unit for unit, twin in twins.items() if stage_of_unit[unit] != stage_of_unit[twin]]
    trainer = trainer_of(parallel.module)
    owners = (parallel.module, *getattr(trainer, "callbacks", ()))
    pairing = [hook for x in owners for hook in HOOKS if is_users(x, hook) and mentions(x, _PAIRING, hook)]
    if apart and pairing:
        warn_once_per_run(
            f"`{apart[0]}` is like `{twins[apart[0]]}` and on another pipeline stage. If `{pairing[0]}` goes over the"
            " parameters of both networks (`zip(average.parameters(), model.parameters())`), it meets those of its own"
            " stage only, and other pairs than on one device. Put each pair on one stage by `stages=[[...], ...]`."
        )


_PAIRING = frozenset(
    [
        "zip",
        "update_parameters",
        "update_momentum",
        "_foreach_mul_",
        "_foreach_lerp_",
        "_foreach_add_",
        "_foreach_copy_",
    ]
)
"""What hooks are found by that go over two networks."""


def _flows_forward(
    parallel: ParallelModule,
    stage_of_unit: Mapping[str, int],
    n_stages: int,
    example: Example | None,
    device: torch.device,
) -> bool:
    """Whether a step can run on these stages, as far as that can be found out."""
    if example is None or example.batch is None:
        return True
    batch = apply_to_collection(example.batch, Tensor, lambda x: x.to(device))
    slicer = Slicer(parallel.module, stage_of_unit, n_stages, parallel.sizes, device)
    try:
        plan = slicer.plan(example.bare_step, batch)
    except SliceError:
        return False
    except Exception:
        return True  # see `_looked_at`
    finally:
        slicer.close()
    called = {unit for operation in plan.operations for unit in operation.units}
    unseen = [unit for unit in stage_of_unit if plan.ended and unit not in called]  # these may come after the end
    return all(stage_of_unit[unit] == n_stages - 1 for unit in unseen)


def used_beside(module: nn.Module, units: Sequence[str], example: Example | None) -> set[str]:
    """The names of the parameters of some layers and blocks that a step uses otherwise than by calling these, as far as
    that can be found out. The module may not be on its device yet."""
    tensors = (x.device for x in (*module.parameters(), *module.buffers()) if not x.is_meta)
    device = next(tensors, torch.device("cpu"))
    for cut in (list(units), find_units(module)):  # blocks that can't be passed over, may be by parts
        found = _looked_at(module, cut, example, device) if cut else None
        if found is not None:  # of a step that ends by a value (a router's choice) the rest was not seen
            return _with_siblings(module, found.touched) if found.idle else found.touched
    return set()


def _with_siblings(module: nn.Module, names: Collection[str]) -> set[str]:
    """Parameters, and those of the same name in other entries of their lists (`layers.0.gate`, `layers.1.gate`)."""

    def pattern(name: str) -> str:
        return re.sub(r"\.\d+\.", ".*.", name)

    patterns = set(map(pattern, names))
    return {name for name, _ in module.named_parameters() if pattern(name) in patterns}


def _in_order(
    module: nn.Module,
    units: list[str],
    example: Example | None,
    device: torch.device,
    sizes: Sizes | None = None,
    refuse: bool = False,
) -> UnitsOfStep:
    """The units in the order in which a step calls them, which is not always that of definition.

    Raises:
        KindError: see `_looked_at`.
    """
    return _looked_at(module, units, example, device, sizes, refuse) or UnitsOfStep(units)


def _looked_at(
    module: nn.Module,
    units: list[str],
    example: Example | None,
    device: torch.device,
    sizes: Sizes | None = None,
    refuse: bool = False,
) -> UnitsOfStep | None:
    """What a step does with units; None if that can't be seen.

    Raises:
        KindError: with `refuse`, it does what no pipeline can do.
    """
    if example is None or example.batch is None:
        return None
    batch = apply_to_collection(example.batch, Tensor, lambda x: x.to(device))
    try:
        with alone():  # of a step's own messages those of fakes would not be sent, and the others so
            return units_of_step(module, units, example.bare_step, batch, sizes, device)
    except KindError:
        if refuse:
            raise
        return None
    except Exception:
        return None  # what keeps the step from being looked at is told when the first batch is planned


def reuse_pipeline(pipeline: Pipeline, mesh: ParallelMesh, options: PipelineOptions) -> None:
    """Let another Trainer go on with a pipeline: what each rank holds stays, the rest is as it asks.

    Raises:
        ValueError: it asks for other stages.
    """
    settings = _settings(options, mesh)
    before, after = pipeline.settings.schedule(1), settings.schedule(1)
    same = before.placement == after.placement and pipeline.settings.stages == settings.stages
    if pipeline.mesh.shape != mesh.shape or not same:
        raise ValueError(
            "MegaTPStrategy: this LightningModule was already cut into pipeline stages by an earlier Trainer, with"
            " another layout or other `stages`. Give the same ones, or build a new module and load the checkpoint into"
            " it."
        )
    pipeline.compiled = _put_off(pipeline.parallel, list(pipeline.stage_of_unit), after)
    pipeline.use(settings)


def _settings(options: PipelineOptions, mesh: ParallelMesh) -> Settings:
    ranks = mesh.size("pp")
    placement = options.made(ranks, 1).placement
    return Settings(
        microbatches=options.microbatches or 4 * ranks,
        schedule=lambda m: _on_device(options.made(ranks, m), mesh.device),
        evaluation=lambda m: _on_device(forward_only(placement, m), mesh.device),
        stages=options.stages,
    )


def _on_device(schedule: Schedule, device: torch.device) -> Schedule:
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


def check_pipelined(parallel: ParallelModule) -> None:
    """Refuse what can't work when a step runs on several stages.

    Raises:
        ValueError: manual optimization, a step that takes an iterator, an own `backward`, a MetricTracker.
    """
    module = parallel.module
    steps = [getattr(module, f"{kind}_step", None) for kind in _KINDS]  # `test_step = None` says that there is none
    found = None
    if not getattr(module, "automatic_optimization", True):
        found = "manual optimization (automatic_optimization=False): the pipeline's schedule runs the backward", "pp=1"
    elif any("dataloader_iter" in inspect.signature(step).parameters for step in filter(callable, steps)):
        found = "a step that takes `dataloader_iter`", "a step that takes a batch"
    elif not getattr(type(module), "backward", print).__module__.endswith(("core.module", "builtins")):
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
        ValueError: see `split.check_rows` and `check_columns`.
    """
    if options.microbatches != 1 and not hasattr(parallel.module, "split_batch"):
        batches = example.of_samples(2, 3)
        check_rows(batches)
        if example.batch is not None:
            check_columns(batches, example.batch)


def pipeline_rank(mesh: ParallelMesh, schedule: Schedule) -> int:
    """This rank's place in the schedule. Index 0 on the pp axis has the last stage, wherever a schedule puts that."""
    return _order(schedule).index(mesh.rank("pp"))


def _order(schedule: Schedule) -> list[int]:
    """Pipeline rank -> index on the pp axis."""
    forward = list(range(schedule.ranks))
    return forward if schedule.placement[-1] == 0 else forward[::-1]


def unit_costs(
    module: nn.Module, units: Sequence[str], size: Callable[[Tensor], int] = Tensor.numel
) -> dict[str, float]:
    """An estimate of each unit's time: its parameters, those of embeddings not counted, since looking up is cheap.

    Args:
        size: elements of a parameter. All ranks have to find the same, and their parts may be uneven.
    """
    return {unit: _cost(module.get_submodule(unit), size) for unit in units}


def _cost(unit: nn.Module, size: Callable[[Tensor], int]) -> float:
    embeddings = {id(p) for child in unit.modules() if isinstance(child, nn.Embedding) for p in child.parameters()}
    return 1.0 + sum(size(p) for p in unit.parameters() if id(p) not in embeddings)


def holders_of(module: nn.Module, stage_of_unit: Mapping[str, int], schedule: Schedule) -> dict[int, list[int]]:
    """id(parameter) -> the pipeline ranks that hold it, in the order of its stages. Parameters outside of all units are
    on every rank."""
    stages: dict[int, set[int]] = {}
    for unit, stage in stage_of_unit.items():
        for parameter in module.get_submodule(unit).parameters():
            stages.setdefault(id(parameter), set()).add(stage)
    everywhere = set(range(schedule.stages))
    found = {}
    for parameter in module.parameters():
        ranks = [schedule.placement[stage] for stage in sorted(stages.get(id(parameter), everywhere), reverse=True)]
        found[id(parameter)] = list(dict.fromkeys(ranks))[::-1]
    return found


def _stage_sizes(parallel: ParallelModule, stage_of_unit: Mapping[str, int], stages: int) -> list[int]:
    """Parameters of each stage, before they are split over tensor ranks; tied ones in each of their stages."""
    sizes = []
    for stage in range(stages):
        units = [parallel.module.get_submodule(unit) for unit, at in stage_of_unit.items() if at == stage]
        held = {id(p): parallel.whole_size(p) for unit in units for p in unit.parameters()}
        sizes.append(sum(held.values()))
    return sizes


def stages_along(pipeline: Pipeline) -> list[list[int]]:
    """The stages of each index on the pp axis."""
    schedule = pipeline.settings.schedule(pipeline.settings.microbatches)
    order = _order(schedule)
    return [schedule.stages_of(order.index(at)) for at in range(schedule.ranks)]


def stage_table(pipeline: Pipeline) -> Table:
    """What each stage holds, and where."""
    schedule, shape = pipeline.settings.schedule(pipeline.settings.microbatches), pipeline.mesh.shape
    order = _order(schedule)
    title = f"Pipeline of {schedule.stages} stages, {schedule.name}"
    table = Titled(title=title)
    for column in ("stage", "global ranks", "units", "parameters"):
        table.add_column(column, justify="right" if column == "parameters" else "left")
    for stage, size in enumerate(pipeline.stage_parameters):
        units = [unit for unit, at in pipeline.stage_of_unit.items() if at == stage]
        shown = units if len(units) <= 4 else [*units[:2], "...", units[-1]]
        at_pp = order[schedule.placement[stage]]
        ranks = [rank for rank in range(shape.world_size) if shape.coordinates(rank)["pp"] == at_pp]
        held = Folded(f"{len(units)}: {', '.join(shown)}")
        table.add_row(f"stage {stage}", numbers(ranks), held, f"{size:,}")
    table.caption = f"up to {schedule.microbatches} microbatches per batch (fewer where it has fewer rows)"
    if pipeline.compiled:
        names = ", ".join(pipeline.compiled[:4]) + (", ..." if len(pipeline.compiled) > 4 else "")
        table.caption += f"; compiled, so that weight gradients can't be put off: {names}"
    return table
