"""Runs scenarios on forked ranks: torch is imported once, every rank is a process of its own that ends as it ends.

Reads one JSON request per line from stdin, {"scenario", "world_size", "folder"}: rank r's stderr goes to folder/r.
Says `ready` when it is, and answers each request with one line, the list of the exit statuses.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_megatp.failure import FailureWatch, ParentWatch
from lightning_megatp.failure.parent import LAUNCHER_PID_VARIABLE

Step = Callable[[int], None]


class Run:
    """One rank of a scenario; `train` does what the strategy does around a fit."""

    def __init__(self, rank: int, world_size: int, store: dist.Store) -> None:
        self.rank = rank
        self.world_size = world_size
        self.store = store

    def watch(self, unwind_s: float = 20.0) -> FailureWatch:
        return FailureWatch(self.rank, self.world_size, self.store, grace_s=1.0, settle_s=1.0, unwind_s=unwind_s)

    def all_here(self, name: str) -> None:
        self.store.set(f"{name}/{self.rank}", "")
        self.store.wait([f"{name}/{rank}" for rank in range(self.world_size)])

    def train(
        self, step: Step, steps: int = 50, unwind: Callable[[], None] = lambda: None, unwind_s: float = 20.0
    ) -> None:
        watch = self.watch(unwind_s)
        watch.start()
        if not dist.is_initialized():
            dist.init_process_group("gloo", store=self.store, rank=self.rank, world_size=self.world_size)
        try:
            for i in range(steps):
                dist.all_reduce(torch.ones(4))
                step(i)
        except BaseException as exc:
            watch.report(exc)
            unwind()
            raise
        finally:
            watch.stop()


def kill_self() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def only(rank: int, at_rank: int, act: Callable[[], None]) -> Step:
    """A step that acts on one rank, the 20th time."""
    return lambda i: act() if rank == at_rank and i == 20 else None


def bad_batch() -> None:
    raise ValueError("bad batch")


def interrupt() -> None:
    raise KeyboardInterrupt


def raise_on_0(run: Run) -> None:
    run.train(only(run.rank, 0, bad_batch))


def raise_on_2(run: Run) -> None:
    run.train(only(run.rank, 2, bad_batch))


def kill_0(run: Run) -> None:
    run.train(only(run.rank, 0, kill_self))


def kill_2(run: Run) -> None:
    run.train(only(run.rank, 2, kill_self))


def blocked_peers(run: Run) -> None:
    """Rank 2 raises and unwinds for long: nothing breaks the barrier that its peers wait in."""

    def step(i: int) -> None:
        if i == 5:
            if run.rank == 2:
                bad_batch()
            dist.barrier()

    def unwind() -> None:
        with contextlib.suppress(dist.DistError):  # until rank 0, who hosts the store, is gone
            run.store.wait(["never set"])

    run.train(step, unwind=unwind)


def blocked_unwinding(run: Run) -> None:
    """Every rank raises, and rank 1 hangs while it unwinds, as in a collective of a user's teardown."""

    def unwind() -> None:
        if run.rank == 1:
            threading.Event().wait()

    run.train(lambda i: bad_batch(), unwind=unwind, unwind_s=2.0)


def all_raise(run: Run) -> None:
    run.train(lambda i: bad_batch())


def bad_plan() -> None:
    raise RuntimeError("MegaTPStrategy: no such layer.")


def all_raise_ours(run: Run) -> None:
    """An error that this package words, under frames of Lightning's."""
    names: dict[str, Any] = {"__name__": "lightning.pytorch.call", "bad_plan": bad_plan}
    exec(compile("def hook(i):\n    bad_plan()", "call.py", "exec"), names)
    run.train(names["hook"])


def caught_and_raised_anew(run: Run) -> None:
    """Who catches it finds it as it is; what is raised then is another error."""
    try:
        all_raise_ours(run)
    except RuntimeError as error:
        assert "in hook" in "".join(traceback.format_exception(error))
        raise ValueError(f"rank {run.rank} gives up") from error


def all_interrupted(run: Run) -> None:
    run.train(lambda i: interrupt())


def interrupt_2(run: Run) -> None:
    run.train(only(run.rank, 2, interrupt))


def sys_exit_2(run: Run) -> None:
    run.train(only(run.rank, 2, lambda: sys.exit(3)))


def os_exit_1(run: Run) -> None:
    run.train(only(run.rank, 1, lambda: os._exit(0)))


def forked_child_outlives_2(run: Run) -> None:
    """A worker process inherits the connection; the death of its parent must show all the same."""

    def fork_and_die() -> None:
        if os.fork() == 0:
            threading.Event().wait(25)
            os._exit(0)
        kill_self()

    # no collectives: gloo's own sockets are inherited too, and nothing but the watch can tell
    watch = run.watch()
    watch.start()
    if run.rank == 2:
        fork_and_die()
    threading.Event().wait()


def raise_before_others_connect(run: Run) -> None:
    """Rank 1 fails at once; rank 2 starts its watch when the verdict is already there."""
    if run.rank == 2:
        run.store.wait(["decided"])
    watch = run.watch()
    watch.start()
    try:
        if run.rank == 1:
            bad_batch()
        threading.Event().wait()
    except ValueError as exc:
        assert "bad batch" in (watch.report(exc) or "")
        run.store.set("decided", "")
        raise


def second_run_raises(run: Run) -> None:
    run.train(lambda i: None)
    run.train(only(run.rank, 1, bad_batch))


def caught_then_second_run(run: Run) -> None:
    """Every rank catches the error and goes on: past `stop` nothing ends it."""
    for _ in range(2):
        try:
            run.train(lambda i: bad_batch())
        except ValueError:
            pass
        else:
            raise AssertionError("the error did not come through")
    run.train(lambda i: None)
    leave_no_trace()
    dist.destroy_process_group()


def slow_rank(run: Run) -> None:
    """Ranks 0 and 1 stop and stay, rank 2 stops later: no failure, and in the end no thread and no socket is left."""
    before = descriptors()
    watch = run.watch()
    watch.start()
    if run.rank == 2:
        run.store.wait(["stopped/0", "stopped/1"])
    watch.stop()
    watch.stop()
    run.store.set(f"stopped/{run.rank}", "")
    run.store.wait(["stopped/2"])
    leave_no_trace()
    left = descriptors() - before
    assert not left, f"left open: {left}"
    run.all_here("end")  # rank 0 hosts the store: it must not leave before the others


def rank_0_leaves_first(run: Run) -> None:
    """The process of rank 0 ends after its orderly stop while others still train: they only lose their watch."""
    watch = run.watch()
    watch.start()
    run.all_here("started")
    if run.rank == 0:
        watch.stop()
        return
    leave_no_trace()  # returns once the connection to rank 0 is closed
    watch.stop()


def launcher_dies(run: Run) -> None:
    """A launcher dies while the rank it started waits: this process returns once that rank has ended too."""
    ended, held_by_rank = os.pipe()
    if (launcher := os.fork()) == 0:
        os.environ[LAUNCHER_PID_VARIABLE] = str(os.getpid())
        watching, say_watching = os.pipe()
        if os.fork() == 0:
            ParentWatch("rank 1", poll_s=0.1).start()
            os.write(say_watching, b"!")
            threading.Event().wait()
        os.read(watching, 1)
        kill_self()
    os.waitpid(launcher, 0)
    os.close(held_by_rank)
    assert os.read(ended, 1) == b""  # nobody has the other end open any more


def leave_no_trace() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("megatp"):
            thread.join()


def descriptors() -> set[str]:
    """What this process has open, sockets and selectors included; nothing where the system has no /proc."""
    folder = Path("/proc/self/fd")
    return {os.readlink(fd) for fd in folder.iterdir() if fd.is_symlink()} if folder.exists() else set()


def run_rank(scenario: str, rank: int, world_size: int, listener: socket.socket, folder: Path) -> None:
    with (folder / str(rank)).open("w") as file:
        os.dup2(file.fileno(), 2)
    port = listener.getsockname()[1]
    descriptor = listener.detach()
    if rank != 0:
        os.close(descriptor)
    store = dist.TCPStore(
        "127.0.0.1",
        port,
        world_size,
        rank == 0,
        timedelta(minutes=5),  # longer than any test: the store's own time-out must not be what ends a rank
        master_listen_fd=descriptor if rank == 0 else None,
    )
    globals()[scenario](Run(rank, world_size, store))


def serve() -> None:
    gc.freeze()  # or every rank, when it ends, walks through and copies all that torch made: a second each
    print("ready", flush=True)
    # a child runs its scenario and falls out of this function: a real interpreter's end
    for line in sys.stdin:
        request = json.loads(line)
        world_size = request["world_size"]
        listener = socket.create_server(("127.0.0.1", 0))
        pids = []
        for rank in range(world_size):
            if (pid := os.fork()) == 0:
                return run_rank(request["scenario"], rank, world_size, listener, Path(request["folder"]))
            pids.append(pid)
        listener.close()
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    serve()
