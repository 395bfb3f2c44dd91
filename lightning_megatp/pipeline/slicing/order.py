"""How a step uses the units of a module: in which order, and which of them need one stage. Found by a dry run in which
there is a single stage."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_megatp.containers import tensors_in
from lightning_megatp.pipeline.slicing.dry_run.dry_runs import Step
from lightning_megatp.pipeline.slicing.plan import SlicePlan
from lightning_megatp.pipeline.slicing.slicer import Slicer
from lightning_megatp.pipeline.slicing.state.ownership import Sizes
from lightning_megatp.plan.units import children_of, in_definition_order, keepers_of


@dataclass(frozen=True)
class UnitsOfStep:
    """How a step uses the units of a module."""

    order: list[str]
    """In which they are first called, but for those that make what earlier ones take in a later call: these come
    before them. One that never is called is where a parameter of it is first used beside it, or after the one defined
    before."""
    idle: set[str] = field(default_factory=set)
    """Units that are never called."""
    touched: set[str] = field(default_factory=set)
    """Names of their parameters that the step uses beside them."""
    untrained: set[str] = field(default_factory=set)
    """Units whose results never need a gradient: frozen ones, what is called under `torch.no_grad()` alone, and what
    the step has no use for."""
    together: list[tuple[str, str]] = field(default_factory=list)
    """Pairs that need one stage, and all in between with them: the first, called once more, takes what the second has
    made, or one operation or activation checkpoint calls both."""


def units_of_step(
    module: nn.Module,
    units: Sequence[str],
    step: Step,
    batch: Any,
    sizes: Sizes | None = None,
    device: torch.device | None = None,
) -> UnitsOfStep:
    """Dry-run a step between units. One that is never called because the model calls its parts is replaced by these,
    and so is one that reads values, where the step can be followed between its parts. A module without parameters,
    between units, that changes its buffers (a batch norm with affine=False) becomes one.

    Raises:
        SliceError: see `Slicer.plan`.
    """
    plan = _whole_plan(module, units, step, batch, sizes, device)
    called = _calls(plan)
    # Those that come after the one that stopped the run were not called either, and need not be opened for that.
    for closed in (plan.ended_in, [unit for unit in units if unit not in called]):
        parts = {unit: children_of(module, unit) for unit in closed}
        split = [part for unit in units for part in parts.get(unit) or [unit]]
        if split != list(units):
            called_parts = _calls(_whole_plan(module, split, step, batch, sizes, device))
            split = [part for unit in units for part in _used(unit, parts, called_parts)]
            if split != list(units):
                return units_of_step(module, split, step, batch, sizes, device)
    keepers = keepers_of(module, units, plan.changed)
    with_keepers = in_definition_order(module, {*units, *keepers})
    kept = _calls(_whole_plan(module, with_keepers, step, batch, sizes, device)) if keepers else {}
    if any(keeper in kept for keeper in keepers):
        with_keepers = [unit for unit in with_keepers if unit in units or unit in kept]
        return units_of_step(module, with_keepers, step, batch, sizes, device)
    used = called | _uses_beside(plan, [unit for unit in units if unit not in called])
    order = _by_need(sorted(used, key=used.__getitem__), plan)
    together = _together(plan, [unit for unit in order if unit in called])
    for before, unit in zip(["", *units], units, strict=False):
        if unit not in used:
            order.insert(order.index(before) + 1 if before in order else 0, unit)
    idle, untrained = set(order) - set(called), _untrained(plan)
    if not plan.ended:  # or it may call them later
        untrained |= idle - used.keys()
    return UnitsOfStep(order, idle, set(plan.touched), untrained, together)


def _whole_plan(module: nn.Module, units: Sequence[str], step: Step, batch: Any, *options: Any) -> SlicePlan:
    """The plan of a single stage."""
    slicer = Slicer(module, dict.fromkeys(units, 0), 1, *options)
    try:
        return slicer.plan(followed(slicer, module, step), batch)
    finally:
        slicer.close()


def followed(slicer: Slicer, module: nn.Module, step: Step) -> Step:
    """A step, to be looked at before training: what it does by hand is left out."""

    def follow(batch: Any) -> Any:
        slicer.follows.follow_by_hand(lambda *_: None)
        return step(batch)

    return step if getattr(module, "automatic_optimization", True) else follow


def _calls(plan: SlicePlan) -> dict[str, int]:
    """Unit -> the first operation that calls it."""
    calls: dict[str, int] = {}
    for i, operation in enumerate(plan.operations):
        for unit in operation.units:
            calls.setdefault(unit, i)
    return calls


def _untrained(plan: SlicePlan) -> set[str]:
    trained = [op.units for op in plan.operations if any(x.requires_grad for x in tensors_in(op.ghosts))]
    return {unit for op in plan.operations for unit in op.units}.difference(*trained)


def _uses_beside(plan: SlicePlan, units: Sequence[str]) -> dict[str, int]:
    """Unit that is not called -> the first operation that uses a parameter of it, if the step has one."""
    uses = {unit: [i for name, i in plan.touched.items() if name.startswith(f"{unit}.")] for unit in units}
    return {unit: min(operations) for unit, operations in uses.items() if operations}


def _by_need(units: Sequence[str], plan: SlicePlan) -> list[str]:
    """Units such that each comes behind all whose results any of its calls takes: the stems of several inputs, which
    one trunk takes in turn, before that. Those that take each other's results stay in the order that is given."""
    behind: list[set[str]] = []  # the units that each operation depends on
    needs: dict[str, set[str]] = {unit: set() for unit in units}
    for operation in plan.operations:
        needed = set[str]().union(*(behind[key.operation] for key in operation.inputs))
        behind.append(needed.union(operation.units))
        for unit in operation.units:
            needs[unit] |= needed
    ordered: dict[str, None] = {}
    for unit in units:
        before = [other for other in units if other in needs[unit] and unit not in needs[other]]
        ordered |= dict.fromkeys([*sorted(before, key=lambda other: len(needs[other])), unit])
    return list(ordered)


def _together(plan: SlicePlan, called: Sequence[str]) -> list[tuple[str, str]]:
    place = {unit: i for i, unit in enumerate(called)}
    found: dict[tuple[str, str], None] = {}
    latest: list[int] = []  # of the units that each operation depends on
    first: dict[int, int] = {}  # unit that each activation checkpoint calls
    for operation in plan.operations:
        own = [place[unit] for unit in operation.units]
        if own and operation.checkpoint is not None:
            own.append(first.setdefault(operation.checkpoint, own[0]))
        latest.append(max([*own, *(latest[key.operation] for key in operation.inputs)], default=-1))
        if own and min(own) < latest[-1]:
            found[called[min(own)], called[latest[-1]]] = None
    return list(found)


def _used(unit: str, parts: Mapping[str, list[str]], called: Collection[str]) -> list[str]:
    of_unit = parts.get(unit, [])
    return of_unit if any(part in called for part in of_unit) else [unit]
