"""From what a dry run saw to the plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from lightning_megatp.pipeline.slicing.dry_run.tracer import Tracer
from lightning_megatp.pipeline.slicing.dry_run.values import Value
from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.pipeline.slicing.plan import Key, Operation, Part, Relay, SideEffects, SlicePlan


def make_plan(tracer: Tracer, names: Mapping[int, str], effects: SideEffects) -> SlicePlan:
    """Decide what crosses each boundary.

    Args:
        tracer: after its run.
        names: id -> name of the parameters.
        effects: of the step.

    Raises:
        SliceError: a stage has nothing to do where gradients are wanted, or a stage changes what others use.
    """
    values, n_stages = tracer.values, tracer.values.n_stages
    last_of = {operation.stage: i for i, operation in enumerate(tracer.record.operations)}
    ends = [last_of.get(stage, -1) for stage in range(n_stages - 1)]
    changed = values.changed_for_good(ends)
    values.find_gradients()
    parts = values.parts
    for stage in range(n_stages):
        is_tail = tracer.manner.tail is not None and stage == n_stages - 1
        idles = not any(operation.stage == stage for operation in tracer.record.operations)
        if idles and not is_tail and not tracer.traits.by_hand:
            if tracer.guesses.failed:
                raise SliceError(
                    f"{tracer.guesses.misled}. What comes after it can't be planned. Let that module return one tensor"
                    " like the hidden states it takes, or keep it on the last stage by `stages=[[...], ...]`."
                )
            if not torch.is_grad_enabled():  # of a model that is trained whole, predictions may need an encoder alone
                continue
            raise SliceError(
                f"pipeline stage {stage} of {n_stages} has nothing to do in this step: none of its modules is called."
                " Use fewer stages, or spread the modules that are by `stages=[[...], ...]`."
            )
    shared = {names[i]: tuple(sorted(at)) for i, at in values.owners.items() if len(at) > 1 and i in names}
    glue = {name: _stages(values.uses.get(i, set()), n_stages) for i, name in values.glue.items()}
    return SlicePlan(
        n_stages=n_stages,
        operations=_operations(tracer, changed.ids),
        relays=tuple(_relays(tracer, stage) for stage in range(n_stages)),
        shared={**shared, **{name: stages for name, stages in glue.items() if len(stages) > 1}},
        glue=glue,
        not_operations=frozenset(tracer.record.not_operations),
        touched={names[i]: first for i, first in tracer.record.touched.items() if i in names},
        effects=effects,
        uses_functions=tracer.traits.uses_functions,
        converts=tracer.traits.converts,
        changed=changed.by_stage,
        changed_alike=changed.alike,
        used=changed.used,
        clones=frozenset(values.clones),
        reads=tuple(tracer.host_reads.replicated),
        varies=tracer.traits.varies,
        mixes=tracer.samples.orders.mixed,
        divides=tracer.samples.orders.divided,
        couples=tracer.samples.interleaving.coupled,
        unit_rows=tracer.samples.interleaving.of_units,
        ended=tracer.ending.early,
        ended_in=tracer.ending.early_in,
        late_hooks=tracer.manner.late_hooks,
        attributes=tracer.manner.attributes,
        part=Part(
            number=parts.number,
            begins=parts.begins,
            acts_first=tracer.traits.acts_first or bool(parts.begins),
            host_reads=tuple(tracer.host_reads.by_hand),
            recalled=parts.recalled,
            goes_backward=parts.goes_backward,
            retains_graph=parts.retains_graph,
            learns=parts.learns,
        ),
    )


def _operations(tracer: Tracer, changed: Collection[int]) -> tuple[Operation, ...]:
    operations = list(tracer.record.operations)
    for i, position, lasting in tracer.record.lasting_inputs:
        if not lasting.isdisjoint(changed):
            operations[i] = replace(operations[i], copied=(*operations[i].copied, position))
    for i, seed in tracer.generators.seeds():
        drawn = operations[i]
        operations[i] = replace(drawn, own_generator=True, recipe=f"{drawn.recipe} {seed}")
    return tuple(operations)


def _stages(users: set[int | None], n_stages: int) -> tuple[int, ...]:
    return tuple(range(n_stages)) if None in users else tuple(sorted(stage for stage in users if stage is not None))


def _relays(tracer: Tracer, stage: int) -> tuple[Relay, ...]:
    """What crosses the boundary before a stage: values of earlier stages that it, or a later one, uses."""
    values = tracer.values.by_key.values()
    crossing = [value for value in values if (value.stage or 0) < stage <= max(value.consumers, default=-1)]
    in_order = sorted(crossing, key=lambda value: value.key or Key(0, 0))
    return tuple(_relay(value, stage, tracer.samples.interleaving.rounds_of(value.tensor)) for value in in_order)


def _relay(value: Value, stage: int, rounds: int) -> Relay:
    assert value.key is not None and value.ghost is not None
    ghost = value.ghost
    return Relay(
        key=value.key,
        shape=tuple(ghost.shape),
        stride=tuple(ghost.stride()),
        dtype=ghost.dtype,
        device=ghost.device,
        requires_grad=ghost.requires_grad and value.has_gradient(stage),
        has_graph=ghost.requires_grad,
        rounds=rounds,
    )
