"""Stages make new plans in the same batches, or one of them waits for the others forever, and they for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_megatp.pipeline.slicing.errors import SliceError

Note = Sequence[int]
"""Index of a batch, and how many new plans a stage has had to agree on in it."""


class Lockstep:
    """Notices a stage that needs a new plan in a batch for which this one goes on with what it has.

    The other stage waits in a collective that this one never calls, and this one soon waits for its activations. So a
    stage tells the others before it waits, over the connections of the failure watch, which are heard meanwhile.
    """

    def __init__(self) -> None:
        self.tell: Callable[[Note], None] = lambda note: None
        """Tells the other stages of this copy of the model."""
        self._batch = self._done = 0
        self._agreed: dict[int, int] = {}
        """Batch -> on how many new plans; where there were any."""
        self._told: list[Note] = []

    def begin(self) -> None:
        """A batch's plans are about to be chosen; all stages count alike."""
        self._batch += 1

    def agreeing(self) -> None:
        """This stage is about to wait for the others, with a new plan."""
        number = self._agreed[self._batch] = self._agreed.get(self._batch, 0) + 1
        self.tell((self._batch, number))

    def end(self) -> None:
        """All plans of the batch are there.

        Raises:
            SliceError: another stage waits for one that this stage doesn't need.
        """
        self._done = self._batch
        told, self._told = self._told, []
        if any(map(self._is_missed, told)):
            raise SliceError(_WHY)

    def hear(self, note: Note) -> str | None:
        """What another stage tells; from another thread.

        Returns:
            Why this stage can't come to it, if it has gone on without.
        """
        self._told.append(note)  # before the look at `_done`, which the other thread sets before its look at this
        return f"SliceError: {SliceError(_WHY)}" if self._is_missed(note) else None

    def _is_missed(self, note: Note) -> bool:
        batch, number = note
        return batch <= self._done and number > self._agreed.get(batch, 0)


_WHY = (
    "the stages planned the same batch differently: another one needs a new plan, and this one goes on"
    " with what it has, since it finds other values where the step asks for one (an `if` on a tensor, a length). What a"
    " step does between modules may not depend on the rank, on Python's or NumPy's random numbers, or on what hooks and"
    " steps before have kept on one stage."
)
