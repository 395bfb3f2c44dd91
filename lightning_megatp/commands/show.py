"""What `megatp plan` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_megatp.auto_plan.blocks import kinds_of_blocks
from lightning_megatp.auto_plan.results import BlockResult
from lightning_megatp.plan.parallel_plan import ParallelPlan
from lightning_megatp.plan.ranges import length
from lightning_megatp.planner.rehearsal import SavedForBackward, interception_seconds
from lightning_megatp.planner.report import size
from lightning_megatp.tables import Folded, Titled, grouped, layers_table, times


def print_plan(
    model: nn.Module,
    plan: ParallelPlan,
    results: Sequence[BlockResult],
    problems: Sequence[str],
    stage_of_unit: Mapping[str, int] | None = None,
    kept: tuple[SavedForBackward, SavedForBackward] | None = None,
) -> None:
    """Each kind of block once, what lies outside of blocks, what stays whole and why, stages, and the memory.

    Args:
        stage_of_unit: in their order; None without a pipeline.
        kept: what a step on the batch that was looked at keeps for backward, unsplit and on tensor rank 0.
    """
    console = Console()
    for result in results:
        console.print(_block_table(result, plan.tp))
    inside = tuple(f"{name}." for result in results for name in result.block.names)
    rest = [layer for layer in plan.layers.values() if not layer.name.startswith(inside)]
    if rest:
        title = "Outside of these blocks" if results else f"What is split over tp={plan.tp}"
        console.print(layers_table(title, rest, 0, "on tensor rank 0", plan.how))
    if stage_of_unit is not None:
        console.print(_stages(model, stage_of_unit))
    console.print(_memory(model, plan))
    if kept is not None:
        console.print(_activations(model, *kept))
    for problem in problems:
        console.print(f"Note: {problem}", highlight=False)


def _block_table(result: BlockResult, tp: int) -> Table:
    """One kind of block: its layers, the numbers in its code that are divided, and what stays whole."""
    block = result.block
    others = f" and {len(block.names) - 1} more" if len(block.names) > 1 else ""
    title = f"{type(block.module).__name__}: {block.names[0]}{others}, over tp={tp}"
    more = [
        (attribute.name, "divide", f"{attribute.by_rank[0]} of {sum(attribute.by_rank)}", "a number in the code")
        for attribute in result.plan.attributes
    ]
    more += [
        (times(name, names), "whole", "all", result.whole[names[0]]) for name, names in grouped(result.whole).items()
    ]
    table = layers_table(title, result.plan.layers.values(), 0, "on tensor rank 0", result.how, more)
    captions = [str(table.caption)] if table.caption else []
    if result.errors:
        captions.append(f"Proven in float64: largest difference {max(result.errors.values()):.0e}.")
        if result.gathers:
            gathers = ", ".join(f"{name} (x{count})" for name, count in result.gathers.items())
            captions.append(f"All features are gathered for {gathers}.")
    table.caption = "\n".join(captions) or None
    return table


def _stages(model: nn.Module, stage_of_unit: Mapping[str, int]) -> Table:
    stages = max(stage_of_unit.values()) + 1
    table = Titled(title=f"{stages} pipeline stages")
    for column in ("stage", "units", "parameters"):
        table.add_column(column, justify="right" if column == "parameters" else "left")
    for stage in range(stages):
        own = [unit for unit, at in stage_of_unit.items() if at == stage]
        names = ", ".join(own if len(own) <= 4 else [*own[:2], "...", own[-1]])
        table.add_row(f"stage {stage}", Folded(names), f"{_parameters(model, own):,}")
    return table


def _parameters(model: nn.Module, units: Sequence[str]) -> int:
    """How many parameters some units have together, tied ones once."""
    return sum({id(p): p.numel() for unit in units for p in model.get_submodule(unit).parameters()}.values())


def _activations(model: nn.Module, whole: SavedForBackward, split: SavedForBackward) -> Table:
    table = Titled(title="One block in a step on the rows that were looked at")
    for column in ("block", "activations unsplit", "on tensor rank 0", "operations intercepted", "which cost"):
        table.add_column(column, justify="left" if column == "block" else "right")
    seconds = interception_seconds() if split.intercepted else 0.0
    for kind in kinds_of_blocks(model):
        (before, _), (own, count) = (found.of_block(kind.names[0]) for found in (whole, split))
        if before:
            share = f"{size(own)} ({own / before:.0%})"
            cost = f"{count * seconds * 1e6:,.0f} µs per forward" if count else ""
            table.add_row(Folded(kind.names[0]), size(before), share, str(count), cost)
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
    table = Titled(title="Parameters")
    for column in ("", "unsplit", "on tensor rank 0"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("split", f"{split:,}", f"{own:,}")
    table.add_row("whole on every tensor rank", f"{whole:,}", f"{whole:,}")
    table.add_row("all", f"{split + whole:,}", f"{own + whole:,} ({(own + whole) / max(split + whole, 1):.0%})")
    return table
