"""Regions: which column layers feed which row layers, and that these own the same features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from lightning_megatp.plan.layer import LayerPlan
from lightning_megatp.plan.layer_styles import pieces
from lightning_megatp.plan.parallel_plan import ParallelPlan
from lightning_megatp.plan.ranges import Ranges, deal_units, shard_ranges, show


def place(plan: ParallelPlan, modules: Mapping[str, nn.Module]) -> None:
    """Find the region of each column and row layer, and the rows inside sequence blocks."""
    columns = [name for name, layer in plan.layers.items() if layer.style.style == "column"]
    rows = [name for name, layer in plan.layers.items() if layer.style.style == "row"]
    for name, layer in list(plan.layers.items()):
        region = layer.region
        if layer.style.style in ("column", "row"):
            partners = rows if layer.style.style == "column" else columns
            region = next((a for a in _ancestors(name) if any(_inside(partner, a) for partner in partners)), None)
            if region is None:
                other, fix = ("row", "column_gather") if layer.style.style == "column" else ("column", "row_split")
                what = "output is split, and nothing consumes it" if other == "row" else "input is never split"
                raise ValueError(
                    f"MegaTPStrategy: `{name}` has the style `{layer.style.style}`, but its {what}: the plan has no"
                    f" `{other}` layer. {_missing(plan, name, other, modules)}, or use `{fix}` for `{name}`."
                )
        blocks = [a for a in _ancestors(name) if a in plan.sequences]
        closes = layer.style.style in ("row", "row_split", "attention")
        dim = plan.sequences[blocks[0]].dim if blocks and closes else None
        tracked = layer.style.global_sizes
        if layer.style.style == "row":
            tracked = any(plan.layers[c].style.global_sizes and _inside(c, region or "") for c in columns)
        plan.layers[name] = replace(layer, region=region, sequence_dim=dim, global_sizes=tracked, lazy=layer.style.lazy)
    for name in rows:
        _check_row(plan, name)
    for name in columns:
        _check_column(plan, name)
    for region in dict.fromkeys(layer.region for layer in plan.layers.values()):
        if region is not None:
            _check_shared_heads(plan, region)


def _missing(plan: ParallelPlan, name: str, style: str, modules: Mapping[str, nn.Module]) -> str:
    """What to add to the plan: the style for the one linear layer beside another whose features fit, where that is
    plain."""
    layer, parent = modules[name], name.rpartition(".")[0]
    here, there = ("out_features", "in_features") if style == "row" else ("in_features", "out_features")
    beside = (
        other
        for other, module in modules.items()
        if other != name and other.rpartition(".")[0] == parent and isinstance(module, nn.Linear)
        if getattr(module, there) == getattr(layer, here, None)
    )
    fitting = list(beside)
    if len(fitting) != 1:
        return "Add one"
    verb = "takes" if style == "row" else "makes"
    instead = f" instead of `{plan.layers[fitting[0]].style.style}`" if fitting[0] in plan.layers else ""
    return f"Give `{fitting[0]}`, which {verb} as many features, the style `{style}`{instead}"


def _check_row(plan: ParallelPlan, name: str) -> None:
    """A row and the columns of its region must own the same features, or the product is silently wrong."""
    row = plan.layers[name]
    columns = [c for c in plan.layers.values() if c.style.style == "column" and c.region == row.region]
    left = [(column, part) for column in columns for part in _parts_of(column, plan.tp)]
    for part in _parts_of(row, plan.tp):
        if any(_feeds(column, other, row, part, plan.tp) for column, other in left):
            continue
        same_size = [other for _, other in left if _size(other) == _size(part)]
        if same_size:
            raise ValueError(
                f"MegaTPStrategy: `{name}` takes the features {', '.join(show(r) for r in part)} on ranks"
                f" 0..{plan.tp - 1}, but `{columns[0].name}` leaves {', '.join(show(r) for r in same_size[0])}. Give"
                " both the same `unit`."
            )
        sizes = ", ".join(f"`{column.name}` leaves {_part_sizes(column)}" for column in columns)
        raise ValueError(
            f"MegaTPStrategy: `{name}` takes {_size(part)} features in one piece, but {sizes}. Where a layer holds"
            " several projections one after another (q, k and v; gate and up), or takes several concatenated, each of"
            " them has to be split by itself: say so with `parts`, their number or their sizes."
        )


def _check_column(plan: ParallelPlan, name: str) -> None:
    """A column layer needs a row layer beside it, or one elsewhere in its region that takes what it leaves."""
    column = plan.layers[name]
    rows = [r for r in plan.layers.values() if r.style.style == "row" and r.region == column.region]
    beside = any(row.name.rpartition(".")[0] == name.rpartition(".")[0] for row in rows)
    parts = _parts_of(column, plan.tp)
    fed = any(_feeds(column, x, row, y, plan.tp) for row in rows for x in parts for y in _parts_of(row, plan.tp))
    if rows and not beside and not fed:
        raise ValueError(
            f"MegaTPStrategy: `{name}` has the style `column`, but its output is split, and nothing consumes it: of the"
            f" plan's `row` layers, {', '.join(f'`{row.name}`' for row in rows)} take other features. Add the `row`"
            f" layer that follows it, or use `column_gather` for `{name}`."
        )


def _feeds(column: LayerPlan, left: tuple[Ranges, ...], row: LayerPlan, taken: tuple[Ranges, ...], tp: int) -> bool:
    """Whether a part that a column leaves can be the one a row takes: the same ranges, or, for projections that
    alternate head by head, the same share of the heads."""
    if left == taken:
        return True
    units, size = _size(left) // column.unit, _size(taken)
    if column.unit == 1 or _size(left) <= size or size % units or row.unit not in (1, size // units):
        return False
    return shard_ranges(size, tp, 1, size // units) == taken


def _check_shared_heads(plan: ParallelPlan, region: str) -> None:
    """Query heads must sit with the key-value heads they attend to."""
    columns = [c for c in plan.layers.values() if c.style.style == "column" and c.region == region and c.unit > 1]
    parts = [(column, part) for column in columns for part in _part_sizes(column)]
    if not parts:
        return
    queries = max(size // column.unit for column, size in parts)
    for column, size in parts:
        heads = size // column.unit
        if queries % heads:
            continue
        group = queries // heads
        for (q_start, q_stop), held in zip(deal_units(queries, plan.tp), deal_units(heads, plan.tp), strict=True):
            if q_stop > q_start and (q_start // group, (q_stop - 1) // group + 1) != held:
                raise ValueError(
                    f"MegaTPStrategy: over tp={plan.tp} the {heads} heads of `{column.name}` do not lie with the"
                    f" {queries} query heads that use them (rank with queries {q_start}..{q_stop - 1} would hold heads"
                    f" {held[0]}..{held[1] - 1}). Use a tp that divides {queries} and divides, or is divided by,"
                    f" {heads}, or leave this attention out of the plan."
                )


def _size(by_rank: tuple[Ranges, ...]) -> int:
    """Features that all ranks own together, repeated ones once."""
    return len({i for ranges in by_rank for start, stop in ranges for i in range(start, stop)})


def _part_sizes(layer: LayerPlan) -> list[int]:
    return pieces(_size(layer.by_rank), layer.style.parts)


def _parts_of(layer: LayerPlan, tp: int) -> list[tuple[Ranges, ...]]:
    """The ranges of each fused part of a layer, counted from the part's start."""
    return [shard_ranges(part, tp, 1, layer.unit) for part in _part_sizes(layer)]


def _ancestors(name: str) -> Iterator[str]:
    """blocks.0.attn.qkv -> blocks.0.attn, blocks.0, blocks, (root)."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _inside(name: str, ancestor: str) -> bool:
    return ancestor == "" or name.startswith(ancestor + ".")
