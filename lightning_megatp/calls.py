"""What stands in for methods while a step is planned or run by stages: calls of units and metrics, self.log."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from types import MethodType
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from lightning_megatp.detour import entries_replaced, look_up_late
from lightning_megatp.messages import OfOneRank
from lightning_megatp.origins import package_of
from lightning_megatp.shim.lightning import around_metrics, trainer_of

Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Runs a method with its arguments."""


class Told(Enum):
    """What a step tells a parameter."""

    LEARN = auto()
    """To require a gradient."""
    FREEZE = auto()
    """Not to."""
    CLEAR = auto()
    """To have no gradient: `p.grad = None`."""


Tell = Callable[[Tensor, Told], None]
_LOGGING = ("log", "log_dict")
_METRIC_METHODS = ("forward", "update", "compute", "reset")


class Decides(Protocol):
    """What decides about calls: the modes that plan a step (Tracer), run a stage's part of it (StageMode), or all of
    it."""

    def unit(
        self, name: str, stage: int, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of a unit."""

    def metric(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a metric's method."""

    def log(self, original: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        """`self.log` and `self.log_dict`."""

    def reading_metrics(self) -> contextlib.AbstractContextManager[None]:
        """Around what computes the Trainer's metrics."""


@runtime_checkable
class Follows(Protocol):
    """What follows a step that optimizes by hand."""

    done: bool
    """The step is being left."""

    def follow_by_hand(self, tell: Tell) -> None:
        """A run of it begins.

        Args:
            tell: is called where it tells a parameter something.
        """

    def acting(self) -> contextlib.AbstractContextManager[None]:
        """Around what the step does by hand: no operations of the step's."""

    def note_action(self) -> None:
        """The step does something by hand."""

    def begin_part(self) -> None:
        """The step has gone backward by hand, and goes on."""

    def end_part(self, retains_graph: bool, learns: Mapping[str, bool]) -> None:
        """The step goes backward by hand, and is left.

        Args:
            retains_graph: it may go backward once more through the same graph.
            learns: whether parameters require a gradient now, of those that it has told to, or not to.
        """


@dataclass
class Switch:
    """Who decides about calls right now; None outside of steps."""

    mode: Decides | None = None

    @contextlib.contextmanager
    def to(self, mode: Decides) -> Iterator[None]:
        """Let a mode decide meanwhile."""
        before, self.mode = self.mode, mode
        try:
            yield
        finally:
            self.mode = before

    def log(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """A call of `self.log` or `self.log_dict`."""
        if self.mode is None:
            original(*args, **kwargs)
        else:
            self.mode.log(original, *args, **kwargs)

    def reading_metrics(self) -> contextlib.AbstractContextManager[None]:
        """Around what computes the Trainer's metrics."""
        return contextlib.nullcontext() if self.mode is None else self.mode.reading_metrics()


class Intercepted(OfOneRank):
    """A method of one module that asks first.

    Args:
        switch: whom to ask.
        name: of the unit, or of the metric and its method.
        stage: the unit's; None for a metric's, that belong to the last one.
        function: the method.
    """

    def __init__(self, switch: Switch, name: str, stage: int | None, function: Callable[..., Any]) -> None:
        self._switch, self._name, self._stage, self._function = switch, name, stage, function
        functools.update_wrapper(self, function, updated=())

    @property
    def function(self) -> Callable[..., Any]:
        """The method."""
        return self._function

    def put_around(self, around: Around) -> None:
        """Run the method inside of something else, whenever it is run."""
        self._function = _Surrounded(around, self._function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode = self._switch.mode
        if mode is None:
            return self._outside_of_steps(*args, **kwargs)
        if self._stage is None:
            return mode.metric(self._name, self._function, args, kwargs)
        return mode.unit(self._name, self._stage, self._function, args, kwargs)

    def _outside_of_steps(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._function(*args, **kwargs)
        except (AssertionError, StopIteration) as error:
            if isinstance(error, AssertionError) and "FakeTensor" not in str(error):
                raise
            raise RuntimeError(
                f"MegaTPStrategy: `{self._name}` is called outside of a step, and its parameters are on another"
                " pipeline stage. Only training, validation, test and predict steps run on all stages together: do it"
                " in one of these, or from a checkpoint with pp=1."
            ) from None

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module runs by itself: the method of the copy, which asks nobody."""
        return copy.deepcopy(self._function, memo)


def around_calls(unit: nn.Module, around: Around) -> None:
    """Let `around(method, args, kwargs)` run the methods that a unit is called by; inside of an interception, so that
    it is not asked where another stage's unit is skipped."""
    for name, function in _entries(unit).items():
        if isinstance(function, Intercepted):
            function.put_around(around)
        else:
            unit.__dict__[name] = _Surrounded(around, function)


def around_forward(unit: nn.Module, around: Around) -> None:
    """Let `around(method, args, kwargs)` run a unit's forward, also where code calls that directly and its hooks don't
    run. Nothing is done to a compiled unit."""
    if "_compiled_call_impl" not in unit.__dict__:
        unit.__dict__["forward"] = _Surrounded(around, unit.forward)


@contextlib.contextmanager
def calls_surrounded(around: Mapping[nn.Module, Around]) -> Iterator[None]:
    """Meanwhile, let `around[module](method, args, kwargs)` run the methods that each of these modules is called by."""
    before: list[tuple[nn.Module, str, Any, _Surrounded]] = []
    for module, run in around.items():
        for name, function in _entries(module).items():
            before.append((module, name, module.__dict__.get(name), _Surrounded(run, function)))
            module.__dict__[name] = before[-1][-1]
    try:
        yield
    finally:
        for module, name, value, surrounded in reversed(before):
            if module.__dict__.get(name) is surrounded:  # nobody has put another in its place
                _put(module, name, value)


class _Surrounded(OfOneRank):
    """A method that something else runs."""

    def __init__(self, around: Around, function: Callable[..., Any]) -> None:
        self._around, self._function = around, function
        functools.update_wrapper(self, function, updated=())

    @property
    def __self__(self) -> Any:
        """Whose method it is."""
        return getattr(self._function, "__self__", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._function, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module runs by itself."""
        return copy.deepcopy(self._function, memo)


class Interception:
    """Intercepts the units and the metrics of a module, once, until `undo`.

    Args:
        module: the whole.
        stage_of_unit: unit name -> stage.
        switch: whom the calls ask.
    """

    def __init__(self, module: nn.Module, stage_of_unit: dict[str, int], switch: Switch) -> None:
        self._before: list[tuple[nn.Module, str, Any]] = []
        self._module, modules = module, dict(module.named_modules())
        self._units = {name: modules[name] for name in stage_of_unit}
        self._places = {place for name in self._units for place in _way_to(name, modules)}
        for name, stage in stage_of_unit.items():
            for method, function in _entries(modules[name]).items():
                self._replace(modules[name], method, Intercepted(switch, name, stage, function))
        for name, child in modules.items():
            if _is_metric(child):
                for method in _METRIC_METHODS:
                    function = getattr(child, method)
                    self._replace(child, method, Intercepted(switch, f"{name}.{method}", None, function))
            if isinstance(child, nn.TransformerEncoder) and any(parent is child for parent, _, _ in self._places):
                # Between units no nested tensors, which it makes in evaluation where the values of a mask allow it.
                self._replace(child, "use_nested_tensor", False)

    def replaced(self) -> tuple[str, nn.Module] | None:
        """A unit in whose place somebody has put another module, its name and that module."""
        if all(parent._modules.get(leaf) is child for parent, leaf, child in self._places):
            return None
        units, found = set(self._units.values()), dict(self._module.named_modules())
        for name in self._units:
            if name in found and units.isdisjoint(found[name].modules()):  # one that holds a unit runs it
                return name, found[name]
        return None

    def undo(self) -> None:
        """Give all methods back."""
        for module, name, before in reversed(self._before):
            _put(module, name, before)
        self._before.clear()

    def _replace(self, module: nn.Module, name: str, value: Any) -> None:
        self._before.append((module, name, module.__dict__.get(name)))
        module.__dict__[name] = value


def loggers_in(module: nn.Module) -> list[nn.Module]:
    """The LightningModules among a module and its parts: those that log."""
    return [child for child in module.modules() if all(hasattr(type(child), name) for name in _LOGGING)]


def follow_handed_on(module: nn.Module) -> None:
    """Let the `self.log` that a LightningModule has handed on (`self.criterion = Loss(self.log)`) be looked up when it
    is called: what stands in for it is to hear of that, too."""
    methods = [x for x in gc.get_referrers(module) if isinstance(x, MethodType) and x.__self__ is module]
    look_up_late([x for x in methods if x.__name__ in _LOGGING])


@contextlib.contextmanager
def logging_by(switch: Switch, loggers: Sequence[nn.Module]) -> Iterator[None]:
    """Let a switch decide about `self.log(...)` and `self.log_dict(...)` of modules, and about the metrics that a step
    reads of their Trainer."""
    trainer = next(filter(None, map(trainer_of, loggers)), None)
    methods = (
        (vars(child), name, functools.partial(switch.log, getattr(child, name)))
        for child in loggers
        for name in _LOGGING
    )
    reading = contextlib.nullcontext() if trainer is None else around_metrics(trainer, switch.reading_metrics)
    with entries_replaced(methods), reading:
        yield


def _entries(unit: nn.Module) -> dict[str, Callable[..., Any]]:
    """How a unit is called. `_call_impl` is what `unit(...)` runs, hooks included; `unit.compile()` puts a compiled one
    beside it, which runs instead (torch 2.11-2.13). `forward` is for code that calls it directly; the compiler must not
    meet a replaced one."""
    compiled = unit.__dict__.get("_compiled_call_impl")
    if compiled is not None:
        return {"_compiled_call_impl": compiled}
    return {"_call_impl": unit._call_impl, "forward": unit.forward}


def _way_to(name: str, modules: Mapping[str, nn.Module]) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Module, name of a child, and the child: from the whole module down to one of its parts."""
    while name:
        parent, _, leaf = name.rpartition(".")
        yield modules[parent], leaf, modules[name]
        name = parent


def _is_metric(module: nn.Module) -> bool:
    return any(package_of(base) == "torchmetrics" for base in type(module).__mro__)


def _put(module: nn.Module, name: str, value: Any) -> None:
    if value is None:
        module.__dict__.pop(name, None)
    else:
        module.__dict__[name] = value
