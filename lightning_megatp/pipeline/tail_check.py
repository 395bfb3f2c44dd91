"""What microbatches come to, beside what one device makes of the batch: the tail of the step, again for all samples.

Which losses are averages is seen by what they are made with, and nobody knows all the ways in which samples may meet.
So in some batches what the units made of all microbatches is kept, and the step's tail runs on it as with `whole_loss`,
without a backward: its loss, and what it logs, are one device's, whatever they are made with.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_megatp.pipeline.slicing.kept import Kept
from lightning_megatp.pipeline.slicing.plan import Key, SlicePlan
from lightning_megatp.pipeline.slicing.running import Taken
from lightning_megatp.pipeline.told.logs import Call
from lightning_megatp.pipeline.whole_loss import WholeLoss


class IfItDiffers(str):
    """A reason that the numbers settle: where one device's loss is the same, there is nothing to say."""


class Finding(NamedTuple):
    """Something to be said once."""

    known: tuple[str, ...]
    """What it is known by: texts with numbers differ."""
    text: str

    @classmethod
    def of(cls, text: str) -> Finding:
        """One that is always the same."""
        return cls((text,), text)


class TailCheck:
    """Compares a batch's loss and logs with those that its tail makes of all samples.

    Args:
        batch: all of it.
        plan: of the step on it, in which the tail is a stage more.
        microbatches: how many it is divided into.
        coupled: what makes something of all samples between blocks; "" for nothing.
    """

    def __init__(self, batch: Any, plan: SlicePlan, microbatches: int, coupled: str = "") -> None:
        self.batch, self.plan, self.stage = batch, plan, plan.n_stages - 1
        wanted = frozenset(relay.key for relay in plan.relays[-1])
        self.kept = [Kept(wanted) for _ in range(microbatches)]
        """By microbatch, what the last stage makes for the tail."""
        self._before_tail: list[str] = []
        self._whole = WholeLoss(batch, plan, says=self._before_tail.append)
        self._whole.coupled = coupled

    @classmethod
    def of(cls, batch: Any, plan: SlicePlan | None, plans: Sequence[SlicePlan], coupled: str = "") -> TailCheck | None:
        """None where the tail of the batch would be that of another step, or too large to be held.

        Args:
            plans: of its microbatches.
            coupled: what makes something of all samples between blocks.
        """
        if plan is None or plan.clones or plan.mixes or plan.effects.draws_on_host:
            return None
        if any(operation.random for operation in plan.operations) or any(x.changed for x in (plan, *plans)):
            return None
        if any(_early(x, plan) != _early(plan, plan) for x in plans):
            return None
        crossing = sum(torch.Size(relay.shape).numel() * relay.dtype.itemsize for relay in plan.relays[-1])
        return cls(batch, plan, len(plans), coupled) if crossing <= _MOST_BYTES else None

    @property
    def takes_parameters(self) -> bool:
        """Whether the tail takes some that are in no unit."""
        return any(self.stage in stages for stages in self.plan.glue.values())

    def note(self, microbatch: int, received: Mapping[Key, Tensor]) -> None:
        """After a microbatch's forward on the last stage.

        Args:
            received: what that stage got for it.
        """
        values = {**received, **self.kept[microbatch].values}
        self._whole.parts.append([values[r.key].detach() for r in self.plan.relays[-1] if r.key in values])
        self.kept[microbatch].values.clear()
        self._whole.forget_taken(microbatch, self.stage - 1)

    def taken_by(self, microbatch: int) -> Taken | None:
        """Where what operations of stages take is to be noted, of a microbatch or, by their number, of the batch."""
        return self._whole.taken_by(microbatch)

    def before_tail(self) -> Sequence[Finding]:
        """What is to be said of what the step does before its tail, once that was run. The tail can't tell: it begins
        with what came of that."""
        self._whole.compare_taken()
        return [Finding.of(text) for text in self._before_tail]

    def join(self) -> list[list[Tensor]]:
        """What the tail takes of all microbatches. Where stages make numbers of a microbatch (the loss of an earlier
        network, an auxiliary one of experts) nobody knows those of the batch: they are the first microbatch's and, in a
        second list, the last one's. What comes out the same doesn't depend on them.

        Raises:
            SliceError: that can't be put together.
            ValueError: some of it was not made.
        """
        self._whole.stands = 0
        ways = [self._whole.join()]
        if self._whole.has_numbers:
            self._whole.stands = -1
            ways.append(self._whole.join())
        return ways

    def of_loss(
        self, whole: Any, loss: Tensor, losses: Sequence[Tensor], reasons: Sequence[Finding]
    ) -> Sequence[Finding]:
        """What is to be said of the batch's loss.

        Args:
            whole: the loss of the tail; None if that isn't known.
            loss: that of the microbatches together.
            losses: theirs.
            reasons: why it may be another one, as far as that was seen. The first of them is given the numbers.
        """
        if not isinstance(whole, Tensor):
            return reasons
        differs = _differ(whole, loss, losses)
        if not reasons:
            return [Finding(("loss",), _LOSS.format(*_texts(whole, loss), len(self.kept)))] if differs else []
        numbers = "This batch's is {}, and on one device {}.".format(*_texts(loss, whole))
        above = "" if whole.dtype == torch.float64 or float(whole) == float(loss) else f" above {_ROUNDING:.1%}"
        end = numbers if differs else f"For this batch the losses are the same{above}; gradients may not be."
        (known, text), *others = reasons
        if isinstance(text, IfItDiffers) and not differs and float(whole) != 0:
            return others
        return [Finding(known, f"{text} {end}"), *others]

    def other_logs(self, calls: Sequence[Call], logged: Sequence[Call]) -> list[tuple[Call, Call]]:
        """What is logged for the batch, and differs.

        Args:
            calls: of `self.log` in the tail.
            logged: by the microbatches together.
        """
        times = Counter(call.entry.name for call in calls)
        by_name = {call.entry.name: call for call in logged}
        numbers = [x for x in calls if x.entry.has_value and x.entry.metric is None]
        pairs = [(x, by_name[x.entry.name]) for x in numbers if x.entry.name in by_name and times[x.entry.name] == 1]
        return [(x, other) for x, other in pairs if _differ(x.value, other.value, dtype=x.entry.dtype)]

    def of_sums(self, logged: Sequence[Sequence[Call]], known: Sequence[Call]) -> Sequence[Finding]:
        """What is to be said of sums over samples that are logged, and of which nobody knows the batch's, as of those
        that a module makes of its samples.

        Args:
            logged: by each microbatch.
            known: calls of `self.log` in the tail.
        """
        settled = {x.entry.name for x in known}
        ways: dict[str, set[str]] = {}
        for call in itertools.chain(*logged):
            is_loss = call.is_loss is not None and bool(call.is_loss)  # of which is said elsewhere
            if not is_loss and call.entry.options.get("reduce_fx", "mean") == "mean" and call.entry.name not in settled:
                ways.setdefault(call.entry.name, set()).add(call.sums)
        found = [(name, *how) for name, how in ways.items() if len(how) == 1 and "" not in how]
        return [Finding((f"sum {name}",), _SUMS.format(name, how, len(logged))) for name, how in found]

    def of_logs(self, others: Sequence[tuple[Call, Call]], again: Sequence[Call] | None) -> Sequence[Finding]:
        """What is to be said of what is logged for the batch.

        Args:
            others: `other_logs`.
            again: calls of `self.log` in the tail, when it was run once more; None if it wasn't. Python numbers that
                are others then are times.
        """
        steady = {x.entry.name: x.value for x in again or ()}
        found = [
            (x, other)
            for x, other in others
            if isinstance(x.given, Tensor) or _is_same(x.value, steady.get(x.entry.name))
        ]
        if not found:
            return []
        texts = [f"`{x.entry.name}` {' and '.join(_texts(x.value, other.value))}" for x, other in found]
        more = [f"and {len(texts) - _MOST_NAMES} more"] if len(texts) > _MOST_NAMES else []
        named = ", ".join(texts[:_MOST_NAMES] + more)
        return [Finding(tuple(f"log {x.entry.name}" for x, _ in found), _LOGGED.format(len(self.kept), named))]


class End(NamedTuple):
    """What a tail came to."""

    loss: Any
    calls: Sequence[Call]
    """Of `self.log`."""

    def known(self, other: End) -> End:
        """What is the same in another one."""
        loss = self.loss if _is_same(self.loss, other.loss) else None
        if len(self.calls) != len(other.calls):
            return End(loss, [])
        pairs = zip(self.calls, other.calls, strict=True)
        return End(loss, [x for x, y in pairs if x.entry.name == y.entry.name and _is_same(x.value, y.value)])


def _is_same(one: Any, other: Any) -> bool:
    return isinstance(one, Tensor) and isinstance(other, Tensor) and one.equal(other)


def _early(plan: SlicePlan, with_tail: SlicePlan) -> list[Any]:
    """What a plan does before the tail of another one."""
    tail = with_tail.n_stages - 1
    before = [i for i, x in enumerate(with_tail.operations) if x.stage is not None and x.stage < tail]
    return [(x.name, x.stage, x.outputs) for i in before for x in plan.operations[i : i + 1]]


def _differ(one: Tensor, other: Tensor, parts: Sequence[Tensor] = (), dtype: torch.dtype | None = None) -> bool:
    """Whether two numbers are apart by more than rounding, also of sums that come to nothing of numbers about one.

    Args:
        parts: what the other one was made of, which may be much larger.
        dtype: in which they were computed.
    """
    eps = torch.finfo(dtype or (one.dtype if one.is_floating_point() else torch.float32)).eps
    a, b = float(one), float(other)
    scale = max([abs(a), abs(b), *(abs(float(x)) for x in parts)])
    rounding = max(min(_ROUNDING, _OF_LONG_SUMS * eps) * scale, 8 * eps * max(scale, 1.0))
    return not (abs(a - b) <= rounding or a == b or (a != a and b != b))


def _texts(*numbers: Tensor) -> list[str]:
    """With as many digits as tell them apart."""
    ways = [[f"{float(x):.{digits}g}" for x in numbers] for digits in (4, 6, 8, 10)]
    return next((texts for texts in ways if len(set(texts)) == len(texts)), ways[0])


_LOSS = (
    "the loss of a batch is {} on one device, and {} by its {} microbatches: what the step does after its last block"
    " depends on which samples are together. It compares them with each other, takes a statistic of them, or makes"
    " something else than sums and averages. `MegaTPStrategy(whole_loss=True)` does that once, on all samples."
)
_LOGGED = (
    "`self.log` is given other numbers for a batch on one device than its {} microbatches come to, which are no"
    " averages over samples: {}. Log a torchmetrics object, which counts over microbatches, or use"
    " `MegaTPStrategy(whole_loss=True)`."
)
_SUMS = (
    "`self.log({!r}, ...)` is given {} over the samples of a microbatch, and logs the mean of these for a batch. If one"
    " device does the same with all samples, its number is {} times as large: divide by what a microbatch holds"
    " (`len(x)`), or by what it counts."
)
_MOST_NAMES = 4
_ROUNDING = 1e-3
"""Relative; what numbers of 32 bits and less lose in a long sum."""
_OF_LONG_SUMS = 2.0**32
"""Times the last digit: what those of 64 bits lose, 1e-6, where some of 32 bits are among what they are made of."""
_MOST_BYTES = 2**28
"""What the units made of all microbatches: tables of classes by tokens are larger, and their losses are averages."""
