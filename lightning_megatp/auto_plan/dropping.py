"""Taking layers out of a plan again."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_megatp.plan.parallel_plan import ParallelPlan


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
