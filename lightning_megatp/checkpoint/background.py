"""Saving while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from lightning_megatp.checkpoint.agree import together


class BackgroundSave:
    """One save at a time, in a thread of its own, and what has to wait for it."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[None] | None = None
        self._afterwards: list[Callable[[], None]] = []

    def start(self, save: Callable[[], None]) -> None:
        """Run a save; `wait` was called before."""
        self._thread = self._thread or ThreadPoolExecutor(1, "megatp-checkpoint")
        self._running = self._thread.submit(save)

    def afterwards(self, action: Callable[[], None]) -> None:
        """Do something once what is being saved is complete: now, if nothing is."""
        if self._running is None:
            action()
        else:
            self._afterwards.append(action)

    def wait(self) -> None:
        """Until the save is complete; every rank has to call it.

        Raises:
            RuntimeError: on every rank, if it failed on one. What had to wait for it is dropped then.

        Communication: one object all-gather, if something was being saved.
        """
        running, self._running = self._running, None
        waiting, self._afterwards = self._afterwards, []
        if running is None:
            return
        with together("a checkpoint was not saved"):
            running.result()
        for action in waiting:
            action()

    def close(self) -> None:
        """Let the thread end."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)
            self._thread = None
