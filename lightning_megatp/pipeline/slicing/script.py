"""A plan as one stage carries it out, operation by operation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from lightning_megatp.pipeline.slicing.plan import Key, Operation, SlicePlan


@dataclass(slots=True)
class Instruction:
    """One operation as one stage carries it out."""

    operation: Operation
    what: Any
    computed: bool
    ghosts: Any
    special: bool
    """Computed, but not by simply calling it: its arguments or its random numbers need care."""
    received: tuple[tuple[int, Key], ...]
    """Not computed, but it returns these relayed values, by position in its result."""
    targets: tuple[tuple[int, int], ...]
    """Not computed, and it returns what it would have changed in place: positions in its result and its arguments."""
    shared: bool
    """Not computed, and its ghosts are returned as they are: nothing is received, nobody can change the structure, nor
    asks what was given."""
    became: tuple[tuple[int, Key], ...]
    """Not computed, and changed what are relayed values since, by position among the tensors of its arguments."""
    kept: tuple[tuple[int, Key], ...]
    """Computed, and these values of its result are sent on."""
    kept_changed: tuple[tuple[int, Key], ...]
    """Computed, and these values that it changed in place are sent on, by position among the tensors of its
    arguments."""


@dataclass(frozen=True, slots=True)
class Script:
    """A plan as one stage sees it."""

    instructions: tuple[Instruction, ...]
    last: int
    """Index of the operation after which the stage has nothing left to do."""
    free_after: int
    """On the last stage: from here on it holds all it needs, and the step may do other operations than planned."""

    @classmethod
    def of(cls, plan: SlicePlan, stage: int | None) -> Script:
        if stage is None:
            scripts = [plan.script(s) for s in range(plan.n_stages)]
            instructions = tuple(_instruct(op, None, False, set(), set(), set()) for op in plan.operations)
            return cls(instructions, max([scripts[-1].free_after, *(script.last for script in scripts[:-1])]), -1)
        received = {relay.key for relay in plan.relays[stage]}
        is_last = stage == plan.n_stages - 1
        awaited = [key.operation for key in received]
        received |= plan.recalled_on(stage)
        sent = set() if is_last else {relay.key for relay in plan.relays[stage + 1]} - received
        stood_in: set[Key] = set()
        instructions = tuple(
            _instruct(op, stage, plan.is_earlier(i), received, sent, stood_in) for i, op in enumerate(plan.operations)
        )
        own = [i for i, op in enumerate(plan.operations) if op.stage == stage and not plan.is_earlier(i)]
        return cls(
            instructions=instructions,
            last=len(plan.operations) if is_last else max(own, default=-1),
            free_after=max(awaited, default=-1),
        )


def _instruct(
    op: Operation, stage: int | None, is_earlier: bool, received: set[Key], sent: set[Key], stood_in: set[Key]
) -> Instruction:
    """What a stage does about one operation.

    Args:
        is_earlier: an earlier part of the step has done it.
        stood_in: values that the step knows by a tensor which an operation of another stage changed in place: on this
            stage what was received stands in for it. Operations are to be given in order; this one's are added.
    """
    computed = op.stage is None or (op.stage == stage and not is_earlier)
    needs_stand_ins = any(key in stood_in for key in op.inputs)
    stood_in.update(key for _, key in op.changed if (needs_stand_ins if computed else key in received))

    def chosen(pairs: Iterable[tuple[int, Key | None]], keys: set[Key]) -> tuple[tuple[int, Key], ...]:
        return tuple((position, key) for position, key in pairs if key in keys and key is not None)

    argument = {key: position for position, key in op.changed}
    targets = tuple((position, argument[key]) for position, key in enumerate(op.outputs) if key in argument)
    returned = () if computed else chosen(enumerate(op.outputs), received - argument.keys())
    return Instruction(
        operation=op,
        what=op.what,
        computed=computed,
        ghosts=op.ghosts,
        special=needs_stand_ins or op.random or op.shape_only or bool(op.copied),
        received=returned,
        targets=() if computed else targets,
        shared=not (computed or returned or targets or stage is None) and _is_immutable(op.ghosts),
        became=() if computed else chosen(op.changed, received),
        kept=chosen(enumerate(op.outputs), sent) if computed else (),
        kept_changed=chosen(op.changed, sent) if computed else (),
    )


def _is_immutable(ghosts: Any) -> bool:
    return ghosts is None or isinstance(ghosts, Tensor) or (type(ghosts) is tuple and all(map(_is_immutable, ghosts)))
