"""Which operations of a step are its tail: nothing that a unit takes is made of them."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_megatp.pipeline.slicing.plan import Key, Operation, last_unit


class Tail:
    """The operations between units whose results reach no call of a unit any more: the loss, what is logged. Where a
    step has several heads, some come before the last unit.

    Args:
        operations: of a dry run of the same step, in which the tail was no stage of its own.
        of_stage: leave operations of other stages than this one where they are, though no unit takes them: the loss of
            the first of two networks.
    """

    def __init__(self, operations: Sequence[Operation], of_stage: int | None = None) -> None:
        self._last_unit = last_unit(operations)
        needed: set[Key] = set()
        self._reaching: set[int] = set()
        if of_stage is not None:
            self._reaching.update(i for i, x in enumerate(operations) if x.stage not in (None, of_stage))
        for i in range(self._last_unit, -1, -1):
            operation = operations[i]
            made = [*operation.outputs, *(key for _, key in operation.changed)]
            if operation.units or not needed.isdisjoint(key for key in made if key is not None):
                self._reaching.add(i)
                needed.update(operation.inputs)

    def __contains__(self, index: int) -> bool:
        """Whether an operation is in it; one that has a stage."""
        return index not in self._reaching

    def has_all_samples(self, index: int, is_in: bool) -> bool:
        """Whether an operation, of no stage maybe, is made once for all microbatches.

        Args:
            is_in: whether its stage is the tail.
        """
        return is_in or index > self._last_unit
