"""The dry run: a user's step on tensors without data, seen operation by operation.

Between units a TorchFunctionMode sees every operation. What depends on the batch, constants and glue parameters alone
is computed; everything else becomes a *ghost*: a fake tensor, that reports the real device, dtype and shape. Units run
on fakes as a whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode
from torchmetrics import MetricCollection

from lightning_megatp.calls import Tell
from lightning_megatp.containers import tensors_in
from lightning_megatp.pipeline.slicing.aside import Aside, WithoutFastPath
from lightning_megatp.pipeline.slicing.dry_run.call import Call, changed_statistics, sets_requires_grad
from lightning_megatp.pipeline.slicing.dry_run.deeds import Deeds, Moment, deed_of
from lightning_megatp.pipeline.slicing.dry_run.fakes import Fakes
from lightning_megatp.pipeline.slicing.dry_run.guesses import guess, guessed_where_they_fail, parts_of
from lightning_megatp.pipeline.slicing.dry_run.inside import Inside
from lightning_megatp.pipeline.slicing.dry_run.interleaving import Interleaving
from lightning_megatp.pipeline.slicing.dry_run.manner import Manner
from lightning_megatp.pipeline.slicing.dry_run.orders import Orders
from lightning_megatp.pipeline.slicing.dry_run.record import Record
from lightning_megatp.pipeline.slicing.dry_run.refusals import (
    CheckpointRegions,
    refuse_backwards,
    refuse_kind,
    refuse_setting,
)
from lightning_megatp.pipeline.slicing.dry_run.stage_states import Known, StageStates
from lightning_megatp.pipeline.slicing.dry_run.step_generators import StepGenerators
from lightning_megatp.pipeline.slicing.dry_run.values import Value, Values, versions
from lightning_megatp.pipeline.slicing.dry_run.watched import Watched
from lightning_megatp.pipeline.slicing.errors import ReadsValues, SideDoor, SliceError
from lightning_megatp.pipeline.slicing.operations import (
    EFFECTS,
    HOST_READS,
    LIKE_ANOTHER,
    SHAPE_ONLY,
    NeedsValues,
    StepEnded,
    by_positions,
    cut_by_numbers,
    is_bookkeeping,
    masks_read,
    random_states,
    sets_values,
    told_by,
    with_memory,
)
from lightning_megatp.pipeline.slicing.plan import HostRead, Read
from lightning_megatp.pipeline.slicing.reads import stand_in
from lightning_megatp.pipeline.slicing.state.collected import with_collected
from lightning_megatp.pipeline.slicing.state.kept import Kept
from lightning_megatp.pipeline.slicing.state.lasting import UNNAMED
from lightning_megatp.pipeline.slicing.surroundings import Surroundings
from lightning_megatp.shim.autograd import (
    checkpoint_region,
    function_name,
    functorch_is_active,
    untransformed,
)
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import FOREACH_IN_PLACE, WithoutMode, open_dataclasses, tree_leaves
from lightning_megatp.snapshots.snapshot import Snapshot
from lightning_megatp.tensor.functions import check_caller, one_by_one, operation_name, unreflected


class Tracer(TorchFunctionMode):
    """Records the operations of one step.

    Args:
        owners: id(parameter or buffer of a unit) -> the stages of its units. Those of operations between units that use
            it are added.
        glue: id -> name of the parameters that belong to no unit.
        values: of this step.
        around: of the module.
        states: of what several stages change.
        manner: how to follow this one.
        batch: its tensors.
        left: gives the tensors that the step has left on the module so far.
        passes: is called where a later stage goes on.
    """

    def __init__(
        self,
        owners: dict[int, set[int]],
        glue: dict[int, str],
        values: Values,
        around: Surroundings,
        states: StageStates,
        manner: Manner,
        batch: Sequence[Tensor],
        left: Callable[[], list[Tensor]],
        passes: Callable[[], None],
    ) -> None:
        super().__init__()
        self._left, self._passes = left, passes
        self._hooks, self._watched, self._states = around.hooks, Watched(), states
        self.owners, self.glue, self.values, self.manner = owners, glue, values, manner
        self.fake_mode, self.locator, self.n_stages = around.fake_mode, around.locator, values.n_stages
        self.last_stage = self.n_stages - 1
        self._before = 0
        """The stage of the last operation that has one."""
        self._batch = {id(x) for x in batch}
        self.orders, self.interleaving = Orders(batch), Interleaving(batch)
        self.fakes, self.record = Fakes(values, self.fake_mode, owners), Record(values, owners, self.fake_mode)
        self._doing = Deeds(Moment.now())
        self.not_operations: set[Any] = set()
        self.reads: list[Read] = []
        self.host_reads: list[HostRead] = []
        self.by_hand = False
        """The step optimizes by hand."""
        self._tell: Tell | None = None
        self.acts_first = False
        """It does something by hand before its first operation of stages."""
        self.uses_functions = False
        self.converts = False
        """The step calls a module's `to(...)` or its like."""
        self.guessed = False
        """A metric's result was made up: from there on the step may fail for that."""
        self.misled = ""
        """Which unit's result was made up, and how the step failed after that."""
        self.failed = False
        """Whether it did fail."""
        self.error: SliceError | None = None
        """The first, which the user's code may have caught."""
        self.done = False
        """The step is being left."""
        self.ended = ""
        """Where on the last stage the run ended before the step did, and why."""
        self.ended_in: tuple[str, ...] = ()
        """The unit whose call that was."""
        self.kept: set[Kept] = set()
        """Python values that units have set on themselves."""
        self.unseen: set[str] = set()
        """Units that were not followed to their end: they may set others."""
        self.asks_batch = False
        """The step's code reads values of the batch."""
        self.varies = False
        """Batches of the same signature may find something else than values of tensors: texts, what was logged."""
        self.met_mask = False
        """It met a mask that it does not go past."""
        self._inside: Inside | None = None
        self._transforms = False
        """An operation under torch.func runs, which may lift the transforms for its parts."""
        self._inner: dict[int, tuple[Tensor, int | None, str]] = {}
        """What was made inside of units, of which stage, and by which."""
        self.known_alike: dict[int, Known] = {}
        """What every stage would make alike, of what was made inside of units."""
        self.generators = StepGenerators()
        self._regions = CheckpointRegions()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        check_caller(func)
        func, args = unreflected(func, args)
        if self._tell is not None and (told := told_by(func, args, kwargs)) is not None:
            self._tell(args[0], told)
            return args[0]
        if func is torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args))
        if sets_values(func, args) and self.values.is_persistent(args[0]) and id(args[0]) not in self.owners:
            with torch.no_grad():
                return self.__torch_function__(torch.Tensor.copy_, types, args)
        if func in FOREACH_IN_PLACE:
            for single, given, named in one_by_one(func, args, kwargs or {}):
                self.__torch_function__(single, types, given, named)
            return None

        def read(x: Tensor) -> int:
            return int(self.__torch_function__(torch.Tensor.__index__, types, (x,)))

        args, function = cut_by_numbers(func, args, read), func
        if self._follows_masks(args):
            function = by_positions(func, args) if masks_read(func, args, read) else func
        else:
            self.met_mask |= masks_read(func, args, int)
        return self._trace(Call(func, operation_name(func), function, args, kwargs or {}))

    def _follows_masks(self, args: tuple[Any, ...]) -> bool:
        """Whether a mask of a ghost is gone past. On the last stage the step goes on by itself, unless earlier stages
        have something to do after that: another mask would need another plan."""
        value = self.values.get(args[0]) if args and isinstance(args[0], Tensor) else None
        early = value is not None and value.stage is not None and value.stage < self.last_stage
        return early or self.manner.past_masks

    def unit(
        self, name: str, stage: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a unit: one operation, whose stage is known."""
        self._states.enter(name, stage, (args, kwargs), self.known_alike)
        if self._inside is not None:
            self._inside.enter_unit(name, stage)
            with WithoutFastPath():
                return call(*args, **kwargs)

        def trace(called: Callable[..., Any]) -> Any:
            return self._trace(
                Call(name, name, called, args, kwargs, unit_stage=stage, units=[name], collects=called is not call)
            )

        late = self._hooks.late(name, self.manner.late_hooks)
        with Aside(self):
            out = with_collected(late.carried(trace), call)
        if any(result is not None for result in late.run()):
            raise SliceError(f"a hook of `{name}` hands its tensors to the step, and changes them as well.")
        return out

    def function(self, function: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of an autograd function, or of one of torch.jit's: one operation, whatever it does inside."""
        if self._inside is not None or self._transforms or is_bookkeeping(function) or functorch_is_active():
            return apply(*args, **kwargs)
        self.uses_functions = True

        def trace(called: Callable[..., Any]) -> Any:
            return self._trace(Call(function, function_name(function), called, args, kwargs, opaque=True))

        with WithoutMode(self):
            return with_collected(trace, apply)

    def metric(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a metric, or of one of its methods: it happens on the last stage, and is not tried here. It may be
        the loss; torchmetrics' `update` and `compute`, which it wraps, give no gradient.

        Raises:
            SliceError: a module of another stage calls it.
        """
        metric = getattr(function, "__self__", None)
        if isinstance(metric, MetricCollection):
            parts = metric.values(copy_state=False)  # copies of states would look like what a step leaves
            learns = any(part.is_differentiable is not False for part in parts)
        else:
            learns = metric is not None and metric.is_differentiable is not False
        learns = learns and torch.is_grad_enabled()

        def guess(*args: Any, **kwargs: Any) -> Tensor:
            tensors = tensors_in(args, kwargs)
            made = torch.zeros((), device=tensors[0].device if tensors else "cpu")
            return sum((0 * x.sum() for x in tensors if x.requires_grad), start=made) if learns else made

        self.guessed = True
        if self._inside is not None:
            stage = self._inside.find_stage(None)
            if stage != self.last_stage:
                raise SliceError(
                    f"`{name}` ({self.locator.here()}) is called inside a module of pipeline stage {stage}; metrics are"
                    f" on the last stage ({self.last_stage}). Return what it is given from the module's forward, and"
                    " call it in the step."
                )
            return guess(*args, **kwargs)
        with WithoutMode(self):
            return self._trace(Call(name, name, guess, args, kwargs, unit_stage=self.last_stage, gradient=learns))

    def setting(self, _: str, kept: Kept) -> None:
        """A Python value of a unit's module is set."""
        if self._inside is not None:
            self.kept.add(kept)

    def reading(self, _: str, kept: Kept) -> None:
        """One is read: units of all stages have run."""

    def log(self, _: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Stands for `self.log` and `self.log_dict`."""
        value = args, kwargs
        by = f"`self.log({next(iter([*args, *kwargs.values()]), None)!r})` ({self.locator.here()})"
        if self._inside is None:
            with WithoutMode(self):
                self.consume(value, gradient=False, by=by)
            return
        stage = self._inside.find_stage(None)
        if stage != self.last_stage and tensors_in(value):
            raise SliceError(
                f"{by} logs from inside a module of pipeline stage {stage}; values are logged on the last stage"
                f" ({self.last_stage}). Return the value from the module's forward, and log it in the step."
            )

    def reading_metrics(self) -> contextlib.AbstractContextManager[None]:
        """Around what computes the Trainer's metrics: the same on all stages, and no operations of the step's."""
        self.varies = True
        return self._aside()

    def reading_progress(self) -> contextlib.AbstractContextManager[None]:
        """Around what tells the step or the epoch."""
        self.varies = True
        return contextlib.nullcontext()

    def converting(self) -> contextlib.AbstractContextManager[None]:
        """Around a module's `to(...)` and its like: no operations of the step's."""
        self.converts = True
        return self._aside()

    def follow_by_hand(self, tell: Tell) -> None:
        """The step optimizes by hand: it is followed behind what it reads."""
        self.by_hand, self._tell = True, tell

    def acting(self) -> contextlib.AbstractContextManager[None]:
        """Around what the step does by hand: no operations of the step's."""
        return self._aside()

    def note_action(self) -> None:
        """The step does something by hand."""
        self.acts_first |= all(operation.stage is None for operation in self.record.operations)

    def begin_part(self) -> None:
        """The step has gone backward by hand, and goes on."""
        self.values.begin_part(len(self.record.operations), self.glue)

    def end_part(self, retains_graph: bool, learns: Mapping[str, bool]) -> None:
        """The step goes backward by hand, and is left."""
        self.done = True
        self.values.parts.end(retains_graph, learns)

    def consume(self, value: Any, gradient: bool, by: str) -> None:
        """The last stage needs a value: it is logged or returned."""
        for tensor in tensors_in(value):
            self.values.use(self.find(tensor, by), self.last_stage, by, [None] if gradient else [])

    def consume_left(self, snapshot: Snapshot) -> list[Value]:
        """The last stage needs what the step left on the module.

        Returns:
            That. Where it is of an earlier stage, those in between will find ghosts in its place.

        Raises:
            SliceError: the next step would read, on other stages than the last, what this one replaced; or a hook the
                gradient of a tensor that every stage has.
        """
        left = [value for value in map(self.values.get, snapshot.new_tensors()) if value is not None]
        for value in left:
            self.record.refuse_stand_in(value, self.last_stage, "a tensor that the step leaves on the module")
            if value.stage is None and value.tensor.is_leaf and value.tensor.requires_grad:
                raise SliceError(
                    f"a tensor that {value.maker} made, and that the step leaves on the module, requires a gradient:"
                    " each pipeline stage would find its own part of that in its `grad`. Leave `x.detach()` there, or"
                    " make it a parameter of a module."
                )
            self.values.use(value, self.last_stage, "an attribute set by the step")
        for name, before in snapshot.replaced_tensors():
            users = self.values.uses.get(id(before), set()) - {self.last_stage}
            if users:
                raise SliceError(
                    f"the step sets `{name}` anew, and pipeline stages other than the last read it, which would not see"
                    " that. Keep what reads it on the last stage, or update it in the forward of a module that is in a"
                    " unit together with what reads it."
                )
        return left

    def end(self, why: str) -> None:
        """The step can't be followed any further, at an operation that was not seen.

        Args:
            why: what is done there.

        Raises:
            SliceError: the last stage has not begun.
        """
        begun = any(operation.stage == self.last_stage for operation in self.record.operations)
        if not begun and self.manner.tail is None:
            raise SliceError(
                f"the step has {why}, and pipeline stage {self.last_stage}, where values are known, has not begun."
                " Do it after the last block, or in the forward of a module."
            )
        for value in self.values.early_numbers(self.last_stage):
            self.record.use(value, self.last_stage, why, [])
        self.ended = self.ended or why

    def find(self, tensor: Tensor, by: str) -> Value:
        """The value of a tensor; those that were there before the step are replicated.

        Raises:
            SliceError: it came from nowhere the dry run has seen.
        """
        value = self.values.get(tensor)
        if value is not None:
            return value
        if is_fake(tensor) and id(tensor) not in self.owners:
            origin = self.side_door(tensor)[0] or "an operation that torch functions don't show"
            raise SideDoor(
                f"{by} uses a tensor that came out of {origin} by a side door: an attribute, a changed argument, a"
                " cache, an object that it returned. Other stages don't have it. Let the module's forward return it,"
                " alone or in a tuple, list or dict.",
                self._watched.code(tensor),
            )
        is_origin = self.values.is_persistent(tensor) and id(tensor) not in self.owners
        origins = frozenset([id(tensor)] if is_origin else [])
        constant = id(tensor) not in self._batch
        return self.values.add(tensor, None, "the module, its caller or the batch", origins=origins, constant=constant)

    def lasting(self, tensor: Tensor) -> str:
        """The name of a tensor that outlives the step, or a number for one of a unit without name; "" for others."""
        name = self.values.name(tensor)
        has_none = name == UNNAMED or (not name and id(tensor) in self.owners)
        return f"tensor {id(tensor)}" if has_none else name

    def side_door(self, tensor: Tensor) -> tuple[str | None, int | None]:
        """For a tensor that was made inside of a unit: of which unit, and its stage."""
        _, stage, origin = self._inner.get(id(tensor), (None, None, None))
        return origin, stage

    def hangs_on_the_module(self, tensor: Tensor) -> bool:
        """Whether a tensor that was made in this step is there, or on what hangs there."""
        return any(x is tensor for x in self._left())

    def _aside(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._inside is not None else WithoutMode(self)

    def _trace(self, call: Call) -> Any:
        try:
            return self._traced(call)
        except SliceError as error:
            self.error = self.error or error
            raise

    def _traced(self, call: Call) -> Any:
        call.where = self.locator.here()
        if call.is_unit:
            open_dataclasses(call.args, call.kwargs)
        refuse_kind(call)
        if functorch_is_active():
            return self._transformed(call)
        call.inputs = [self.find(x, call.by) for x in tensors_in(call.args, call.kwargs)]
        call.given = tuple(self._given(value) for value in call.inputs)
        refuse_setting(call, lambda x: self.values.is_persistent(x) or id(x) in self.owners)
        if call.is_unit or call.opaque or any(self.fakes.is_without_data(value.tensor) for value in call.inputs):
            for value in call.inputs:
                value.fake = self.values.fake(value.tensor)
        if self.by_hand and call.name in HOST_READS and (answer := self._answer(call)) is not None:
            return answer
        before, random_before = versions(call.inputs), random_states(call.args, call.kwargs)
        moment = Moment.now()
        begin = self._doing.begin if moment == self._doing.begin else moment  # most draw nothing: kept once
        self._doing = Deeds(begin, [deed_of(call.name, call.args, call.kwargs, self.lasting)])
        stage, out = self._carry_out(call)
        if call.is_unit:
            open_dataclasses(out)
        after = versions(call.inputs)
        silently = {id(x) for x in changed_statistics(call)}
        changed = [i for i, old in enumerate(before) if old != after[i] or id(call.inputs[i].tensor) in silently]
        for value in call.inputs if stage is None else ():
            value.follow()
        if not (call.is_unit or changed or tensors_in(out) or call.name in EFFECTS or sets_requires_grad(call)):
            self.not_operations.add(call.what)
            if call.name in HOST_READS:
                self.reads.append(Read.of(len(self.record.operations), out))
                self.asks_batch |= any(not value.constant for value in call.inputs)
                for value in call.inputs:
                    self.values.look_at(value, len(self.record.operations))
            return out
        call.random = stage is None and random_states(call.args, call.kwargs) != random_before
        self.generators.note(call, stage, len(self.record.operations))
        if stage is None and not call.opaque and tensors_in(out) and self._is_sized_by_values(call):
            self.reads.append(Read(len(self.record.operations), None))
        refuse_backwards(call, stage)
        self._regions.add(call, stage)
        if checkpoint_region() is not None:
            for value in call.inputs:
                self.record.refuse_stand_in(value, stage, f"a tensor that {call.by} takes in an activation checkpoint")
        if stage is not None and stage > self._before:
            self._passes()
        self._before = self._before if stage is None else stage
        out = self.record.add(call, stage, out, changed, self._doing)
        if stage is None:
            values = filter(None, map(self.values.get, tensors_in(out)))
            self.values.parts.follow(call.inputs, values)
        at = len(self.record.operations) - 1
        if self.manner.tail is None or not self.manner.tail.has_all_samples(at, stage == self.last_stage):
            self.orders.note(call, out)
            if self.manner.tail is not None:
                self.interleaving.note(call, out)
        return out

    def _answer(self, call: Call) -> Any:
        """What stands for a value that a step by hand reads on the host; None where it is read as ever."""
        parts, staged = self.values.parts, [value for value in call.inputs if value.stage is not None]
        if any(operation.stage is not None for operation in self.record.operations[parts.begins :]):
            for value in call.inputs:
                parts.refuse_stale(value, call.by)
        made = any(not value.origins.isdisjoint(self.glue) for value in call.inputs)
        fresh = not staged and made and not any(map(parts.is_stale, call.inputs))
        self.host_reads.append(HostRead(call.name, len(self.record.operations), bool(staged) or made, fresh))
        answer = stand_in(call.name, call.args[0], staged[-1].maker) if staged else None
        if answer is not None:
            for value in staged:
                self.values.use(value, self.last_stage, call.by, [])
            self.not_operations.add(call.what)
        return answer

    def _given(self, value: Value) -> Any:
        """What an operation is to be given where stages depend on it: shape and dtype of a replicated value."""
        x = value.tensor
        apart = value.stage is not None or self.values.is_persistent(x) or id(x) in self.owners
        return None if apart else (tuple(x.shape), x.dtype)

    def _transformed(self, call: Call) -> Any:
        """An operation under torch.func (`vmap`), of which the plan says nothing: each stage computes what it has all
        of (a mask of the batch).

        Raises:
            SliceError: stages would not get the same, or can't follow.
        """
        given = [untransformed(x) for x in tensors_in(call.args, call.kwargs)]
        why = ""
        if any(self.fakes.is_without_data(x) or x.requires_grad for x in given):
            why = "takes a value that not every stage has, or one that learns"
        known = [self.find(x, call.by) for x in given if self.values.is_persistent(x) or self.values.get(x) is not None]
        before, random_before = versions(known), random_states(call.args, call.kwargs)
        self._transforms = True
        try:
            out = None if why else call.function(*call.args, **call.kwargs)
        finally:
            self._transforms = False
        if versions(known) != before:
            why = "changes a tensor in place"
        elif random_states(call.args, call.kwargs) != random_before:
            why = "draws random numbers"
        if why:
            raise SliceError(
                f"{call.by} runs under torch.func, between the pipeline's units, and {why}. Do it inside the forward of"
                " a module."
            )
        for value in known:
            self.values.look_at(value, len(self.record.operations))
        return out

    def _carry_out(self, call: Call) -> tuple[int | None, Any]:
        """Find the stage of an operation, and its result: computed if it is replicated, else without data."""
        stages = [value.stage for value in call.inputs if value.stage is not None]
        call.shape_only = bool(stages) and not call.is_unit and self._asks_for_shapes(call)
        stage = call.unit_stage
        if stage is None and not call.shape_only:
            homes = [min(self.owners[id(v.tensor)]) for v in call.inputs if id(v.tensor) in self.owners]
            stage = max(stages or homes, default=None)
        stage = self._or_tail(call, stage)
        try:
            if call.is_unit or call.opaque:
                return self._look_inside(call, stage)
            if stage is not None:
                return stage, self.fakes.evaluate(call.name, call.function, call.args, call.kwargs)
        except NeedsValues as error:
            self.unseen.update(call.units)
            if call.is_unit and (made_up := self._guess(call)) is not None:
                self._say_guessed(call)
                return stage, made_up
            if stage == self.last_stage:
                for value in dict.fromkeys([*call.inputs, *self.values.early_numbers(stage)]):
                    self.record.use(value, stage, call.by, [])
                self.ended, self.ended_in = f"{call.by}, since {error}", tuple(call.units)
                raise StepEnded from error
            raise SliceError(
                f"{call.by} can't be planned on pipeline stage {stage}: {error}. Values are known on the last stage"
                f" ({self.last_stage}) only. Do it after the loss, in a hook, or on that stage; or inside the forward"
                " of a module that returns what has the shape of its first input (a recurrent layer: pack, run, and"
                " pad with `total_length`)."
            ) from error
        args, kwargs = with_memory(call.args, call.kwargs) if call.shape_only else (call.args, call.kwargs)
        return None, call.function(*args, **kwargs)

    def _or_tail(self, call: Call, stage: int | None) -> int | None:
        """The stage of an operation, or the tail, if it is of that: not what weights alone are made into, which is the
        same for all microbatches."""
        in_tail = self.manner.tail is not None and len(self.record.operations) in self.manner.tail
        if stage is None or call.units or not in_tail:
            return stage
        return self.last_stage if any(value.stage is not None for value in call.inputs) else stage

    def _asks_for_shapes(self, call: Call) -> bool:
        """Whether an operation reads no data of a stage's tensors."""
        if call.name in LIKE_ANOTHER and isinstance(call.args[0], Tensor):
            return call.inputs[0].stage is None and id(call.args[0]) not in self.owners
        return call.name in SHAPE_ONLY

    def _is_sized_by_values(self, call: Call) -> bool:
        """Whether the shape of what a replicated operation returns may depend on values of the batch, which nobody sees
        it read (a mask as index, a tensor as bound or size)."""
        leaves = tree_leaves((call.args, call.kwargs))
        bounds = [b for x in leaves if isinstance(x, slice) for b in tensors_in(x.start, x.stop)]
        if all(value.constant for value in [*call.inputs, *(self.find(x, call.by) for x in bounds)]):
            return False
        return self.fakes.needs_values(call.name, call.function, call.args, call.kwargs)

    def _look_inside(self, call: Call, stage: int | None) -> tuple[int | None, Any]:
        self._inside = inside = Inside(self, call)
        hooks = self._hooks.of(call.name) if call.is_unit and call.units else []
        parts = parts_of(call.function) if call.is_unit and not call.collects else []
        self._doing.inside, self._doing.compared = inside.deeds, False
        try:
            with (
                guessed_where_they_fail(parts if self.manner.guesses_parts else [], inside.missed_by),
                inside,
                self.fakes.inside(),
                self._watched.watching(hooks, inside),
            ):
                out = call.function(*call.args, **call.kwargs)
        except Exception as error:
            if isinstance(error, SliceError) or not inside.missed_by(error):
                raise
            if parts and not self.manner.guesses_parts:
                raise ReadsValues(str(error)) from error
            if inside.missed is None:
                raise
            raise inside.missed from error  # made-up results led it astray
        finally:
            self._inside = None
        self._doing.compared = not hooks
        if inside.missed is not None:
            self._say_guessed(call)
        stage = self._or_tail(call, inside.find_stage(stage))
        self._inner.update((key, (x, stage, call.by)) for key, x in inside.made.items())
        return stage, out

    def _say_guessed(self, call: Call) -> None:
        self.unseen.update(call.units)
        self.guessed = True
        self.misled = self.misled or f"{call.by} has shapes that depend on values, so its result was guessed"

    def _guess(self, call: Call) -> Any:
        """The result of a unit inside of which values are read; None if there is nothing to go by."""
        if call.collects:
            return None
        hidden = next((value.fake for value in call.inputs if value.tensor.is_floating_point()), None)
        if hidden is None or hidden.dim() < 2 or any(isinstance(x, PackedSequence) for x in call.args):
            return None
        with self.fake_mode:
            return guess(call.function, hidden)
