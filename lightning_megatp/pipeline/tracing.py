"""The dry run: a user's step on tensors without data, seen operation by operation.

Between units a TorchFunctionMode sees every operation. What depends on the batch, constants and glue parameters alone
is computed; everything else becomes a *ghost*: a fake tensor, that reports the real device, dtype and shape. Units run
on fakes as a whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_megatp.pipeline.place import Place
from lightning_megatp.pipeline.plan import Key, Operation, SliceError, tensors_in
from lightning_megatp.pipeline.values import Value, Values, versions
from lightning_megatp.shim.torch import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedOperatorException,
    checkpoint_region,
    functorch_is_active,
    is_fake,
    tree_leaves,
    tree_map,
    without_mode,
)
from lightning_megatp.tensor.functions import operation_name, operation_names
from lightning_megatp.tensor.random import default_generator


class StepEnded(BaseException):
    """Leaves a user's step when nothing is left to do or to learn. Not an Exception: `except Exception` lets it pass."""


class NeedsValues(Exception):
    """An operation on a ghost that needs its data."""


@dataclass(eq=False)
class Call:
    """One operation while it is traced."""

    what: Any
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    unit_stage: int | None = None
    """Of a unit."""
    opaque: bool = False
    """An autograd function: its forward is seen, but is part of one operation."""
    gradient: bool = True
    """Whether gradients may come back through it."""
    units: list[str] = field(default_factory=list)
    where: str = ""
    inputs: list[Value] = field(default_factory=list)
    shape_only: bool = False
    random: bool = False

    @property
    def by(self) -> str:
        """For messages."""
        return f"`{self.name}` ({self.where})"

    @property
    def is_unit(self) -> bool:
        return self.unit_stage is not None


class Tracer(TorchFunctionMode):
    """Records the operations of one step.

    Args:
        owners: id(parameter or buffer of a unit) -> the stages of its units; uses by operations between units are added.
        glue: id -> name of the parameters that belong to no unit.
        values: of this step.
        fake_mode: makes the ghosts.
        n_stages: how many there are.
        place: names where an operation is.
    """

    def __init__(
        self,
        owners: dict[int, set[int]],
        glue: dict[int, str],
        values: Values,
        fake_mode: FakeTensorMode,
        n_stages: int,
        place: Place,
    ) -> None:
        super().__init__()
        self.owners, self.glue, self.values, self.fake_mode, self.place = owners, glue, values, fake_mode, place
        self.last_stage = n_stages - 1
        self.operations: list[Operation] = []
        self.not_operations: set[Any] = set()
        self.glue_uses: dict[int, set[int]] = {}
        self.touches_parameters = False
        self.uses_functions = False
        self.guessed = False
        """A metric's result was made up: from there on the step may fail for that."""
        self._inside: _Inside | None = None
        self._leaks: dict[int, tuple[Tensor, int | None, str]] = {}
        self._regions: dict[int, tuple[object, set[int]]] = {}
        self._changed: set[Key] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args))
        return self._trace(Call(func, operation_name(func), func, args, kwargs or {}))

    def unit(
        self, name: str, stage: int, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a unit: one operation, whose stage is known."""
        if self._inside is not None:
            self._inside.enter_unit(name, stage)
            return call(*args, **kwargs)
        with without_mode(self):
            return self._trace(Call(name, name, call, args, kwargs, unit_stage=stage, units=[name]))

    def function(self, cls: type, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of an autograd function: one operation, whatever it does inside."""
        if self._inside is not None or is_bookkeeping(cls):
            return apply(*args, **kwargs)
        self.uses_functions = True
        with without_mode(self):
            return self._trace(Call(cls, cls.__name__, apply, args, kwargs, opaque=True))

    def metric(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a metric, or of one of its methods: it happens on the last stage, and is not tried here."""

        def guess(*args: Any, **kwargs: Any) -> Tensor:
            tensors = tensors_in(args, kwargs)
            return torch.zeros((), device=tensors[0].device if tensors else "cpu")

        self.guessed = True
        with without_mode(self):
            return self._trace(Call(name, name, guess, args, kwargs, unit_stage=self.last_stage, gradient=False))

    def log(self, _: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Stands for `self.log` and `self.log_dict`."""
        value = args, kwargs
        by = f"`self.log({next(iter([*args, *kwargs.values()]), None)!r})` ({self.place.here()})"
        if self._inside is None:
            with without_mode(self):
                self.consume(value, gradient=False, by=by)
        elif self._inside.stage != self.last_stage and tensors_in(value):
            raise SliceError(
                f"{by} logs from inside a module of pipeline stage {self._inside.stage}; values are logged on the last"
                f" stage ({self.last_stage}). Return the value from the module's forward, and log it in the step."
            )

    def consume(self, value: Any, gradient: bool, by: str) -> None:
        """The last stage needs a value: it is logged or returned."""
        for tensor in tensors_in(value):
            self.values.use(self._find(tensor, by), self.last_stage, gradient, by)

    def consume_left(self, tensors: list[Tensor]) -> None:
        """The last stage needs what the step left on the module."""
        for tensor in tensors:
            value = self.values.get(tensor)
            if value is not None and not self.values.outlives(tensor):
                self.refuse_stand_in(value, self.last_stage, "a tensor that the step leaves on the module")
                self.values.use(value, self.last_stage, gradient=False, by="an attribute set by the step")

    def refuse_stand_in(self, value: Value, stage: int | None, what: str) -> None:
        """Raise where a stage would find the tensor that another stage changed in place, and not what it became.

        Raises:
            SliceError: it would.
        """
        if value.key is not None and value.stage != stage and value.key in self._changed:
            raise SliceError(
                f"{what} was changed in place by {value.maker} on pipeline stage {value.stage}; stage {stage} does not"
                " see that. Use the operation that returns a new tensor."
            )

    def evaluate(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute, on fakes if any of the tensors is one, or belongs to a unit.

        Raises:
            NeedsValues: the operation asks for the data of a fake.
        """
        if not any(self._is_without_data(x) for x in tensors_in(args, kwargs)):
            return function(*args, **kwargs)
        if name in _HOST_READS:
            raise NeedsValues("it reads a value on the host")
        args, kwargs = tree_map(lambda x: self.values.fake(x) if isinstance(x, Tensor) else x, (args, kwargs))
        try:
            with self.fake_mode:
                return function(*args, **kwargs)
        except DataDependentOutputException as error:
            raise NeedsValues(f"`{name}` reads a value on the host") from error
        except DynamicOutputShapeException as error:
            raise NeedsValues(f"the shape of what `{name}` returns depends on values") from error
        except UnsupportedOperatorException as error:
            raise NeedsValues(f"`{name}` can't tell the shape of its result without computing it") from error

    def _is_without_data(self, x: Tensor) -> bool:
        known = self.values.get(x)
        return is_fake(x) or id(x) in self.owners or (known is not None and known.stage is not None)

    def _find(self, tensor: Tensor, by: str) -> Value:
        value = self.values.get(tensor)
        if value is not None:
            return value
        if is_fake(tensor) and id(tensor) not in self.owners:
            _, _, origin = self._leaks.get(id(tensor), (None, None, "an operation that torch functions don't show"))
            raise SliceError(
                f"{by} uses a tensor that came out of {origin} by a side door: an attribute, a changed argument, a"
                " cache. Other stages don't have it. Let the module's forward return it."
            )
        parameters = frozenset([id(tensor)] if id(tensor) in self.glue else [])
        return self.values.add(tensor, None, "the module, its caller or the batch", parameters=parameters)

    def _trace(self, call: Call) -> Any:
        call.where = self.place.here()
        self._refuse(call)
        call.inputs = [self._find(x, call.by) for x in tensors_in(call.args, call.kwargs)]
        if call.is_unit or call.opaque or any(self._is_without_data(value.tensor) for value in call.inputs):
            for value in call.inputs:
                value.fake = self.values.fake(value.tensor)
        before, random_before = versions(call.inputs), _random_states(call)
        stage, out = self._carry_out(call)
        after = versions(call.inputs)
        changed = [i for i, version in enumerate(before) if version != after[i]]
        if not (call.is_unit or changed or tensors_in(out) or call.name in _EFFECTS):
            self.not_operations.add(call.what)
            return out
        call.random = stage is None and _random_states(call) != random_before
        self._check_order(call, stage)
        self._check_region(call, stage)
        return self._record(call, stage, out, changed)

    def _carry_out(self, call: Call) -> tuple[int | None, Any]:
        """Find the stage of an operation, and its result: computed if it is replicated, else without data."""
        stages = [value.stage for value in call.inputs if value.stage is not None]
        call.shape_only = not call.is_unit and call.name in _SHAPE_ONLY and bool(stages)
        homes = [min(self.owners[id(v.tensor)]) for v in call.inputs if v.stage is None and id(v.tensor) in self.owners]
        stage = call.unit_stage if call.is_unit else None if call.shape_only else max(stages or homes, default=None)
        try:
            if call.is_unit or call.opaque:
                inside = _Inside(self, call)
                out = self._run_inside(inside, call)
                return inside.find_stage(stage), out
            if stage is not None:
                return stage, self.evaluate(call.name, call.function, call.args, call.kwargs)
        except NeedsValues as error:
            if stage == self.last_stage:
                raise StepEnded from error
            raise SliceError(
                f"{call.by} can't be planned on pipeline stage {stage}: {error}. Values are known on the last stage"
                f" ({self.last_stage}) only. Do it after the loss, in a hook, or on that stage."
            ) from error
        args, kwargs = with_memory(call.args, call.kwargs) if call.shape_only else (call.args, call.kwargs)
        return None, call.function(*args, **kwargs)

    def _run_inside(self, inside: _Inside, call: Call) -> Any:
        self._inside = inside
        try:
            with inside:
                return call.function(*call.args, **call.kwargs)
        finally:
            self._inside = None
            for key, (tensor, stage, origin) in inside.made.items():
                self._leaks[key] = tensor, stage, origin

    def _record(self, call: Call, stage: int | None, out: Any, changed: list[int]) -> Any:
        index, n_outputs = len(self.operations), len(tensors_in(out))
        became = {}
        for n, position in enumerate(changed):
            key = None if stage is None else Key(index, n_outputs + n)
            became[position] = self.values.change(call.inputs[position], stage, key, call.by)
            self._changed.update([key] if key is not None else [])
        out = self._name_outputs(out, call, stage, became)
        outputs = [value for value in map(self.values.get, tensors_in(out)) if value is not None]
        differentiable = any(self.values.fake(v.tensor).requires_grad for v in [*outputs, *became.values()])
        if not call.shape_only:
            for value in call.inputs:
                self._use(value, stage, call.gradient and differentiable, call.by)
        self.operations.append(
            Operation(
                what=call.what,
                name=call.name,
                where=call.where,
                stage=stage,
                units=tuple(call.units),
                inputs=tuple(value.key for value in call.inputs if value.key is not None),
                ghosts=None if stage is None else tree_map(self._ghost, out),
                outputs=tuple(value.key for value in outputs),
                changed=tuple((position, value.key) for position, value in became.items() if value.key is not None),
                random=call.random,
                shape_only=call.shape_only,
                scalars=tuple(
                    x for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, (bool, int, float, str))
                ),
            )
        )
        return out

    def _name_outputs(self, out: Any, call: Call, stage: int | None, became: dict[int, Value]) -> Any:
        """Give the tensors of a result keys. What is an input unchanged keeps its own; the rest are new objects, so that
        a tensor which a unit also hides somewhere is not taken for the one it returned."""
        index = len(self.operations)
        given = {id(x): value for value in [*call.inputs, *became.values()] for x in (value.tensor, value.fake)}
        parameters = frozenset[int]().union(*(value.parameters for value in call.inputs))
        count = iter(range(len(tensors_in(out))))

        def name(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            position = next(count)
            value = given.get(id(x))
            if value is not None and value.stage == stage and not call.is_unit:
                return value.tensor
            if stage is None:
                self.values.add(x, None, call.by, parameters=parameters)
                return x
            x = self.values.fake(x)
            if call.is_unit or value is not None:
                with self.fake_mode:
                    x = x.view_as(x)
            self.values.add(x, stage, call.by, Key(index, position))
            return x

        return tree_map(name, out)

    def _ghost(self, x: Any) -> Any:
        value = self.values.get(x) if isinstance(x, Tensor) else None
        return x if value is None else value.ghost

    def _use(self, value: Value, stage: int | None, gradient: bool, by: str) -> None:
        self.values.use(value, stage, gradient, by)
        if stage is None:
            return
        for parameter in value.parameters:
            self.glue_uses.setdefault(parameter, set()).add(stage)
        if id(value.tensor) in self.owners and value.key is None:
            self.owners[id(value.tensor)].add(stage)
            self.touches_parameters = True

    def _check_order(self, call: Call, stage: int | None) -> None:
        late = [value for value in call.inputs if value.stage is not None and not call.shape_only]
        late = [value for value in late if stage is None or (value.stage or 0) > stage]
        if late:
            raise SliceError(
                f"{call.by} is on pipeline stage {stage}, and takes what {late[0].maker} made on the later stage"
                f" {late[0].stage}. Data flows forward only: keep the modules in between on one stage, by"
                " `stages=[[...], ...]`."
            )

    def _check_region(self, call: Call, stage: int | None) -> None:
        region = checkpoint_region()
        if region is None:
            return
        for value in call.inputs:
            self.refuse_stand_in(value, stage, f"a tensor that {call.by} takes in an activation checkpoint")
        _, stages = self._regions.setdefault(id(region), (region, set()))
        stages.update(() if stage is None else [stage])
        if len(stages) > 1:
            raise SliceError(
                f"{call.by} is part of an activation checkpoint that reaches over pipeline stages {sorted(stages)}."
                " Checkpoint single blocks, or keep these modules on one stage by `stages=[[...], ...]`."
            )
        if call.random:
            raise SliceError(
                f"{call.by} draws random numbers that all pipeline stages share, inside an activation checkpoint, which"
                " would draw others when it recomputes. Draw them before the checkpoint, or inside a module."
            )

    def _refuse(self, call: Call) -> None:
        if call.what in (torch.autograd.grad, torch.Tensor.backward):
            raise SliceError(
                f"{call.by} differentiates inside the step. Under pipeline parallelism the strategy runs backward, after"
                " the step: return the loss, or do it inside the forward of a module."
            )
        if functorch_is_active():
            raise SliceError(
                f"{call.by} runs under torch.func, between the pipeline's units. Do it inside the forward of a module."
            )
        if getattr(call.what, "__name__", "") == "__set__":
            raise SliceError(
                f"{call.by} sets an attribute of a tensor, between the pipeline's units. Use an operation."
            )


class _Inside(TorchFunctionMode):
    """Runs a unit, or an autograd function, on fakes; notes what it reads besides its arguments, and what it makes."""

    def __init__(self, tracer: Tracer, call: Call) -> None:
        super().__init__()
        self._tracer, self._call = tracer, call
        self._inputs = {id(value.tensor) for value in call.inputs}
        self._stages: set[int] = set()
        self.stage = call.unit_stage
        self.made: dict[int, tuple[Tensor, int | None, str]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for x in tensors_in(args, kwargs):
            if id(x) not in self._inputs and id(x) not in self.made:
                self._read_besides(x)
        out = self._tracer.evaluate(operation_name(func), func, args, kwargs or {})
        for x in tensors_in(out):
            self.made[id(x)] = x, self._call.unit_stage, self._call.by
        return out

    def enter_unit(self, name: str, stage: int) -> None:
        """A unit inside of an autograd function (activation checkpointing with use_reentrant=True), or of a unit."""
        self._stages.add(stage)
        if name not in self._call.units:
            self._call.units.append(name)

    def find_stage(self, stage: int | None) -> int | None:
        """The stage of the whole: that of the units inside."""
        if self._call.is_unit:
            return stage
        stages = self._stages
        if len(stages) > 1:
            raise SliceError(
                f"{self._call.by} runs modules of several pipeline stages: {', '.join(self._call.units)}. Keep them on one stage, by"
                " `stages=[[...], ...]`, or checkpoint single blocks."
            )
        inputs = [value.stage for value in self._call.inputs if value.stage is not None]
        return max([*stages, *inputs] if stages else [*inputs, *([] if stage is None else [stage])], default=None)

    def _read_besides(self, x: Tensor) -> None:
        """A tensor from an attribute, a closure or a global: a value of the step is an input like any other."""
        value = self._tracer.values.get(x)
        if value is not None and value.stage is not None:
            self._tracer.refuse_stand_in(value, self.stage, f"a tensor that {self._call.by} takes from an attribute")
            self._call.inputs.append(value)
            self._inputs.add(id(x))
        leak = self._tracer._leaks.get(id(x))
        if value is None and leak is not None and leak[1] != self._call.unit_stage:
            raise SliceError(
                f"{self._call.by} uses a tensor that came out of {leak[2]} by a side door (an attribute, a cache), on"
                f" another pipeline stage ({leak[1]}). Pass it through the forwards of the modules, or keep both on one"
                " stage, by `stages=[[...], ...]`."
            )


def is_bookkeeping(cls: type) -> bool:
    """Autograd functions of activation checkpointing that only hold on to its arguments."""
    return cls.__module__ == "torch.utils.checkpoint" and cls.__name__ != "CheckpointFunction"


def with_memory(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ghosts as real tensors with arbitrary values, for operations that only read shapes."""

    def allocate(x: Any) -> Any:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) if is_fake(x) else x

    return tree_map(allocate, (args, kwargs))


def generators_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Generator]:
    """The generators that an operation may draw from."""
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Generator)]
    devices = {x.device for x in tensors_in(args, kwargs)} | {torch.device(kwargs.get("device") or "cpu")}
    return given + [default_generator(device) for device in sorted(devices, key=str) if device.type in ("cpu", "cuda")]


def _random_states(call: Call) -> list[bytes]:
    return [bytes(g.get_state().numpy()) for g in generators_of(call.args, call.kwargs)]


_EFFECTS = operation_names("register_hook retain_grad register_post_accumulate_grad_hook")
_HOST_READS = operation_names(
    """
    item tolist numpy data_ptr equal allclose is_nonzero
    __bool__ __float__ __int__ __index__ __complex__ __array__ __contains__ __dlpack__ __format__
    """
)
_SHAPE_ONLY = operation_names(
    """
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like
    new_zeros new_ones new_empty new_full
    """
)
