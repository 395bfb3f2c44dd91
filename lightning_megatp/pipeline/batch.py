"""One batch on its way through a pipeline: each stage's part of the user's step, microbatch by microbatch."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatp.batches.split import batch_size
from lightning_megatp.module import ParallelModule
from lightning_megatp.parts.on_parameters import warn_of_microbatches
from lightning_megatp.pipeline.block_check import BlockCheck
from lightning_megatp.pipeline.carried import CarriedState, OwnNumbers
from lightning_megatp.pipeline.loss.averages import Averages
from lightning_megatp.pipeline.loss.early import EarlyTerms
from lightning_megatp.pipeline.own_values import OwnValues, explaining_changes
from lightning_megatp.pipeline.remote.calls import RemoteCalls
from lightning_megatp.pipeline.results import Results, Step, loss_of
from lightning_megatp.pipeline.seeds import mixed
from lightning_megatp.pipeline.slicing.errors import BeyondPlan
from lightning_megatp.pipeline.slicing.kept import Kept
from lightning_megatp.pipeline.slicing.plan import Relay, SlicePlan
from lightning_megatp.pipeline.slicing.slicer import Slicer, StageRun
from lightning_megatp.pipeline.tail_check import TailCheck
from lightning_megatp.pipeline.told.logs import Logs
from lightning_megatp.pipeline.whole_loss import WholeLoss
from lightning_megatp.places import buffer_at
from lightning_megatp.random_states import seeded
from lightning_megatp.shim.compiler import is_compiled
from lightning_megatp.snapshots.leftovers import Path, PlainValues
from lightning_megatp.tensor.random import generators_on
from lightning_megatp.zero.sharding import ZeroSharding


@dataclass
class Backward:
    """How the last stage starts a backward, and what every stage calls before its first.

    Args:
        scale: the loss's factor for gradient accumulation and for float16.
        before: called once per batch, with a scalar.
        complete: called with a stage when its gradients are there, and with what they have to be multiplied by, ()
            float64; None where they are not summed over data-parallel ranks before the batch is over.
    """

    scale: Callable[[Tensor], Tensor]
    before: Callable[[Tensor], None]
    complete: Callable[[int, Tensor], None] | None = None


@dataclass
class PartRun:
    """A part of a step that goes backward by hand, on the microbatches of a batch."""

    number: int
    kept: Sequence[Kept]
    """By microbatch."""
    averages: dict[int, Averages]
    """By microbatch, what the step has averaged on the last stage, in all parts so far."""
    goes_backward: bool
    """Whether it ends with a backward; else it is the last one."""
    learning: Callable[[Mapping[str, bool]], contextlib.AbstractContextManager[None]]
    """Around a backward: lets parameters require a gradient as the plan says."""


@dataclass
class BatchRun:
    """The stages of this rank on the microbatches of one batch: what the executor drives.

    Args:
        parallel: the module.
        slicer: cuts its steps.
        logs: stands in for its `log`.
        device: of weights that are plain numbers.
        step: the user's step on a microbatch, in its contexts.
        microbatches: the parts of the batch.
        plans: one per microbatch.
        seed: of the batch, alike on all stages.
        backward: None for evaluation.
        opened: the modules whose Python code runs on every stage, by name.
        stages: of this rank. What the step sets on modules is undone after all but the highest of them, so that a
            counter counts each microbatch once; each of them finds what it has set in the microbatch before.
        sharding: gathers the parameters of units.
        reduces_each: see `Pipeline`.
        stage_of_unit: unit name -> stage.
        loss_units: the units inside of which steps were seen to average losses, in any batch; kept up.
        carried: looks at what one microbatch leaves for the next; None after the first batch.
        numbers: notes those that steps set, on the last stage; None where nobody looks.
        warns: reports where the loss differs from the one on a single device; None where nobody looks.
        own_values: gives microbatches their own of what units change; None where there is one, or no backward.
        whole: what makes the tail of the step once, for all microbatches; None where each has its own.
        looks: whether it is looked at, on all stages, for what is not one device's.
        check: compares the batch's loss with one device's, on the last stage; None where nobody looks.
        blocks: tries blocks of this rank; None where nobody looks.
        part: of a step that goes backward by hand, which is run part after part; None for others.
        remote: with it the last stage runs the steps, and calls the other stages' units; there are no plans then, or
            those that the steps may leave.
        forwarded: called after a stage's forward of a microbatch.
    """

    parallel: ParallelModule
    slicer: Slicer
    logs: Logs
    device: torch.device
    step: Step
    microbatches: Sequence[Any]
    plans: Sequence[SlicePlan]
    seed: int
    backward: Backward | None
    opened: Mapping[str, nn.Module]
    stages: Sequence[int]
    sharding: ZeroSharding | None
    reduces_each: bool
    stage_of_unit: Mapping[str, int]
    loss_units: set[str]
    carried: CarriedState | None = None
    numbers: OwnNumbers | None = None
    warns: Callable[[str], None] | None = None
    own_values: OwnValues | None = None
    whole: WholeLoss | None = None
    looks: bool = False
    check: TailCheck | None = None
    blocks: BlockCheck | None = None
    part: PartRun | None = None
    remote: RemoteCalls | None = None
    forwarded: Callable[[], None] = lambda: None
    beyond: BeyondPlan | None = None
    """What kept the last stage from the end of a step of evaluation."""
    _plain_values: dict[int, dict[Path, bytes]] = field(default_factory=dict)
    """By stage, what its part of the step has set so far, but for the highest stage of the rank."""
    _early: dict[int, EarlyTerms] = field(default_factory=dict)
    """By stage, in batches that are looked at."""
    _factor: Tensor | None = None
    _backwards: Counter[int] = field(default_factory=Counter)
    """By stage, those that have begun."""

    @functools.cached_property
    def results(self) -> Results:
        """What the steps come to, on the last stage."""
        batches = self.microbatches if self.whole is None else [self.whole.batch]
        weight = self.parallel.loss_weight
        return Results(batches, self.device, weight, self.reduces_each, self.loss_units, self.warns)

    @functools.cached_property
    def _buffers(self) -> frozenset[int]:
        """Their identities, where it is looked for what samples have to do with each other."""
        return frozenset() if self.warns is None else frozenset(map(id, self.parallel.module.buffers()))

    def relays(self, boundary: int, microbatch: int) -> Sequence[Relay]:
        return self.plans[microbatch].relays[boundary]

    def forward(self, stage: int, microbatch: int, received: list[Tensor]) -> list[Tensor]:
        last = stage == self.last_stage
        if last and self.beyond is not None:
            return []  # what the other stages still send is received, and no more
        if self.part is not None:
            plan = self.plans[microbatch]
            if not last and plan.is_idle(stage):
                return []
            self.part.kept[microbatch].take_leaves(stage, plan.relays[stage], received, plan.part.begins)
        seed = mixed(self.seed, microbatch)
        several = len(self.results.rows) > 1
        rows, compares = self.results.rows[microbatch] if several else 0, several and self.warns is not None
        ends = last and self.whole is None  # else the step ends in its tail
        counting = self._counting(microbatch, rows, compares) if ends else None
        if counting is not None and several:
            counting.note_early(received)
        if compares and not last and self.whole is None and self.remote is None and self.is_training:
            counting = Averages((), self._closed, rows, compares, self._buffers)
        with contextlib.ExitStack() as stack:
            stack.enter_context(seeded(self._seed_of_units(seed, stage), generators_on(self.device)))
            stack.enter_context(torch.set_grad_enabled(self.is_training and torch.is_grad_enabled()))
            if counting is not None:
                stack.enter_context(counting)
            if self.blocks is not None:
                stack.enter_context(self.blocks.noting(microbatch))
            if self.own_values is not None:
                names = [name for name, on in self.plans[microbatch].changed.items() if on == stage]
                places = map(functools.partial(buffer_at, self.parallel.module), names)
                stack.enter_context(self.own_values.forward(stage, list(filter(None, places))))
            if self.carried is not None:
                samples = batch_size(self.microbatches[microbatch]) or 1
                stack.enter_context(self.carried.watching(microbatch, samples))
            calls = stack.enter_context(self.logs.recording()) if ends else []
            if stage != max(self.stages) or (last and not ends) or not self.is_last_part:
                stack.enter_context(self._plain_values_of(stage))
            done = self._done(functools.partial(self._run, stage, microbatch, received, seed, counting))
            self.forwarded()
            if ends and self.numbers is not None:
                self.numbers.note()
        if done is None:
            return []
        if not ends:
            needed: list[Tensor] = []
            if self.backward is not None:
                if self.parallel.has_regions:
                    # a node for what is passed on, whose gradient is whole, where that of uses in regions is in parts
                    ids = set(map(id, received))
                    done = replace(done, sent=tuple(x.view_as(x) if id(x) in ids else x for x in done.sent))
                relays = self.relays(stage + 1, microbatch)
                needed = [x for x, r in zip(done.sent, relays, strict=True) if r.requires_grad]
                self.parallel.partial.trace(needed, received)
            if not last:
                if counting is not None:
                    self._note_early(stage, microbatch, counting, done)
                return list(done.sent)
            self._meet_tail(done, microbatch)
            return needed
        assert counting is not None
        self.results.add(microbatch, done.result, counting, calls)
        return [] if self.backward is None else [self._root(loss_of(done.result), microbatch, received)]

    def _seed_of_units(self, seed: int, stage: int) -> int:
        """Of what a stage's units draw: other numbers in each part of a step."""
        of_stage = mixed(seed, stage)
        return mixed(of_stage, self.part.number) if self.part is not None and self.part.number else of_stage

    def _counting(self, microbatch: int, rows: int, compares: bool) -> Averages:
        """What sees what a step averages. It goes on through all parts of a step."""
        if self.part is None or microbatch not in self.part.averages:
            counting = Averages(self.results.with_losses, self._closed, rows, compares, self._buffers)
        else:
            counting = self.part.averages[microbatch]
            counting.of_targets = []
        if self.part is not None:
            self.part.averages[microbatch] = counting
        return counting

    def weights_of(self, numbers: Sequence[Any]) -> list[float]:
        """What numbers of microbatches weigh in one of the batch: by what each averages, else by samples.

        Args:
            numbers: as the step has read them, by microbatch.
        """
        averages = {} if self.part is None else self.part.averages
        counts = [averages[i].count_of(x) if i in averages else None for i, x in enumerate(numbers)]
        known = [float(count) for count in counts if count is not None]
        sure = len(known) == len(numbers) and 0 < sum(known) < float("inf")
        return known if sure else [float(x) for x in self.results.rows]

    @property
    def is_training(self) -> bool:
        """Whether the step is one of training, which may have parts without a backward."""
        return self.backward is not None or self.part is not None

    @property
    def is_last_part(self) -> bool:
        """Whether what the step sets in Python stays: no other part runs the step from its beginning."""
        return self.part is None or not self.part.goes_backward

    def _note_early(self, stage: int, microbatch: int, counting: Averages, done: StageRun) -> None:
        """Look at what a stage before the last one hands on; after all microbatches say what of it is no average."""
        terms = self._early.setdefault(stage, EarlyTerms())
        keys = (relay.key for relay in self.relays(stage + 1, microbatch))
        terms.note(counting, zip(keys, done.sent, strict=True))
        if microbatch == len(self.microbatches) - 1 and self.warns is not None and (text := terms.text()):
            self.warns(text)

    def _meet_tail(self, done: StageRun, microbatch: int) -> None:
        """With `whole`: keep what a microbatch makes for the tail of the step; behind the last one run that, forward
        and backward."""
        whole = self.whole
        assert whole is not None
        whole.parts.append([x.detach() for x in done.sent])
        if microbatch < len(self.microbatches) - 1:
            return
        leaves, seed, tail = whole.join(), mixed(self.seed, len(self.microbatches)), self.last_stage + 1
        # what tables are for was put back after each microbatch, and the tables that these have made are still there
        set_by_parts = self._plain_values.get(self.last_stage, {})
        PlainValues(self.opened).adopt(self.slicer.tables.lengths_among(set_by_parts, self.opened))
        with contextlib.ExitStack() as stack:
            stack.enter_context(seeded(seed, generators_on(self.device)))
            stack.enter_context(torch.set_grad_enabled(self.backward is not None and torch.is_grad_enabled()))
            calls = stack.enter_context(self.logs.recording())
            taken = whole.taken_by(len(self.microbatches))
            run = functools.partial(self.slicer.run, whole.plan, tail, self.step, whole.batch, leaves, seed)
            ended = self._done(functools.partial(run, taken=taken))
        if ended is None:
            return
        whole.compare_taken()
        self.results.add(0, ended.result, Averages(), calls)
        if self.backward is not None:
            root = self._root(loss_of(ended.result), 0, leaves)
            self._prepare_backward(tail)
            with self.parallel.user_code():
                root.backward()
            for leaf in leaves:
                if leaf.grad is not None:
                    leaf.grad = self.gradient_of(leaf, leaf.grad)

    @property
    def retains_graph(self) -> bool:
        """Whether backward leaves the graph as it is, for another one."""
        return bool(self.plans) and self.plans[0].part.retains_graph

    def gradient_of(self, received: Tensor, gradient: Tensor) -> Tensor:
        return self.parallel.partial.completed_received(received, gradient)

    def root_gradients(self, microbatch: int) -> Sequence[Tensor] | None:
        return None if self.whole is None else self.whole.gradients(microbatch)

    def run_uncut(self) -> None:
        """Run the steps on the last stage, with `remote`; the others answer its calls."""
        for microbatch in range(len(self.microbatches)):
            self.forward(max(self.stages), microbatch, [])

    @property
    def goes_on(self) -> bool:
        """Whether the last stage, which ran the steps by itself, called more units of other stages than plans say."""
        if self.remote is None or not self.plans:
            return self.remote is not None
        early = [op for plan in self.plans for op in plan.operations if op.stage != plan.n_stages - 1]
        planned = sum(len(op.units) for op in early)
        return self.remote.calls * len(self.plans) > planned * len(self.microbatches)

    def _run(
        self, stage: int, microbatch: int, received: list[Tensor], seed: int, counting: Averages | None
    ) -> StageRun:
        batch = self.microbatches[microbatch]
        if self.remote is None:
            plan, last = self.plans[microbatch], stage == self.last_stage
            check = self.check if last else None
            looks = self.whole if last and self.whole is not None else check
            taken = None if looks is None else looks.taken_by(microbatch)
            keeps = self.part or check
            kept = None if keeps is None else keeps.kept[microbatch]
            done = self.slicer.run(plan, stage, self.step, batch, received, seed, counting, taken, kept)
            if check is not None:
                check.note(microbatch, {r.key: x for r, x in zip(plan.relays[stage], received, strict=True)})
            return done
        step = functools.partial(self.step, batch)
        if counting is not None:
            return StageRun((), self.remote.drive(self.slicer.decided_by, step, counting))
        self.remote.serve(self.slicer.decided_by, step)
        return StageRun(())

    @contextlib.contextmanager
    def _plain_values_of(self, stage: int) -> Iterator[None]:
        """Around a stage's part: Python values are as it has left them, and then as they were."""
        others = PlainValues(self.opened)
        others.adopt(self._plain_values.get(stage, {}))
        try:
            yield
        finally:
            self._plain_values[stage] = others.put_back()

    @functools.cached_property
    def _closed(self) -> Callable[[str], bool]:
        """Tells whether a unit is compiled code, inside of which no step that was watched averaged a loss. It doesn't
        hold this batch, which holds what asks it."""
        return functools.partial(_is_closed, self.parallel, self.stage_of_unit, self.loss_units)

    def _done(self, run: Callable[[], StageRun]) -> StageRun | None:
        """What a stage made; None where a step of evaluation goes on beyond its plan."""
        try:
            return run() if self.sharding is None else self._gathered(run)
        except BeyondPlan as error:
            if self.is_training:
                raise
            self.beyond = error
            return None

    def _gathered(self, run: Callable[[], StageRun]) -> StageRun:
        """Run a stage where FSDP2 sees what leaves it."""
        assert self.sharding is not None

        def parts() -> tuple[tuple[Tensor, ...], Any]:
            done = run()
            return done.sent, done.result

        return StageRun(*self.sharding.step(parts))

    @contextlib.contextmanager
    def around_backward(self, stage: int, microbatch: int) -> Iterator[None]:
        learns = {} if self.part is None else self.plans[microbatch].part.learns
        with self.part.learning(learns) if self.part is not None and learns else contextlib.nullcontext():
            self._before_backward(stage, microbatch)
            # activation checkpointing runs the user's forward again
            with explaining_changes(self.plans, stage), self.parallel.user_code():
                yield

    def _before_backward(self, stage: int, microbatch: int) -> None:
        first = not self._backwards
        self._backwards[stage] += 1
        self._prepare_backward(stage)
        if first and self.carried is not None and len(self.microbatches) > 1:
            warn_of_microbatches(self.parallel.module)
        if self.backward is not None and first:
            returned = self.results.returned
            loss = loss_of(returned[microbatch]) if microbatch in returned else torch.zeros(())
            with self.logs.recording() as calls:
                self.backward.before(loss)
            if self.results.logged:
                self.results.logged[0] += calls

    @property
    def last_stage(self) -> int:
        """The stage of the last units."""
        return self.slicer.n_stages - 1 - self.slicer.tail

    @property
    def sends_factor(self) -> bool:
        """Whether stages need to know, before the batch is over, what their gradients have to be multiplied by."""
        return self.backward is not None and self.backward.complete is not None

    @property
    def factor(self) -> Tensor:
        """That: () float64. Known on the last stage when it has run all microbatches, on the others when the gradient
        of the last one has arrived."""
        if self._factor is None:
            self._factor = self.results.loss.factor(self.results.loss.weights())
        return self._factor

    @factor.setter
    def factor(self, factor: Tensor) -> None:
        self._factor = factor

    def _prepare_backward(self, stage: int) -> None:
        if self.sharding is not None:
            units = {unit for unit, of in self.stage_of_unit.items() if of == stage}
            self.sharding.before_backward_of(units, self.reduces_each)

    def complete(self, stage: int) -> None:
        if self.backward is not None and self.backward.complete is not None:
            self.backward.complete(stage, self.factor)

    def conclude(self) -> tuple[Tensor, Tensor]:
        """On the last stage, after all microbatches.

        Returns:
            The loss of the batch, nan where there is none; and the weights of its microbatches, (m,) float64.
        """
        if not self.has_loss:
            return torch.full((), torch.nan, device=self.device), self.results.loss.weights()
        return self.results.conclude()

    @property
    def has_loss(self) -> bool:
        """On the last stage, whether the step returned a loss, or went backward from one by hand."""
        if self.backward is not None or self.part is None:
            return self.backward is not None
        return self.results.hold_loss

    @property
    def returns_more(self) -> bool:
        """Whether the step returns more than a loss."""
        result = self.results.returned[0]
        if not self.is_training:
            return result is not None
        return isinstance(result, Mapping) and len(result) > 1

    def _root(self, loss: Tensor, microbatch: int, received: Sequence[Tensor]) -> Tensor:
        assert self.backward is not None
        if not loss.requires_grad:
            raise RuntimeError(
                "MegaTPStrategy: training_step returned a loss that needs no gradient: it was made by `detach`, under"
                " `no_grad`, or of frozen parameters alone. Return the loss with its graph."
            )
        self.parallel.partial.trace([loss], received)
        return self.backward.scale(loss * self.results.loss.share(microbatch).to(loss))


def _is_closed(parallel: ParallelModule, stage_of_unit: Mapping[str, int], loss_units: set[str], unit: str) -> bool:
    if unit not in stage_of_unit or unit in loss_units or parallel.uncompiled:
        return False
    return is_compiled(parallel.module.get_submodule(unit))
