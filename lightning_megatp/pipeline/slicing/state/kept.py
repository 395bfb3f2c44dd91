"""Python values that units set on themselves in their forward (a scale, a count, a range): only the unit's stage has
them before the batch is over."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from lightning_megatp.origins import is_frameworks
from lightning_megatp.plan.units import parts_of_one_stage
from lightning_megatp.snapshots.leftovers import is_plain
from lightning_megatp.user_hooks import function_of, loaded_in, stored_in, words_of

_ABSENT = object()


class Kept(NamedTuple):
    """A Python value that a unit sets on itself."""

    module: str
    """Its name in the whole."""
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class KeptByUnits:
    """Notes who sets and who reads them.

    Args:
        module: the whole.
        stage_of_unit: unit name -> stage. What units of several stages share each of these has for itself.
    """

    def __init__(self, module: nn.Module, stage_of_unit: Mapping[str, int]) -> None:
        self._modules: dict[int, tuple[str, str]] = {}
        """id(module) -> its unit, and its own name."""
        self._kinds: dict[type, Collection[str]] = {}
        for name, unit in parts_of_one_stage(module, stage_of_unit).items():
            part = module.get_submodule(name)
            if stored := stored_by_forward(part):
                self._modules[id(part)] = unit, name
                self._kinds[type(part)] = stored

    @contextlib.contextmanager
    def watching(self, setting: Callable[[str, Kept], None], reading: Callable[[str, Kept], None]) -> Iterator[None]:
        """Meanwhile tell of each time that a module is given another such value, or asked for one, and of which unit
        it is."""
        watched = [(kind, name) for kind, names in self._kinds.items() for name in names]
        before = [vars(kind).get(name, _ABSENT) for kind, name in watched]
        for kind, name in watched:
            setattr(kind, name, _Watched(name, getattr(kind, name, _ABSENT), self._modules, setting, reading))
        try:
            yield
        finally:
            for (kind, name), default in reversed(list(zip(watched, before, strict=True))):
                if default is _ABSENT:
                    delattr(kind, name)
                else:
                    setattr(kind, name, default)


class _Watched:
    """Stands in a class for an attribute of its objects."""

    def __init__(
        self,
        name: str,
        default: Any,
        modules: Mapping[int, tuple[str, str]],
        setting: Callable[[str, Kept], None],
        reading: Callable[[str, Kept], None],
    ) -> None:
        self._name, self._default, self._modules = name, default, modules
        self._setting, self._reading = setting, reading

    def __get__(self, owner: Any, kind: type) -> Any:
        found = self._default if owner is None else vars(owner).get(self._name, self._default)
        if found is _ABSENT:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {self._name!r}")
        self._tell(self._reading, owner, found)
        return found

    def __set__(self, owner: Any, value: Any) -> None:
        before = vars(owner).get(self._name, self._default)
        vars(owner)[self._name] = value
        if type(value) is not type(before) or (is_plain(value) and value != before):
            self._tell(self._setting, owner, value)

    def __delete__(self, owner: Any) -> None:
        del vars(owner)[self._name]

    def _tell(self, whom: Callable[[str, Kept], None], owner: Any, value: Any) -> None:
        unit, module = self._modules.get(id(owner), (None, ""))
        if unit is not None and is_plain(value):
            whom(unit, Kept(module, self._name))


def stored_by_forward(module: nn.Module) -> frozenset[str]:
    """The names of the attributes that a module's forward sets, with the methods of its own that it calls; without
    those that are methods or properties themselves."""
    kind: Any = type(module)
    return _by_forward(kind)[0]


def set_anew_by_forward(module: nn.Module) -> frozenset[str]:
    """The names of the attributes that a module's forward sets and does not read: what was there goes into nothing."""
    kind: Any = type(module)
    stored, loaded = _by_forward(kind)
    return stored - loaded


@functools.cache
def _by_forward(kind: type) -> tuple[frozenset[str], frozenset[str]]:
    """The attributes that a class's forward sets, and those that it reads."""
    if is_frameworks(kind, "torchmetrics"):
        return frozenset(), frozenset()
    stored: set[str] = set()
    loaded: set[str] = set()
    seen: set[str] = set()
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        functions = (function_of(vars(base).get(name)) for base in kind.__mro__)  # `super().forward(x)` calls several
        for code in (function.__code__ for function in filter(None, functions)):
            stored |= stored_in(code)
            loaded |= loaded_in(code)
            waiting += words_of(code)
    plain = (name for name in stored if not callable(getattr(kind, name, None)))
    return frozenset(name for name in plain if not hasattr(getattr(kind, name, None), "__get__")), frozenset(loaded)
