"""What a step, or a hook, leaves on its module."""

from __future__ import annotations

import contextlib
import functools
import numbers
import pickle
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from enum import Enum
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from lightning_megatp.origins import is_frameworks, package_of
from lightning_megatp.random_states import generator_state, is_host_generator, set_generator_state
from lightning_megatp.snapshots.snapshot import FEW, is_small_array

_LARGE = 10_000
"""Containers with more entries are compared by their length."""
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_NOT_SEARCHED = ("builtins", "torchmetrics", "numpy")
"""Objects of these packages, and of frameworks, are compared by identity: trainers, loggers, tensors, metrics."""


class Attributes:
    """The attributes of a LightningModule at one moment, to be compared with those at a later one.

    They are compared by identity, and so are the entries of containers and the attributes of the user's own objects, at
    any depth. What was found is kept alive, so that no identity is given anew.

    Args:
        module: its submodules, and the values of tensors, are not looked into.
        left_out: entries that are not looked at, each as the id of the dict or list that holds it, and its key there.
    """

    def __init__(self, module: nn.Module, left_out: Collection[tuple[int, Any]] = ()) -> None:
        self._left_out = left_out
        self._held: list[Any] = []
        self._seen: set[int] = set()
        self._described = {name: self._describe(x) for name, x in self._looked_at(vars(module))}

    def differing(self, earlier: Attributes) -> list[tuple[str, ...]]:
        """What was set, replaced, added or removed since, each by the names that lead to it through the user's own
        objects."""
        return list(_differing((), self._described, earlier._described))

    def differ_at(self, path: tuple[str, ...], earlier: Attributes) -> bool:
        """Whether the attribute to which these names lead is one of them, or holds some."""
        return self._at(path) != earlier._at(path)

    def _at(self, path: tuple[str, ...]) -> Any:
        *outer, name = path
        attributes = self._described
        for part in outer:
            holder = attributes.get(part)
            if not isinstance(holder, _Described):
                return None
            attributes = holder.attributes
        return attributes.get(name)

    def _looked_at(self, container: Any) -> Iterator[tuple[Any, ...]]:
        """The entries of a container, of a dict with their keys."""
        if isinstance(container, dict):
            return (x for x in container.items() if (id(container), x[0]) not in self._left_out)
        of_list = isinstance(container, list) and self._left_out
        return ((x,) for i, x in enumerate(container) if not of_list or (id(container), i) not in self._left_out)

    def _describe(self, value: Any) -> Any:
        identity = id(value)
        if identity in self._seen:
            return identity
        self._seen.add(identity)
        self._held.append(value)
        if isinstance(value, CONTAINERS):
            if (length := _length(value)) > _LARGE:
                return identity, length
            entries = [x for pair in self._looked_at(value) for x in pair]
            return identity, tuple(map(self._describe, entries))
        kind: Any = type(value)
        held = getattr(value, "__dict__", None)  # of `list[int]`, which is an object, that of a class
        if not _is_searched(kind) or not isinstance(held, dict):
            return identity
        if (length := len(held)) > _LARGE:
            return identity, length
        return _Described(identity, {name: self._describe(x) for name, x in self._looked_at(held)})


class _Described(NamedTuple):
    """One of the user's own objects."""

    identity: int
    attributes: dict[str, Any]


def _differing(path: tuple[str, ...], now: dict[str, Any], then: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name in {**then, **now}:
        mine, was = now.get(name), then.get(name)
        if mine == was:
            continue
        if isinstance(mine, _Described) and isinstance(was, _Described) and mine.identity == was.identity:
            yield from _differing((*path, name), mine.attributes, was.attributes)
        else:
            yield (*path, name)


@functools.cache
def _is_searched(kind: type) -> bool:
    """Whether objects of a class are looked into; asked of each value of a module, twice per batch."""
    opaque = issubclass(kind, (nn.Module, Tensor, type, FunctionType, MethodType, ModuleType))
    return not opaque and not is_frameworks(kind, *_NOT_SEARCHED)


Path = tuple[Any, ...]
"""A module's name, then names of attributes, keys and indices: ("", "schedules", 0, "stretch") is
`module.schedules[0].stretch`."""


def name_of(path: Path) -> str:
    """For messages."""
    return ".".join(str(part) for part in path if part != "")


def _holds_reals(x: Any) -> bool:
    return type(x) is dict and any(type(value) is float for value in x.values())


class PlainValues:
    """The Python values on some modules at one moment: numbers, strings, None, and containers of nothing else; what
    small arrays of NumPy hold, and where generators of Python and NumPy are.

    Other stages may need them in their part of the next step (a counter, a temperature, losses by noise level). The
    user's own objects are looked into, and so are lists and dicts that hold other things beside.

    Args:
        modules: by name; what their submodules hold is not looked at.
        arrays: look at arrays and generators, too.
    """

    def __init__(self, modules: Mapping[str, nn.Module], arrays: bool = True) -> None:
        self._modules, self._arrays = modules, arrays
        self._seen: set[int] = set()
        self._values: dict[Path, bytes] = {}
        for name, module in modules.items():
            own = {key: x for key, x in vars(module).items() if key not in OF_MODULES}
            self._values.update(self._plain((name,), own))

    def changes(self, earlier: PlainValues) -> dict[Path, bytes]:
        """What was set since, pickled; what was removed stays."""
        return {path: value for path, value in self._values.items() if earlier._values.get(path) != value}

    def risen_by(self, steps: int, earlier: PlainValues) -> list[str]:
        """The names of whole numbers that are so much larger than earlier."""
        changes = self.changes(earlier).items()
        pairs = [(path, earlier._values.get(path), now) for path, now in changes if len(now) < _MOST_OF_A_NUMBER]
        values = [(path, pickle.loads(was), pickle.loads(now)) for path, was, now in pairs if was is not None]
        return [name_of(path) for path, was, now in values if type(was) is type(now) is int and now - was == steps]

    def reals_set(self, earlier: PlainValues) -> list[str]:
        """The names of real numbers, and of dicts of such, that were others earlier."""
        found = []
        for path, now in self.changes(earlier).items():
            was = earlier._values.get(path)
            both = [] if was is None else [pickle.loads(was), pickle.loads(now)]
            if both and (all(type(x) is float for x in both) or all(map(_holds_reals, both))):
                found.append(name_of(path))
        return found

    def adopt(self, changes: Mapping[Path, bytes]) -> list[Path]:
        """Set what was changed elsewhere.

        Returns:
            Where numbers and the like were others here.
        """
        differed = []
        for path, pickled in changes.items():
            mine = self._values.get(path)
            if mine == pickled:
                continue
            value = pickle.loads(pickled)
            if mine is not None and type(value) not in (*CONTAINERS, _State):
                differed.append(path)
            _set(self._modules[path[0]], path[1:], value)
        return differed

    def put_back(self) -> dict[Path, bytes]:
        """Undo what was set since, and return that. What is new stays."""
        now = PlainValues(self._modules, self._arrays)
        now.adopt({path: value for path, value in self._values.items() if now._values.get(path) != value})
        return now.changes(self)

    def _plain(self, path: Path, holder: Any) -> Iterator[tuple[Path, bytes]]:
        fixed = isinstance(holder, tuple)  # as long as it is the same, so are plain values in it
        for name, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
            if is_plain(value):
                if not fixed:
                    with contextlib.suppress(pickle.PicklingError, AttributeError):  # of a class made inside a function
                        yield (*path, name), pickle.dumps(value)
            elif is_small_array(value) or is_host_generator(value):
                if self._arrays:
                    told = value if isinstance(value, np.ndarray) else _State(generator_state(value))
                    yield (*path, name), pickle.dumps(told)
            elif (inside := self._opened(value)) is not None and id(value) not in self._seen:
                self._seen.add(id(value))
                yield from self._plain((*path, name), inside)

    def _opened(self, value: Any) -> Any:
        """What is looked into: the attributes of an object of the user's, the entries of a small list or dict. None for
        all else."""
        if isinstance(value, (list, tuple, dict)):
            few = _length(value) <= FEW and len(self._values) <= _MOST_VALUES
            by_name = not isinstance(value, dict) or all(type(key) in (str, int) for key in value)
            return value if few and by_name else None
        return vars(value) if is_own_object(value) else None


class _State(NamedTuple):
    """Where a generator is."""

    state: Any


_MOST_VALUES = 2_000
"""With more, no list or dict is looked into: they are looked at twice per batch."""
_MOST_OF_A_NUMBER = 64
"""Bytes of one that is pickled."""
OF_MODULES = frozenset(nn.Module().__dict__) - {"training"}
"""The attributes that every module has."""
_SCALARS = (numbers.Number, str, bytes, type(None), Enum, np.generic)


def is_plain(value: Any) -> bool:
    """Whether it is a number or the like, or containers of not too many of them."""
    waiting, count = [value], 0
    while waiting:
        entry = waiting.pop()
        count += 1
        if isinstance(entry, CONTAINERS):
            count += _length(entry)
            if count > _LARGE:
                return False
            waiting.extend(x for x in entry)
            waiting += entry.values() if isinstance(entry, dict) else ()
        elif not isinstance(entry, _SCALARS):
            return False
    return True


def _length(container: Any) -> int:
    """Also of a tuple of a class that refuses to tell it, such as e3nn's."""
    return next(kind for kind in CONTAINERS if isinstance(container, kind)).__len__(container)


def is_own_object(value: Any) -> bool:
    """Whether a value is of a class of the user's, and keeps attributes. Configurations (transformers', omegaconf's)
    are large, and stay as they are."""
    kind: Any = type(value)
    return _is_searched(kind) and package_of(kind) not in _OF_CONFIGURATIONS and hasattr(value, "__dict__")


_OF_CONFIGURATIONS = frozenset(["transformers", "omegaconf"])


def _set(holder: Any, path: Path, value: Any) -> None:
    """Set an attribute or an entry, where what holds it is there; a container or an array is filled anew, so that
    whoever else holds it sees the same."""
    *outer, name = path
    try:
        for part in outer:
            holder = _entries_of(holder)[part]
        entries = _entries_of(holder)
        held: Any = entries.get(name) if isinstance(entries, dict) else entries[name]
    except (KeyError, IndexError, TypeError):  # it was made where the value was set
        return
    if isinstance(value, _State):
        if is_host_generator(held):
            set_generator_state(held, value.state)
    elif (
        is_small_array(held)
        and isinstance(value, np.ndarray)
        and (held.shape, held.dtype) == (value.shape, value.dtype)
    ):
        np.copyto(held, value)
    elif type(held) is type(value) and isinstance(value, (dict, list, set, deque)):
        held.clear()
        (held.extend if isinstance(value, (list, deque)) else held.update)(value)
    elif entries is not holder:
        setattr(holder, name, value)
    elif not isinstance(holder, tuple):
        holder[name] = value


def _entries_of(holder: Any) -> Any:
    return holder if isinstance(holder, (list, tuple, dict)) else vars(holder)
