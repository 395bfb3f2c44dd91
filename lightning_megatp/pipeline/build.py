"""From a module and a mesh to its pipeline: which units are on which stage, and what this rank keeps."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

from rich.table import Table
from torch import nn

from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.executor import Executor, Links
from lightning_megatp.pipeline.logs import Logs
from lightning_megatp.pipeline.pipeline import Pipeline, Settings, Shared
from lightning_megatp.pipeline.schedule import Schedule, forward_only, make_schedule
from lightning_megatp.pipeline.slicing import Slicer
from lightning_megatp.pipeline.units import assign, find_units


@dataclass(frozen=True)
class PipelineOptions:
    """What a user chooses.

    Args:
        microbatches: per batch; None for four per stage.
        schedule: see `pipeline.schedule.NAMES`.
        virtual_stages: stages per rank; None for what the schedule needs.
        stages: the units of each stage, as names or patterns; None balances them.
    """

    microbatches: int | None = None
    schedule: str = "1f1b"
    virtual_stages: int | None = None
    stages: Sequence[Sequence[str]] | None = None


def build_pipeline(
    parallel: ParallelModule, mesh: ParallelMesh, options: PipelineOptions, timeout: timedelta | None = None
) -> Pipeline:
    """Cut a module over the pp axis, and let go of what other stages own.

    Args:
        parallel: the module, with its layers swapped.
        mesh: pp > 1.
        options: what the user chose.
        timeout: of messages between stages.

    Raises:
        ValueError: sizes, a schedule or stages that don't fit the model.

    Communication: two rendezvous over pp.
    """
    ranks = mesh.size("pp")
    microbatches = options.microbatches or 4 * ranks
    schedule = make_schedule(options.schedule, ranks, microbatches, options.virtual_stages)
    units = find_units(parallel.module)
    stage_of_unit = assign(units, schedule.stages, unit_costs(parallel.module, units), options.stages)
    slicer = Slicer(parallel.module, stage_of_unit, schedule.stages)
    rank = pipeline_rank(mesh, schedule)
    links = Links(
        ranks=[mesh.ranks("pp")[i] for i in _order(schedule)],
        rank=rank,
        up=mesh.new_group("pp", timeout),
        down=mesh.new_group("pp", timeout),
        device=mesh.device,
    )
    holders = _holders(parallel.module, stage_of_unit, schedule)
    parallel.counted_elsewhere = {i for i, ranks_of in holders.items() if ranks_of[-1] != rank}
    names = {id(p): name for name, p in parallel.module.named_parameters()}
    shared = [Shared.of(names[i], parallel.names[names[i]]) for i, ranks_of in holders.items() if len(ranks_of) > 1]
    parallel.order = tuple(parallel.module.state_dict(keep_vars=True))
    slicer.free(schedule.stages_of(rank))
    parallel.forget_freed()
    settings = Settings(
        microbatches=microbatches,
        schedule=lambda m: make_schedule(options.schedule, ranks, m, options.virtual_stages),
        evaluation=lambda m: forward_only(schedule.placement, m),
    )
    logs = Logs(parallel.module)
    return Pipeline(parallel, slicer, Executor(links), mesh, settings, logs, shared, stage_of_unit)


def check_pipelined(parallel: ParallelModule) -> None:
    """Refuse what can't work when a step runs on several stages.

    Raises:
        ValueError: manual optimization, a step that takes an iterator, an own `backward`.
    """
    module = parallel.module
    found = None
    if not getattr(module, "automatic_optimization", True):
        found = "manual optimization (automatic_optimization=False): the pipeline's schedule runs the backward", "pp=1"
    elif "dataloader_iter" in inspect.signature(getattr(module, "training_step", print)).parameters:
        found = "a step that takes `dataloader_iter`", "a step that takes a batch"
    elif not getattr(type(module), "backward", print).__module__.endswith(("core.module", "builtins")):
        found = "a LightningModule with its own `backward`: the pipeline's schedule runs it", "on_before_backward"
    if found:
        what, use = found
        raise ValueError(f"MegaTPStrategy: pp > 1 does not go together with {what}. Use {use}.")


def pipeline_rank(mesh: ParallelMesh, schedule: Schedule) -> int:
    """This rank's place in the schedule. Index 0 on the pp axis has the last stage, wherever a schedule puts that."""
    return _order(schedule).index(mesh.rank("pp"))


def _order(schedule: Schedule) -> list[int]:
    """Pipeline rank -> index on the pp axis."""
    forward = list(range(schedule.ranks))
    return forward if schedule.placement[-1] == 0 else forward[::-1]


def unit_costs(module: nn.Module, units: Sequence[str]) -> dict[str, float]:
    """An estimate of each unit's time: its parameters, those of embeddings not counted, since looking up is cheap."""
    return {unit: _cost(module.get_submodule(unit)) for unit in units}


def _cost(unit: nn.Module) -> float:
    embeddings = {id(p) for child in unit.modules() if isinstance(child, nn.Embedding) for p in child.parameters()}
    return 1.0 + sum(p.numel() for p in unit.parameters() if id(p) not in embeddings)


def _holders(module: nn.Module, stage_of_unit: Mapping[str, int], schedule: Schedule) -> dict[int, list[int]]:
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


def stage_table(pipeline: Pipeline) -> Table:
    """What each stage holds, and where."""
    schedule = pipeline.settings.schedule(pipeline.settings.microbatches)
    table = Table(title=f"Pipeline of {schedule.stages} stages, {schedule.name}", title_justify="left")
    for column in ("stage", "on pipeline rank", "units"):
        table.add_column(column)
    for stage in range(schedule.stages):
        units = [unit for unit, at in pipeline.stage_of_unit.items() if at == stage]
        shown = units if len(units) <= 4 else [*units[:2], "...", units[-1]]
        table.add_row(str(stage), str(schedule.placement[stage]), f"{len(units)}: {', '.join(shown)}")
    m, p = schedule.microbatches, schedule.ranks
    table.caption = f"{m} microbatches over {p} ranks (batches with fewer rows have fewer)"
    return table
