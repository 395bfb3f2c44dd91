"""The rank pool itself: what every distributed test stands on."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import lightning_utilities.core.rank_zero
import pytest
import torch
import torch.distributed as dist
import torchmetrics.utilities.prints

from tests import ranks
from tests.distributed.ranks import test_fork_server
from tests.fork_server import ForkServer
from tests.ranks import NOT_CONNECTED, RankError, RankPools, pools, run_ranks, run_reference


def _sum(rank: int, world_size: int, offset: float) -> float:
    value = torch.tensor([rank + offset])
    dist.all_reduce(value)
    return float(value)


def _raise_on(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        raise ValueError("the culprit's words")
    dist.barrier()


def _die_on(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        os._exit(7)
    dist.barrier()


def _die_of(rank: int, world_size: int, culprit: int, number: int) -> None:
    if rank == culprit:
        os.kill(os.getpid(), number)
    dist.barrier()


def _order(rank: int, world_size: int) -> tuple[int, list[str], list[int]]:
    """Of a set, and what Lightning and torchmetrics think is their rank."""
    told = [
        module.rank_zero_only.rank for module in (lightning_utilities.core.rank_zero, torchmetrics.utilities.prints)
    ]
    return hash("a word"), list({f"word {i}" for i in range(20)}), told


def _hang_on(rank: int, world_size: int, culprit: int) -> None:
    if rank == culprit:
        threading.Event().wait()


def _not_connected(rank: int, world_size: int, seen: str, times: int) -> int:
    if rank == 1:
        Path(seen).write_text(Path(seen).read_text() + "x")
        if len(Path(seen).read_text()) <= times:
            raise RuntimeError(f"{NOT_CONNECTED} with [...] Connection closed by peer")
    dist.barrier()
    return os.getpid()


def _import_package() -> None:
    sys.modules["lightning_megatp"] = sys


def _nothing() -> int:
    sys.modules.pop("lightning_megatp", None)
    return os.getpid()


def _send_columns(rank: int, world_size: int, how: str) -> None:
    columns = torch.zeros(4, 6)[:, :3]
    if how == "isend" and rank == 0:
        dist.isend(columns, 1)
    elif how == "all_reduce":
        dist.all_reduce(columns)
    dist.barrier()


@pytest.mark.parametrize("how", ["all_reduce", "isend"])
def test_what_is_not_contiguous_is_not_sent(how: str) -> None:
    with pytest.raises(RankError, match=how + r" of a tensor \(4, 3\) with strides \(6, 1\)"):
        run_ranks(2, _send_columns, how)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_back_by_rank(world_size: int) -> None:
    expected = world_size * (world_size - 1) / 2 + 0.5 * world_size
    assert run_ranks(world_size, _sum, 0.5) == [expected] * world_size


def test_an_error_names_its_rank_first_and_the_pool_goes_on() -> None:
    with pytest.raises(RankError, match="rank 1 of 2: ValueError: the culprit's words") as error:
        run_ranks(2, _raise_on, 1)
    assert "_raise_on" in error.value.failures[0].traceback
    assert run_ranks(2, _sum, 0.0) == [1.0, 1.0]


def test_a_dead_rank_is_named_and_the_pool_starts_again() -> None:
    with pytest.raises(RankError, match="ended with status 7"):
        run_ranks(2, _die_on, 1)
    assert run_ranks(2, _sum, 0.0) == [1.0, 1.0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_dies_of_a_signal_is_named_and_so_is_the_signal(number: int) -> None:
    with pytest.raises(RankError, match=f"ended with status -{number:d} in ") as error:
        run_ranks(2, _die_of, 1, number)
    (death,) = (failure for failure in error.value.failures if failure.type_name == "Died")
    assert death.rank == 1
    if number == signal.SIGSEGV:
        assert "in _die_of" in death.traceback, "where it was"
    assert run_ranks(2, _sum, 0.0) == [1.0, 1.0]


def test_neighbours_have_their_sets_in_different_orders_and_know_their_rank() -> None:
    seeds, orders, told = zip(*run_ranks(4, _order), strict=True)
    assert told == tuple([rank, rank] for rank in range(4))
    for rank, neighbour in ((0, 1), (0, 2), (1, 3), (2, 3)):
        assert seeds[rank] != seeds[neighbour] and orders[rank] != orders[neighbour]


def test_a_closed_pool_leaves_no_process_and_no_folder() -> None:
    run_ranks(2, _sum, 0.0)
    pool = pools.get(2)
    pids, folder = [process.pid for process in pool.processes], Path(pool.directory.name)
    assert folder.exists()
    pool.close()
    assert not folder.exists() and not pool.usable
    for pid in pids:
        with pytest.raises(ProcessLookupError):  # not even a status that nobody asked for
            os.kill(pid, 0)


def test_a_server_that_ended_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "ForkServer", lambda imports, *options, **more: ForkServer((), *options, **more))
    monkeypatch.setattr(ranks, "_serve", test_fork_server._wait)  # it imports nothing either
    own = RankPools()
    try:
        first, second = own.get(2).servers
        before = own.get(2)
        os.kill(first._process.pid, signal.SIGKILL)
        first._process.wait()
        assert not before.usable
        after = own.get(2)
        assert after.usable and first not in after.servers and second in after.servers
    finally:
        own.close()
    assert not any(server.usable for server in (first, *after.servers))


@pytest.mark.extended  # waits, and starts ranks anew
def test_a_rank_that_never_ends_is_stopped() -> None:
    with pytest.raises(RankError, match="rank 1 of 2: Timeout: not done after 1 s") as error:
        run_ranks(2, _hang_on, 1, timeout=1.0)
    assert "_hang_on" in error.value.failures[0].traceback, "the place where it hangs"
    assert run_ranks(2, _sum, 0.0) == [1.0, 1.0]


def test_where_gloo_does_not_connect_ranks_others_try_once_more(tmp_path: Path) -> None:
    (tmp_path / "seen").write_text("")
    before = run_ranks(2, _not_connected, str(tmp_path / "seen"), 0)
    with pytest.warns(UserWarning, match=f"{NOT_CONNECTED}.*; once more"):
        assert set(run_ranks(2, _not_connected, str(tmp_path / "seen"), 2)).isdisjoint(before)
    (tmp_path / "seen").write_text("")
    with pytest.warns(UserWarning, match="once more"), pytest.raises(RankError, match=NOT_CONNECTED):
        run_ranks(2, _not_connected, str(tmp_path / "seen"), 2)


def test_the_reference_process_refuses_the_package() -> None:
    with pytest.raises(RankError, match="must not know lightning_megatp"):
        run_reference(_import_package)
    assert run_reference(_nothing) == pools.reference().processes[0].pid
