"""What `megatp plan` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_megatp.pipeline.slicing.units import assign, find_units
from lightning_megatp.plan.auto.blocks import kinds_of_blocks
from lightning_megatp.plan.auto.search import BlockResult
from lightning_megatp.plan.parallel_plan import ParallelPlan
from lightning_megatp.plan.ranges import length, show
from lightning_megatp.planner.rehearsal import Rehearsal, interception_seconds
from lightning_megatp.planner.report import size


def print_plan(
    model: nn.Module,
    plan: ParallelPlan,
    results: Sequence[BlockResult],
    problems: Sequence[str],
    stages: int,
    kept: tuple[Rehearsal, Rehearsal] | None = None,
) -> None:
    """Each kind of block once, what lies outside of blocks, what stays whole and why, stages, and the memory.

    Args:
        stages: of the pipeline; 1 for none.
        kept: what a step on the batch that was looked at keeps for backward, unsplit and on tensor rank 0.
    """
    console = Console()
    for result in results:
        console.print(_block_table(result, plan.tp))
    inside = tuple(f"{name}." for result in results for name in result.block.names)
    rest = [layer for layer in plan.layers.values() if not layer.name.startswith(inside)]
    if rest:
        table = _table("Outside of these blocks")
        for layer in rest:
            own = layer.by_rank[0]
            how = plan.how.get(layer.name, "by the user's plan")
            table.add_row(layer.name, layer.style.style, f"{length(own)}: {show(own)}", how)
        console.print(table)
    if stages > 1:
        console.print(_stages(model, stages))
    console.print(_memory(model, plan))
    if kept is not None:
        console.print(_activations(model, *kept))
    for problem in problems:
        console.print(f"Note: {problem}", highlight=False)


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("layer", "style", "features on rank 0", "how"):
        table.add_column(column, overflow="fold")
    return table


def _block_table(result: BlockResult, tp: int) -> Table:
    block = result.block
    more = f" and {len(block.names) - 1} more" if len(block.names) > 1 else ""
    table = _table(f"{type(block.module).__name__}: {block.names[0]}{more}, over tp={tp}")
    for name, layer in result.plan.layers.items():
        own = layer.by_rank[0]
        table.add_row(name, layer.style.style, f"{length(own)}: {show(own)}", result.how.get(name, ""))
    for attribute in result.plan.attributes:
        table.add_row(attribute.name, "divide", str(attribute.by_rank[0]), "a number in the code")
    for name, why in result.whole.items():
        table.add_row(name, "whole", "all", why)
    if result.errors:
        table.caption = f"proven in float64: largest difference {max(result.errors.values()):.0e}"
        if result.gathers:
            gathers = ", ".join(f"{name} (x{count})" for name, count in result.gathers.items())
            table.caption += f"; all features gathered for {gathers}"
    return table


def _stages(model: nn.Module, stages: int) -> Table:
    units = find_units(model)
    cost = {unit: 1.0 + sum(p.numel() for p in model.get_submodule(unit).parameters()) for unit in units}
    placed = assign(units, stages, cost)
    table = Table(title=f"{stages} pipeline stages", title_justify="left")
    for column in ("stage", "units", "parameters"):
        table.add_column(column)
    for stage in range(stages):
        own = [unit for unit in units if placed[unit] == stage]
        names = ", ".join(own if len(own) <= 4 else [*own[:2], "...", own[-1]])
        table.add_row(str(stage), names, f"{int(sum(cost[unit] for unit in own)):,}")
    return table


def _activations(model: nn.Module, whole: Rehearsal, split: Rehearsal) -> Table:
    table = Table(title="One block in a step on the rows that were looked at", title_justify="left")
    for column in ("block", "activations unsplit", "on tensor rank 0", "operations intercepted", "which cost"):
        table.add_column(column, justify="left" if column == "block" else "right")
    seconds = interception_seconds() if split.intercepted else 0.0
    for kind in kinds_of_blocks(model):
        (before, _), (own, count) = (found.of_block(kind.names[0]) for found in (whole, split))
        if before:
            share = f"{size(own)} ({own / before:.0%})"
            cost = f"{count * seconds * 1e6:,.0f} µs per forward" if count else ""
            table.add_row(kind.names[0], size(before), share, str(count), cost)
    return table


def _memory(model: nn.Module, plan: ParallelPlan) -> Table:
    whole = split = own = 0
    for name, parameter in model.named_parameters():
        spec = plan.parameters.get(name)
        if spec is None:
            whole += parameter.numel()
        else:
            split += parameter.numel()
            own += parameter.numel() // spec.shape[spec.dim] * length(spec.by_rank[0])
    table = Table(title="Parameters", title_justify="left")
    for column in ("", "unsplit", "on tensor rank 0"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("split", f"{split:,}", f"{own:,}")
    table.add_row("whole on every tensor rank", f"{whole:,}", f"{whole:,}")
    table.add_row("all", f"{split + whole:,}", f"{own + whole:,} ({(own + whole) / max(split + whole, 1):.0%})")
    return table
