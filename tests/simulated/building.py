"""The simulated device's library, compiled once for a version of torch and of its source."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCE = Path(__file__).parent / "device.cpp"
NAME = "simulated_device"


def missing() -> str:
    """What this machine lacks for it; empty if nothing."""
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return "a torch that was built without CUDA"
    needed = {
        "g++": shutil.which("g++") is not None,
        "Python's headers": (Path(sysconfig.get_path("include")) / "Python.h").exists(),
        "ninja": (Path(sys.executable).parent / "ninja").exists(),
    }
    return ", ".join(name for name, found in needed.items() if not found)


@functools.cache
def library() -> Path:
    """Where it lies. Compiling takes half a minute.

    Raises:
        RuntimeError: it does not compile.
    """
    import torch

    key = hashlib.sha256(f"{torch.__version__} {sys.version}".encode() + SOURCE.read_bytes()).hexdigest()[:16]
    found = Path(tempfile.gettempdir()) / f"{NAME}_{os.getuid()}_{key}" / f"{NAME}.so"
    if not found.exists():
        with tempfile.TemporaryDirectory() as directory:
            done = subprocess.run(
                [sys.executable, "-m", "tests.simulated.building", directory],
                cwd=SOURCE.parent.parent.parent, capture_output=True, text=True,
            )  # fmt: skip
            if done.returncode:
                raise RuntimeError(f"{SOURCE.name} does not compile:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
            found.parent.mkdir(mode=0o700, exist_ok=True)
            complete = found.with_suffix(f".{os.getpid()}")
            shutil.copy(Path(directory) / found.name, complete)
            complete.rename(found)  # never half of it
    return found


def _compile(directory: str) -> None:
    """In a process of its own, since the library is loaded too."""
    from torch.utils.cpp_extension import load

    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # ninja's
    load(NAME, [str(SOURCE)], extra_cflags=["-O1", "-w"], build_directory=directory)


if __name__ == "__main__":
    _compile(sys.argv[1])
