"""The server that forks the ranks. Here it imports nothing, and starts at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import Forked, ForkServer, ServerEnded, inherited

LIMIT_S = 30.0
PROGRAM = """
import socket, time
from multiprocessing.connection import Connection
from pathlib import Path
from tests.distributed.ranks.test_fork_server import _start_another
from tests.fork_server import ForkServer, inherited

base = ForkServer(imports=())
server = ForkServer(imports=(), base=base)
ours, theirs = socket.socketpair()
options = {"environment": inherited(), "cwd": "/", "log": Path("/dev/null")}
child = server.start(_start_another, connection=theirs.fileno(), **options)
print(base._process.pid, server._process.pid, child.pid, Connection(ours.detach()).recv(), flush=True)
time.sleep(1000)
"""


def _report(connection: Connection, word: str) -> None:
    print("said", word, os.environ["GIVEN"], flush=True)
    print("complained", file=sys.stderr, flush=True)
    connection.send((os.getpid(), os.getsid(0), os.getcwd(), "NOT_GIVEN" in os.environ))
    connection.recv()


def _wait(connection: Connection, *args: Any) -> None:
    connection.recv()


def _end(connection: Connection, how: str) -> None:
    if how == "signal":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "error":
        raise ValueError("the last words")
    if how == "status":
        sys.exit(7)


def _imported(connection: Connection) -> None:
    connection.send(list(sys.modules))


def _start_another(connection: Connection) -> None:
    connection.send(subprocess.Popen(["sleep", "1000"]).pid)
    time.sleep(1000)


def _running(pid: int) -> bool:
    """Whether there is such a process, and not only its status."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout.strip()
    return bool(state) and not state.startswith("Z")


def _all_end(*pids: int) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while any(map(_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(_running, pids))


@pytest.fixture(params=[True, False], ids=["forks", "executes"])
def server(request: pytest.FixtureRequest) -> Iterator[ForkServer]:
    server = ForkServer(imports=(), forks=request.param)
    yield server
    server.close()


@pytest.fixture
def start(server: ForkServer, tmp_path: Path) -> Callable[..., tuple[Forked, Connection]]:
    """A process of the server, which writes to `log`, and our end of its connection."""

    def start(target: Callable[..., None], *args: Any, **variables: str) -> tuple[Forked, Connection]:
        ours, theirs = socket.socketpair()
        environment = {**inherited(), **variables}
        with theirs:
            forked = server.start(
                target, *args,
                connection=theirs.fileno(), environment=environment, cwd=str(tmp_path), log=tmp_path / "log",
            )  # fmt: skip
        return forked, Connection(ours.detach())

    return start


Start = Callable[..., tuple[Forked, Connection]]


def test_a_process_has_a_session_a_folder_an_output_and_variables(
    start: Start, tmp_path: Path, server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, connection = start(_report, "first", GIVEN="a")
    assert connection.recv() == (first.pid, first.pid, str(tmp_path), False)
    assert (tmp_path / "log").read_text() == "said first a\ncomplained\n"
    connection.close()
    assert first.wait() == 1  # EOFError
    second, connection = start(_report, "second", GIVEN="b", NOT_GIVEN="")
    assert connection.recv() == (second.pid, second.pid, str(tmp_path), True)
    assert (tmp_path / "log").read_text() == "said second b\ncomplained\n"


@pytest.mark.parametrize(
    ("how", "status", "written"),
    [
        ("", 0, ""),
        ("status", 7, ""),
        ("error", 1, "ValueError: the last words"),
        ("signal", -signal.SIGSEGV, "in _end"),
    ],
)
def test_how_a_process_ended(how: str, status: int, written: str, start: Start, tmp_path: Path) -> None:
    forked, connection = start(_end, how)
    with pytest.raises(EOFError):
        connection.recv()
    assert forked.wait() == status and forked.poll() == status and forked.returncode == status
    assert written in (tmp_path / "log").read_text()


def test_a_process_leads_its_session_from_the_first_moment(start: Start) -> None:
    for _ in range(20):  # whoever ends it right away ends it, not nothing
        forked, _ours = start(_wait)
        assert os.getsid(forked.pid) == forked.pid


def test_a_process_that_goes_on_has_no_status(start: Start) -> None:
    forked, _ours = start(_wait)
    other, others = start(_wait)
    assert forked.poll() is None and forked.returncode is None
    os.killpg(forked.pid, signal.SIGKILL)
    assert forked.wait() == -signal.SIGKILL
    assert other.poll() is None
    others.send("go on")
    assert other.wait() == 0


def test_the_end_of_its_connection_reaches_a_process_though_others_were_forked_later(start: Start) -> None:
    forked, connection = start(_wait)
    other, _ = start(_wait)
    connection.close()
    assert forked.wait() == 1
    assert other.poll() is None


def test_a_closed_server_leaves_nothing(start: Start, server: ForkServer) -> None:
    forked, connection = start(_start_another)
    pids = [server._process.pid, forked.pid, connection.recv()]
    assert all(map(_running, pids)) and server.usable
    server.close()
    assert _all_end(*pids)


def test_a_server_is_forked_from_another(server: ForkServer, tmp_path: Path) -> None:
    further = ForkServer(("fractions",), base=server)
    names = []
    for other in (further, server):
        ours, theirs = socket.socketpair()
        with theirs, Connection(ours.detach()) as connection:
            forked = other.start(
                _imported, connection=theirs.fileno(), environment=inherited(), cwd="/", log=tmp_path / "log"
            )
            names.append(connection.recv())
            assert forked.wait() == 0
    assert "fractions" in names[0] and "fractions" not in names[1]
    further.close()
    assert server.usable and not further.usable


def test_nothing_is_left_when_the_program_is_killed() -> None:
    program = subprocess.Popen([sys.executable, "-c", PROGRAM], env=inherited(), stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    pids = [int(pid) for pid in program.stdout.readline().split()]
    assert len(pids) == 4 and all(map(_running, pids))
    program.kill()
    program.communicate()
    assert _all_end(*pids)


def test_a_server_with_threads_executes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lasting = "import threading, time; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
    (tmp_path / "has_thread.py").write_text(lasting)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    base = ForkServer(("has_thread",))
    further = ForkServer(("fractions",), base=base)
    ours, theirs = socket.socketpair()
    with theirs, Connection(ours.detach()) as connection:
        process = further.start(
            _imported, connection=theirs.fileno(), environment=inherited(), cwd="/", log=tmp_path / "log"
        )
        names = connection.recv()
        assert process.wait() == 0
    assert "has_thread" in names and "fractions" in names
    for server in (further, base):
        server.close()


def test_a_server_is_ready_when_it_has_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "takes_time.py").write_text(f"import time; time.sleep(1); open({str(tmp_path / 'done')!r}, 'w')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    server = ForkServer(("takes_time",))
    server.ready()
    assert (tmp_path / "done").exists()
    server.close()


def test_a_server_that_ended_says_how(start: Start, server: ForkServer) -> None:
    forked, _ = start(_wait)
    os.kill(server._process.pid, signal.SIGKILL)
    server._process.wait()
    assert not server.usable
    with pytest.raises(ServerEnded, match="a fork server ended with status -9"):
        forked.poll()
    os.kill(forked.pid, signal.SIGKILL)


def test_what_a_server_cannot_import_is_told() -> None:
    server = ForkServer(imports=("no_such_module",))
    with pytest.raises(ServerEnded, match="No module named 'no_such_module'") as error:
        server.start(_wait, connection=0, environment={}, cwd="/", log=Path("/dev/null"))
    assert "ended with status 1" in str(error.value)
    server.close()
