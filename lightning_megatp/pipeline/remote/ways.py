"""How the batches of an evaluation are run: cut into stages, or by the last stage alone."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum


class Way(Enum):
    """How one batch of an evaluation is run."""

    CUT = "cut into stages, a microbatch at a time"
    PARTS = "by the last stage, a microbatch at a time"
    WHOLE = "by the last stage, the whole batch"


@dataclass
class Ways:
    """How batches of one kind of step (validate, test, predict) are run: those before tell how the next ones are.

    Within one loop over the data, a metric counts either microbatches or batches, so that all weigh alike. So a loop
    whose first batch the last stage has to run by itself goes on with whole batches, as on one device. One that began
    with stages goes on with microbatches where a later batch can't be cut; and so does the next loop, if that was true
    of some batches and not of others, since stages are faster. The ranks of a pipeline tell it the same.

    Args:
        whole_loss: a batch that is cut into stages counts as one, too.
    """

    whole_loss: bool = False
    loop: Hashable = None
    _of_loop: Way | None = None
    """WHOLE or CUT; None before its first batch is over."""
    _batches: int = 0
    _uncut: int = 0

    def enter(self, loop: Hashable) -> None:
        """Before a batch.

        Args:
            loop: it belongs to.
        """
        if loop == self.loop:
            return
        if self._batches:
            self._of_loop = Way.WHOLE if self._uncut == self._batches else Way.CUT
        self.loop, self._batches, self._uncut = loop, 0, 0

    def of_batch(self, can_be_cut: bool) -> Way:
        """How to run the next one.

        Args:
            can_be_cut: as far as its plan tells.
        """
        if self._of_loop is Way.WHOLE:
            return Way.WHOLE
        return Way.CUT if can_be_cut else self.instead

    @property
    def instead(self) -> Way:
        """How to run a batch that can't be cut, or turned out so."""
        return Way.PARTS if self._of_loop is Way.CUT and not self.whole_loss else Way.WHOLE

    def ran(self, way: Way, needed: bool) -> None:
        """After a batch.

        Args:
            way: how it was run.
            needed: whether stages would not have done, if it was not cut.
        """
        self._batches += 1
        self._uncut += way is not Way.CUT and needed
        self._of_loop = self._of_loop or (Way.WHOLE if way is Way.WHOLE else Way.CUT)
