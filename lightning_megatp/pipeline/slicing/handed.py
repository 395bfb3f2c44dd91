"""Functions and objects that units return, and that hold tensors: `return x / size, lambda y: y * size`; `return
Rigid(rotation, shift)`; `return Normal(mean, std)`.

Other stages have them from the dry run, with tensors of then. So something stands in their place that torch's pytree
looks into, as into a tuple: what they hold is returned by the unit like anything else, and is sent where it is taken.
"""

from __future__ import annotations

import functools
from abc import ABCMeta
from collections.abc import Callable, Collection, Iterable, Sequence
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.distributions import Distribution, Transform

from lightning_megatp.containers import leaves_in, tensors_in
from lightning_megatp.origins import is_frameworks, package_of
from lightning_megatp.shim.torch import open_attributes, open_class, open_containers, tree_map, with_attributes


class HandingOn:
    """A unit's method that returns what it holds in functions and objects, too."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.__wrapped__ = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return opened(self.__wrapped__(*args, **kwargs), self.__wrapped__)


def opened(value: Any, method: Callable[..., Any]) -> Any:
    """Nested values in which pytree finds the tensors that functions and objects hold.

    Args:
        method: the unit's, which has returned them. Objects that hang on it are not opened: it goes on with these.
    """
    if not any(map(_may_hold, leaves_in(value))):
        return value
    open_containers(value)
    unit = getattr(method, "__self__", None)
    kept = {id(x) for child in unit.modules() for x in vars(child).values()} if isinstance(unit, nn.Module) else set()
    return _opened(value, kept)


def _opened(value: Any, closed: Collection[int]) -> Any:
    """
    Args:
        closed: id() of what is not to be opened: what holds the value may be held by it.
    """

    def open_one(x: Any) -> Any:
        if not _may_hold(x) or id(x) in closed:
            return x
        held, made = _parts(x)
        held = [_opened(entry, {*closed, id(x)}) for entry in held]
        return made(held) if tensors_in(held) else x

    return tree_map(open_one, value)


def _may_hold(x: Any) -> bool:
    """Whether it is a function or an object that may hold tensors, where pytree does not find them."""
    kind: Any = type(x)
    return not isinstance(x, Tensor) and (isinstance(x, _FUNCTIONS) or _is_opened(kind))


@functools.cache
def _is_opened(kind: type) -> bool:
    """Whether objects of a class are made of their attributes alone. Configurations and caches of transformers stay as
    they are."""
    if issubclass(kind, (nn.Module, type, ModuleType, MethodType, Closure)):
        return False
    if is_frameworks(kind, "transformers") and not issubclass(kind, (Distribution, Transform)):
        return False
    if type(kind) not in (type, ABCMeta) or kind.__dictoffset__ == 0 or kind.__new__ not in _NEW:
        return False
    own = {name for base in kind.__mro__ if package_of(base) not in ("builtins", "typing") for name in vars(base)}
    has_slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    return not has_slots and "__init_subclass__" not in own  # which may want to know of all derived classes


def _parts(x: Any) -> tuple[Sequence[Any], Callable[[Sequence[Any]], Any]]:
    """What a function or an object holds, and what makes one like it of other values."""
    if isinstance(x, _FUNCTIONS):
        return _held_by(x), functools.partial(Closure, x)
    kind: Any = type(x)
    names, values = list(vars(x)), list(vars(x).values())
    return values, lambda held: with_attributes(_open_kind(kind), held, names)


class Closure:
    """Stands for a function that holds tensors: in variables of the function around it, or as defaults."""

    def __init__(self, function: Any, held: Iterable[Any]) -> None:
        self._function, self._held = function, list(held)
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def parts(self) -> tuple[list[Any], Any]:
        """What it holds, and the function."""
        return self._held, self._function


def _held_by(function: Any) -> list[Any]:
    if isinstance(function, functools.partial):
        return [function.func, function.args, function.keywords]
    variables = map(_content, function.__closure__ or ())
    return [function.__defaults__, function.__kwdefaults__, *(_ITSELF if x is function else x for x in variables)]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # of a variable that isn't set yet
        return None


def _with_held(function: Any, held: Iterable[Any]) -> Closure:
    """A function of the same code, with other values."""
    held = list(held)
    if isinstance(function, functools.partial):
        of, args, keywords = held
        return Closure(functools.partial(of, *args, **keywords), held)
    defaults, named, *variables = held
    cells = tuple(map(CellType, variables))
    made = FunctionType(function.__code__, function.__globals__, function.__name__, defaults, cells)
    made.__kwdefaults__ = named
    made.__dict__.update(vars(function))
    for cell in cells:
        if cell.cell_contents is _ITSELF:
            cell.cell_contents = made
    return Closure(made, held)


@functools.cache
def _open_kind(kind: type) -> type:
    """A class like another, into whose objects pytree looks: not into those of the class itself, which a unit may be
    given, and fill on its own."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    metaclass: Any = type(kind)
    made: type = metaclass(kind.__name__, (kind,), names)
    open_attributes(made)
    return made


_ITSELF = object()
"""Stands for a function among what it holds, where it calls itself."""
_FUNCTIONS = (FunctionType, functools.partial)
_NEW = (object.__new__, SimpleNamespace.__new__)
"""They make an object without attributes."""

open_class(Closure, lambda x: x.parts, lambda held, function: _with_held(function, held))
