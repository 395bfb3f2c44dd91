"""Loaders that are iterated in a context: data sets that divide their samples by rank do so while they are read."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

Context = Callable[[], AbstractContextManager[None]]
_CONTEXT = "iterated_in"


def iterate_in(loader: Any, context: Context) -> None:
    """Let a loader's batches, and its worker processes, be made in a context. It stays the object that it is, and
    becomes one of a subclass of its class. What can't change its class, such as a generator, stays as it is.

    Args:
        loader: a DataLoader, or any iterable that the user's code made.
        context: of every call.
    """
    iterate_freely(loader)
    if hasattr(loader, "__iter__") and not isinstance(loader, Tensor):  # whose rows would be of that class, too
        with contextlib.suppress(TypeError):
            loader.__class__ = _iterated_in(context, type(loader))


def iterate_freely(loader: Any) -> None:
    """Take back `iterate_in`."""
    if _CONTEXT in vars(type(loader)):
        loader.__class__ = type(loader).__base__


def _iterated_in(context: Context, kind: type[Any]) -> type[Any]:
    def iterate(self: Any) -> Iterator[Any]:
        with context():  # workers start here, and keep what they find
            return _Items(kind.__iter__(self), context)

    def copied(self: Any, copy_of: Callable[..., Any], *memo: Any) -> Any:
        with _as_it_was(self, kind):
            twin = copy_of(self, *memo)
        twin.__class__ = type(self)
        return twin

    def reduced(self: Any, protocol: Any) -> Any:
        """For worker processes that are spawned, with a loader that collates itself."""
        with _as_it_was(self, kind):
            make, *rest = self.__reduce_ex__(protocol)
        return functools.partial(make), *rest  # pickle wants the class of what it knows by name to be the object's

    names = {
        "__iter__": iterate,
        "__reduce_ex__": reduced,
        "__copy__": lambda self: copied(self, copy.copy),
        "__deepcopy__": lambda self, memo: copied(self, copy.deepcopy, memo),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        _CONTEXT: context,
    }
    return type(kind.__name__, (kind,), names)


@contextlib.contextmanager
def _as_it_was(loader: Any, kind: type[Any]) -> Iterator[None]:
    now = type(loader)
    loader.__class__ = kind
    try:
        yield
    finally:
        loader.__class__ = now


class _Items:
    """The items of a loader, each of them made in a context."""

    def __init__(self, items: Iterator[Any], context: Context) -> None:
        self._items, self._context = items, context

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._context():
            return next(self._items)
