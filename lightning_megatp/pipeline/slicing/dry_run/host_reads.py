"""What a step reads of values on the host, as a dry run finds it. See `slicing.reads` for how a run answers."""

from __future__ import annotations

from typing import Any

from lightning_megatp.containers import tensors_in
from lightning_megatp.pipeline.slicing.dry_run.call import Call
from lightning_megatp.pipeline.slicing.dry_run.fakes import Fakes
from lightning_megatp.pipeline.slicing.dry_run.provenance import Provenance
from lightning_megatp.pipeline.slicing.dry_run.record import Record
from lightning_megatp.pipeline.slicing.dry_run.values import Values
from lightning_megatp.pipeline.slicing.plan import HostRead, Read
from lightning_megatp.pipeline.slicing.reads import stand_in
from lightning_megatp.shim.torch import tree_leaves


class HostReads:
    """The reads of one step.

    Args:
        values: its tensors.
        record: its operations.
        provenance: of the tensors.
        fakes: tries operations without data.
    """

    def __init__(self, values: Values, record: Record, provenance: Provenance, fakes: Fakes) -> None:
        self._values, self._record, self._provenance, self._fakes = values, record, provenance, fakes
        self.replicated: list[Read] = []
        """Of values that every stage has."""
        self.of_batch = False
        """Whether some are the batch's."""
        self.by_hand: list[HostRead] = []
        """All, of a step that optimizes by hand."""

    def note(self, call: Call, out: Any) -> None:
        """A read of values that every stage has.

        Args:
            out: the answer.
        """
        self.replicated.append(Read.of(self._record.next, out))
        self.of_batch |= any(not value.constant for value in call.inputs)
        for value in call.inputs:
            self._values.look_at(value, self._record.next)

    def note_size(self, call: Call) -> None:
        """A replicated operation makes tensors: the shape of these may depend on values of the batch, which nobody sees
        it read (a mask as index, a tensor as bound or size)."""
        leaves = tree_leaves((call.args, call.kwargs))
        bounds = [b for x in leaves if isinstance(x, slice) for b in tensors_in(x.start, x.stop)]
        known = [*call.inputs, *(self._provenance.find(x, call.by) for x in bounds)]
        if all(value.constant for value in known):
            return
        if self._fakes.needs_values(call.name, call.function, call.args, call.kwargs):
            self.replicated.append(Read(self._record.next, None))

    def answer(self, call: Call) -> Any:
        """What stands for a value that a step by hand reads; None where it is read as ever."""
        parts, staged = self._values.parts, [value for value in call.inputs if value.stage is not None]
        if any(operation.stage is not None for operation in self._record.operations[parts.begins :]):
            for value in call.inputs:
                parts.refuse_stale(value, call.by)
        made = any(not value.origins.isdisjoint(self._values.glue) for value in call.inputs)
        fresh = not staged and made and not any(map(parts.is_stale, call.inputs))
        self.by_hand.append(HostRead(call.name, self._record.next, bool(staged) or made, fresh))
        answer = stand_in(call.name, call.args[0], staged[-1].maker) if staged else None
        if answer is not None:
            for value in staged:
                self._values.use(value, self._values.last_stage, call.by)
            self._record.not_operations.add(call.what)
        return answer
