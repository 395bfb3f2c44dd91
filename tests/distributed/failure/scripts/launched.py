"""A script as a user starts theirs, with our launcher: `launched.py <case> <namespace of Lightning>`."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from datetime import timedelta

case, namespace = sys.argv[1:]
is_child = "LOCAL_RANK" in os.environ
if is_child and case.startswith("crash_at_import"):
    sys.exit(3)

import torch.distributed as dist  # noqa: E402  (the crash comes before anything is imported)

from lightning_megatp.failure import FailureWatch  # noqa: E402
from lightning_megatp.failure.parent import LAUNCHER_PID_VARIABLE  # noqa: E402


def child() -> None:
    assert os.environ[LAUNCHER_PID_VARIABLE] == str(os.getppid())
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, False, timedelta(minutes=5))
    FailureWatch(1, 2, store, name="rank 1 (tp 1)").start()
    os.kill(os.getpid(), signal.SIGKILL)


def launch() -> None:
    base = importlib.import_module(f"{namespace}.strategies.launchers.subprocess_script")._SubprocessScriptLauncher
    environments = "lightning_fabric" if namespace == "pytorch_lightning" else "lightning.fabric"
    environment = importlib.import_module(f"{environments}.plugins.environments").LightningEnvironment()
    from lightning_megatp.shim.launcher import subprocess_launcher

    launcher = subprocess_launcher(base, settle_s=1.0)(environment, num_processes=2, num_nodes=1)

    def main() -> None:
        assert LAUNCHER_PID_VARIABLE not in os.environ
        if case == "child_is_killed":
            store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), 2, True, timedelta(minutes=5))
            watch = FailureWatch(0, 2, store, grace_s=0.5, describe_exit=launcher.describe_exit)
            watch.start()
            launcher.failure_watch = watch
        if case == "crash_at_import_while_rank_0_ends":
            return
        threading.Event().wait()

    launcher.launch(main)


if __name__ == "__main__":
    child() if is_child else launch()
