"""Numbers that stages before the last one make, for the loss or to be logged: the last one can't see of what they
are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable

from torch import Tensor

from lightning_megatp.pipeline.loss.averages import Averages


class EarlyTerms:
    """Numbers that a stage hands on, of one batch, and that are no averages over its samples."""

    def __init__(self) -> None:
        self._made: defaultdict[Hashable, list[tuple[Tensor, str, bool]]] = defaultdict(list)
        """What crosses -> by microbatch, the number, and the operation that made something else of averages, or
        compared samples."""

    def note(self, counting: Averages, sent: Iterable[tuple[Hashable, Tensor]]) -> None:
        """After a microbatch.

        Args:
            counting: has seen what the stage averages.
            sent: what it hands on, by keys that are the same for all microbatches.
        """
        for key, x in sent:
            made = counting.made(x)
            by = counting.compared if made is None else made.bent or counting.compared
            if by and x.is_floating_point() and x.numel() == 1:
                self._made[key].append((x.detach(), by, x.requires_grad))

    def text(self) -> str:
        """What is to be said after all microbatches; "" for nothing, as of a norm of weights, which is the same in
        all. Waits for a GPU."""
        for made in self._made.values():
            first, by, learns = made[0]
            if all(first.allclose(x, rtol=1e-6, atol=0.0) for x, *_ in made):
                continue
            takes, what, other = _OF_LOSS if learns else _OF_LOGS
            return (
                f"a stage before the last one hands on a number, which {takes}, and which is no average over its"
                f" samples (by `{by}`). A pipeline makes one of every microbatch, and {what} is the mean of what comes"
                f" of them; one device makes one of the batch. If that matters, {other}."
            )
        return ""


_OF_LOSS = "the loss may take", "the batch's loss", "use whole_loss=True, or let it be an average"
_OF_LOGS = "is logged, maybe", "what is logged of the batch", "log a torchmetrics object, or use whole_loss=True"
