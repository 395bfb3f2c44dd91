"""Methods of torch's classes for which others stand meanwhile, put there once. No version of torch matters."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

Handle = Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Stands for a call: given what the method is of, what does the work, and with what that is called."""


class Standing:
    """Who stands for the calls of a method now, the inner one last.

    What is put onto the class asks this, and stays there. To change a class makes Python forget where it finds
    attributes of that and of all derived from it, from 3.13 on for ever after a thousand times: a step must not do it.
    """

    def __init__(self) -> None:
        self._handles: tuple[Handle, ...] = ()

    def call(self, of: Any, work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What is done in place of `work(*args, **kwargs)`, in all threads."""
        return _call(self._handles, of, work, args, kwargs)

    @contextlib.contextmanager
    def by(self, handle: Handle) -> Iterator[None]:
        """Meanwhile `handle` is asked, and does the work by those around it."""
        before, self._handles = self._handles, (*self._handles, handle)
        try:
            yield
        finally:
            self._handles = before


def _call(
    handles: tuple[Handle, ...], of: Any, work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not handles:
        return work(*args, **kwargs)
    *outer, handle = handles

    def further(*args: Any, **kwargs: Any) -> Any:
        return _call(tuple(outer), of, work, args, kwargs)

    return handle(of, further if outer else work, args, kwargs)
