"""What is replaced for a while: a method of one object, on that object alone, also for those who have kept it; entries
of dicts."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

_ABSENT = object()


class Detour:
    """Stands for a method of an object until `end`. It looks like the method to whoever inspects it.

    Args:
        owner: the object.
        name: the method's.
        through: what is called in its place, with the call that was meant: a partial.
    """

    def __init__(self, owner: Any, name: str, through: Callable[[functools.partial[Any]], Any]) -> None:
        self._owner, self._name, self._through = owner, name, through
        self._before = owner.__dict__.get(name)
        self._method: Callable[..., Any] = getattr(owner, name)
        self.__wrapped__: Any
        functools.update_wrapper(self, self._method, updated=())
        if isinstance(self._method, Detour):  # who asks what is behind a method looks behind one wrapper
            self.__wrapped__ = self._method.__wrapped__
        owner.__dict__[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._through(functools.partial(self._method, *args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        """What somebody has noted on the method."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._method, name)

    def end(self) -> None:
        """Give the object its own method back; or a detour that was put around this one since what this one had."""
        around = self._owner.__dict__.get(self._name)
        if around is self and self._before is None:
            del self._owner.__dict__[self._name]
        elif around is self:
            self._owner.__dict__[self._name] = self._before
        while isinstance(around, Detour) and around is not self:
            if around._before is self:
                around._before, around._method = self._before, self._method
            around = around._before

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the object has the method itself."""
        return copy.deepcopy(self._method, memo)

    def __reduce__(self) -> Any:
        """So has a pickled one, such as a metric among hyperparameters."""
        if self._before is not None:
            return functools.partial, (self._before,)
        return getattr, (self._owner, self._name)


def end_all(detours: list[Detour]) -> None:
    """Give all their objects the methods back; the list is empty then."""
    for detour in detours:
        detour.end()
    detours.clear()


class _Late:
    """A method of an object, looked up when it is called."""

    def __init__(self, owner: Any, name: str) -> None:
        self._owner, self._name = owner, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._owner, self._name)(*args, **kwargs)


def look_up_late(bound: list[Any]) -> None:
    """Let bound methods, wherever a program keeps them (a file's globals, a class, an attribute, a list, a closure), be
    looked up when they are called, so that what stands for them by then is called. Tuples keep theirs."""
    late = {id(x): _Late(x.__self__, x.__name__) for x in bound}
    holders: list[Any] = gc.get_referrers(*bound) if bound else []
    for holder in holders:
        if isinstance(holder, types.CellType):
            holder.cell_contents = late[id(holder.cell_contents)]
        elif isinstance(holder, functools.partial):
            state = late.get(id(holder.func), holder.func), holder.args, holder.keywords, vars(holder)
            holder.__setstate__(state)  # type: ignore[attr-defined]
        elif isinstance(holder, list) and holder is not bound:
            holder[:] = [late.get(id(x), x) for x in holder]
        elif isinstance(holder, dict) and (classes := [x for x in gc.get_referrers(holder) if isinstance(x, type)]):
            for key in [key for key, x in holder.items() if id(x) in late]:
                setattr(classes[0], key, late[id(holder[key])])
        elif isinstance(held := holder if isinstance(holder, dict) else getattr(holder, "__dict__", None), dict):
            held.update({key: late[id(x)] for key, x in held.items() if id(x) in late})


@contextlib.contextmanager
def entries_replaced(entries: Iterable[tuple[dict[Any, Any], Any, Any]]) -> Iterator[None]:
    """Let dicts hold other values meanwhile. What was absent is absent again afterwards.

    Args:
        entries: dict, key and value. Each is asked for when those before it are in place. The dicts' own methods are
            passed by: `LayerParameters` hands out other objects than it holds.
    """
    before: list[tuple[dict[Any, Any], Any, Any]] = []
    try:
        for held, key, value in entries:
            before.append((held, key, dict.get(held, key, _ABSENT)))
            dict.__setitem__(held, key, value)
        yield
    finally:
        for held, key, value in reversed(before):
            if value is _ABSENT:
                dict.pop(held, key, None)
            else:
                dict.__setitem__(held, key, value)
