"""How a process says something on its screen and ends at once, from whatever thread, whatever its main thread does."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

_SAY_S = 0.5
_FLUSH_S = 1.0


def say(text: str) -> None:
    """Print one line on stderr; goes on without it if the screen takes nothing, or another thread holds its lock."""
    thread = threading.Thread(target=_write, args=(text,), daemon=True)
    thread.start()
    thread.join(_SAY_S)


@contextlib.contextmanager
def saying_after(seconds: float, text: str) -> Iterator[None]:
    """Print a line if what is inside takes longer."""
    timer = threading.Timer(seconds, say, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end_process(text: str | None) -> NoReturn:
    """Print a last line and end this process with status 1, past its main thread, which may be blocked for good."""
    # in a thread of its own: the blocked main thread may hold the lock of a stream
    thread = threading.Thread(target=_last_words, args=(text,), daemon=True)
    thread.start()
    thread.join(_FLUSH_S)
    os._exit(1)


def _last_words(text: str | None) -> None:
    if text is not None:
        _write(text)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _write(text: str) -> None:
    """On a line of its own, though a progress bar may be half-way through one."""
    with contextlib.suppress(OSError, ValueError):  # closed or broken: the screen is gone, the rank must still end
        sys.stderr.write(f"\n{text}\n")
        sys.stderr.flush()
