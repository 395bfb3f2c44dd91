"""How much memory a piece of code takes at its peak."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

TELLS = Path("/proc/self/clear_refs").exists()
"""Whether the system can be asked for a peak that begins anew: Linux alone."""
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""Environment of a process that gives freed tensors back at once. Otherwise glibc moves its threshold up to the largest
tensor freed so far, and the holes that a heap happens to have are measured: tens of MiB, different in each run."""


def status_mib(key: str) -> float:
    """A line of this process's `/proc/self/status`, as `VmRSS` or `VmHWM`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) / 2**10


def peak_mib(run: Callable[[], object]) -> float:
    """How far the resident memory of this process rises, mapped files included. Give the process `ALLOCATOR`."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = status_mib("VmRSS")
    run()
    return status_mib("VmHWM") - before


def printed_alone(function: Callable[..., object], *arguments: str) -> str:
    """What a function of a test's module prints, in a process of its own with `ALLOCATOR`."""
    program = f"import sys; from {function.__module__} import {function.__name__} as run; run(*sys.argv[1:])"
    environment = {**os.environ, **ALLOCATOR, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", program, *arguments]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout
