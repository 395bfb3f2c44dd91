"""Lightning's subprocess launcher with a patient observer: ranks end with the first cause on the screen, not before it.

Private names touched, as of Lightning 2.5 and 2.6 (`pytorch/strategies/launchers/subprocess_script.py`):
`_SubprocessScriptLauncher` (the class, its `procs`, `launch`, `kill`, `_call_children_scripts`) and
`_set_num_threads_if_needed`. Lightning's own observer kills every process, rank 0 included, up to 5 s after one child
failed and without a word on the screen: possibly before rank 0 has said why, or while it unwinds.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from lightning_megatp.failure.ending import end_process
from lightning_megatp.failure.parent import LAUNCHER_PID_VARIABLE
from lightning_megatp.failure.watch import FailureWatch

_POLL_S = 0.5


def subprocess_launcher(base: type, settle_s: float = 10.0) -> type:
    """Make the launcher class for one namespace of Lightning.

    Args:
        base: `_SubprocessScriptLauncher` of `lightning.pytorch` or of `pytorch_lightning`.
        settle_s: How long the ranks may take to end by themselves after one of them failed without a failure watch.
    """

    class MegaTPSubprocessLauncher(base):
        """Starts the other ranks of this machine, and ends all when one of them fails.

        `failure_watch` is set by the strategy once it is connected. While it is active it alone ends this process.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.failure_watch: FailureWatch | None = None
            self._observer: _ChildObserver | None = None

        def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
            # Lightning's own body, but for the observer.
            environment = self.cluster_environment
            environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
            if not environment.creates_processes_externally:
                self._call_children_scripts()
                first_rank = environment.node_rank() * self.num_processes
                self._observer = _ChildObserver(self.procs, first_rank, settle_s, lambda: self.failure_watch)
                self._observer.start()
                atexit.register(self._observer.meet_children_at_exit)
            sys.modules[base.__module__]._set_num_threads_if_needed(num_processes=self.num_processes)
            return function(*args, **kwargs)

        def kill(self, signum: Any) -> None:
            """Send a signal to the other ranks of this machine, on purpose: their end is no failure."""
            if self._observer is not None:
                self._observer.cancel()
            super().kill(signum)

        def describe_exit(self, pid: int) -> str | None:
            """Say how the child with this pid ended; None for a stranger, or one that hasn't ended."""
            return next((_how_it_ended(proc) for proc in self.procs if proc.pid == pid), None)

        def _call_children_scripts(self) -> None:
            os.environ[LAUNCHER_PID_VARIABLE] = str(os.getpid())
            try:
                super()._call_children_scripts()
            finally:
                del os.environ[LAUNCHER_PID_VARIABLE]  # the children have it; processes started later are no ranks

    return MegaTPSubprocessLauncher


class _ChildObserver(threading.Thread):
    """Tells the failure watch of a child that failed; where none is active, ends this process and its children.

    That is a child that failed at import, before the ranks were connected, or after the run.
    """

    def __init__(
        self,
        procs: list[subprocess.Popen[bytes]],
        first_rank: int,
        settle_s: float,
        watch: Callable[[], FailureWatch | None],
    ) -> None:
        super().__init__(name="megatp-child-observer", daemon=True)
        self._procs = procs
        self._first_rank = first_rank
        self._settle_s = settle_s
        self._watch = watch
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    def run(self) -> None:
        failed: tuple[int, subprocess.Popen[bytes]] | None = None
        since = time.monotonic()
        while not self._cancelled.wait(_POLL_S):
            codes = [proc.poll() for proc in self._procs]
            if all(code == 0 for code in codes):
                return
            if failed is None:
                failed = next(((i + 1, proc) for i, proc in enumerate(self._procs) if codes[i]), None)
            watch = self._watch()
            if failed is None:
                since = time.monotonic()
            elif watch is not None and watch.active:
                local_rank, proc = failed
                watch.report_death(self._first_rank + local_rank, proc.pid, _how_it_ended(proc) or "")
                since = time.monotonic()
            elif time.monotonic() - since >= self._settle_s:
                self._end(*failed)

    def meet_children_at_exit(self) -> None:
        """End with status 1 where a child failed after the run: this process's status is the one of the whole job."""
        if self._cancelled.is_set() or hasattr(sys, "last_value"):  # killed on purpose; or failed here, and said so
            return
        self.cancel()
        limit = time.monotonic() + self._settle_s
        for local_rank, proc in enumerate(self._procs, start=1):
            with contextlib.suppress(subprocess.TimeoutExpired):  # it has work left: it may outlive us
                if proc.wait(max(0.0, limit - time.monotonic())) != 0:
                    self._end(local_rank, proc)

    def _end(self, local_rank: int, failed: subprocess.Popen[bytes]) -> None:
        for proc in self._procs:
            if proc.poll() is None:
                proc.kill()  # a process that hangs in a collective doesn't hear SIGTERM
        end_process(
            f"MegaTPStrategy: the process of local rank {local_rank} (pid {failed.pid}) {_how_it_ended(failed)},"
            " outside of a run that could tell the others. All ranks of this machine stop."
        )


def _how_it_ended(proc: subprocess.Popen[bytes]) -> str | None:
    try:
        code = proc.wait(timeout=1.0)  # its connections close a moment before it can be waited for
    except subprocess.TimeoutExpired:
        return None
    if code >= 0:
        return f"ended with status {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
