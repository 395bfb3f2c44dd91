"""A model that no rank could hold is built, trained and saved under a limit that the kernel keeps."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.training import PLAIN, Layout
from tests.fork_server import REPOSITORY
from tests.memory import TELLS
from tests.ranks import free_port

LAYOUT = Layout(tp=2, pp=2, dp=2, microbatches=2, zero=3)
CONFIG = {"layers": 38, "hidden": 384}
"""67 million parameters, 1 GiB with gradients and AdamW's state; a block is 1/38 of it."""
ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(2**16), "MALLOC_TRIM_THRESHOLD_": str(2**20)}
"""Freed tensors go back to the system at once: the allocator's holes are not asked for."""
TIMEOUT_S = 400


def _small_stacks() -> None:
    """8 MiB per thread are reserved otherwise, and count as data though nothing is there."""
    resource.setrlimit(resource.RLIMIT_STACK, (2**20, 2**20))


def _run(layout: Layout, folder: Path, share: float) -> tuple[list[int], list[str]]:
    """Exit status, and what was printed, of each rank.

    Args:
        share: the limit, of what the whole model takes; 0 for none.
    """
    arguments = {"layout": dataclasses.asdict(layout), "folder": str(folder), "config": CONFIG, "share": share}
    command = [sys.executable, "-W", "ignore", "-m", "tests.distributed.memory.limited", json.dumps(arguments)]
    common = {**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "NODE_RANK": "0"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(layout.ranks)}
    folder.mkdir(exist_ok=True)
    processes, logs = [], [folder / f"rank{rank}.log" for rank in range(layout.ranks)]
    try:
        for rank, log in enumerate(logs):
            ranks = {} if layout.plain else {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with log.open("wb") as file:
                process = subprocess.Popen(
                    command, env={**common, **ranks}, cwd=folder, stdout=file, stderr=subprocess.STDOUT,
                    start_new_session=True, preexec_fn=_small_stacks,
                )  # fmt: skip
            processes.append(process)
        return [process.wait(TIMEOUT_S) for process in processes], [log.read_text() for log in logs]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _losses(printed: str) -> list[float]:
    losses: list[float] = json.loads(printed.partition("RESULT ")[2].partition("\n")[0])
    return losses


@pytest.mark.extended
@pytest.mark.skipif(not TELLS, reason="only Linux limits and tells")
def test_a_model_of_four_times_the_limit(tmp_path: Path) -> None:
    """The full size is that of the parameters, gradients and optimizer's state of the whole model, in float32 with
    AdamW. The limit, on RLIMIT_DATA, is a quarter of it, beyond what a rank has after it has trained a tiny model.

    Of eight ranks each holds half of its limit between steps; the other half is for gathered blocks, activations and
    copies.
    """
    status, [alone] = _run(PLAIN, tmp_path / "plain", share=0)
    assert status == [0], alone
    status, printed = _run(LAYOUT, tmp_path / "ranks", share=1 / 4)
    assert status == [0] * LAYOUT.ranks, "\n".join(printed)
    halves = [_losses(printed[rank]) for rank in (0, LAYOUT.tp)]  # of the batch, on data-parallel ranks 0 and 1
    assert [sum(half) / 2 for half in zip(*halves, strict=True)] == pytest.approx(_losses(alone), rel=1e-3)
    saved = sum(file.stat().st_size for file in (tmp_path / "ranks" / "large").rglob("*") if file.is_file())
    assert saved > 12 / 16 * 2**30


@pytest.mark.extended
@pytest.mark.skipif(not TELLS, reason="only Linux limits and tells")
def test_without_zero_it_does_not_fit(tmp_path: Path) -> None:
    status, printed = _run(dataclasses.replace(LAYOUT, zero=0), tmp_path, share=1 / 4)
    assert all(status)
    assert any("can't allocate memory" in text or "bad_alloc" in text for text in printed), "\n".join(printed)
