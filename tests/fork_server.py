"""Processes that begin with torch and Lightning imported: forked from a server that has imported them once.

The imports take seconds, more than most tests; a fork takes milliseconds. The server has one thread, which imports and
forks; it runs nothing of a test. A server that imports more can itself be forked from one. Only what a process reads
when it is executed is the server's: Python's hash seed, its addresses, and the variables that glibc reads. A forked
process has a session, a folder, an output and variables of its own. When the program that started the server is gone,
however it ended, so are the server and what it forked.

Where a library starts threads as it is imported, which no fork survives, and for processes that will use a real GPU,
the server executes each process instead, which then imports by itself.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.memory import ALLOCATOR
from tests.simulated import cuda
from tests.simulated.building import library

REPOSITORY = Path(__file__).resolve().parent.parent
LIGHTNING = ("lightning.pytorch", "torch.distributed.checkpoint", "torch.utils.tensorboard", "pytest")
"""What most processes import sooner or later. Not this package: the reference process must not know it."""
PACKAGE = ("lightning_megatp", "tests.distributed.training", "tests.parity.parallel")
"""What ranks import besides."""


class ServerEnded(RuntimeError):
    """A fork server is gone, and with it what it knew of the processes that it had forked."""


class ForkServer:
    """A process that forks others, which run `target(connection, *args)`.

    Args:
        imports: the modules it imports.
        simulated: give them a simulated CUDA device.
        base: a server to fork this one from; it has that one's imports too.
        forks: if not, the server imports nothing, and each process is executed.
    """

    def __init__(
        self, imports: Sequence[str], simulated: bool = False, base: ForkServer | None = None, forks: bool = True
    ) -> None:
        ours, theirs = socket.socketpair()
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115  # as long as the server
        self.base = base
        self.imports = (*imports,) if base is None else (*base.imports, *imports)
        self._process: subprocess.Popen[bytes] | Forked
        with theirs:
            if base is None:
                self._process = _execute(theirs.fileno(), imports, simulated, forks, self._output)
            else:
                request = pickle.dumps((_become, (self.imports,), str(REPOSITORY), self._output.name))
                self._process = Forked(base, base._ask("server", (inherited(), request), theirs.fileno()))
        self._connection = Connection(ours.detach())

    def start(
        self, target: Callable[..., None], *args: Any, connection: int, environment: dict[str, str], cwd: str, log: Path
    ) -> Forked:
        """A new process that runs `target(Connection, *args)`; `connection` is the descriptor of its end of a pair."""
        request = pickle.dumps((target, args, cwd, str(log)))
        return Forked(self, self._ask("start", (environment, request), descriptor=connection))

    def ready(self) -> None:
        """Return when it has imported."""
        self._ask("ready", None)

    def close(self) -> None:
        """End the server and everything that it forked."""
        with contextlib.suppress(OSError):  # it has ended already
            self._connection.send(("close", None))
        self._connection.close()
        with contextlib.suppress(ServerEnded):  # the one it was forked from
            self._process.wait()
        self._output.close()

    @property
    def usable(self) -> bool:
        return (self.base is None or self.base.usable) and self._process.poll() is None

    def _ask(self, what: str, value: Any, descriptor: int | None = None) -> Any:
        try:
            self._connection.send((what, value))
            if descriptor is not None:
                reduction.send_handle(self._connection, descriptor, self._process.pid)
            return self._connection.recv()
        except (EOFError, OSError) as error:
            status = self._process.wait()
            self._output.seek(0)
            printed = self._output.read().decode(errors="replace")
            raise ServerEnded(f"a fork server ended with status {status}:\n{printed}") from error


class Forked:
    """A process that a server has forked, with what of `subprocess.Popen` the pools need."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server, self.pid = server, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._status(os.WNOHANG)

    def wait(self) -> int:
        status = self._status(0)
        assert status is not None
        return status

    def _status(self, options: int) -> int | None:
        if self.returncode is None:
            self.returncode = self._server._ask("status", (self.pid, options))
        return self.returncode


def inherited() -> dict[str, str]:
    """The variables of a process that a test starts."""
    environment = {name: value for name, value in os.environ.items() if name != "PL_GLOBAL_SEED"}  # a test's
    environment |= {**ALLOCATOR, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # an import that asks starts no CUDA: no fork survives it
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH", "")]))
    environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return environment


def _execute(
    descriptor: int, imports: Sequence[str], simulated: bool, forks: bool, output: Any
) -> subprocess.Popen[bytes]:
    options = (["--simulated", str(library())] if simulated else []) + ["--execute"] * (not forks)
    return subprocess.Popen(
        _command(descriptor, *options, *imports), env=inherited(), cwd=REPOSITORY,
        pass_fds=[descriptor], start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
    )  # fmt: skip


# What follows runs in the server.

Start = Callable[[int, dict[str, str], bytes], int]
"""Starts a process, given its end of a connection, its variables and what it shall run."""


def _command(descriptor: int, *options: str) -> list[str]:
    return [sys.executable, "-m", "tests.fork_server", "--fd", str(descriptor), *options]


def _become(connection: Connection, imports: Sequence[str], *options: str) -> None:
    for name in imports:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # what is imported stays: collecting in a forked process is then cheap, and leaves these pages shared
    threads = len(os.listdir("/proc/self/task")) if Path("/proc/self/task").exists() else 1
    # A fork has one of the threads, and the locks of all.
    start = _fork if threads == 1 else _executes(imports, *options)
    run = _serve(connection, start)
    if run is not None:
        run()


def _serve(connection: Connection, start: Start) -> Callable[[], None] | None:
    """Answer requests until nobody is left to send one. In a forked process: what it shall run."""
    children: set[int] = set()
    while True:
        try:
            what, value = connection.recv()
        except (EOFError, OSError):
            return _kill(children)
        if what in ("start", "server"):
            descriptor = reduction.recv_handle(connection)
            pid = start(descriptor, *value)
            if pid == 0:
                connection.close()
                return functools.partial(_run, Connection(descriptor), *value)
            os.close(descriptor)
            if what == "start":  # a server ends as this one does, when it has ended what it started
                children.add(pid)
            connection.send(pid)
        elif what == "ready":
            connection.send(None)
        elif what == "status":
            pid, status = os.waitpid(*value)
            children.discard(pid)
            connection.send(os.waitstatus_to_exitcode(status) if pid else None)
        else:
            return _kill(children)


def _fork(descriptor: int, environment: dict[str, str], request: bytes) -> int:
    """A process that leads a session of its own, and its number; 0 in that process."""
    begun, begins = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        os.close(begun)
        os.close(begins)
        return 0
    os.close(begins)
    os.read(begun, 1)  # ends when the child has closed its end: from then on its session can be ended
    os.close(begun)
    return pid


def _executes(imports: Sequence[str], *options: str) -> Start:
    """The same, but the process is executed: it does these imports, and reads from its input what it shall run."""

    def start(descriptor: int, environment: dict[str, str], request: bytes) -> int:
        with tempfile.TemporaryFile() as given:
            given.write(request)
            given.seek(0)
            os.set_inheritable(descriptor, True)
            actions = [(os.POSIX_SPAWN_DUP2, given.fileno(), 0)]
            command = _command(descriptor, "--run", *options, *imports)
            return os.posix_spawn(sys.executable, command, environment, file_actions=actions, setsid=True)

    return start


def _kill(children: set[int]) -> None:
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def _run(connection: Connection, environment: dict[str, str], request: bytes) -> None:
    target, args, cwd, log = pickle.loads(request)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    _watch_for_death()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # Python's random numbers begin anew in a fork; numpy's go on, alike in all
    target(connection, *args)


def _watch_for_death() -> None:
    faulthandler.enable()  # a process that dies of a signal writes where it was
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--simulated", type=Path)
    parser.add_argument("--execute", action="store_true", help="import nothing, and execute every process")
    parser.add_argument("--run", action="store_true", help="run what the input says instead of serving")
    parser.add_argument("imports", nargs="*")
    arguments = parser.parse_args()
    connection, imports = Connection(arguments.fd), arguments.imports
    os.set_inheritable(arguments.fd, False)
    simulated = [] if arguments.simulated is None else ["--simulated", str(arguments.simulated)]
    if arguments.execute:
        _serve(connection, _executes(imports, *simulated))
        return
    if simulated:
        cuda.start(arguments.simulated)
    if not arguments.run:
        return _become(connection, imports, *simulated)
    for name in imports:
        importlib.import_module(name)
    _run(connection, dict(os.environ), sys.stdin.buffer.read())


if __name__ == "__main__":
    from tests import fork_server  # the one that others import, not a second of the name `__main__`

    fork_server._main()
