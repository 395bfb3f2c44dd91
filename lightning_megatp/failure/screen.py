"""What an exception looks like on the screen whose cause is known: where it came from in the user's code, and said once
if all ranks have it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

from lightning_megatp.failure.cause import chain
from lightning_megatp.origins import is_frameworks_frame

FULL_VARIABLE = "MEGATP_FULL_TRACEBACK"
"""Set to anything: tracebacks keep the frames of Lightning, torch and this package, and every rank prints its own."""
_BETWEEN = ("contextlib", "functools")  # frames of these two stand between others, and say nothing by themselves

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def print_shortened(error: BaseException, words: str) -> None:
    """Let the interpreter print this exception without internal frames, under some words on how to see these.

    The exception itself stays as it is: who catches it sees nothing of this, and other exceptions print as before.
    """
    _print_by(error, lambda: print(f"{words} ({FULL_VARIABLE}=1 shows all)", file=sys.stderr))


def print_nothing(error: BaseException) -> None:
    """Let the interpreter end with this exception without printing it, since another rank does."""
    _print_by(error, None)


def _print_by(error: BaseException, introduce: Callable[[], None] | None) -> None:
    if os.environ.get(FULL_VARIABLE):
        return
    hook = sys.excepthook
    sys.excepthook = _Printing(hook.before if isinstance(hook, _Printing) else hook, error, introduce)


class _Printing:
    """An excepthook in front of another one.

    Args:
        before: the other.
        error: what it changes the printing of; not kept, since its traceback keeps the whole run alive.
        introduce: prints a line before it; None prints nothing at all.
    """

    def __init__(self, before: Hook, error: BaseException, introduce: Callable[[], None] | None) -> None:
        self.before = before
        self._key = _key_of(error)
        self._introduce = introduce

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if _key_of(error) != self._key:
            self.before(kind, error, trace)
        elif self._introduce is not None:
            self._introduce()
            with _only_users_frames(error):
                self.before(kind, error, error.__traceback__)


def _key_of(error: BaseException) -> tuple[int, str]:
    return id(error), f"{type(error).__name__}: {error}"


@contextlib.contextmanager
def _only_users_frames(error: BaseException) -> Iterator[None]:
    """Meanwhile an exception, and what it was raised from, have tracebacks without internal frames."""
    before = [(each, each.__traceback__) for each in chain(error)]
    for each, trace in before:
        each.__traceback__ = _users(trace)
    try:
        yield
    finally:
        for each, trace in before:
            each.__traceback__ = trace


def _users(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without internal frames; as it is where no other would be left."""
    kept = [each for each in _links(trace) if not is_frameworks_frame(each.tb_frame, *_BETWEEN)]
    return _linked(kept) if kept else trace


def _links(trace: TracebackType | None) -> Iterator[TracebackType]:
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _linked(kept: Sequence[TracebackType]) -> TracebackType | None:
    below: TracebackType | None = None
    for each in reversed(kept):
        below = TracebackType(below, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return below
