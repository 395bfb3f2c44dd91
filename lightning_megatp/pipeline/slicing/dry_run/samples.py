"""How the tensors of a step hold the samples of a microbatch: in which order, and in how many rounds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from lightning_megatp.pipeline.slicing.dry_run.call import Call
from lightning_megatp.pipeline.slicing.dry_run.interleaving import Interleaving
from lightning_megatp.pipeline.slicing.dry_run.orders import Orders
from lightning_megatp.pipeline.slicing.dry_run.tail import Tail


class Samples:
    """Follows the order and the rounds of samples, as long as what operations make is of one microbatch.

    Args:
        batch: tensors of the microbatch. The first one's rows are its samples.
        tail: of the step, where it is a stage of its own: it puts microbatches together, and has to know of rounds.
    """

    def __init__(self, batch: Sequence[Tensor], tail: Tail | None) -> None:
        count = next((len(x) for x in batch if x.dim()), 0)
        tables = [x for x in batch if count > 1 and x.dim() and len(x) == count]
        self._tail = tail
        self.orders, self.interleaving = Orders(count, tables), Interleaving(count, tables)

    def note(self, call: Call, out: Any, index: int, in_tail: bool) -> None:
        """After an operation.

        Args:
            out: what it returned.
            index: which one it is.
            in_tail: whether its stage is the tail, if there is one.
        """
        if self._tail is None or not self._tail.has_all_samples(index, in_tail):
            self.orders.note(call, out)
            if self._tail is not None:
                self.interleaving.note(call, out)
