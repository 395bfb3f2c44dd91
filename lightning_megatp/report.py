"""What people see at set-up: who is where, what is split, what stays whole."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.build import stage_table
from lightning_megatp.pipeline.pipeline import Pipeline
from lightning_megatp.plan.layer import LayerPlan
from lightning_megatp.plan.ranges import length, show


def print_layout(parallel: ParallelModule, mesh: ParallelMesh, pipeline: Pipeline | None = None) -> None:
    """Print the tables to the terminal."""
    console = Console()
    if mesh.shape.world_size > 1:
        console.print(mesh.table())
    if parallel.plan.layers and mesh.size("tp") > 1:
        console.print(layer_table(parallel))
    if pipeline is not None:
        console.print(stage_table(pipeline))
    console.print(memory_table(parallel))
    if parallel.recomputation is not None and parallel.recomputation.options.kind != "none":
        console.print(parallel.recomputation.describe())
    if 1 < mesh.size("dp") == mesh.shape.world_size and parallel.sharding is None:
        console.print("Every rank holds the whole model, as under DDP; tp, pp or zero of MegaTPStrategy divide it.")
    console.print(peak_memory(), style="italic")


def layer_table(parallel: ParallelModule) -> Table:
    """One row per kind of split layer: layers that differ in their index only are counted."""
    table = Table(title=f"What is split over tp={parallel.plan.tp}", title_justify="left")
    table.add_column("layers", overflow="fold")
    table.add_column("style", no_wrap=True)
    table.add_column("on this rank", overflow="fold")
    table.add_column("notes", overflow="fold")
    for name, layers in _grouped(parallel.plan.layers.values()).items():
        layer = layers[0]
        own = layer.by_rank[parallel.context.rank]
        of = max(stop for ranges in layer.by_rank for _, stop in ranges)
        notes = [parallel.plan.how.get(layer.name, ""), "sequence shards" if layer.sequence_dim is not None else ""]
        table.add_row(
            name + (f" (x{len(layers)})" if len(layers) > 1 else ""),
            layer.style.style,
            f"{length(own)} of {of}: {show(own)}",
            "; ".join(filter(None, notes)),
        )
    return table


def memory_table(parallel: ParallelModule) -> Table:
    """Parameters in all and on this rank, split and whole, and the largest of those that stay whole."""
    split_full = split_own = whole = bytes_own = 0
    largest: list[tuple[int, str]] = []
    for name, parameter in parallel.module.named_parameters():
        spec = parallel.spec(parameter)
        bytes_own += parameter.numel() * parameter.element_size()
        if spec is None:
            whole += parameter.numel()
            largest.append((parameter.numel(), name))
        else:
            split_full += spec.spec(0).numel
            split_own += parameter.numel()
    pipelined = split_full + whole < parallel.whole_parameters
    table = Table(title="Parameters of this rank's stages" if pipelined else "Parameters", title_justify="left")
    for column in ("", "unsplit", "this rank"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("split", f"{split_full:,}", f"{split_own:,}")
    table.add_row("whole on every tensor rank", f"{whole:,}", f"{whole:,}")
    table.add_row("all", f"{split_full + whole:,}", f"{split_own + whole:,} ({bytes_own / 2**20:,.1f} MiB)")
    if parallel.sharding is not None:
        rows = sum(held.numel() for _, held in parallel.named_held())
        level, ranks = parallel.sharding.options.level, parallel.rows_group.size() if parallel.rows_group else 1
        what = "held between uses" if level == 3 else "optimized here"
        table.add_row(f"{what} (zero={level}, over {ranks} ranks)", "", f"{rows:,}")
        if parallel.sharding.whole:
            names = ", ".join(parallel.sharding.whole[:3])
            table.add_row(f"not divided: {names}{', ...' if len(parallel.sharding.whole) > 3 else ''}", "", "")
    if pipelined:
        table.add_row("whole model, all stages", f"{parallel.whole_parameters:,}", "")
    if parallel.plan.tp > 1 and largest:
        table.caption_justify = "left"
        table.caption = "Largest whole parameters:\n" + "\n".join(_largest(parallel, largest))
    return table


def _largest(parallel: ParallelModule, whole: Iterable[tuple[int, str]]) -> list[str]:
    """The three kinds of parameters with the most elements in all, and why these are whole."""
    kinds: dict[str, list[tuple[int, str]]] = {}
    for numel, name in whole:
        kinds.setdefault(_pattern(name), []).append((numel, name))
    most = sorted(kinds.items(), key=lambda kind: -sum(numel for numel, _ in kind[1]))[:3]
    found = []
    for pattern, (first, *others) in most:
        times, why = f"{len(others) + 1} x " if others else "", _why_whole(parallel, first[1])
        found.append(f"{pattern} ({times}{first[0]:,})" + (f": {why}" if why else ""))
    return found


def _why_whole(parallel: ParallelModule, name: str) -> str:
    layer, _, computed = name.partition(".parametrizations.")
    owner = layer if computed else name.rpartition(".")[0]
    module = parallel.module.get_submodule(owner)
    if computed or name.endswith(("weight_g", "weight_v", "weight_orig")):
        return "its layer's weight is computed from it (a parametrization)"
    if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward:
        return f"`{type(module).__name__}` has a forward of its own"
    return parallel.plan.whole.get(owner, "")


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


def _grouped(layers: Iterable[LayerPlan]) -> dict[str, list[LayerPlan]]:
    groups: dict[str, list[LayerPlan]] = {}
    for layer in layers:
        groups.setdefault(_pattern(layer.name), []).append(layer)
    return groups


def _pattern(name: str) -> str:
    """A name without its numbers."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
