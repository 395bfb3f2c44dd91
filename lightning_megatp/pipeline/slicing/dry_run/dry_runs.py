"""The dry runs of a module's steps: of the whole, then of each stage alone."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_megatp.batches.signature import leaves_out, tensors_of
from lightning_megatp.calls import Decides
from lightning_megatp.pipeline.slicing.dry_run.alone import Alone, Difference, Reading
from lightning_megatp.pipeline.slicing.dry_run.deeds import Deeds
from lightning_megatp.pipeline.slicing.dry_run.manner import Manner
from lightning_megatp.pipeline.slicing.dry_run.planning import make_plan
from lightning_megatp.pipeline.slicing.dry_run.stage_states import StageStates, shared_parts
from lightning_megatp.pipeline.slicing.dry_run.tail import Tail
from lightning_megatp.pipeline.slicing.dry_run.tracer import Tracer
from lightning_megatp.pipeline.slicing.dry_run.values import StandIns, Values
from lightning_megatp.pipeline.slicing.errors import ReadsValues, SideDoor, SliceError
from lightning_megatp.pipeline.slicing.operations import StepEnded
from lightning_megatp.pipeline.slicing.plan import Operation, SideEffects, SlicePlan
from lightning_megatp.pipeline.slicing.state.kept import KeptByUnits
from lightning_megatp.pipeline.slicing.state.lasting import UNNAMED
from lightning_megatp.pipeline.slicing.state.own_draws import OwnDraws
from lightning_megatp.pipeline.slicing.state.put_back import Toggles, modules_with, putting_back
from lightning_megatp.pipeline.slicing.state.tables import Left
from lightning_megatp.pipeline.slicing.surroundings import Surroundings
from lightning_megatp.random_states import host_seeded, random_state_kept
from lightning_megatp.shim.autograd import checkpoints_ended, handle_functions
from lightning_megatp.shim.compiler import uncompiled
from lightning_megatp.shim.fakes import forget_fakes, subclassed_fake
from lightning_megatp.shim.lightning import around_progress, trainer_of
from lightning_megatp.shim.modules import conversions_around
from lightning_megatp.shim.torch import WeakIdKeyDictionary, tensor_version
from lightning_megatp.snapshots.snapshot import FirstValues, Snapshot

Step = Callable[[Any], Any]
"""A user's step on one batch, in the contexts it runs in (autocast)."""

_MOST_TRIES = 3
"""How often a whole dry run that is not the same as the last one is tried, at most."""


class _Seen(NamedTuple):
    """What a dry run saw."""

    plan: SlicePlan
    left: Left
    deeds: Sequence[Deeds]
    difference: Difference | Reading | None
    """The first operation that a stage does otherwise alone."""
    stops_at_mask: bool
    """It could not be followed to the end of the step, and met a mask of the last stage's values."""


class DryRuns:
    """Finds out what a step does, without computing more than what is replicated, and without leaving a trace.

    Args:
        around: of the module whose steps they are.
        n_stages: how many stages.
        before_tail: with it the last of them is the tail of a step, and these find out what that is: dry runs with a
            stage less.
        deciding: lets somebody decide about the calls of units and metrics, around a step.
    """

    def __init__(
        self,
        around: Surroundings,
        n_stages: int,
        before_tail: DryRuns | None,
        deciding: Callable[[Decides], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._around, self._n_stages, self._before_tail, self._deciding = around, n_stages, before_tail, deciding
        self._module, self._ownership, self._fake_mode = around.module, around.ownership, around.fake_mode
        self._stand_ins: StandIns = WeakIdKeyDictionary()
        self._early_modules = {
            f"{name}.{inner}".rstrip("."): part
            for name, stage in around.stage_of_unit.items()
            if stage < n_stages - 1
            for inner, part in around.module.get_submodule(name).named_modules()
        }
        self._shared = shared_parts(around.module, around.stage_of_unit)
        self._kept = KeptByUnits(around.module, around.stage_of_unit)
        self._tried_alone: set[Hashable] = set()
        """Kinds of steps of which each stage alone does the same as with the others."""

    def run(self, step: Step, batch: Any, seed: int = 0) -> tuple[SlicePlan, Left]:
        """The plan, and what the step would leave on the module, which is as before. Hooks on units that hand something
        to the step are called after their units, where it can be cut so; masks of the last stage's values are gone past
        where something that comes then concerns other stages."""
        manner = Manner(past_masks=self._n_stages == 1)
        if self._before_tail is not None:
            manner = replace(manner, tail=Tail(self._before_tail.operations(step, batch, seed)))
        try:
            seen, manner = self._by_hooks(manner, step, batch, seed)
        except ReadsValues:
            seen, manner = self._by_hooks(replace(manner, guesses_parts=True), step, batch, seed)
        if seen.stops_at_mask:
            with contextlib.suppress(SliceError):
                further, past = self._by_hooks(replace(manner, past_masks=True), step, batch, seed)
                if further.plan.relays != seen.plan.relays:
                    seen, manner = further, past
        if manner.side_door is not None and self._n_stages > 1:
            self._check_sets_again(manner, manner.side_door, step, batch, seed, seen)
        self._check_alone(manner, step, batch, seed, seen)
        return seen.plan, seen.left

    def with_tail(self, like: SlicePlan, step: Step, batch: Any, seed: int) -> SlicePlan:
        """The plan of a step of which the tail is known, by one of fewer samples. No stage is tried alone, and nobody
        learns who uses what: it is no plan of a pipeline.

        Args:
            like: the plan of that, in which the tail is a part of the last stage.
        """
        manner = Manner(like.late_hooks, like.attributes, tail=Tail(like.operations, of_stage=like.n_stages - 1))
        try:
            return self._seen(manner, step, batch, seed, is_run=False).plan
        except ReadsValues:
            return self._seen(replace(manner, guesses_parts=True), step, batch, seed, is_run=False).plan

    def operations(self, step: Step, batch: Any, seed: int) -> Sequence[Operation]:
        """What the step does, behind masks of the last stage's values, too, where it can be followed there: a head may
        come behind one."""
        with contextlib.suppress(SliceError):
            return self._by_hooks(Manner(past_masks=True), step, batch, seed)[0].plan.operations
        return self.run(step, batch, seed)[0].operations

    def _by_hooks(self, manner: Manner, step: Step, batch: Any, seed: int) -> tuple[_Seen, Manner]:
        """A dry run, with the hooks called late that need it, and what units set on themselves, where it is taken."""
        first: SliceError | None = None
        while True:
            try:
                return self._seen(manner, step, batch, seed), manner
            except SliceError as error:
                first = first or error
                if not isinstance(error, SideDoor) or (other := self._further(manner, error)) == manner:
                    raise first from None
                manner = other

    def _further(self, manner: Manner, error: SideDoor) -> Manner:
        """How else to follow a step that takes what a unit did not return; not at all if it is the same."""
        if error.hook is not None:
            return replace(manner, late_hooks=manner.late_hooks | {error.hook})
        found, attributes = error.attribute, manner.attributes
        if found is None or found in attributes.get(found.unit, ()):
            return manner
        kind, alike = type(self._module.get_submodule(found.unit)), {}
        for name in self._around.stage_of_unit:
            unit = self._module.get_submodule(name)
            if type(unit) is kind and (other := found.of(name, unit)) is not None:
                alike[name] = (*attributes.get(name, ()), other)
        return replace(manner, attributes={**attributes, **alike}, side_door=manner.side_door or error)

    def _check_sets_again(
        self, manner: Manner, side_door: SideDoor, step: Step, batch: Any, seed: int, seen: _Seen
    ) -> None:
        """What units set on themselves, and the step takes, they have to set in each step, and not to read before: not
        a table that they keep, which stages would make of other values, and no count, which later stages go on with.

        Raises:
            SideDoor: they don't.
        """
        followed = [attribute for of_unit in manner.attributes.values() for attribute in of_unit]
        before, known = state_before(self._module), {id(x) for each in followed for x in each.tensors()}
        seen.left.put_everything()
        kept = [x for each in followed for x in each.tensors() if id(x) not in known]
        try:
            again = self._seen(replace(manner, last_step=kept), step, batch, seed)
        except SliceError:
            raise side_door from None
        finally:
            before.restore()
        if again.plan.digest() != seen.plan.digest():
            raise side_door

    def _check_alone(self, manner: Manner, step: Step, batch: Any, seed: int, seen: _Seen) -> None:
        """Each stage alone has to do what it did in the dry run of the whole step; unless that differs from time to
        time by itself (by a cache of the process, a counter that lasts).

        Raises:
            SliceError: a stage does something else.
        """
        for _ in range(_MOST_TRIES if seen.difference is not None else 0):
            again = self._seen(manner, step, batch, seed)
            if again.difference is None:
                return
            if [x.inside for x in again.deeds] == [x.inside for x in seen.deeds]:
                raise again.difference.error()
            seen = again

    def _seen(self, manner: Manner, step: Step, batch: Any, seed: int, is_run: bool = True) -> _Seen:
        varies, original, batch = leaves_out(batch), batch, copy.deepcopy(batch)
        in_batch, containers = tensors_of(batch), Snapshot(SimpleNamespace(batch=batch), submodules=False)
        before = [(tensor_version(x), x.requires_grad) for x in in_batch]
        owned = self._ownership
        with self._prepared_to_plan(), owned.present(), owned.whole_as_fakes(), owned.buffers_aside():
            snapshot = state_before(self._module)
            toggles, draws = Toggles(snapshot), OwnDraws(self._module)
            tracer = self._tracer(snapshot, in_batch, toggles, draws, manner)
            tracer.traits.varies = varies
            values_before = FirstValues(snapshot.tensors.values())
            try:
                with owned.lists_noted() as lists, values_before, host_seeded(seed) as drawn, self._progress(tracer):
                    self._trace(tracer, step, batch, toggles)
                    draws_on_host = drawn()
                draws.look()
                values = tracer.ending.consume_left(snapshot)
                left = Left(self._module, snapshot, values, tracer.host_reads.of_batch)
                put_back = toggles.put_back_by_now()
                set_late = [*self._early_modules]  # of a step that was not seen to its end
                changes_module = bool(tracer.ending.early) or any(True for _ in snapshot.changed_entries())
                if not tracer.ending.early:
                    set_late = modules_with(toggles.set_late(), self._early_modules)
            finally:
                snapshot.restore()
                values_before.restore()
            changes_batch = before != [(tensor_version(x), x.requires_grad) for x in in_batch]
            changes_batch = changes_batch or any(True for _ in containers.changed_entries())
            left_early = any(value.stage not in (None, self._n_stages - 1) for value in values)
            effects = SideEffects(
                changes_batch, left_early, lists.any, put_back, tuple(set_late), changes_module,
                draws_on_host or draws.any, draws.apart(to_the_end=not tracer.ending.early),
            )  # fmt: skip
            plan = make_plan(tracer, owned.names, effects)
            difference = None
            if is_run:
                owned.learn(tracer.values.owners)
                difference = self._difference(tracer, plan, step, original, seed, snapshot)
        stops_at_mask = bool(tracer.ending.early) and tracer.traits.met_mask
        return _Seen(plan, left, tracer.record.deeds, difference, stops_at_mask)

    def _difference(
        self, tracer: Tracer, plan: SlicePlan, step: Step, batch: Any, seed: int, snapshot: Snapshot
    ) -> Difference | Reading | None:
        """The first operation that a stage does otherwise alone. Steps that differ from a known one by numbers and
        shapes only are not tried again."""
        kind = tuple((op.name, op.stage) for op in plan.operations), torch.is_grad_enabled()
        tried = self._n_stages == 1 or kind in self._tried_alone
        for stage in range(self._n_stages) if not tried else ():
            mode = Alone(plan, stage, tracer, seed, self._around)
            values, microbatch = FirstValues(snapshot.tensors.values()), copy.deepcopy(batch)
            try:
                with (
                    values,
                    host_seeded(seed),
                    putting_back(plan.effects.put_back),
                    self._seen_by(mode),
                    contextlib.suppress(StepEnded),
                    mode,
                ):
                    step(microbatch)
            except Exception:
                pass  # where it fails alone, a run will, and will say how
            finally:
                snapshot.restore()
                values.restore()
            if mode.difference is not None:
                return mode.difference
        self._tried_alone.add(kind)
        return None

    @contextlib.contextmanager
    def _prepared_to_plan(self) -> Iterator[None]:
        """Nothing outside notices a dry run: neither generators nor autocast's cache of weights, nor the compiler."""
        grad = torch.is_grad_enabled()
        self._fake_mode.allow_non_fake_inputs = True
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(random_state_kept())
                stack.enter_context(torch.inference_mode(False))  # inference tensors can't tell in-place changes
                stack.enter_context(torch.set_grad_enabled(grad))
                stack.enter_context(uncompiled())
                stack.enter_context(checkpoints_ended())
                yield
        finally:
            self._fake_mode.allow_non_fake_inputs = False
            self._stand_ins.clear()
            forget_fakes(self._fake_mode)  # they know whether their parameters had a gradient
            torch.clear_autocast_cache()

    def _tracer(
        self, snapshot: Snapshot, batch: Sequence[Tensor], toggles: Toggles, draws: OwnDraws, manner: Manner
    ) -> Tracer:
        owners = self._ownership.of_units()
        names = self._ownership.names
        glue = {tensor_id: name for tensor_id, name in names.items() if tensor_id not in owners}
        buffers = {id(x): name for name, x in self._module.named_buffers()}
        others = dict.fromkeys(snapshot.tensors, UNNAMED)
        values = Values(self._fake_mode, {**others, **buffers, **names}, owners, glue, self._n_stages, self._stand_ins)
        states = StageStates(self._shared)

        def look() -> None:
            toggles.look()
            draws.look()

        return Tracer(values, self._around, states, manner, batch, snapshot.new_tensors, look)

    def _progress(self, tracer: Tracer) -> contextlib.AbstractContextManager[None]:
        """A step that asks how far the training is may do something else in a later one (a curriculum of lengths)."""
        trainer = trainer_of(self._module)
        return contextlib.nullcontext() if trainer is None else around_progress(trainer, tracer.reading_progress)

    @contextlib.contextmanager
    def _seen_by(self, mode: Tracer | Alone) -> Iterator[None]:
        """Around a dry run: what a mode does not see by itself."""
        with (
            self._deciding(mode),
            self._kept.watching(mode.setting, mode.reading),
            handle_functions(mode.function),
            conversions_around(mode.converting),
        ):
            yield

    def _trace(self, tracer: Tracer, step: Step, batch: Any, toggles: Toggles) -> None:
        with self._seen_by(tracer):
            result = None
            toggles.begin()
            try:
                with tracer:
                    result = step(batch)
            except StepEnded:
                pass
            except SliceError:
                raise
            except Exception as error:
                if kind := subclassed_fake(error):
                    tracer.ending.end_unseen(f"a value made into a `{kind}` (a class of tensors)")
                elif not tracer.guesses.explain(error):
                    raise
        if tracer.error is not None:
            raise tracer.error
        loss = result.get("loss") if isinstance(result, Mapping) else result
        tracer.ending.consume(loss, gradient=True, by="the result of the step")
        tracer.ending.consume(result, gradient=False, by="the result of the step")


def state_before(module: nn.Module) -> Snapshot:
    """What a step finds: the module, and what it may set on its optimizers: attributes, and options such as rates."""
    optimizers = getattr(trainer_of(module), "optimizers", [])
    options = [group for optimizer in optimizers for group in optimizer.param_groups]
    return Snapshot(module, beside=[*(x.__dict__ for x in optimizers), *options])
