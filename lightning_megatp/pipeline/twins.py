"""Averaged copies of trained units (a teacher, a target network): on the stages of what they are copies of."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
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
from lightning_megatp.steps import StepKind
from lightning_megatp.user_hooks import codes_of, mentions, users_hooks


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
    units, unnamed = step.order, _unnamed(parallel.module, step)
    twins = _twins_of(parallel, step, unnamed, device)
    leaders = [unit for unit in units if unit not in twins]
    if not twins or len(leaders) < n_stages:
        return None
    both = {unit: costs[unit] + sum(costs[twin] for twin in twins if twins[twin] == unit) for unit in leaders}
    together = [pair for pair in step.together if twins.keys().isdisjoint(pair)]
    found = assign(leaders, n_stages, both, together=together)
    stage_of_unit = {unit: found[twins.get(unit, unit)] for unit in units}
    return stage_of_unit if flows_forward(parallel, stage_of_unit, n_stages, example, device, unnamed) else None


def warn_of_pairs(
    parallel: ParallelModule, step: UnitsOfStep, stage_of_unit: Mapping[str, int], device: torch.device
) -> None:
    """Warn of averaged copies on other stages than what they are copies of, where a hook may go over both."""
    twins = _twins_of(parallel, step, _unnamed(parallel.module, step), device)
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


def _twins_of(
    parallel: ParallelModule, step: UnitsOfStep, unnamed: Collection[str], device: torch.device
) -> dict[str, str]:
    def added(x: Tensor) -> Tensor:
        with torch.no_grad():
            return parallel.context.exchange.reduce(x.to(device)).cpu()

    return frozen_twins(parallel.module, step.order, step.untrained.union(unnamed), parallel.whole_shape, added)


def _unnamed(module: nn.Module, step: UnitsOfStep) -> set[str]:
    """Units that a step does not use, though it was not followed to its end: it was not seen to call them, and its code
    does not name the network of the LightningModule in which they are."""
    hook = StepKind.first_of(trainer_of(module).state.fn).method
    hooks = [name for name in (hook, "forward") if any(True for _ in codes_of(module, name))]
    if hook not in hooks:
        return set()
    networks = {unit.partition(".")[0] for unit in step.idle}
    named = {name for name in networks if any(mentions(module, [name], hook) for hook in hooks)}
    return {unit for unit in step.idle if unit.partition(".")[0] not in named}


def frozen_twins(
    module: nn.Module,
    units: Sequence[str],
    untrained: Collection[str] = (),
    shape: Callable[[Tensor], torch.Size] = Tensor.size,
    added: Callable[[Tensor], Tensor] = Tensor.clone,
) -> dict[str, str]:
    """Units of averaged copies (a teacher, a target network) -> the trained units that they are copies of.

    A unit without trained parameters, and a trained one of the same class and shapes whose name ends alike
    (`teacher.blocks.0` and `blocks.0`, or `student.blocks.0`): of several the one that shares most, and never one of a
    network that differs in the shapes of another unit (an actor beside its critic). Of several networks
    (`target.0` beside `actor.0` and `critic.0`) it is the one with more such pairs, and else with the closer values. A
    unit that is an attribute of the model itself (`ema_head`) needs no such name, if a single trained one is like it.
    The user's loops over the parameters of both networks meet the same pairs on every stage, if each pair is on one.

    Args:
        untrained: units of which a step needs no gradient, if that is known.
        shape: of a parameter. All ranks have to find the same, and their parts may be uneven.
        added: sums numbers over the ranks that hold parts of a parameter.

    Communication: one such sum, where networks are alike.
    """
    parts = {unit: module.get_submodule(unit) for unit in units}
    kinds = {
        unit: (type(part), [(name, tuple(shape(p))) for name, p in part.named_parameters()])
        for unit, part in parts.items()
    }
    frozen = [u for u in units if u in untrained or not any(p.requires_grad for p in parts[u].parameters())]

    @functools.cache
    def differ(network: str, other: str) -> bool:
        start, its = (f"{name}." if name else "" for name in (network, other))
        places = {unit: its + unit.removeprefix(start) for unit in units if unit.startswith(start)}
        return any(place in kinds and kinds[place] != kinds[unit] for unit, place in places.items())

    near = {}
    for unit in frozen:
        alike = [other for other in units if other not in frozen and kinds[other] == kinds[unit]]
        alike = [other for other in alike if not differ(*_starts(unit, other))]
        most = max((common_end(unit, other) for other in alike), default=0)
        if most or ("." not in unit and len(alike) == 1):
            near[unit] = [other for other in alike if common_end(unit, other) == most]
    pairs = Counter(_starts(unit, other) for unit, others in near.items() for other in others)
    away = _distances(parts, {unit: others for unit, others in near.items() if len(others) > 1}, added)

    def fit(unit: str, other: str) -> tuple[int, float]:
        return pairs[_starts(unit, other)], -away.get(_starts(unit, other), 0.0)

    twins = {unit: max(others, key=functools.partial(fit, unit)) for unit, others in near.items()}
    networks = {_starts(unit, other) for unit, other in twins.items()}
    for unit in frozen:  # what neither of two networks uses (a classifier) is a pair, too
        beside = [v for v in frozen if v not in twins and kinds[v] == kinds[unit] and _starts(unit, v) in networks]
        if unit not in twins and len(beside) == 1:
            twins[unit] = beside[0]
    return twins


def _distances(
    parts: Mapping[str, nn.Module], near: Mapping[str, Sequence[str]], added: Callable[[Tensor], Tensor]
) -> dict[tuple[str, str], float]:
    """How far the values of networks are from each other, by the starts of their names. Layers of `configure_model`
    have no values yet."""
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for unit, others in near.items():
        for other in others:
            values = zip(parts[unit].parameters(), parts[other].parameters(), strict=True)
            alike = [(p.detach(), q.detach()) for p, q in values if p.shape == q.shape and not (p.is_meta or q.is_meta)]
            found[_starts(unit, other)] += sum(float(torch.dist(p.float(), q.float())) for p, q in alike)
    names = sorted(found)
    sums = added(torch.tensor([found[name] for name in names], dtype=torch.float64)) if names else torch.zeros(0)
    return dict(zip(names, sums.tolist(), strict=True))


def _starts(name: str, other: str) -> tuple[str, str]:
    """Two names without what is the same at their ends."""
    n = common_end(name, other)
    return ".".join(name.split(".")[: -n or None]), ".".join(other.split(".")[: -n or None])
