"""What a dry run must not change: the state of a module, with the random generators on it."""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset

from lightning_megatp.origins import is_frameworks
from lightning_megatp.random_states import generator_state, is_generator, set_generator_state
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import storage_id
from lightning_megatp.tensor.functions import is_in_place, operation_name

LARGE = 10_000
"""Containers with more entries (data sets, vocabularies) are restored as they were, but not searched."""

MOST_OF_AN_ARRAY, FEW = 2**20, 100
"""Bytes of an array of NumPy that is taken for a state (losses by noise level), and entries of a container of such.
Larger ones are taken for data."""

CONTAINERS = (list, dict, set, deque)
PLAIN = frozenset({type(None), bool, int, float, str})

_NOT_SEARCHED = ("builtins", "numpy")
"""Objects of these packages, and of frameworks, are neither searched nor restored: the trainer, loggers, groups."""


class Snapshot:
    """The attributes of objects and of what hangs on them: submodules, lists, dicts, sets, the user's own objects; and
    the states of random number generators among them, and what arrays of NumPy hold that are no data.

    Args:
        owners: modules, and objects of the user's.
        submodules: look at those of the modules, too.
        beside: dicts that are put back, and not searched.
    """

    def __init__(self, *owners: Any, submodules: bool = True, beside: Iterable[dict[str, Any]] = ()) -> None:
        self._owners = [x for y in owners for x in (y.modules() if submodules and isinstance(y, nn.Module) else (y,))]
        self._holders = [(holder, _copy(holder)) for holder in self._found()]
        self._beside = [(holder, dict(holder)) for holder in beside]

    @functools.cached_property
    def tensors(self) -> dict[int, Tensor]:
        """id -> tensor, for all that were found."""
        return {id(x): x for _, before in self._holders for x in _tensors(before)}

    def restore(self) -> None:
        """Put everything back, in place."""
        for holder, before in (*self._holders, *self._beside):
            refill(holder, before)

    def drop_fakes(self) -> None:
        """Put back only what tensors without data were put into."""
        for holder, before in self._holders:
            if any(is_fake(x) and id(x) not in self.tensors for x in _tensors(holder)):
                refill(holder, before)

    def changes(self) -> list[tuple[Any, Any]]:
        """What holds something else than before, with its new entries, or all it holds if it is no dict."""
        pairs = [(holder, before) for holder, before in self._holders if isinstance(holder, CONTAINERS)]
        found = [(holder, _entries_since(holder, before)) for holder, before in pairs]
        return [(holder, new) for holder, new in found if new]

    def changed_entries(self) -> Iterator[tuple[Any, Any]]:
        """Where something else is than before: a dict and a key; a list, set or deque, and None."""
        for holder, before in self._holders:
            if not isinstance(holder, CONTAINERS) or _is_untouched(holder, before):
                continue
            if isinstance(holder, dict):
                keys = dict.fromkeys((*before, *holder))
                pairs = ((key, _entry(holder, key, holder), _entry(before, key, holder)) for key in keys)
                yield from ((holder, key) for key, now, then in pairs if not is_same(now, then))
            elif not is_same(tuple(holder), tuple(before)):
                yield holder, None

    def new_tensors(self) -> list[Tensor]:
        """What hangs on the owner now and did not before."""
        return [x for holder in self._found() for x in _tensors(holder) if id(x) not in self.tensors]

    def replaced_tensors(self) -> list[tuple[str, Tensor, Tensor]]:
        """Attributes and entries that were tensors and now are others: name, and the tensors before and now."""
        found = []
        for holder, before in self._holders:
            if isinstance(before, dict):
                pairs = [(str(key), x, holder.get(key)) for key, x in before.items()]
                found += [(key, x, y) for key, x, y in pairs if isinstance(x, Tensor) and isinstance(y, Tensor)]
        return [entry for entry in found if entry[1] is not entry[2]]

    def _found(self) -> list[Any]:
        return holders_of(self._owners)


class FirstValues(TorchFunctionMode):
    """Active during a dry run: copies what a tensor holds before the first operation that changes it in place. Most are
    never changed, so most are never copied.

    Args:
        tensors: whose values are to be put back.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        plain = [x for x in tensors if type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided]
        self._of_storage = {storage_id(x): x.untyped_storage() for x in plain if not (x.is_meta or is_fake(x))}
        self._shown = [(x, x.data) for x in plain]
        self._copies: dict[int, Any] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        changed = args[0] if args and is_in_place(operation_name(func)) else (kwargs or {}).get("out")
        for x in changed if isinstance(changed, (list, tuple)) else (changed,):
            if isinstance(x, Tensor) and (key := storage_id(x)) in self._of_storage and key not in self._copies:
                self._copies[key] = self._of_storage[key].clone()
        return func(*args, **(kwargs or {}))

    def copied(self, x: Tensor) -> bool:
        """Whether a tensor's values are put back."""
        return storage_id(x) in self._copies

    def restore(self) -> None:
        """Put values back, and memory that `.data` was pointed away from."""
        for key, copy in self._copies.items():
            self._of_storage[key].copy_(copy)
        for x, data in self._shown:
            if storage_id(x) != storage_id(data):
                x.data = data


def kept_by(modules: Iterable[nn.Module]) -> list[Tensor]:
    """What hangs on modules, without their submodules: parameters and buffers, and tables that they have made."""
    return [x for holder in holders_of(modules) for x in _tensors(holder)]


def drawn_by(modules: Iterable[nn.Module]) -> list[Any]:
    """Tensors and arrays that hang on modules, without parameters and buffers, and generators of random numbers."""
    modules = list(modules)
    registered = {id(x) for m in modules for x in (*m.parameters(recurse=False), *m.buffers(recurse=False))}
    holders = holders_of(modules)
    values = [x for holder in holders for x in _entries(holder) if isinstance(x, Tensor | np.ndarray)]
    found = {id(x): x for x in (*values, *filter(is_generator, holders)) if id(x) not in registered}
    return list(found.values())


def is_small_array(x: Any) -> bool:
    """Whether it is an array of NumPy that may be changed in place, and is no data."""
    changes = type(x) is np.ndarray and x.flags.writeable and not x.dtype.hasobject  # a memmap is a file
    return changes and x.nbytes <= MOST_OF_AN_ARRAY


def places_of(owners: Iterable[Any], kind: Callable[[Any], bool]) -> list[tuple[Any, Any]]:
    """Where things of a kind hang on objects: a dict and a key, or a list and an index."""
    found = []
    for holder in holders_of(owners):
        if isinstance(holder, (dict, list)) and len(holder) <= LARGE:
            entries = holder.items() if isinstance(holder, dict) else enumerate(holder)
            found += [(holder, key) for key, x in entries if kind(x)]
    return found


def modules_on(owner: Any) -> list[nn.Module]:
    """What hangs on an object, in lists, dicts and the user's own objects too, where a module doesn't register it."""
    submodules = list(owner.modules()) if isinstance(owner, nn.Module) else []
    hanging = [x for holder in holders_of([owner, *submodules]) for x in _entries(holder) if isinstance(x, nn.Module)]
    return list(dict.fromkeys(x for module in [*submodules, *hanging] for x in module.modules()))


def holders_of(owners: Iterable[Any], leaving_out: type | tuple[type, ...] = ()) -> list[Any]:
    """Everything under objects that can be changed in place, each once; modules and objects as their `__dict__`,
    generators, and arrays of NumPy of at most `MOST_OF_AN_ARRAY`, where there are few."""
    found: dict[int, Any] = {}
    waiting: list[Any] = [x.__dict__ for x in owners if hasattr(x, "__dict__")]
    while waiting:
        holder = waiting.pop()
        if id(holder) in found:
            continue
        found[id(holder)] = holder
        for entry in _entries(holder):  # most are plain
            kind: Any = type(entry)
            if not _is_never_searched(kind) and not isinstance(entry, leaving_out):
                part = _held(entry)
                if part is not None and not (isinstance(part, np.ndarray) and len(holder) > FEW):
                    waiting.append(part)
    return list(found.values())


@functools.lru_cache(4096)
def _is_never_searched(kind: type) -> bool:
    """Whether what belongs to a class changes nowhere in place, or is looked at elsewhere."""
    return kind in PLAIN or issubclass(kind, (Tensor, nn.Module, FunctionType, ModuleType, type))


def _held(entry: Any) -> Any:
    """What of an entry may change in place; None for what belongs to others."""
    if isinstance(entry, CONTAINERS) or is_generator(entry) or is_small_array(entry):
        return entry
    if isinstance(entry, tuple):
        return list(tuple.__getitem__(entry, slice(None)))  # e3nn's have no length
    if isinstance(entry, Dataset):  # torch's own, too: a Subset holds the user's
        return entry.__dict__
    held = None if is_frameworks(type(entry), *_NOT_SEARCHED) else getattr(entry, "__dict__", None)
    return held if isinstance(held, dict) else None  # `list[int]` shows that of its class, which can't change


def _entries(holder: Any) -> list[Any]:
    """What is searched of it; most are empty."""
    if not isinstance(holder, CONTAINERS) or not holder or len(holder) > LARGE:
        return []
    return list(holder.values()) if isinstance(holder, dict) else list(holder)


def _copy(holder: Any) -> Any:
    if isinstance(holder, dict):
        return dict(holder) if holder else {}
    return list(holder) if isinstance(holder, CONTAINERS) else _way_back(holder)


def refill(holder: Any, before: Any) -> None:
    """Let it hold other entries, in place."""
    if isinstance(holder, dict):
        if len(holder) != len(before) or any(holder.get(key) is not value for key, value in before.items()):
            holder.clear()
            holder.update(before)
    elif isinstance(holder, set):  # one that is filled anew may go through its entries in another order
        holder.difference_update(holder.difference(before))
        holder.update(before)
    elif isinstance(holder, (list, deque)):
        holder.clear()
        holder.extend(before)
    else:
        before()


def _entries_since(holder: Any, before: Any) -> Any:
    if isinstance(holder, dict):
        return {key: x for key, x in holder.items() if before.get(key, before) is not x}
    same = len(holder) == len(before) and all(x is y for x, y in zip(holder, before, strict=True))
    return [] if same else list(holder)


def _is_untouched(holder: Any, before: Any) -> bool:
    """Whether a container holds the very same; most do."""
    if len(holder) != len(before):
        return False
    if isinstance(holder, dict):
        return holder.keys() == before.keys() and all(map(operator.is_, dict.values(holder), before.values()))
    return all(map(operator.is_, holder, before))


_ABSENT = object()


def _entry(entries: dict[Any, Any], key: Any, holder: dict[Any, Any]) -> Any:
    """What an object's attributes or another dict have under a key. A method of the object's class that it was given as
    an attribute (`x.forward = own`, after it was another) is what it has without; so is one that is intercepted."""
    entry = dict.get(entries, key, _ABSENT)
    method = getattr(entry, "function", entry) if key == "forward" else entry
    if isinstance(method, MethodType) and getattr(method.__self__, "__dict__", None) is holder:
        return _ABSENT if getattr(type(method.__self__), str(key), None) is method.__func__ else entry
    return entry


def is_same(now: Any, before: Any) -> bool:
    """Whether it is one object, or equal numbers and the like."""
    if now is before or (isinstance(now, MethodType) and now == before):
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, tuple):
        return len(now) == len(before) and all(map(is_same, now, before))
    return type(now) in PLAIN and bool(now == before)


def _way_back(x: Any) -> Callable[[], None]:
    """What puts a generator back where it is now, or into an array what it holds."""
    if isinstance(x, np.ndarray):
        return functools.partial(np.copyto, x, x.copy())
    return functools.partial(set_generator_state, x, generator_state(x))


def _tensors(holder: Any) -> list[Tensor]:
    return [x for x in _entries(holder) if isinstance(x, Tensor)]
