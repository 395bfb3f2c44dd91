"""What a step that optimizes by hand reads of stages' values on the host (`loss.item()`), and what it is answered.

Such a step goes on after its losses: it steps optimizers and logs. Whether it does may hang on a number (`if
loss.item() < 10`), and mostly the number is logged alone. The last stage reads values as they are. On the others, and
where all do what is done by hand, a read of a part that was run is answered with what the last stage has read: that of
the microbatch, or that of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.pipeline.slicing.plan import HostRead
from lightning_megatp.shim.fakes import is_fake

Answer = bool | int | float | str

_NUMBERS = frozenset({"item", "tolist"})
_TRUTHS = frozenset({"__bool__", "is_nonzero", "equal", "allclose"})


@dataclass
class Reads:
    """What one run of a step is answered.

    Args:
        known: the answers so far, by the number of the read.
        reads: a read that has none is made, and its answer kept.
        ahead: what the step does by hand before these reads is not done yet.
    """

    known: dict[int, Any]
    reads: bool = False
    ahead: bool = False
    _seen: int = 0

    def answer(self, planned: Sequence[HostRead], name: str, read: Callable[[], Any], of: Any) -> Any:
        """A read of a value.

        Args:
            planned: all reads of the step, in order.
            name: of the operation.
            read: does it.
            of: what is read.

        Raises:
            SliceError: it is another one than planned.
        """
        number, self._seen = self._seen, self._seen + 1
        if number >= len(planned):
            return read()
        if planned[number].name != name:
            raise _otherwise(name)
        if number in self.known:
            return self.known[number]
        if not planned[number].of_stage or (self.ahead and planned[number].is_fresh):
            return read()
        if not self.reads:
            return stand_in(name, of, "") if is_fake(of) else read()
        if is_fake(of):  # of an earlier part, which has not read it
            raise _otherwise(name)
        self.known[number] = read()
        return self.known[number]


def _otherwise(name: str) -> SliceError:
    return SliceError(
        f"the step reads values on the host by `{name}`, and when it was planned, without values, it could not be"
        " followed there. In a step that optimizes by hand read numbers (`loss.item()`), or look at values behind the"
        " last step of an optimizer, or in a hook."
    )


def stand_in(name: str, of: Any, maker: str) -> Answer | None:
    """What stands for the answer to a read where nobody knows it; None if nothing can.

    Args:
        name: of the operation.
        of: what is read.
        maker: what made that.
    """
    if name in _TRUTHS:
        return "isfinite" in maker
    if name == "__float__":
        return math.nan
    if name in ("__int__", "__index__"):
        return 0
    if name == "__format__":
        return "nan"
    if name in _NUMBERS and isinstance(of, Tensor) and of.numel() == 1 and (name == "item" or of.dim() == 0):
        return math.nan if of.is_floating_point() else of.dtype != torch.bool and 0
    return None


def of_batch(answers: Sequence[Answer], weights: Sequence[float]) -> Answer | None:
    """What a batch answers where its microbatches did: a mean of real numbers, a sum of whole ones, and what they have
    in common else; None for nothing.

    Args:
        answers: by microbatch.
        weights: the same.
    """
    first = answers[0]
    if type(first) is float and any(x != first for x in answers):
        return sum(float(x) * w for x, w in zip(answers, weights, strict=True)) / sum(weights)
    if type(first) is int:
        return sum(map(int, answers))
    return first if all(x == first for x in answers) else None
