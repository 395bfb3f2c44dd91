"""The dry run: a user's step on tensors without data, seen operation by operation.

Between units a TorchFunctionMode sees every operation. What depends on the batch, constants and glue parameters alone
is computed; everything else becomes a *ghost*: a fake tensor, that reports the real device, dtype and shape. Units run
on fakes as a whole.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_megatp.calls import Tell
from lightning_megatp.containers import tensors_in
from lightning_megatp.pipeline.slicing.aside import Aside, WithoutFastPath
from lightning_megatp.pipeline.slicing.dry_run.call import Call, changed_statistics, sets_requires_grad
from lightning_megatp.pipeline.slicing.dry_run.ending import Ending
from lightning_megatp.pipeline.slicing.dry_run.evaluator import Evaluator
from lightning_megatp.pipeline.slicing.dry_run.fakes import Fakes
from lightning_megatp.pipeline.slicing.dry_run.guesses import Guesses, guess_metric, metric_learns
from lightning_megatp.pipeline.slicing.dry_run.host_reads import HostReads
from lightning_megatp.pipeline.slicing.dry_run.manner import Manner
from lightning_megatp.pipeline.slicing.dry_run.provenance import Provenance
from lightning_megatp.pipeline.slicing.dry_run.record import Record
from lightning_megatp.pipeline.slicing.dry_run.refusals import (
    CheckpointRegions,
    refuse_backwards,
    refuse_kind,
    refuse_setting,
)
from lightning_megatp.pipeline.slicing.dry_run.samples import Samples
from lightning_megatp.pipeline.slicing.dry_run.stage_states import StageStates
from lightning_megatp.pipeline.slicing.dry_run.step_generators import StepGenerators
from lightning_megatp.pipeline.slicing.dry_run.traits import Traits
from lightning_megatp.pipeline.slicing.dry_run.values import Value, Values, versions
from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.pipeline.slicing.filled import with_filled
from lightning_megatp.pipeline.slicing.handed import HandingOn
from lightning_megatp.pipeline.slicing.operations import (
    EFFECTS,
    HOST_READS,
    by_positions,
    cut_by_numbers,
    is_bookkeeping,
    masks_read,
    random_states,
    sets_values,
    told_by,
)
from lightning_megatp.pipeline.slicing.state.collected import with_collected
from lightning_megatp.pipeline.slicing.state.kept import Kept
from lightning_megatp.pipeline.slicing.surroundings import Surroundings
from lightning_megatp.shim.autograd import function_name, transforms_are_active
from lightning_megatp.shim.torch import FOREACH_IN_PLACE, WithoutMode, open_containers
from lightning_megatp.tensor.functions import check_caller, one_by_one, operation_name, unreflected


class Tracer(TorchFunctionMode):
    """Sees the operations of one step, and has them evaluated and recorded.

    Args:
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
        values: Values,
        around: Surroundings,
        states: StageStates,
        manner: Manner,
        batch: Sequence[Tensor],
        left: Callable[[], list[Tensor]],
        passes: Callable[[], None],
    ) -> None:
        super().__init__()
        self._passes, self._hooks, self._locator, self._states = passes, around.hooks, around.locator, states
        self.values, self.manner = values, manner
        self.fakes, self.record = Fakes(values, around.fake_mode), Record(values, around.fake_mode)
        self._provenance, self.guesses = Provenance(around.module, values, batch, left, manner.last_step), Guesses()
        self.ending = Ending(values, self.record, self._provenance, states, manner.tail is not None)
        self.host_reads = HostReads(values, self.record, self._provenance, self.fakes)
        self._evaluator = Evaluator(
            values,
            self.record,
            self.fakes,
            self._provenance,
            self.guesses,
            self.ending,
            manner,
        )
        self.samples, self.generators = Samples(batch, manner.tail), StepGenerators()
        self._regions = CheckpointRegions()
        self._tell: Tell | None = None
        self.traits = Traits()
        self.kept: set[Kept] = set()
        """Python values that units have set on themselves."""
        self.error: SliceError | None = None
        """The first, which the user's code may have caught."""
        self.done = False
        """The step is being left."""

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
        if sets_values(func, args) and self.values.is_persistent(args[0]) and not self.values.is_of_unit(args[0]):
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
            self.traits.met_mask |= masks_read(func, args, int)
        return self._trace(Call(func, operation_name(func), function, args, kwargs or {}))

    def _follows_masks(self, args: tuple[Any, ...]) -> bool:
        """Whether a mask of a ghost is gone past. On the last stage the step goes on by itself, unless earlier stages
        have something to do after that: another mask would need another plan."""
        value = self.values.get(args[0]) if args and isinstance(args[0], Tensor) else None
        early = value is not None and value.stage is not None and value.stage < self.values.last_stage
        return early or self.manner.past_masks

    def unit(
        self, name: str, stage: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a unit: one operation, whose stage is known."""
        self._states.enter(name, stage, (args, kwargs), self._provenance.alike)
        if self._evaluator.inside is not None:
            self._evaluator.inside.enter_unit(name, stage)
            with WithoutFastPath():
                return call(*args, **kwargs)

        def carried_out(filling: Callable[..., Any]) -> Any:
            def trace(called: Callable[..., Any]) -> Any:
                collects, hooks = called is not filling, self._hooks.of(name)
                return self._trace(
                    Call(name, name, called, args, kwargs, stage, units=[name], collects=collects, hooks=hooks)
                )

            return with_collected(late.carried(trace), filling)

        attributes = self.manner.attributes.get(name, ())
        late = self._hooks.late(name, self.manner.late_hooks)
        with Aside(self):
            out = with_filled(carried_out, HandingOn(call), args=args, kwargs=kwargs, attributes=attributes)
        if any(result is not None for result in late.run()):
            raise SliceError(f"a hook of `{name}` hands its tensors to the step, and changes them as well.")
        return out

    def function(self, function: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of an autograd function, or of one of torch.jit's: one operation, whatever it does inside."""
        within = self._evaluator.inside is not None or self._evaluator.transforms
        if within or is_bookkeeping(function) or transforms_are_active():
            return apply(*args, **kwargs)
        self.traits.uses_functions = True

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
        learning = metric_learns(getattr(function, "__self__", None))
        guess = functools.partial(guess_metric, learning)
        self.guesses.any = True
        last, inside = self.values.last_stage, self._evaluator.inside
        if inside is None:
            with WithoutMode(self):
                return self._trace(Call(name, name, guess, args, kwargs, unit_stage=last, gradient=learning))
        if (stage := inside.find_stage(None)) != last:
            raise SliceError(
                f"`{name}` ({self._locator.here()}) is called inside a module of pipeline stage {stage}; metrics are on"
                f" the last stage ({last}). Return what it is given from the module's forward, and call it in the step."
            )
        return guess(*args, **kwargs)

    def setting(self, _: str, kept: Kept) -> None:
        """A Python value of a unit's module is set."""
        if self._evaluator.inside is not None:
            self.kept.add(kept)

    def reading(self, _: str, kept: Kept) -> None:
        """One is read: units of all stages have run."""

    def log(self, _: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Stands for `self.log` and `self.log_dict`."""
        value, last, inside = (args, kwargs), self.values.last_stage, self._evaluator.inside
        by = f"`self.log({next(iter([*args, *kwargs.values()]), None)!r})` ({self._locator.here()})"
        if inside is None:
            with WithoutMode(self):
                self.ending.consume(value, gradient=False, by=by)
        elif (stage := inside.find_stage(None)) != last and tensors_in(value):
            raise SliceError(
                f"{by} logs from inside a module of pipeline stage {stage}; values are logged on the last stage"
                f" ({last}). Return the value from the module's forward, and log it in the step."
            )

    def reading_metrics(self) -> contextlib.AbstractContextManager[None]:
        """Around what computes the Trainer's metrics: the same on all stages, and no operations of the step's."""
        self.traits.varies = True
        return self._aside()

    def reading_progress(self) -> contextlib.AbstractContextManager[None]:
        """Around what tells the step or the epoch."""
        self.traits.varies = True
        return contextlib.nullcontext()

    def converting(self) -> contextlib.AbstractContextManager[None]:
        """Around a module's `to(...)` and its like: no operations of the step's."""
        self.traits.converts = True
        return self._aside()

    def follow_by_hand(self, tell: Tell) -> None:
        """The step optimizes by hand: it is followed behind what it reads."""
        self.traits.by_hand, self._tell = True, tell

    def acting(self) -> contextlib.AbstractContextManager[None]:
        """Around what the step does by hand: no operations of the step's."""
        return self._aside()

    def note_action(self) -> None:
        """The step does something by hand."""
        self.traits.acts_first |= all(operation.stage is None for operation in self.record.operations)

    def begin_part(self) -> None:
        """The step has gone backward by hand, and goes on."""
        self.values.begin_part(self.record.next)

    def end_part(self, retains_graph: bool, learns: Mapping[str, bool]) -> None:
        """The step goes backward by hand, and is left."""
        self.done = True
        self.values.parts.end(retains_graph, learns)

    def _aside(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._evaluator.inside is not None else WithoutMode(self)

    def _trace(self, call: Call) -> Any:
        try:
            return self._traced(call)
        except SliceError as error:
            self.error = self.error or error
            raise

    def _traced(self, call: Call) -> Any:
        call.where = self._locator.here()
        if call.is_unit:
            open_containers(call.args, call.kwargs)
        refuse_kind(call)
        if transforms_are_active():
            return self._evaluator.evaluate_transformed(call)
        self._find_inputs(call)
        if self.traits.by_hand and call.name in HOST_READS and (answer := self.host_reads.answer(call)) is not None:
            return answer
        before, random_before = versions(call.inputs), random_states(call.args, call.kwargs)
        self.record.begin(call)
        out = self._evaluator.evaluate(call)
        if call.is_unit:
            open_containers(out)
        after, silently = versions(call.inputs), {id(x) for x in changed_statistics(call)}
        altered = (i for i, old in enumerate(before) if old != after[i] or id(call.inputs[i].tensor) in silently)
        call.changed = list(altered)
        for value in call.inputs if call.stage is None else ():
            value.follow()
        if not (call.is_unit or call.changed or tensors_in(out) or call.name in EFFECTS or sets_requires_grad(call)):
            self.record.not_operations.add(call.what)
            if call.name in HOST_READS:
                self.host_reads.note(call, out)
            return out
        call.random = call.stage is None and random_states(call.args, call.kwargs) != random_before
        return self._add(call, out)

    def _find_inputs(self, call: Call) -> None:
        call.inputs = [self._provenance.find(x, call.by) for x in tensors_in(call.args, call.kwargs)]
        call.given = tuple(map(self._given, call.inputs))
        refuse_setting(call, self.values.is_of_module)
        if call.is_unit or call.opaque or any(self.fakes.is_without_data(value.tensor) for value in call.inputs):
            for value in call.inputs:
                value.fake = self.values.fake(value.tensor)

    def _given(self, value: Value) -> Any:
        """What an operation is to be given where stages depend on it: shape and dtype of a replicated value."""
        apart = value.stage is not None or self.values.is_of_module(value.tensor)
        return None if apart else (tuple(value.tensor.shape), value.tensor.dtype)

    def _add(self, call: Call, out: Any) -> Any:
        """Add an operation to those of the step, and follow what it has made.

        Raises:
            SliceError: no pipeline can do it.
        """
        self.generators.note(call, self.record.next)
        if call.stage is None and not call.opaque and tensors_in(out):
            self.host_reads.note_size(call)
        refuse_backwards(call)
        self._regions.add(call, self.record.next)
        if call.stage is not None and call.stage > self.record.stage:
            self._passes()
        out = self.record.add(call, out)
        if call.stage is None:
            self.values.parts.follow(call.inputs, filter(None, map(self.values.get, tensors_in(out))))
        self.samples.note(call, out, self.record.next - 1, in_tail=call.stage == self.values.last_stage)
        return out
