"""A rank that Lightning's launcher started ends with its launcher, also before the failure watch is up."""

from __future__ import annotations

import os
import threading

from lightning_megatp.failure.ending import end_process

LAUNCHER_PID_VARIABLE = "MEGATP_LAUNCHER_PID"
"""Set by our launcher in the environment of the ranks it starts: its own pid."""


class ParentWatch:
    """Ends this process when the process that launched it is gone.

    It covers the time until the failure watch has its connections: a rendezvous may wait for a dead rank 0 as long as
    the whole timeout of the process group. Without effect in a process that our launcher didn't start.

    Args:
        name: Who this rank is, for people.
        poll_s: How often to look.
    """

    def __init__(self, name: str, poll_s: float = 0.5) -> None:
        self._name = name
        self._poll_s = poll_s
        self._launcher_pid = int(os.environ.get(LAUNCHER_PID_VARIABLE, "0"))
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start to watch; a launcher that is already gone ends this process now."""
        if self._launcher_pid == 0:
            return
        if os.getppid() != self._launcher_pid and _exists(self._launcher_pid):
            return  # a process that a rank started, with its environment: not a rank itself
        threading.Thread(target=self._run, name="megatp-parent-watch", daemon=True).start()

    def stop(self) -> None:
        """Stop watching; after this it never ends the process."""
        with self._lock:
            self._stopped.set()

    def _run(self) -> None:
        while os.getppid() == self._launcher_pid:
            if self._stopped.wait(self._poll_s):
                return
        with self._lock:
            if not self._stopped.is_set():
                end_process(
                    f"MegaTPStrategy: the process that launched {self._name} (pid {self._launcher_pid}) ended before"
                    " the ranks were connected. This rank stops."
                )


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
