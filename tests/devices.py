"""Where ranks of tests compute: `pytest --device cpu | simulated | cuda`.

- cpu: gloo between processes of this machine, the default.
- simulated: every process has a simulated CUDA device (tests/simulated), and groups for its tensors alone.
- cuda: real GPUs and NCCL. Ranks share them if there are fewer: each says that it is a machine of its own, with one
  GPU, and NCCL then sends through sockets. So one GPU is enough to train with any number of ranks, slowly.

`listen` counts waits of the host, on both kinds of CUDA device.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from typing import Any

VARIABLE = "TESTS_DEVICE"
KINDS = ("cpu", "simulated", "cuda")
BACKEND = "TESTS_BACKEND"
"""Another backend for process groups: gloo also sends between GPUs, through the hosts' memory."""
GPUS = "TESTS_GPUS"
"""How many there are, for ranks: each of them sees one."""


def chosen() -> str:
    """The kind that this process's tests or ranks use."""
    return os.environ.get(VARIABLE, "cpu")


def choose(kind: str) -> None:
    """For this process and those that it starts."""
    os.environ[VARIABLE] = kind
    if kind == "cuda":
        import torch

        os.environ[GPUS] = str(torch.cuda.device_count())


def backend(kind: str) -> str:
    """Of process groups."""
    return os.environ.get(BACKEND) or {"cpu": "gloo", "simulated": "simulated", "cuda": "nccl"}[kind]


def environment(kind: str, rank: int) -> dict[str, str]:
    """What a rank's process needs to use its device."""
    if kind != "cuda":
        return {VARIABLE: kind}
    own = {
        "NCCL_HOSTID": f"rank{rank}",  # ranks of one host may not share a GPU (NCCL before 2.30)
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",  # since then they may, if this is set
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
        "NCCL_MAX_CTAS": "2",
        "NCCL_BUFFSIZE": str(1 << 20),
    }
    gpu = rank % max(1, int(os.environ.get(GPUS, "1")))
    return {VARIABLE: kind, "CUDA_VISIBLE_DEVICES": str(gpu), **own}


def placed(ranks: int) -> dict[str, Any]:
    """Arguments of a Trainer of so many ranks."""
    if chosen() == "cuda":
        return {"accelerator": "cuda", "devices": 1, "num_nodes": ranks}
    return {"accelerator": "cpu" if chosen() == "cpu" else "cuda", "devices": ranks}


def listen(heard: Callable[[str], None] | None) -> None:
    """From now on `heard(why)` is called where the host waits for its CUDA device; None: no longer."""
    if chosen() == "simulated":
        from tests.simulated import cuda

        return cuda.listen(heard)
    import torch

    _listening.close()
    torch.cuda.set_sync_debug_mode("default" if heard is None else "warn")
    if heard is None:
        return

    def hear(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            heard(str(message))

    _listening.enter_context(warnings.catch_warnings())
    warnings.simplefilter("always")
    warnings.showwarning = hear


_listening = contextlib.ExitStack()
"""Ends with what warnings were before."""
