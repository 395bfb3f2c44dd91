"""A step that optimizes by hand, run on every stage alike for what it does by hand: its operations are not done.

Between the parts of such a step nothing is under way, so that all stages can clear gradients, sum them and step their
optimizers together. In place of what stages compute there are ghosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.pipeline.slicing.kept import Kept
from lightning_megatp.pipeline.slicing.plan import SlicePlan
from lightning_megatp.pipeline.slicing.reads import Answer, Reads
from lightning_megatp.pipeline.slicing.running import StageMode
from lightning_megatp.pipeline.slicing.script import Instruction
from lightning_megatp.pipeline.slicing.surroundings import Surroundings
from lightning_megatp.tensor.functions import operation_name


class Ahead(StageMode):
    """The last stage's run of a part up to the first operation of stages: what it reads by then on the host, all have
    to know before they do by hand what may depend on it.

    Args:
        plan: of the part.
        kept: what the microbatch has kept of earlier parts. The answers are added to it.
        seed: of the random numbers that all stages share.
        around: of the module.
    """

    def __init__(self, plan: SlicePlan, kept: Kept, seed: int, around: Surroundings) -> None:
        last = plan.n_stages - 1
        leaves = {key: x for (stage, key), x in kept.leaves.items() if stage == last and key in plan.part.recalled}
        super().__init__(plan, last, leaves | kept.recalled(plan, last), seed, around)
        self.reads = Reads(kept.answers, reads=True, ahead=True)
        self._last = plan.first_of_stages - 1

    def log(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """The run of the part will log it."""


class Acting(StageMode):
    """Does what every stage computes, up to the first operation of stages in the plan's part.

    Args:
        plan: of the part.
        seed: of the random numbers that all stages share.
        around: of the module.
        to_the_end: go on through the part.
        answers: to what it reads of stages' values, of the whole batch.
    """

    def __init__(
        self, plan: SlicePlan, seed: int, around: Surroundings, to_the_end: bool, answers: dict[int, Answer | None]
    ) -> None:
        super().__init__(plan, None, {}, seed, around)
        self.reads = Reads(answers)
        self._overran = False
        self._last = len(plan.operations) if to_the_end else plan.first_of_stages - 1

    def log(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """The stages' runs of the step have logged it, or will; not what hooks log."""
        if self.inside:
            original(*args, **kwargs)

    def check(self, skipped: bool) -> None:
        """After the step, which may end anywhere.

        Raises:
            SliceError: its code caught an error of the pipeline's.
        """
        if self._error is not None:
            raise self._error

    def metric(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a metric's method: the last stage's run of the step calls it."""
        if self.done:
            return None
        return self._opaque(function, name, False, args, kwargs)

    def end_part(self, retains_graph: bool, learns: Mapping[str, bool]) -> None:
        """The step goes backward where a part is to be run first, and is left."""
        super().end_part(retains_graph, learns)
        self._overran = True

    @property
    def followed(self) -> bool:
        """Whether the step did all that the plan says, and no more."""
        did = self._index >= len(self._plan.operations) - 1 and self._parts_done == self._plan.part.number
        return self._error is None and did and not self._overran

    def _next(self, what: Any) -> Instruction | None:
        if not self.done and self._plan.ended and self._index + 1 == len(self._plan.operations):
            self._refuse(what if isinstance(what, str) else operation_name(what))
        return super()._next(what)

    def _read(self, reads: Reads, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        answer = super()._read(reads, func, args, kwargs)
        if answer is None:  # microbatches have not the same
            self._refuse(operation_name(func))
        return answer

    def _refuse(self, name: str) -> None:
        self._error = SliceError(
            f"`{name}` ({self._locator.here()}) reads a value of one pipeline stage, in a step that optimizes by hand."
            " Each stage steps its own optimizers, and has to know by that value whether to. A number that is a mean"
            " over samples is known to all (`loss.item()`), other values are those of a microbatch. Compare such a"
            " number, or look at values behind the last step of an optimizer, or in a hook."
        )
        raise self._error
