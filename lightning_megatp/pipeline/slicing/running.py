"""One stage's run of a user's step on one microbatch, by the plan.

The stage computes its own operations and the replicated ones. In place of what other stages compute it returns what
was received, or a ghost made once per plan. A real tensor needs no bookkeeping here: the operations come in the order
of the plan, so the index says it all.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_megatp.calls import Tell
from lightning_megatp.containers import tensors_in
from lightning_megatp.pipeline.loss.averages import Averages
from lightning_megatp.pipeline.slicing.aside import Aside
from lightning_megatp.pipeline.slicing.errors import BeyondPlan, SliceError, gradient_read
from lightning_megatp.pipeline.slicing.filled import with_filled
from lightning_megatp.pipeline.slicing.handed import HandingOn
from lightning_megatp.pipeline.slicing.kept import Kept
from lightning_megatp.pipeline.slicing.operations import (
    HOST_READS,
    StepEnded,
    generators_of,
    is_bookkeeping,
    is_conversion,
    sets_values,
    told_by,
    with_memory,
)
from lightning_megatp.pipeline.slicing.plan import Key, Operation, SlicePlan
from lightning_megatp.pipeline.slicing.reads import Reads
from lightning_megatp.pipeline.slicing.script import Instruction
from lightning_megatp.pipeline.slicing.state.collected import with_collected
from lightning_megatp.pipeline.slicing.surroundings import Surroundings
from lightning_megatp.random_states import seeded
from lightning_megatp.shim.autograd import transforms_are_active
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import (
    FOREACH_IN_PLACE,
    DisableTorchFunction,
    is_of_parameter,
    tensor_version,
    tree_leaves,
    tree_map,
)
from lightning_megatp.tensor.deferred import DeferredWeights
from lightning_megatp.tensor.functions import REFLECTED, asks_gradient, one_by_one, operation_name, unreflected

Taken = dict[tuple[int, int], Tensor]
"""By the operation that takes it (`SlicePlan.numbers`), and its position there: among the tensors, or (negative) the
Python numbers."""


class StageMode(TorchFunctionMode):
    """Sees the operations between units, and the calls of units.

    Args:
        plan: of the batch's signature.
        stage: the one that is run; None to do what is replicated alone, as far as stages depend on each other.
        received: the values of `plan.relays[stage]`.
        seed: of the random numbers that all stages share; another one for every step and microbatch.
        around: of the module.
        counting: sees the same operations, and those inside of units, on the last stage.
        taken: is filled with what operations of stages take of values that every stage has, where it is there.
        kept: of this microbatch, for a part of a step: later parts find there what they take.
    """

    def __init__(
        self,
        plan: SlicePlan,
        stage: int | None,
        received: dict[Key, Tensor],
        seed: int,
        around: Surroundings,
        counting: Averages | None = None,
        taken: Taken | None = None,
        kept: Kept | None = None,
    ) -> None:
        super().__init__()
        self._hooks, self._locator = around.hooks, around.locator
        script = plan.script(stage)
        self._instructions, self._last, self._free_after = script.instructions, script.last, script.free_after
        self._not_operations = plan.not_operations | _PROPERTIES
        self._stage, self._is_last, self._seed = stage, stage == plan.n_stages - 1, seed
        self._counting, self._plan = counting, plan
        self._received = {key: x.clone() if key in plan.clones else x for key, x in received.items()}
        self._stand_ins: dict[int, tuple[Tensor, Tensor]] = {}
        self._index = -1
        self._free = False
        self._error: SliceError | None = None
        self.done = False
        self.inside = False
        """A unit runs: it is not looked into."""
        self.made: dict[Key, tuple[Tensor, int]] = {}
        """What is sent on, with its version when it was made."""
        self._keeps: dict[Key, Tensor] = {} if kept is None else kept.values
        self._wanted = frozenset() if kept is None else kept.wanted
        self.reads = Reads({}) if plan.part.host_reads else None
        """Of a step that optimizes by hand: what it is answered."""
        if kept is not None:
            self.reads = Reads(kept.answers, reads=self._is_last)
        self._tell: Tell | None = None
        self._parts_done = 0
        """How often the step has gone backward by hand."""
        self._taken = taken

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in REFLECTED:
            func, args = unreflected(func, args)
        if self._tell is not None and (told := told_by(func, args, kwargs)) is not None:
            self._tell(args[0], told)
            return args[0]
        if func in self._not_operations and not is_conversion(func, args, kwargs):
            if self.reads is not None and operation_name(func) in HOST_READS:
                return self._read(self.reads, func, args, kwargs or {})
            return func(*args, **kwargs) if kwargs else func(*args)
        if transforms_are_active():
            return self._transformed(func, args, kwargs or {})
        if func is torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args))
        if sets_values(func, args):
            with torch.no_grad():
                return self.__torch_function__(torch.Tensor.copy_, types, args)
        if func in FOREACH_IN_PLACE:
            for single, given, named in one_by_one(func, args, kwargs or {}):
                self.__torch_function__(single, types, given, named)
            return None
        deferred = getattr(func, "__func__", None) is DeferredWeights.linear  # of a layer that a unit holds, too
        instruction = self._next(F.linear if deferred else func)
        if instruction is None:
            return self._call_freely(func, args, kwargs or {})
        if self._taken is not None:
            self._note_taken(instruction, args, kwargs or {})
        if instruction.computed:
            return self._compute(instruction, func, args, kwargs or {})
        return self._skip(instruction, args, kwargs or {})

    def _note_taken(self, instruction: Instruction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """But for what is made of weights, which is the same for all microbatches, and may be gone after a step."""
        if self._taken is None or instruction.operation.stage is None:
            return
        number = self._plan.numbers[self._index]
        is_unit = isinstance(instruction.operation.what, str)  # others take indices, too, that go by the rows there are
        with DisableTorchFunction():
            for position, x in enumerate(tensors_in(args, kwargs)):
                of_weights = x.requires_grad or is_of_parameter(x)
                if (is_unit or x.is_floating_point()) and not (of_weights or is_fake(x)):
                    self._taken[number, position] = x.detach()
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, float)] if is_unit else []
            for position, value in enumerate(given):
                self._taken[number, -1 - position] = torch.tensor(value)

    def unit(
        self, name: str, stage: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a unit."""
        if self.inside:
            return function(*args, **kwargs)
        if self.done:
            raise StepEnded
        function = HandingOn(function)
        late = self._hooks.late(name, self._plan.late_hooks) if self._plan.late_hooks else None
        carried = self._opaque if late is None else late.carried(self._opaque)
        carry_out, told = functools.partial(with_collected, carried), (name, stage == self._stage, args, kwargs)
        attributes = self._plan.attributes.get(name, ())
        out = with_filled(carry_out, function, *told, args=args, kwargs=kwargs, attributes=attributes)
        if late is not None:
            late.run()
        return out

    def metric(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a metric's method: the last stage's."""
        with contextlib.nullcontext() if self._counting is None else self._counting.paused():
            if self.inside or self.done:
                return function(*args, **kwargs) if self._is_last else None
            return self._opaque(function, name, self._is_last, args, kwargs)

    def function(self, function: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of an autograd function, or of one of torch.jit's."""
        if self.inside or self.done or is_bookkeeping(function) or transforms_are_active():
            return apply(*args, **kwargs)
        return with_collected(self._opaque, apply, function, True, args, kwargs)

    def log(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """`self.log` and `self.log_dict`: the last stage's. What comes before its part, an earlier one has logged."""
        if not self._is_last or self._parts_done < self._plan.part.number:
            return
        with contextlib.nullcontext() if self.inside else self._outside():
            args, kwargs = self.stood_in((args, kwargs))
            if any(map(is_fake, tensors_in(args, kwargs))):
                self._explain("self.log", args, kwargs, None)
            original(*args, **kwargs)

    def reading_metrics(self) -> contextlib.AbstractContextManager[None]:
        """Around what computes the Trainer's metrics, which the plan says nothing of."""
        return contextlib.nullcontext() if self.inside else self._outside()

    def converting(self) -> contextlib.AbstractContextManager[None]:
        """Around a module's `to(...)` and its like."""
        return self.reading_metrics()

    def follow_by_hand(self, tell: Tell) -> None:
        """The step optimizes by hand."""
        self._tell = tell

    def _read(self, reads: Reads, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A read on the host."""
        args, kwargs = self.stood_in((args, kwargs))
        read = functools.partial(func, *args, **kwargs)
        return reads.answer(self._plan.part.host_reads, operation_name(func), read, args[0])

    def acting(self) -> contextlib.AbstractContextManager[None]:
        """Around what the step does by hand."""
        return self.reading_metrics()

    def note_action(self) -> None:
        """The step does something by hand, as the plan says."""

    def begin_part(self) -> None:
        """The step has gone backward by hand, and goes on."""
        self._parts_done += 1

    def end_part(self, retains_graph: bool, learns: Mapping[str, bool]) -> None:
        """The step goes backward by hand, and is left."""
        self.done = True

    def stood_in(self, values: Any) -> Any:
        """Nested values, with what was received for those that other stages changed in place."""
        if not self._stand_ins:
            return values
        return tree_map(lambda x: self._stand_ins.get(id(x), (x, x))[1], values)

    def operation(self, key: Key) -> Operation:
        """What made a value."""
        return self._instructions[key.operation].operation

    def _outside(self, unit: str | None = None) -> _Outside:
        """Code that is not looked into: this mode does not meet it, and units inside run as they are."""
        return _Outside(self, None if unit is None or self._counting is None else self._counting.inside(unit))

    def _transformed(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation under torch.func: not planned, every stage computes it. It may lift the transforms for its
        parts, autograd functions among them."""
        self.inside = True
        try:
            return func(*args, **kwargs)
        finally:
            self.inside = False

    def _opaque(
        self, function: Callable[..., Any], what: Any, is_own: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        instruction = self._next(what)
        if self._taken is not None and instruction is not None:
            self._note_taken(instruction, args, kwargs)
        if instruction is not None and instruction.shared and not instruction.became:
            return instruction.ghosts
        if instruction is None and not is_own:
            self._diverged(what)
        with self._outside(what if isinstance(what, str) else None):
            if instruction is None:
                return self._call_freely(function, args, kwargs)
            if instruction.computed:
                return self._compute(instruction, function, args, kwargs)
            return self._skip(instruction, args, kwargs)

    def check(self, skipped: bool) -> None:
        """After the step.

        Args:
            skipped: whether it returned None, which leaves a batch out.

        Raises:
            SliceError: it ended before the stage had done its part, or its code caught an error of the pipeline's.
        """
        if self._error is not None:
            raise self._error
        if not self._is_last and self._index < self._last:
            missing = self._instructions[self._index + 1].operation
            if skipped:
                raise SliceError(
                    f"the step returned None before `{missing.name}` ({missing.where}), to leave a batch out, and the"
                    " other microbatches are under way. Leave such batches out in the DataLoader, or return a loss that"
                    " is multiplied by zero."
                )
            raise SliceError(
                f"the step ended on pipeline stage {self._stage} before `{missing.name}` ({missing.where}), which the"
                " plan has next. What a step does may depend on shapes and on the batch's structure, not on values that"
                " differ from stage to stage, such as the rank."
            )

    def _next(self, what: Any) -> Instruction | None:
        """The instruction for an operation; None where the step is free to do what it likes."""
        if self._free or self.done:
            return None
        self._index += 1
        if self._index > self._last:
            self.done = True
            raise StepEnded
        if self._index < len(self._instructions):
            instruction = self._instructions[self._index]
            if instruction.what == what:
                return instruction
        if not self._is_last or self._index <= self._free_after:
            self._diverged(what)
        self._free = True
        return None

    def _compute(
        self, instruction: Instruction, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            if instruction.special:
                out = self._compute_specially(instruction, function, args, kwargs)
            else:
                out = function(*args, **kwargs)
        except Exception as error:
            self._explain(instruction.operation.name, args, kwargs, error)
            raise
        if instruction.kept and len(tensors := tensors_in(out)) == len(instruction.operation.outputs):
            self._keep(instruction.kept, tensors)
        if instruction.kept_changed:
            self._keep(instruction.kept_changed, tensors_in(self.stood_in((args, kwargs))))
        if self._wanted or self._plan.part.recalled:
            return self._between_parts(instruction.operation, out, args, kwargs)
        return out

    def _between_parts(self, operation: Operation, out: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Remember what later parts of the step take of a result; or take what an earlier part has made, where this was
        made anew of what may be other parameters by now."""
        made = {Key(self._index, position): x for position, x in enumerate(tensors_in(out))}
        if operation.stage is None:
            earlier = {id(x): self._received[key] for key, x in made.items() if key in self._received}
            out = tree_map(lambda x: earlier.get(id(x), x), out) if earlier else out
            if self._index >= self._plan.part.begins:  # else it was made anew
                self._keeps.update((key, x) for key, x in made.items() if key in self._wanted)
            return out
        values = dict(zip(operation.outputs, made.values(), strict=False))
        if operation.changed:
            tensors = tensors_in(self.stood_in((args, kwargs)))
            values.update((key, tensors[position]) for position, key in operation.changed)
        self._keeps.update((key, x) for key, x in values.items() if key is not None and key in self._wanted)
        return out

    def _keep(self, kept: tuple[tuple[int, Key], ...], tensors: list[Tensor]) -> None:
        """Remember what will be sent; what is missing, or is not as planned, is found out then."""
        for position, key in kept:
            if position < len(tensors):
                self.made[key] = tensors[position], tensor_version(tensors[position])

    def _compute_specially(
        self, instruction: Instruction, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        operation = instruction.operation
        if operation.shape_only:
            args, kwargs = with_memory(args, kwargs)
        args, kwargs = self.stood_in((args, kwargs))
        if operation.copied:
            tensors = tensors_in(args, kwargs)
            chosen = {id(tensors[position]) for position in operation.copied}
            args, kwargs = tree_map(lambda x: x.clone() if id(x) in chosen else x, (args, kwargs))
        if not operation.random or operation.own_generator:
            return function(*args, **kwargs)
        with self._drawing(generators_of(args, kwargs)):
            return function(*args, **kwargs)

    def _drawing(self, generators: Sequence[torch.Generator]) -> contextlib.AbstractContextManager[None]:
        """Around a replicated operation that draws random numbers."""
        return seeded(hash((self._seed, self._index)), generators)

    def _skip(self, instruction: Instruction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what another stage computes: received values where there are any, ghosts else."""
        tensors = tensors_in(args, kwargs)
        for position, key in instruction.became:
            self._stand_ins[id(tensors[position])] = tensors[position], self._received[key]
        if instruction.shared:
            return instruction.ghosts
        known = {at: self._received[key] for at, key in instruction.received if key in self._received}
        known.update((position, tensors[argument]) for position, argument in instruction.targets)
        count = itertools.count()
        return tree_map(lambda x: known.get(next(count), x) if isinstance(x, Tensor) else x, instruction.ghosts)

    def _call_freely(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation of which the plan says nothing: the last stage's, after it holds all it needs, or those of a
        `finally` after the stage's last operation."""
        if asks_gradient(function, args):
            raise gradient_read(f"`{operation_name(function)}` ({self._locator.here()})")
        try:
            out = function(*args, **kwargs)
        except Exception as error:
            if self.done:
                raise StepEnded from error
            self._explain(operation_name(function), args, kwargs, error)
            raise
        if not self.done and any(map(is_fake, tensors_in(out))):
            self._explain(operation_name(function), args, kwargs, None)
        return out

    def _explain(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception | None) -> None:
        """Turn an error about a ghost into one that says so."""
        if any(map(is_fake, tensors_in(args, kwargs))):
            kind = BeyondPlan if self._is_last else SliceError
            self._error = kind(
                f"`{name}` ({self._locator.here()}) on pipeline stage {self._stage} needs a value of another stage that"
                f" was not sent to it: {self._plan.why_not_sent}"
            )
            raise self._error from error

    def _diverged(self, what: Any) -> None:
        name = what if isinstance(what, str) else operation_name(what)
        found = (
            f"on pipeline stage {self._stage}: it does `{name}` ({self._locator.here()}), and when it was planned it"
        )
        if self._index < len(self._instructions) and not self._free:
            operation = self._instructions[self._index].operation
            self._error = SliceError(
                f"the step left its plan {found} did `{operation.name}` ({operation.where}). Until the last stage has"
                " all it needs, a step does the same operations for all batches of the same shapes. Move what depends"
                " on data, or on the step's number, into the forward of a module, or after the loss."
            )
        else:
            self._error = BeyondPlan(
                f"the step goes on {found} did not. A loop over the whole model that ends by a value (generating"
                " token by token, `model.generate`) would need on the first stage what the last one computes, and data"
                " flows forward only: do it in `validation_step` or `predict_step`, which the last stage can run alone."
            )
        raise self._error


class _Outside(Aside):
    def __init__(self, mode: StageMode, counting: contextlib.AbstractContextManager[None] | None) -> None:
        super().__init__(mode)
        self._stage_mode, self._counting = mode, counting

    def __enter__(self) -> None:
        self._stage_mode.inside = True
        super().__enter__()
        if self._counting is not None:
            self._counting.__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self._counting is not None:
            self._counting.__exit__(*raised)
        super().__exit__(*raised)
        self._stage_mode.inside = False


_PROPERTIES = frozenset([torch.Tensor.device.__get__])
"""What fake tensors answer by a property of their own, so that the dry run doesn't see it asked."""
