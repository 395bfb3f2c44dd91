"""Putting layers into a plan, and taking them out again."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_megatp.plan.layer import LayerPlan
from lightning_megatp.plan.parallel_plan import ParallelPlan
from lightning_megatp.plan.ranges import split_evenly
from lightning_megatp.plan.styles import Style


def add_layer(plan: ParallelPlan, name: str, style: str, size: int, how: str, head: bool = False) -> None:
    """Put a layer into a plan, of which each rank has as many features or rows as any other.

    Args:
        size: of all.
        how: it was planned, in words.
        head: whether a linear layer's outputs are a vocabulary, which a cross-entropy takes split.
    """
    lazy = style == "column_gather" and head and not plan.compiled
    by_rank = tuple((piece,) for piece in split_evenly(size, plan.tp))
    plan.layers[name] = LayerPlan(name, Style(name, style), by_rank, lazy=lazy)
    plan.how[name] = how + (", gathered on demand" if lazy else "")
    plan.whole.pop(name, None)


def drop_region(plan: ParallelPlan, name: str, why: str) -> list[str]:
    """Leave a layer whole, and those of its region; regions that count by the same attributes go with it. A stack of
    experts is a region by itself.

    Returns:
        The layers.
    """
    region = plan.layers[name].region
    alone = region is None or plan.layers[name].stack is not None
    dropped = [
        n
        for n, layer in plan.layers.items()
        if n == name or (not alone and layer.region == region and layer.stack is None)
    ]
    for other in dropped:
        del plan.layers[other]
        plan.how.pop(other, None)
        plan.whole[other] = why
    counted = [a for a in plan.attributes if region is not None and related(a.module, region)]
    plan.attributes = [a for a in plan.attributes if a not in counted]
    for other, layer in list(plan.layers.items()):
        if other not in plan.layers or layer.stack is not None:
            continue
        if any(layer.region and related(a.module, layer.region) for a in counted):
            dropped += drop_region(plan, other, why)
    return dropped


def related(one: str, other: str) -> bool:
    """Whether one of two modules is, or holds, the other."""
    longer, shorter = sorted((f"{one}.", f"{other}."), key=len, reverse=True)
    return longer.startswith(shorter) or not (one and other)


def inside(name: str, modules: Iterable[str]) -> bool:
    """Whether a module is one of these, or in one."""
    return any(f"{name}.".startswith(f"{module}.") for module in modules)
