"""What people see at set-up: who is where, what is split, what stays whole."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.pipeline import Pipeline
from lightning_megatp.pipeline.settings import stage_order
from lightning_megatp.planner.report import size
from lightning_megatp.tables import Folded, Titled, grouped, layers_table, numbers

SHOWN_FROM = 0.1
"""The share of whole parameters from which the largest of them are listed."""


def print_layout(parallel: ParallelModule, mesh: ParallelMesh, pipeline: Pipeline | None, summarised: bool) -> None:
    """Print the tables to the terminal.

    Args:
        summarised: whether Lightning's summary of the model follows.
    """
    console = Console()
    if mesh.shape.world_size > 1:
        console.print(mesh.table(None if pipeline is None else _stages_along(pipeline)))
    if parallel.plan.layers and mesh.size("tp") > 1:
        console.print(layer_table(parallel, mesh))
    if pipeline is not None:
        console.print(stage_table(pipeline))
    console.print(memory_table(parallel, mesh, pipeline))
    for line in memory_remarks(parallel, mesh, summarised):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if parallel.recomputation is not None and parallel.recomputation.options.kind != "none":
        console.print(parallel.recomputation.describe())
    if 1 < mesh.size("dp") == mesh.shape.world_size and parallel.sharding is None:
        console.print("Every rank holds the whole model, as under DDP; tp, pp or zero of MegaTPStrategy divide it.")
    console.print(peak_memory(), style="italic")


def layer_table(parallel: ParallelModule, mesh: ParallelMesh) -> Table:
    """One row per kind of split layer: layers that differ in their index only are counted."""
    plan = parallel.plan
    title, where = f"What is split over tp={plan.tp}", f"on rank {mesh.global_rank}"
    return layers_table(title, plan.layers.values(), parallel.context.rank, where, plan.how)


def stage_table(pipeline: Pipeline) -> Table:
    """What each stage holds, and where."""
    schedule, shape = pipeline.settings.schedule(pipeline.settings.microbatches), pipeline.mesh.shape
    order = stage_order(schedule)
    title = f"Pipeline of {schedule.stages} stages, {schedule.name}"
    table = Titled(title=title)
    for column in ("stage", "global ranks", "units", "parameters"):
        table.add_column(column, justify="right" if column == "parameters" else "left")
    for stage, held in enumerate(pipeline.stage_parameters):
        units = [unit for unit, at in pipeline.stage_of_unit.items() if at == stage]
        shown = units if len(units) <= 4 else [*units[:2], "...", units[-1]]
        at_pp = order[schedule.placement[stage]]
        ranks = [rank for rank in range(shape.world_size) if shape.coordinates(rank)["pp"] == at_pp]
        listed = Folded(f"{len(units)}: {', '.join(shown)}")
        table.add_row(f"stage {stage}", numbers(ranks), listed, f"{held:,}")
    table.caption = f"up to {schedule.microbatches} microbatches per batch (fewer where it has fewer rows)"
    if pipeline.slicer.tail:
        table.caption += "; what comes after the last block is done once for all of them"
    if pipeline.compiled:
        names = ", ".join(pipeline.compiled[:4]) + (", ..." if len(pipeline.compiled) > 4 else "")
        table.caption += f"; compiled, so that weight gradients can't be put off: {names}"
    return table


def _stages_along(pipeline: Pipeline) -> list[list[int]]:
    """The stages of each index on the pp axis."""
    schedule = pipeline.settings.schedule(pipeline.settings.microbatches)
    order = stage_order(schedule)
    return [schedule.stages_of(order.index(at)) for at in range(schedule.ranks)]


def memory_table(parallel: ParallelModule, mesh: ParallelMesh, pipeline: Pipeline | None) -> Table:
    """Parameters in all and on this rank, split and whole."""
    split_full, split_own, whole, nbytes = _counts(parallel)
    rank = f"rank {mesh.global_rank}"
    title = "Parameters"
    if pipeline is not None:
        stages = sorted(pipeline.own_stages)
        title = f"Parameters on {rank}, which has stage{'s' if len(stages) > 1 else ''} {numbers(stages)}"
    table = Titled(title=title)
    for column in ("", "unsplit", f"on {rank}"):
        table.add_column(column, justify="left" if not column else "right")
    if parallel.plan.tp > 1:
        table.add_row("split", f"{split_full:,}", f"{split_own:,}")
        table.add_row("whole on every tensor rank", f"{sum(whole.values()):,}", f"{sum(whole.values()):,}")
    full, own = split_full + sum(whole.values()), split_own + sum(whole.values())
    table.add_row("all", f"{full:,}", f"{own:,} ({size(nbytes)})")
    if parallel.sharding is not None:
        rows = sum(held.numel() for _, held in parallel.named_held())
        level, ranks = parallel.sharding.options.level, parallel.rows_group.size() if parallel.rows_group else 1
        what = "held between uses" if level == 3 else "optimized here"
        table.add_row(f"{what} (zero={level}, over {ranks} ranks)", "", f"{rows:,}")
        if parallel.sharding.whole:
            names = ", ".join(parallel.sharding.whole[:3])
            table.add_row(f"not divided: {names}{', ...' if len(parallel.sharding.whole) > 3 else ''}", "", "")
    if pipeline is not None:
        table.add_row("whole model, all stages", f"{parallel.whole_parameters:,}", "")
    return table


def memory_remarks(parallel: ParallelModule, mesh: ParallelMesh, summarised: bool = False) -> list[str]:
    """What stays whole, and what a summary of Lightning's that follows counts."""
    split_full, split_own, whole, _ = _counts(parallel)
    remarks = _about_whole(parallel, whole, split_full) if parallel.plan.tp > 1 and whole else []
    if summarised and split_own + sum(whole.values()) < parallel.whole_parameters:
        remarks.append(
            f"Lightning's model summary, below, counts what rank {mesh.global_rank} holds; the whole model has"
            f" {parallel.whole_parameters:,} parameters."
        )
    return remarks


def _counts(parallel: ParallelModule) -> tuple[int, int, dict[str, int], int]:
    """Numbers of split parameters in all and on this rank, of each whole one, and the bytes of this rank's."""
    split_full = split_own = nbytes = 0
    whole: dict[str, int] = {}
    for name, parameter in parallel.module.named_parameters():
        spec = parallel.spec(parameter)
        nbytes += parameter.numel() * parameter.element_size()
        if spec is None:
            whole[name] = parameter.numel()
        else:
            split_full += spec.spec(0).numel
            split_own += parameter.numel()
    return split_full, split_own, whole, nbytes


def _about_whole(parallel: ParallelModule, whole: Mapping[str, int], split: int) -> list[str]:
    """What share of the parameters stays whole; if it is large, the three kinds with the most elements, and why."""
    part = sum(whole.values()) / max(split + sum(whole.values()), 1)
    said = f"{part:.1%} of the unsplit parameters stay whole"
    if part < SHOWN_FROM:
        return [f"{said}."]
    kinds = grouped({name: (numel, _why_whole(parallel, name)) for name, numel in whole.items()})
    most = sorted(kinds.items(), key=lambda kind: -len(kind[1]) * whole[kind[1][0]])[:3]
    found = [f"{said}, most of them in"]
    for name, names in most:
        count, each, why = len(names), f"{whole[names[0]]:,}", _why_whole(parallel, names[0])
        found.append(
            f"  {name} ({f'{count} of them, {each} each' if count > 1 else each})" + (f": {why}" if why else "")
        )
    return found


def _why_whole(parallel: ParallelModule, name: str) -> str:
    layer, _, computed = name.partition(".parametrizations.")
    owner, _, leaf = (layer if computed else name).rpartition(".")
    owner = layer if computed else owner
    module = parallel.module.get_submodule(owner)
    if computed or name.endswith(("weight_g", "weight_v", "weight_orig")):
        return "its layer's weight is computed from it (a parametrization)"
    split = parallel.plan.layers.get(owner)
    bare = (x for x in parallel.plan.layers.values() if x.bare is not None and x.owner == owner and x.bare.bias == leaf)
    if (row := next(bare, None)) is not None and row.style.style in ("row", "row_split"):
        return "bias of a row layer: added once, after the sum"
    if split is not None:
        if leaf in split.whole:
            return "the code around its layer uses it otherwise, too"
        if split.style.style in ("row", "row_split") and leaf == "bias":
            return "bias of a row layer: added once, after the sum"
        return "added once, after the sum" if split.stack is not None and leaf in split.stack.once else ""
    attention = parallel.plan.layers.get(owner.removesuffix(".out_proj"))
    if attention is not None and attention.style.style == "attention" and leaf == "bias":
        return "added once, after the sum"
    if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
        return f"`{type(module).__name__}` has a forward of its own"
    return parallel.plan.whole.get(name) or parallel.plan.whole.get(owner, "")


def peak_memory() -> str:
    """The most memory that this process had until now: on the host, as Linux counts it, and on its GPU."""
    found = []
    status = Path("/proc/self/status")
    if status.exists():
        kilobytes = re.search(r"VmHWM:\s*(\d+)", status.read_text())
        found += [f"{int(kilobytes[1]) / 2**20:,.2f} GiB of host memory"] if kilobytes else []
    if torch.cuda.is_available():
        found.append(f"{torch.cuda.max_memory_allocated() / 2**30:,.2f} GiB of GPU memory")
    return f"Peak of this process until now: {' and '.join(found) or 'unknown'}"
