"""One rank's end ends all ranks within 30 seconds, and the first cause is what the screen names: real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
LIMIT_S = 30
SIGKILLED = -signal.SIGKILL


@dataclass
class Ended:
    """How the ranks of a scenario ended."""

    statuses: list[int]
    screens: list[str]

    def verdicts(self, rank: int) -> list[str]:
        """The lines a rank printed about a first cause."""
        return [line for line in self.screens[rank].splitlines() if line.startswith("MegaTPStrategy:")]


def last_word(screen: str) -> str:
    """The last line that Python printed; what C++ says after it is not ours: when gloo is torn down, or of objects that
    are left at the end (torch 2.15)."""
    printed = screen.partition("nanobind: ")[0].splitlines()
    return [line for line in printed if line.strip() and not line.startswith("terminate called")][-1]


def environment() -> dict[str, str]:
    distributed = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in distributed}
    root = str(Path(__file__).parents[3])
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([root, kept.get("PYTHONPATH", "")])}


class Host:
    """A process that has torch imported and forks the ranks; in a session of its own: no rank outlives it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, scenario: str, folder: Path) -> list[int]:
        """Run a scenario on three ranks; the statuses they end with, none if one still runs after the limit."""
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        print(
            json.dumps({"scenario": scenario, "world_size": 3, "folder": str(folder)}), file=process.stdin, flush=True
        )
        with ThreadPoolExecutor(1) as reader:
            answer = reader.submit(process.stdout.readline)
            try:
                return json.loads(answer.result(LIMIT_S))
            except TimeoutError:
                self.close()  # ends the reader too; the next scenario gets a new host
                return []

    def close(self) -> None:
        """End the host and every rank that hangs."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "ranks.py")],
            env=environment(),
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"  # the imports are not in the limit of a scenario
        return self._process


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


@pytest.fixture
def run(host: Host, tmp_path: Path) -> Callable[[str], Ended]:
    """Run a scenario of ranks.py on three ranks; a rank that hasn't ended after the limit fails the test."""

    def run(scenario: str) -> Ended:
        statuses = host.run(scenario, tmp_path)
        screens = [path.read_text() if path.exists() else "" for path in (tmp_path / str(rank) for rank in range(3))]
        shown = "\n".join(f"--- rank {rank}\n{screen}" for rank, screen in enumerate(screens))
        assert statuses, f"ranks still run after {LIMIT_S} s\n{shown}"
        print(shown)
        return Ended(statuses, screens)

    return run


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.extended)])
def test_exception_on_one_rank_ends_all(run: Callable[[str], Ended], rank: int) -> None:
    ended = run(f"raise_on_{rank}")

    assert all(ended.statuses), ended.statuses
    (verdict,) = ended.verdicts(0)[:1]
    assert f"rank {rank} [" in verdict
    assert "failed first: ValueError: bad batch (ranks.py:" in verdict
    assert "in bad_batch). All ranks stop." in verdict
    assert "ValueError: bad batch" in ended.screens[rank]
    for bystander in {0, 1, 2} - {rank}:
        assert "failed first: ValueError: bad batch" in last_word(ended.screens[bystander])


def test_killed_rank_ends_all(run: Callable[[str], Ended]) -> None:
    ended = run("kill_2")

    assert ended.statuses[2] == SIGKILLED
    assert all(ended.statuses), ended.statuses
    assert "rank 2 [" in ended.verdicts(0)[0]
    assert "died first, without reporting an exception" in ended.verdicts(0)[0]
    assert "died first" in last_word(ended.screens[1])


def test_killed_rank_0_ends_all_and_the_others_say_so(run: Callable[[str], Ended]) -> None:
    ended = run("kill_0")

    assert ended.statuses[0] == SIGKILLED
    assert all(ended.statuses), ended.statuses
    for rank in (1, 2):
        assert "rank 0 [" in ended.verdicts(rank)[0]
        assert "died first" in ended.verdicts(rank)[0]


def test_blocked_peers_of_a_rank_that_unwinds_for_long_are_ended(run: Callable[[str], Ended]) -> None:
    ended = run("blocked_peers")

    assert all(ended.statuses), ended.statuses
    assert "rank 2 [" in ended.verdicts(0)[0] and "ValueError: bad batch" in ended.verdicts(0)[0]
    assert "Ending rank 0 [" in ended.verdicts(0)[-1]
    assert "Ending rank 1 [" in ended.verdicts(1)[-1]


def test_rank_that_hangs_while_it_unwinds_is_ended(run: Callable[[str], Ended]) -> None:
    ended = run("blocked_unwinding")

    assert all(ended.statuses), ended.statuses
    assert "Ending rank 1 [" in ended.verdicts(1)[-1]


@pytest.mark.parametrize("scenario", ["all_raise", "all_interrupted"])
def test_same_exception_on_all_ranks_adds_no_word(run: Callable[[str], Ended], scenario: str) -> None:
    ended = run(scenario)

    assert all(ended.statuses), ended.statuses
    assert all("MegaTPStrategy" not in screen for screen in ended.screens)


def test_our_error_on_all_ranks_is_printed_once_without_internal_frames(run: Callable[[str], Ended]) -> None:
    ended = run("all_raise_ours")

    assert all(ended.statuses), ended.statuses
    assert last_word(ended.screens[0]).endswith("RuntimeError: MegaTPStrategy: no such layer.")
    assert "in bad_plan" in ended.screens[0] and "in hook" not in ended.screens[0]
    assert "Traceback" not in ended.screens[1] + ended.screens[2]
    assert "MegaTPStrategy" not in ended.screens[1] + ended.screens[2]


def test_full_tracebacks_are_there_for_who_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setenv("MEGATP_FULL_TRACEBACK", "1")
    host = Host()  # its ranks have its environment
    request.addfinalizer(host.close)
    assert all(host.run("all_raise_ours", tmp_path))
    assert all("in hook" in (tmp_path / str(rank)).read_text() for rank in range(3))


def test_our_error_stays_as_it_is_for_who_catches_it(run: Callable[[str], Ended]) -> None:
    ended = run("caught_and_raised_anew")

    for rank, screen in enumerate(ended.screens):
        assert last_word(screen).endswith(f"ValueError: rank {rank} gives up")
        assert "in hook" in screen and "no such layer" in screen


def test_interrupt_of_one_rank_ends_all_with_one_calm_line(run: Callable[[str], Ended]) -> None:
    ended = run("interrupt_2")

    assert all(ended.statuses), ended.statuses
    assert ended.verdicts(0)[0].endswith("was interrupted. All ranks stop.")


def test_sys_exit_of_one_rank_ends_all(run: Callable[[str], Ended]) -> None:
    ended = run("sys_exit_2")

    assert ended.statuses[2] == 3
    assert all(ended.statuses), ended.statuses
    assert "rank 2 [" in ended.verdicts(0)[0]
    assert "failed first: SystemExit: 3" in ended.verdicts(0)[0]


def test_process_that_ends_with_status_zero_in_mid_run_ends_the_others(run: Callable[[str], Ended]) -> None:
    ended = run("os_exit_1")

    assert ended.statuses[0] != 0 and ended.statuses[2] != 0
    assert "rank 1 [" in ended.verdicts(0)[0]
    assert "died first" in ended.verdicts(0)[0]


def test_forked_worker_does_not_hide_the_death_of_its_rank(run: Callable[[str], Ended]) -> None:
    ended = run("forked_child_outlives_2")

    assert all(ended.statuses), ended.statuses
    assert "rank 2 [" in ended.verdicts(0)[0] and "died first" in ended.verdicts(0)[0]


def test_rank_that_connects_after_the_verdict_is_ended(run: Callable[[str], Ended]) -> None:
    ended = run("raise_before_others_connect")

    assert all(ended.statuses), ended.statuses
    assert "rank 1 [" in ended.verdicts(0)[0] and "ValueError: bad batch" in ended.verdicts(0)[0]


def test_second_watch_on_the_same_store(run: Callable[[str], Ended]) -> None:
    ended = run("second_run_raises")

    assert all(ended.statuses), ended.statuses
    assert "rank 1 [" in ended.verdicts(0)[0] and "ValueError: bad batch" in ended.verdicts(0)[0]


@pytest.mark.parametrize("scenario", ["caught_then_second_run", "slow_rank", "rank_0_leaves_first"])
def test_orderly_stop_ends_nobody(run: Callable[[str], Ended], scenario: str) -> None:
    ended = run(scenario)

    assert ended.statuses == [0, 0, 0]
    assert all("MegaTPStrategy" not in screen for screen in ended.screens)


def test_rank_ends_with_its_launcher_before_the_ranks_are_connected(run: Callable[[str], Ended]) -> None:
    ended = run("launcher_dies")

    assert ended.statuses == [0, 0, 0]  # on every rank, a launcher of its own
    for screen in ended.screens:
        assert "the process that launched rank 1 (pid " in screen
        assert "ended before the ranks were connected. This rank stops." in screen


def launched(case: str, namespace: str) -> subprocess.CompletedProcess[str]:
    """Run launched.py; its stderr is at its end only when the last of its processes has ended."""
    command = [sys.executable, str(SCRIPTS / "launched.py"), case, namespace]
    limit = 2 * LIMIT_S  # the imports of two processes are in it
    return subprocess.run(command, env=environment(), text=True, stderr=subprocess.PIPE, timeout=limit)


@pytest.mark.extended  # processes that import Lightning
@pytest.mark.parametrize("case", ["crash_at_import", "crash_at_import_while_rank_0_ends"])
def test_launcher_ends_all_when_a_child_fails_at_import(case: str) -> None:
    ended = launched(case, "pytorch_lightning")

    assert ended.returncode == 1
    assert "the process of local rank 1 (pid " in ended.stderr
    assert ") ended with status 3, outside of a run" in ended.stderr


@pytest.mark.extended  # repeats test_killed_rank_ends_all under a launcher
def test_launcher_leaves_a_killed_child_to_the_watch_which_names_the_signal() -> None:
    ended = launched("child_is_killed", "lightning.pytorch")

    assert ended.returncode == 1
    assert "rank 1 (tp 1) [" in ended.stderr
    assert "died first, without reporting an exception: its process was killed by SIGKILL. All ranks" in ended.stderr
    assert "outside of a run" not in ended.stderr
