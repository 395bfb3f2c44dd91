"""Slicer: plans how a user's own step is cut into pipeline stages, and runs one stage's part of it.

A step is cut between *units* (blocks, embeddings, heads), which are never looked into. One dry run per kind of batch
gives every value between units a stage: the latest of its inputs'. What depends only on the batch, constants and
parameters outside of units is *replicated*: every stage computes it. A value of stage s used on stage t > s is relayed
hop by hop over the boundaries s + 1, ..., t. To run, each stage executes the same step; other stages' operations return
ghosts, and the step is left after the stage's last own operation. So the step's Python code, and the order of what it
does, is the user's own on every stage.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatp.batches.signature import modes_of, signature_of
from lightning_megatp.calls import Decides, Follows, Interception, Switch, loggers_in, logging_by
from lightning_megatp.containers import tensors_in
from lightning_megatp.pipeline.loss.averages import Averages
from lightning_megatp.pipeline.slicing.acting import Acting, Ahead
from lightning_megatp.pipeline.slicing.dry_run.dry_runs import DryRuns, Step, state_before
from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.pipeline.slicing.handing_on import received_by_key, value_to_send
from lightning_megatp.pipeline.slicing.kept import Kept
from lightning_megatp.pipeline.slicing.late_hooks import UserHooks
from lightning_megatp.pipeline.slicing.locator import Locator
from lightning_megatp.pipeline.slicing.operations import StepEnded
from lightning_megatp.pipeline.slicing.plan import SlicePlan
from lightning_megatp.pipeline.slicing.reads import Answer
from lightning_megatp.pipeline.slicing.rehearsal import Rehearsal
from lightning_megatp.pipeline.slicing.running import StageMode, Taken
from lightning_megatp.pipeline.slicing.state.own_draws import generators_at
from lightning_megatp.pipeline.slicing.state.ownership import Ownership, Sizes
from lightning_megatp.pipeline.slicing.state.put_back import putting_back
from lightning_megatp.pipeline.slicing.state.tables import Left, Tables
from lightning_megatp.pipeline.slicing.surroundings import Surroundings
from lightning_megatp.random_states import host_generators_seeded, host_seeded, random_state_kept
from lightning_megatp.shim.autograd import checkpoints_ended, handle_functions
from lightning_megatp.shim.compiler import keep_compiler_out
from lightning_megatp.shim.fakes import fake_tensor_mode, is_fake
from lightning_megatp.shim.modules import conversions_around
from lightning_megatp.shim.torch import distributions_not_validated
from lightning_megatp.snapshots.snapshot import FirstValues, Snapshot


@dataclass(frozen=True)
class StageRun:
    """What one stage made of one microbatch."""

    sent: tuple[Tensor, ...]
    """In the order of `plan.relays[stage + 1]`, with their graph; what a relay says needs no gradient may have one."""
    result: Any = None
    """What the step returned; on the last stage only."""


class Slicer:
    """Cuts the steps of one module. Make it once: the calls of units are intercepted from then on, until `close`.

    Args:
        module: whose step is cut.
        stage_of_unit: unit name -> stage; units don't contain each other.
        n_stages: how many stages.
        sizes: of the parameters of which each rank holds a part.
        device: where the parameters of units will be, if some are not there yet.
        tail: whether what no unit needs any more is a stage besides, the last.
    """

    def __init__(
        self,
        module: nn.Module,
        stage_of_unit: Mapping[str, int],
        n_stages: int,
        sizes: Sizes | None = None,
        device: torch.device | None = None,
        tail: bool = False,
    ) -> None:
        n_stages += tail
        self.module, self.n_stages, self.tail = module, n_stages, tail
        self.fake_mode = fake_tensor_mode()
        self.ownership = Ownership(module, stage_of_unit, self.fake_mode, sizes or {}, device)
        """Of the parameters and buffers of units: frees those that this rank has no use for, takes them back, and lets
        the user's code find all of them, or its own."""
        self._around = Surroundings(
            module, stage_of_unit, self.ownership, self.fake_mode, Locator(module), UserHooks(module)
        )
        self._loggers = loggers_in(module)
        self._switch = Switch()
        self._interception = Interception(module, dict(stage_of_unit), self._switch)
        self._in_batch = False
        self._before_rehearsals: Snapshot | None = None
        self._values_before: list[FirstValues] = []
        """Before rehearsals that changed tensors in place, of one batch."""
        self.tables = Tables()
        """What steps make once for all later ones."""
        self._dry_runs = DryRuns(self._around, n_stages - tail, None, self._deciding)
        if tail:
            self._dry_runs = DryRuns(self._around, n_stages, self._dry_runs, self._deciding)
        self._follows = False
        """What steps leave on the module has to be followed from microbatch to microbatch."""

    def close(self) -> None:
        """Give the module its own methods back."""
        self._interception.undo()

    def signatures(self, batches: Sequence[Any]) -> list[Hashable]:
        """The signature of each batch. What the module does with batches of the same one can only differ by values: see
        `fits`.

        Raises:
            SliceError: the module has other parts than it had.
        """
        if (replaced := self._interception.replaced()) is not None:
            raise SliceError(
                f"`{replaced[0]}` is another module ({type(replaced[1]).__name__}) than it was at set-up, and pipeline"
                " stages run only those of then. Leave the modules where they are and exchange the values of their"
                " parameters, as Lightning's WeightAveraging does; or use pp=1."
            )
        self.ownership.refuse_copies()
        modes = modes_of(self.module)
        return [(modes, signature_of(batch)) for batch in batches]

    def plan(self, step: Step, batch: Any) -> SlicePlan:
        """Find out what the step does, without computing more than what is replicated, and without leaving a trace.

        Args:
            step: the user's step, in its contexts.
            batch: a microbatch. It is not changed.

        Raises:
            SliceError: the step can't be cut.
        """
        return self._dry_runs.run(step, batch)[0]

    def plans(self, step: Step, batch: Any, is_first: bool, seed: int = 0) -> list[SlicePlan]:
        """The plans of steps that will be run, made as by `plan`. One that makes tables for later steps has two plans,
        first that of a step which finds them: they are left where it put them.

        Args:
            is_first: of a batch's microbatches; what comes before another one runs without its tables.
            seed: as for `run`.
        """
        first, left = self._dry_runs.run(step, batch, seed)
        if not left.any:
            return [first]
        before = state_before(self.module)
        for plain in (False, True) if is_first and left.are_tables else ():
            left.put(plain)
            found = self._planned_from_here(step, batch, before, seed)
            if found is not None and not found[1].any:
                plan, again = found
                left.leave_out(again)
                left.put(plain)
                self.tables.note(plan, left, first)
                self._before_rehearsals = None  # none was a success
                return [plan, first]
        if left.are_tables:
            self.tables.note_places(left, first)
        if not self._follows:
            left.put_everything()
            found = self._planned_from_here(step, batch, before, seed)
            self._follows = found is None or found[0].digest() != first.digest()
        return [first]

    def plan_with_tail(self, like: SlicePlan, step: Step, batch: Any, seed: int = 0) -> SlicePlan:
        """The plan of a batch in which the tail of the step, what no unit takes any more, is one more stage.

        Args:
            like: the plan of a microbatch of it.

        Raises:
            SliceError: the step can't be followed so.
        """
        return DryRuns(self._around, like.n_stages + 1, None, self._deciding).with_tail(like, step, batch, seed)

    def _planned_from_here(self, step: Step, batch: Any, before: Snapshot, seed: int) -> tuple[SlicePlan, Left] | None:
        """The plan of a step that finds what one has left, and what it leaves itself; None if it is lost in that.

        Args:
            before: to be restored.
        """
        try:
            return self._dry_runs.run(step, batch, seed)
        except SliceError:  # it takes what has no data
            return None
        finally:
            before.restore()

    def run(
        self,
        plan: SlicePlan,
        stage: int,
        step: Step,
        batch: Any,
        received: Sequence[Tensor],
        seed: int = 0,
        counting: Averages | None = None,
        taken: Taken | None = None,
        kept: Kept | None = None,
    ) -> StageRun:
        """Run one stage's part of the step on a microbatch.

        Args:
            plan: of the microbatch's signature.
            stage: whose part.
            step: the user's step, in its contexts.
            batch: the microbatch.
            received: in the order of `plan.relays[stage]`: leaves, that require a gradient where the relay says so.
            seed: of the random numbers in replicated operations: the same on all stages, another for every microbatch.
            counting: a mode that is active meanwhile, and may want to be spared what happens inside of units.
            taken: is filled with what operations of stages take, where it is there.
            kept: of this microbatch, for a part of a step: is read and filled.

        Raises:
            SliceError: the step did something else than planned.
        """
        got = received_by_key(plan.relays[stage], received, stage)
        if kept is not None:
            got |= kept.recalled(plan, stage)
        mode = StageMode(plan, stage, got, seed, self._around, counting, taken, kept)
        is_last = stage == plan.n_stages - 1
        result, skipped = None, False
        drops = plan.effects.leaves_ghosts and not is_last
        with self._following(mode, plan, batch, seed, is_left=not is_last, drops=drops, listing=is_last) as microbatch:
            result = step(microbatch)
            skipped = result is None
        mode.check(skipped)
        if not is_last:
            return StageRun(tuple(value_to_send(relay, mode, got, stage) for relay in plan.relays[stage + 1]))
        result = mode.stood_in(result)
        if any(map(is_fake, tensors_in(result))):
            raise SliceError(
                f"the step returned a value of another stage than the last one ({stage}), that was not sent to it:"
                f" {plan.why_not_sent}"
            )
        return StageRun((), result)

    def act(
        self, plan: SlicePlan, step: Step, batch: Any, seed: int, answers: dict[int, Answer | None], to_the_end: bool
    ) -> bool:
        """Run a step that optimizes by hand for what it does by hand: up to the first operation of stages in a part.

        Args:
            plan: of the part.
            step: in its contexts.
            batch: a microbatch, of the plan's signature.
            seed: as for `run`.
            answers: to what it reads of stages' values, of the whole batch.
            to_the_end: go on to the end of the step.

        Returns:
            Whether the step ended.

        Raises:
            SliceError: it goes by a value of a stage, or left its plan.
        """
        mode, ended = Acting(plan, seed, self._around, to_the_end, answers), False
        with self._following(mode, plan, batch, seed, drops=plan.effects.changes_module) as microbatch:
            step(microbatch)
            ended = True
        mode.check(skipped=False)
        return ended

    def read_ahead(self, plan: SlicePlan, step: Step, batch: Any, seed: int, kept: Kept) -> None:
        """On the last stage: find out what a part reads on the host before its first operation of stages.

        Args:
            plan: of the part.
            step: the part, in its contexts.
            batch: the microbatch.
            seed: as for `run`.
            kept: of this microbatch. The answers are added to it.

        Raises:
            SliceError: the step did something else than planned.
        """
        mode = Ahead(plan, kept, seed, self._around)
        with self._following(mode, plan, batch, seed, drops=plan.effects.changes_module) as microbatch:
            step(microbatch)
        mode.check(skipped=False)

    def keeps_to(self, plan: SlicePlan, step: Step, batch: Any, seed: int) -> bool:
        """Whether a step that optimizes by hand does what a plan of its last part says, as far as that was followed.

        Args:
            plan: of the microbatch's signature.
            step: the part, tried.
            batch: a microbatch.
            seed: as for `run`.
        """
        mode = Acting(plan, seed, self._around, to_the_end=True, answers={})
        before = state_before(self.module) if plan.effects.changes_module else None
        following = self._following(mode, plan, batch, seed, drops=before is not None)
        try:
            with random_state_kept(), checkpoints_ended(), following as microbatch:
                step(microbatch)
            return mode.followed
        except SliceError:
            return False
        except Exception:
            return True  # it will fail where it is run
        finally:
            if before is not None:
                before.restore()

    def parameter(self, name: str) -> Tensor:
        """A parameter by name, as its module holds it; of a freed one what tells its shape and dtype."""
        path, _, leaf = name.rpartition(".")
        held = dict.get(self.module.get_submodule(path)._parameters, leaf)  # a split layer would show the whole
        return self.ownership.stand_in(name) if held is None else held

    def ghost(self, x: Tensor) -> Tensor:
        """What stands for a tensor whose values are not known."""
        return self.fake_mode.from_tensor(x)

    @property
    def follows(self) -> Follows:
        """Who follows the step that runs, by hand."""
        mode: Any = self._switch.mode
        assert isinstance(mode, Follows), "steps that optimize by hand are cut"
        return mode

    def fits(self, plan: SlicePlan, step: Step, batch: Any, seed: int = 0) -> bool:
        """Whether a plan of a batch's signature is that of its values, too: see `fitting`."""
        return self.fitting([plan], step, batch, seed) is not None

    def fitting(self, plans: Sequence[SlicePlan], step: Step, batch: Any, seed: int = 0) -> SlicePlan | None:
        """The first plan of a batch's signature that is that of its values, too: of a mask that hides nothing the step
        may make none, and by lengths it may cut its rows. So it may by texts, which are no part of a signature where
        each row has its own; and a table (cosines of positions) it makes in one microbatch, and finds in the next.
        Found out by doing what is replicated, one microbatch after the other; `rehearsing` removes the traces.

        Args:
            seed: as for `run`.
        """
        found: list[tuple[int, Any]] = []
        for plan in plans:
            if any(index >= len(plan.operations) or plan.operations[index].given != given for index, given in found):
                continue  # up to there the step did what an earlier plan says
            mode = Rehearsal(plan, seed, self._around, self._is_rehearsed_to_the_end(plan))
            if self._fits(plan, mode, step, batch, seed):
                return plan
            found += [mode.found] if mode.found is not None else []
        return None

    def _is_rehearsed_to_the_end(self, plan: SlicePlan) -> bool:
        follows = self._follows or bool(plan.changed_alike and plan.early_reads)
        return plan.varies or plan.effects.draws_on_host or follows or not self.tables.are_those_of(plan)

    def _fits(self, plan: SlicePlan, mode: Rehearsal, step: Step, batch: Any, seed: int) -> bool:
        if not (plan.early_reads or self._is_rehearsed_to_the_end(plan)):
            return True
        before = state_before(self.module)
        self._before_rehearsals = self._before_rehearsals or before
        values = FirstValues(before.tensors.values() if plan.changed_alike else ())
        self._values_before.append(values)
        noted = values if plan.changed_alike else contextlib.nullcontext()
        try:
            with (
                random_state_kept(),
                checkpoints_ended(),
                noted,
                self._following(mode, plan, batch, seed, drops=False) as microbatch,
            ):
                step(microbatch)
            mode.check(skipped=False)
        except Exception:  # another plan may list what this one does not; or it fails on all stages, where that is made
            before.restore()
            self._values_before.pop().restore()
            return False
        self.tables.note_if_unchanged(plan, before)
        return True

    @contextlib.contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Around the choice of plans for a batch: what its microbatches did to the module, one after the other as when
        they are run, is undone at the end."""
        try:
            yield
        finally:
            if self._before_rehearsals is not None:
                self._before_rehearsals.restore()
                self._before_rehearsals = None
            while self._values_before:
                self._values_before.pop().restore()

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Around a run of a step that nobody asked for: what it does to the module, and to generators, is undone."""
        before = state_before(self.module)
        values = FirstValues(before.tensors.values())
        try:
            with random_state_kept(), values:
                yield
        finally:
            before.restore()
            values.restore()

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Around the microbatches of a batch: does once what each of their runs would do again (`self.log` replaced).
        Between them it does nothing."""
        keep_compiler_out(StageMode.__module__, Averages.__module__)
        self._in_batch = True
        try:
            with distributions_not_validated(), logging_by(self._switch, self._loggers):
                yield
        finally:
            self._in_batch = False

    @contextlib.contextmanager
    def _deciding(self, mode: Decides) -> Iterator[None]:
        with self.batch(), self._switch.to(mode):
            yield

    def keeping_hooks(self, plan: SlicePlan) -> list[str]:
        """The modules of units with hooks of the user's that keep what they see, and not for the step."""
        return self._around.hooks.keeping(self._around.stage_of_unit, plan.late_hooks)

    def calls_decided_by(self, mode: Decides) -> contextlib.AbstractContextManager[None]:
        """Let somebody else decide about calls of units and metrics, outside of steps."""
        return self._switch.to(mode)

    @contextlib.contextmanager
    def decided_by(self, mode: Decides) -> Iterator[None]:
        """Let somebody else decide about the calls of a step, which has no plan."""
        with contextlib.ExitStack() as stack:
            if not self._in_batch:
                stack.enter_context(self.batch())
            stack.enter_context(self._switch.to(mode))
            stack.enter_context(self.ownership.present())
            yield

    @contextlib.contextmanager
    def _following(
        self,
        mode: StageMode,
        plan: SlicePlan,
        batch: Any,
        seed: int,
        drops: bool,
        is_left: bool = True,
        listing: bool = False,
    ) -> Iterator[Any]:
        """Around a step that follows a plan: let a mode decide what happens between units. It is given a microbatch
        that it may change.

        Args:
            seed: of the random numbers that all stages share.
            drops: at the end the module has no values without data.
            is_left: before its end, maybe, so that somebody else has to put back what it does.
            listing: `module.parameters()` gives what stands for freed ones, whatever the plan says. The last stage may
                do what no plan has seen.
        """
        microbatch = copy.deepcopy(batch) if plan.effects.changes_batch else batch
        with contextlib.ExitStack() as stack:
            if plan.effects.draws_on_host:
                stack.enter_context(host_seeded(seed))
                stack.enter_context(host_generators_seeded(seed, generators_at(plan.effects.drawn_apart)))
            if plan.effects.put_back and is_left:
                stack.enter_context(putting_back(plan.effects.put_back))
            if drops:
                stack.callback(Snapshot(self.module).drop_fakes)
            if not self._in_batch:
                stack.enter_context(self.batch())
            stack.enter_context(self._switch.to(mode))
            if listing or plan.effects.lists_parameters:
                stack.enter_context(self.ownership.present())
            if plan.uses_functions:
                stack.enter_context(handle_functions(mode.function))
            if plan.converts:
                stack.enter_context(conversions_around(mode.converting))
            try:
                with mode:
                    yield microbatch
            except StepEnded as ended:
                ended.__traceback__ = None  # its frames hold tensors, and this one, in a cycle (Python 3.13)
