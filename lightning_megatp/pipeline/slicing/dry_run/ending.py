"""The end of a step, which is on the last stage: what that takes of earlier stages, and where it can't be followed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

from torch import Tensor

from lightning_megatp.containers import tensors_in
from lightning_megatp.pipeline.slicing.dry_run.call import Call
from lightning_megatp.pipeline.slicing.dry_run.provenance import Provenance
from lightning_megatp.pipeline.slicing.dry_run.record import Record
from lightning_megatp.pipeline.slicing.dry_run.refusals import refuse_stand_in
from lightning_megatp.pipeline.slicing.dry_run.stage_states import StageStates
from lightning_megatp.pipeline.slicing.dry_run.values import Value, Values
from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.pipeline.slicing.operations import CONVERSIONS, NeedsValues, StepEnded
from lightning_megatp.snapshots.snapshot import Snapshot


class Ending:
    """What a dry run knows of the end of a step.

    Args:
        values: the tensors of the step.
        record: its operations.
        provenance: of the tensors.
        states: of what several stages change.
        is_tail: the last stage has nothing but the tail of the step.
    """

    def __init__(
        self, values: Values, record: Record, provenance: Provenance, states: StageStates, is_tail: bool
    ) -> None:
        self._values, self._record, self._provenance, self._states = values, record, provenance, states
        self._stage, self._is_tail = values.last_stage, is_tail
        self.early = ""
        """Where the dry run ended before the step did, and why."""
        self.early_in: tuple[str, ...] = ()
        """The unit whose call that was."""

    def consume(self, value: Any, gradient: bool, by: str) -> None:
        """The last stage needs a value: it is logged or returned."""
        for tensor in tensors_in(value):
            self._values.use(self._provenance.find(tensor, by), self._stage, by, [None] if gradient else [])

    def consume_left(self, snapshot: Snapshot) -> list[Value]:
        """The last stage needs what the step left on the module.

        Returns:
            That. Where it is of an earlier stage, those in between will find ghosts in its place.

        Raises:
            SliceError: the next step would read, on other stages than the last, what this one replaced; or a hook the
                gradient of a tensor that every stage has.
        """
        left = [value for value in map(self._values.get, snapshot.new_tensors()) if value is not None]
        for value in left:
            refuse_stand_in(value, self._stage, "a tensor that the step leaves on the module")
            if value.stage is None and value.tensor.is_leaf and value.tensor.requires_grad:
                raise SliceError(
                    f"a tensor that {value.maker} made, and that the step leaves on the module, requires a gradient:"
                    " each pipeline stage would find its own part of that in its `grad`. Leave `x.detach()` there, or"
                    " make it a parameter of a module."
                )
            self._values.use(value, self._stage, "an attribute set by the step")
        for name, before, now in snapshot.replaced_tensors():
            users = self._values.uses.get(id(before), set()) - {self._stage}
            if users and id(before) not in self._states.of_each and not self._is_converted(before, now):
                raise SliceError(
                    f"the step sets `{name}` anew, and pipeline stages other than the last read it, which would not see"
                    " that. Keep what reads it on the last stage, or update it in the forward of a module that is in a"
                    " unit together with what reads it."
                )
        return left

    def _is_converted(self, before: Tensor, now: Tensor) -> bool:
        """Whether a tensor is the one before in another dtype or on another device: a stage that doesn't see that has
        what comes to the same once it is converted there."""
        value = self._values.get(now)
        if value is None or value.stage is not None or value.made_at is None:
            return False
        made_by = self._record.operations[value.made_at.operation]
        return made_by.name in CONVERSIONS and value.origins == {id(before)}

    def end_at(self, call: Call, error: NeedsValues) -> NoReturn:
        """Leave the step at an operation of the last stage, which needs values.

        Raises:
            StepEnded: always.
        """
        self._use([*call.inputs, *self._values.early_numbers()], call.by)
        self.early, self.early_in = f"{call.by}, since {error}", tuple(call.units)
        raise StepEnded from error

    def end_unseen(self, why: str) -> None:
        """The step could not be followed any further, at an operation that was not seen.

        Args:
            why: what is done there.

        Raises:
            SliceError: the last stage has not begun.
        """
        begun = any(operation.stage == self._stage for operation in self._record.operations)
        if not begun and not self._is_tail:
            raise SliceError(
                f"the step has {why}, and pipeline stage {self._stage}, where values are known, has not begun."
                " Do it after the last block, or in the forward of a module."
            )
        self._use(self._values.early_numbers(), why)
        self.early = self.early or why

    def _use(self, values: Iterable[Value], by: str) -> None:
        for value in dict.fromkeys(values):
            self._record.use(value, self._stage, by)
