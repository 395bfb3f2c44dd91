"""A batch of a step that optimizes by hand, on its way through a pipeline, part after part.

A part ends where the step goes backward. It is a schedule of microbatches, as a whole step is; then all ranks do what
the step does by hand up to the next part. What comes behind the last backward (logs, what is returned) is a part
without one. Each run of a part runs the step from its beginning: see `slicing.dry_run.parts`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_megatp.pipeline.actions import Actions
from lightning_megatp.pipeline.batch import Backward, BatchRun, PartRun, Step
from lightning_megatp.pipeline.block_check import BlockCheck
from lightning_megatp.pipeline.loss.averages import Averages
from lightning_megatp.pipeline.pipeline import Pipeline
from lightning_megatp.pipeline.seeds import mixed, shared_seed
from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.pipeline.slicing.kept import Kept
from lightning_megatp.pipeline.slicing.plan import SlicePlan
from lightning_megatp.pipeline.slicing.reads import Answer, of_batch
from lightning_megatp.snapshots.leftovers import PlainValues
from lightning_megatp.steps import StepKind


@dataclass(frozen=True)
class _Way:
    """What steps do by hand, and in what order: another one where a generator is trained in some batches only."""

    number: int
    last: SlicePlan
    """Of its last part, on a batch's first microbatch."""
    told: tuple[tuple[str, bool], ...]
    """`Learning.told`."""
    made: int
    """`Plans.generation` when it was planned."""


class ByHand:
    """Runs training steps that optimize by hand.

    Args:
        pipeline: of the module.
        actions: what its steps do by hand.
    """

    def __init__(self, pipeline: Pipeline, actions: Actions) -> None:
        self._pipeline, self._actions = pipeline, actions
        self._ways: dict[Hashable, list[_Way]] = {}
        """By the signatures of a batch's microbatches."""
        self._planned = 0

    def train(self, step: Step, batch: Any, backward: Backward) -> Any:
        """Run a batch.

        Args:
            step: the user's on a microbatch, in its contexts.
            batch: the same on all ranks of one copy of the model.
            backward: of each part.

        Returns:
            What the step returned: all of it on the last stage, a loss alone on the others, unless a callback asks for
            more; None for nothing.

        Raises:
            SliceError: it can't be cut, or not into parts.
        """
        pipeline = self._pipeline
        if pipeline.sharding is not None:
            pipeline.sharding.begin()
            pipeline.sharding.drop_old()
        microbatches = pipeline.microbatches(batch)
        pipeline.warn_of_one(len(microbatches))
        seed = shared_seed(pipeline.parallel.module.trainer, StepKind.TRAIN)
        pipeline.metrics.next_batch()
        with self._actions.batch():
            with pipeline.metrics.apart():
                parts = self._parts(step, microbatches, seed)
            pipeline.last_stage.expect([plan for plans in parts for plan in plans])
            of_batch = _Batch(pipeline, self._actions, step, backward, batch, microbatches, parts, seed)
            for number in range(len(parts)):
                of_batch.run(number)
            loss = of_batch.end()
        last = of_batch.last_run
        more = pipeline.outputs_of(StepKind.TRAIN, last)
        if not pipeline.last_stage.has_loss:
            return more
        return {**(more or {}), "loss": loss} if more or last.results.are_mappings else loss

    def _parts(self, step: Step, microbatches: Sequence[Any], seed: int) -> list[list[SlicePlan]]:
        """The plans of each part, by microbatch.

        Communication: an object all-gather over pp, of a number; see `Plans.of`.
        """
        signatures = (*self._pipeline.slicer.signatures(microbatches), self._actions.learning.kind())
        ways = self._ways.setdefault(signatures, [])
        ways[:] = [way for way in ways if way.made == self._pipeline.plans.generation]
        way = next((way for way in ways if self._goes(way, step, microbatches[0], seed)), None)
        number = self._planned if way is None else way.number
        if len(set(self._pipeline.mesh.exchange(number if way is not None else -1, "pp"))) > 1:
            raise SliceError(
                "pipeline stages go another way through the same batch, in a step that optimizes by hand. What it does"
                " may depend on the batch, the step's number and what it reads (`loss.item()`), not on the rank, nor on"
                " gradients, which each stage has of its own parameters."
            )
        parts: list[list[SlicePlan]] = []
        while not parts or parts[-1][0].part.goes_backward:
            part = self._actions.tried(step, len(parts))
            plans = self._pipeline.plans.of(StepKind.TRAIN, part, microbatches, seed, (number, len(parts)))
            assert plans is not None, "a training step has a plan, or is refused"
            if len({plan.part.goes_backward for plan in plans}) > 1:
                raise SliceError(
                    "the step calls `manual_backward` for some microbatches of a batch, and for others not."
                    " Call it always, with a loss that is multiplied by zero where there is none."
                )
            parts.append(plans)
        if way is None:
            ways.append(_Way(number, parts[-1][0], tuple(self._actions.learning.told), self._pipeline.plans.generation))
            self._planned += 1
        return parts

    def _goes(self, way: _Way, step: Step, microbatch: Any, seed: int) -> bool:
        """Whether a batch's step goes this way."""
        tried = self._actions.tried(step, way.last.part.number)
        with _python_values_kept(self._pipeline), self._pipeline.metrics.apart():
            goes = self._pipeline.slicer.keeps_to(way.last, tried, microbatch, mixed(seed, 0))
        return goes and (bool(way.last.ended) or tuple(self._actions.learning.told) == way.told)


@dataclass
class _Batch:
    """A batch, part after part."""

    pipeline: Pipeline
    actions: Actions
    step: Step
    backward: Backward
    batch: Any
    microbatches: Sequence[Any]
    parts: Sequence[Sequence[SlicePlan]]
    """By part and microbatch."""
    seed: int

    def __post_init__(self) -> None:
        self._kept = [Kept() for _ in self.microbatches]
        self._averages: dict[int, Averages] = {}
        self._answers: dict[int, Answer | None] = {}
        """To what the step reads on the host, of the batch."""
        self._looks = self.pipeline.begin_training()
        self._ended = False
        """Whether all is done that the step does by hand."""
        self.last_run: BatchRun
        """Of the last part that was run."""

    def run(self, number: int) -> None:
        """Do what the step does by hand before a part, and run that."""
        plans, pipeline = self.parts[number], self.pipeline
        goes_backward = plans[0].part.goes_backward
        part = self.actions.part(self.step, number, goes_backward)
        if plans[0].reads_first:
            self._read_ahead(part, plans)
        if plans[0].part.answered and number:
            self._tell()
        if plans[0].part.acts_first:
            self._act(plans[0], to_the_end=False)
        several = len(self.microbatches) > 1
        for i, kept in enumerate(self._kept):
            kept.wanted = frozenset().union(*(later[i].part.recalled for later in self.parts[number + 1 :]))
        blocks = self._block_check(number) if self._looks and goes_backward else None
        self.last_run = run = pipeline.run_of(
            part,
            self.microbatches,
            plans,
            self.seed,
            self.backward if goes_backward else None,
            part=PartRun(number, self._kept, self._averages, goes_backward, self.actions.learning.meanwhile),
            looks=self._looks,
            blocks=blocks,
            warns=self.pipeline.reasons if self._looks else None,
            numbers=pipeline.own_numbers() if several and not goes_backward else None,
            own_values=pipeline.own_values if several else None,
        )
        sharding = pipeline.sharding
        if goes_backward:
            if sharding is not None:
                sharding.begin()
                sharding.drop_old()
            self.actions.done.losses.append(pipeline.go_backward(run, ()))
        else:
            with contextlib.nullcontext() if sharding is None else sharding.evaluating():
                pipeline.execute(StepKind.TRAIN, run)

    def _block_check(self, number: int) -> BlockCheck | None:
        pipeline, part = self.pipeline, self.actions.tried(self.step, number)
        with _python_values_kept(pipeline), pipeline.metrics.apart():
            return pipeline.findings.block_check(
                part, self.batch, self.microbatches, self.parts[number], self.seed, pipeline.own_units
            )

    def end(self) -> Tensor:
        """After the last part. Returns the loss that the step returned, if any, ()."""
        concluded = self.pipeline.last_stage.conclude(self.last_run)
        assert concluded is not None, "of training, a batch is run once"
        self.pipeline.kept_values.share()
        if not self._ended:
            if self.parts[-1][0].part.answered:
                self._tell()
            self._act(self.parts[-1][0], to_the_end=True)
        return concluded[0]

    def _act(self, plan: SlicePlan, to_the_end: bool) -> None:
        acting, slicer = self.actions.acting(self.step), self.pipeline.slicer
        with _python_values_kept(self.pipeline):
            self._ended = slicer.act(plan, acting, self.microbatches[0], mixed(self.seed, 0), self._answers, to_the_end)
        done = self.actions.done
        if done.set_by_hooks:
            PlainValues(self.pipeline.last_stage.opened).adopt(done.set_by_hooks)
            done.set_by_hooks = {}

    def _read_ahead(self, part: Step, plans: Sequence[SlicePlan]) -> None:
        """On the last stage: see `Slicer.read_ahead`."""
        for i, kept in enumerate(self._kept) if self.pipeline.is_last else ():
            with _python_values_kept(self.pipeline):
                self.pipeline.slicer.read_ahead(plans[i], part, self.microbatches[i], mixed(self.seed, i), kept)

    def _tell(self) -> None:
        """Let all stages know what the last one has read. From then on a read is answered by what it is of the batch,
        as on one device; or by that of the microbatch, where microbatches have nothing in common.

        Communication: an object all-gather over pp, where a step reads on the host.
        """
        own = None
        if self.pipeline.is_last:
            every = set(self._kept[0].answers).intersection(*(kept.answers for kept in self._kept))
            read = {i: [kept.answers[i] for kept in self._kept] for i in sorted(every - self._answers.keys())}
            own = read, {i: of_batch(x, self.last_run.weights_of(x)) for i, x in read.items()}
        of_microbatches, of_all = next(x for x in self.pipeline.mesh.exchange(own, "pp") if x is not None)
        for i, answers in of_microbatches.items():
            for kept, answer in zip(self._kept, answers, strict=True):
                kept.answers[i] = answer if of_all[i] is None else of_all[i]
        self._answers |= of_all


@contextlib.contextmanager
def _python_values_kept(pipeline: Pipeline) -> Iterator[None]:
    """Around a run of a step that is none of its microbatches': what it sets in Python is as before."""
    plain = PlainValues(pipeline.last_stage.opened)
    try:
        yield
    finally:
        plain.put_back()
