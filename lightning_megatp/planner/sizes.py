"""Bytes of parameters, gradients, optimizer state and activations on each pipeline rank, from shapes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_megatp.parts.rows import rows_of
from lightning_megatp.pipeline.assignment import assign, holders_of, unit_costs
from lightning_megatp.pipeline.schedules.generators import make_schedule
from lightning_megatp.pipeline.schedules.schedule import Kind, Schedule
from lightning_megatp.plan.parallel_plan import ParallelPlan
from lightning_megatp.plan.units import find_units
from lightning_megatp.planner.optimizers import States
from lightning_megatp.planner.rehearsal import SavedForBackward
from lightning_megatp.zero.preparing import most_common, trained_dtypes
from lightning_megatp.zero.units import in_several, large_units


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, and what else decides who holds what."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 0
    replicas: int = 1
    schedule: str = "1f1b"
    microbatches: int = 1
    """Per batch; 1 where there is no pipeline."""
    virtual_stages: int | None = None
    stages: Sequence[Sequence[str]] | None = None
    """The user's own choice of units."""

    def made(self) -> Schedule:
        """The pipeline's schedule."""
        if self.pp == 1:
            return make_schedule("1f1b", 1, 1)
        return make_schedule(self.schedule, self.pp, self.microbatches, self.virtual_stages)

    @property
    def ways(self) -> int:
        """Data-parallel ranks that hold different rows; 1 if nothing is divided."""
        return self.dp // self.replicas if self.zero else 1


@dataclass(frozen=True)
class Bytes:
    """The bytes of one rank, at the optimizer's step, where gradients are complete; activations at their peak
    before."""

    parameters: int = 0
    gathered: int = 0
    """With zero > 0: what is gathered of other ranks' parameters while a step runs, at most."""
    gradients: int = 0
    optimizer: int | None = None
    """None where it is not known."""
    activations: int | None = None

    @property
    def total(self) -> int:
        """All of them together."""
        known = self.parameters + self.gathered + self.gradients
        return known + (self.optimizer or 0) + (self.activations or 0)


def predict(
    module: nn.Module,
    plan: ParallelPlan,
    layout: Layout,
    states: States | None,
    rehearsal: SavedForBackward | None,
    stage_of_unit: Mapping[str, int] | None = None,
    tensor_rank: int = 0,
    data_rank: int = 0,
) -> list[Bytes]:
    """Bytes of each pipeline rank.

    Args:
        module: the whole model, perhaps on meta.
        states: what the optimizers keep; None if not known.
        rehearsal: of one microbatch; None if not known.
        stage_of_unit: where the units are; by default balanced as the strategy does.
        data_rank: among those that hold different rows.
    """
    schedule = layout.made()
    if stage_of_unit is None:
        stage_of_unit = place(module, layout, rehearsal)
    holders = holders_of(module, stage_of_unit, schedule)
    dtype = most_common(trained_dtypes(module))
    found = [Bytes(optimizer=None if states is None else 0) for _ in range(schedule.ranks)]
    for name, parameter in module.named_parameters():
        spec = plan.parameters.get(name) if plan.tp > 1 else None
        shape = tuple(parameter.shape) if spec is None else spec.spec(tensor_rank).local_shape
        divided = layout.ways > 1 and parameter.dim() > 0 and parameter.dtype == dtype
        own = _of_parameter(parameter, shape, layout, divided, data_rank, states)
        for rank in holders[id(parameter)]:
            found[rank] = _sum(found[rank], own)
    if layout.ways > 1:
        at = {unit: schedule.placement[stage] for unit, stage in stage_of_unit.items()}
        found = [
            replace(own, gathered=_gathered(module, plan, layout, [u for u, r in at.items() if r == rank] or None, own))
            for rank, own in enumerate(found)
        ]
    if rehearsal is not None:
        kept = rehearsal.by_stage(stage_of_unit, schedule.stages)
        found = [replace(own, activations=peak(schedule, rank, kept)) for rank, own in enumerate(found)]
    return found


def place(module: nn.Module, layout: Layout, rehearsal: SavedForBackward | None = None) -> dict[str, int]:
    """Unit -> stage, as the strategy would place it."""
    units = find_units(module)
    if layout.pp == 1:
        return dict.fromkeys(units, 0)
    costs = unit_costs(module, units)
    if rehearsal is not None:
        called = [unit for unit in rehearsal.order if unit in costs]
        idle = [unit for unit in units if unit not in called]
        units = [*called, *idle]
        costs |= dict.fromkeys(idle, 0.0)
    return assign(units, layout.made().stages, costs, layout.stages)


def peak(schedule: Schedule, rank: int, kept: Sequence[int]) -> int:
    """The most bytes that a rank keeps at once.

    Args:
        kept: bytes of one microbatch on each stage.
    """
    # An upper bound for schedules that put weight gradients off (up to twice as much with zb_h1): between the halves of
    # a backward only the inputs and output gradients of linear layers are kept, and a microbatch counts as a whole here
    # until the second. What is measured ends with the first, since autograd's hooks see no more.
    now = most = 0
    for action in schedule.actions[rank]:
        if action.kind is Kind.FORWARD:
            now += kept[action.stage]
        elif action.completes:
            now -= kept[action.stage]
        most = max(most, now)
    return most


def _of_parameter(
    parameter: Tensor, shape: Sequence[int], layout: Layout, divided: bool, data_rank: int, states: States | None
) -> Bytes:
    size, own = parameter.dtype.itemsize, tuple(shape)
    held = torch.Size(own).numel()
    if divided:  # FSDP2 rounds rows up to equal parts, the optimizer steps those that there are
        start, stop = rows_of(own[0], data_rank % layout.ways, layout.ways)
        own = (stop - start, *own[1:])
        held = -(-shape[0] // layout.ways) * torch.Size(shape[1:]).numel()
    flag = 1 if layout.dp > 1 and not divided else 0  # of a gradient bucket
    return Bytes(
        parameters=held * size,
        gradients=(held + flag) * size if parameter.requires_grad else 0,
        optimizer=None if states is None else sum(x.nbytes(own) for x in states.get(id(parameter), ())),
    )


def _sum(a: Bytes, b: Bytes) -> Bytes:
    optimizer = None if a.optimizer is None or b.optimizer is None else a.optimizer + b.optimizer
    return Bytes(a.parameters + b.parameters, 0, a.gradients + b.gradients, optimizer)


def _gathered(module: nn.Module, plan: ParallelPlan, layout: Layout, units: list[str] | None, own: Bytes) -> int:
    """Levels 1 and 2 gather all for the length of a step; level 3 two units at once (one is fetched ahead), and for the
    length of a step what is in none."""
    everything = own.parameters * layout.ways
    if layout.zero < 3:
        return everything
    units = find_units(module) if units is None else units
    shared = in_several(module, units)
    specs = plan.parameters if plan.tp > 1 else {}
    names = {id(p): name for name, p in module.named_parameters()}

    def nbytes(unit: str) -> int:
        inside = [p for p in module.get_submodule(unit).parameters() if id(p) not in shared]
        shapes = [specs[names[id(p)]].spec(0).local_shape if names[id(p)] in specs else p.shape for p in inside]
        return sum(torch.Size(s).numel() * p.dtype.itemsize for s, p in zip(shapes, inside, strict=True))

    sizes = sorted((nbytes(unit) for unit in large_units(module, units, shared)), reverse=True)
    return max(everything - sum(sizes), 0) + sum(sizes[:2])
