"""Averaged copies of trained units (a teacher, a target network): on the stages of what they are copies of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_megatp.batches.example import Example
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.assignment import assign
from lightning_megatp.pipeline.observed import flows_forward
from lightning_megatp.pipeline.slicing.order import UnitsOfStep
from lightning_megatp.plan.units import common_end
from lightning_megatp.shim.lightning import trainer_of
from lightning_megatp.user_hooks import mentions, users_hooks


def with_twins(
    parallel: ParallelModule,
    step: UnitsOfStep,
    n_stages: int,
    costs: Mapping[str, float],
    example: Example,
    device: torch.device,
) -> dict[str, int] | None:
    """Unit -> stage, in the order of the units; averaged copies beside what they are copies of. None if there are none:
    frozen units of the same shapes may also be what the trained ones read, and then data would flow backward."""
    units = step.order
    twins = frozen_twins(parallel.module, units, step.untrained, parallel.whole_shape)
    leaders = [unit for unit in units if unit not in twins]
    if not twins or len(leaders) < n_stages:
        return None
    both = {unit: costs[unit] + sum(costs[twin] for twin in twins if twins[twin] == unit) for unit in leaders}
    together = [pair for pair in step.together if twins.keys().isdisjoint(pair)]
    found = assign(leaders, n_stages, both, together=together)
    stage_of_unit = {unit: found[twins.get(unit, unit)] for unit in units}
    return stage_of_unit if flows_forward(parallel, stage_of_unit, n_stages, example, device) else None


def warn_of_pairs(parallel: ParallelModule, step: UnitsOfStep, stage_of_unit: Mapping[str, int]) -> None:
    """Warn of averaged copies on other stages than what they are copies of, where a hook may go over both."""
    twins = frozen_twins(parallel.module, step.order, step.untrained, parallel.whole_shape)
    apart = [unit for unit, twin in twins.items() if stage_of_unit[unit] != stage_of_unit[twin]]
    trainer = trainer_of(parallel.module)
    owners = (parallel.module, *getattr(trainer, "callbacks", ()))
    pairing = [hook for owner, hook in users_hooks(owners) if mentions(owner, _PAIRING, hook)]
    if apart and pairing:
        warn_once_per_run(
            f"`{apart[0]}` is like `{twins[apart[0]]}` and on another pipeline stage. If `{pairing[0]}` goes over the"
            " parameters of both networks (`zip(average.parameters(), model.parameters())`), it meets those of its own"
            " stage only, and other pairs than on one device. Put each pair on one stage by `stages=[[...], ...]`."
        )


_PAIRING = frozenset(
    [
        "zip",
        "update_parameters",
        "update_momentum",
        "_foreach_mul_",
        "_foreach_lerp_",
        "_foreach_add_",
        "_foreach_copy_",
    ]
)
"""What hooks are found by that go over two networks."""


def frozen_twins(
    module: nn.Module,
    units: Sequence[str],
    untrained: Collection[str] = (),
    shape: Callable[[Tensor], torch.Size] = Tensor.size,
) -> dict[str, str]:
    """Units of averaged copies (a teacher, a target network) -> the trained units that they are copies of.

    A unit without trained parameters, and a trained one of the same class and shapes whose name ends alike
    (`teacher.blocks.0` and `blocks.0`, or `student.blocks.0`): of several the one that shares most. One that is an
    attribute of the model itself (`ema_head`) needs no such name, if a single trained one is like it. The user's loops
    over the parameters of both networks meet the same pairs on every stage, if each pair is on one.

    Args:
        untrained: units of which a step needs no gradient, if that is known.
        shape: of a parameter. All ranks have to find the same, and their parts may be uneven.
    """
    parts = {unit: module.get_submodule(unit) for unit in units}
    kinds = {
        unit: (type(part), [(name, tuple(shape(p))) for name, p in part.named_parameters()])
        for unit, part in parts.items()
    }
    frozen = [u for u in units if u in untrained or not any(p.requires_grad for p in parts[u].parameters())]
    twins = {}
    for unit in frozen:
        alike = [other for other in units if other not in frozen and kinds[other] == kinds[unit]]
        best = max(alike, key=lambda other: common_end(unit, other), default=None)
        if best is not None and (common_end(unit, best) or ("." not in unit and len(alike) == 1)):
            twins[unit] = best
    networks = {_starts(unit, other) for unit, other in twins.items()}
    for unit in frozen:  # what neither of two networks uses (a classifier) is a pair, too
        beside = [v for v in frozen if v not in twins and kinds[v] == kinds[unit] and _starts(unit, v) in networks]
        if unit not in twins and len(beside) == 1:
            twins[unit] = beside[0]
    return twins


def _starts(name: str, other: str) -> tuple[str, str]:
    """Two names without what is the same at their ends."""
    n = common_end(name, other)
    return ".".join(name.split(".")[: -n or None]), ".".join(other.split(".")[: -n or None])
