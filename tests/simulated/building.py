"""The simulated device's library, compiled once for a version of torch and of its source."""

from __future__ import annotations

import functools
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent / "device.cpp"
NAME = "simulated_device"


def compiles() -> bool:
    """Whether this machine has what it takes."""
    return shutil.which("g++") is not None and (Path(sys.executable).parent / "ninja").exists()


@functools.cache
def library() -> Path:
    """Where it lies. Compiling takes half a minute.

    Raises:
        RuntimeError: it does not compile.
    """
    import torch

    key = hashlib.sha256(f"{torch.__version__} {sys.version}".encode() + SOURCE.read_bytes()).hexdigest()[:16]
    directory = Path(tempfile.gettempdir()) / f"{NAME}_{key}"
    found = directory / f"{NAME}.so"
    if not found.exists():
        directory.mkdir(exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "tests.simulated.building", str(directory)],
            cwd=SOURCE.parent.parent.parent, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{SOURCE.name} does not compile:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return found


def _compile(directory: str) -> None:
    """In a process of its own, since the library is loaded too."""
    import os

    from torch.utils.cpp_extension import load

    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja's
    load(NAME, [str(SOURCE)], extra_cflags=["-O1", "-w"], build_directory=directory)


if __name__ == "__main__":
    _compile(sys.argv[1])
