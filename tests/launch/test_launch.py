"""Every way to start a run, as real processes: same loss as one device, and our strategy in nobody's way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.crossing import fewer
from tests.ranks import free_port

SCRIPT = Path(__file__).with_name("script.py")
TIMEOUT_S = 120
NAMESPACES = ["lightning.pytorch", "pytorch_lightning"]
PYTHON = [sys.executable, "-W", "ignore"]
TORCHRUN = [*PYTHON, "-m", "torch.distributed.run"]


def _start(command: list[str], environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    foreign = ("SLURM_", "TORCHELASTIC_", "MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    clean |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200", **(environment or {})}
    return subprocess.Popen(
        command, env=clean, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def _finish(*processes: subprocess.Popen[str]) -> str:
    """What they printed, one after another. All must end well and in time."""
    try:
        printed = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(printed)
    return "\n".join(printed)


def _results(printed: str) -> list[dict[str, Any]]:
    lines = [line[line.index("RESULT ") + 7 :] for line in printed.splitlines() if "RESULT " in line]
    return sorted(map(json.loads, lines), key=lambda result: result.get("rank", -1))


def _script(namespace: str, how: str, *arguments: str) -> list[str]:
    return [str(SCRIPT), namespace, how, *arguments]


@cache
def _alone(namespace: str) -> list[dict[str, Any]]:
    return _results(_finish(_start([*PYTHON, *_script(namespace, "alone")])))


def _reference() -> float:
    """The loss of one device, strategy auto."""
    return next(float(r["loss"]) for r in _alone("lightning.pytorch") if r.get("environment") == "NoneType")


def _check(printed: str, environment: str, strategy: str = "lightning_megatp.MegaTPStrategy") -> None:
    results = _results(printed)
    assert [result["rank"] for result in results] == [0, 1], printed
    for result in results:
        assert (result["world_size"], result["rows"]) == (2, 4)
        assert (result["environment"], result["strategy"]) == (environment, strategy)
        assert result["loss"] == pytest.approx(_reference(), rel=1e-12)


def test_lightning_starts_the_other_rank() -> None:
    _check(_finish(_start([*PYTHON, *_script("lightning.pytorch", "1")])), "LightningEnvironment")


def test_the_other_namespace_through_its_cli(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        """
        trainer:
          accelerator: cpu
          devices: 2
          precision: 64-true
          max_epochs: 1
          logger: false
          enable_checkpointing: false
          enable_progress_bar: false
          enable_model_summary: false
          strategy:
            class_path: lightning_megatp.pytorch_lightning.MegaTPStrategy
            init_args:
              tp: 2
              summary: false
              plan: {up: column, down: {style: row}}
        """
    )
    printed = _finish(_start([*PYTHON, *_script("pytorch_lightning", "cli", "fit", f"--config={config}")]))
    _check(printed, "LightningEnvironment", "lightning_megatp.pytorch_lightning.MegaTPStrategy")


@pytest.mark.extended  # repeats test_torchrun_on_two_nodes on one
def test_torchrun_on_one_node() -> None:
    torchrun = [*TORCHRUN, "--standalone", "--nproc-per-node=2"]
    _check(_finish(_start([*torchrun, *_script("lightning.pytorch", "1")])), "TorchElasticEnvironment")


def test_torchrun_on_two_nodes() -> None:
    torchrun = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    torchrun.append(f"--master-port={free_port()}")
    script = _script("lightning.pytorch", "2")
    _check(_finish(*(_start([*torchrun, f"--node-rank={n}", *script]) for n in (0, 1))), "TorchElasticEnvironment")


@pytest.mark.extended  # repeats test_torchrun_on_two_nodes in a further layout
def test_stages_on_two_nodes() -> None:
    """Rank 0, on the first node, has the last stage; each stage has its own layer only."""
    torchrun = [*TORCHRUN, "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    torchrun.append(f"--master-port={free_port()}")
    script = _script("pytorch_lightning", "stages")
    results = _results(_finish(*(_start([*torchrun, f"--node-rank={n}", *script]) for n in (0, 1))))
    assert [(result["rank"], result["parameters"]) for result in results] == [(0, 9), (1, 40)]
    for result in results:
        assert result["loss"] == pytest.approx(_reference(), rel=1e-12)


def test_slurm() -> None:
    """srun starts one process per task and describes it by SLURM_* variables."""
    job = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1", "SLURM_NODEID": "0"}
    job |= {"SLURM_JOB_ID": "4711", "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "127.0.0.1"}
    job |= {"MASTER_PORT": str(free_port())}
    script = [*PYTHON, *_script("lightning.pytorch", "1")]
    tasks = [_start(script, {**job, "SLURM_PROCID": rank, "SLURM_LOCALID": rank}) for rank in ("0", "1")]
    _check(_finish(*tasks), "SLURMEnvironment")


@pytest.mark.parametrize("namespace", fewer(NAMESPACES, extended=["pytorch_lightning"]))
def test_the_name_megatp(namespace: str) -> None:
    reference, named = (result for result in _alone(namespace) if "loss" in result)
    assert named["strategy"] == f"{_package(namespace)}.MegaTPStrategy"
    assert named["loss"] == pytest.approx(reference["loss"], rel=1e-12)
    assert named["rows"] == 8


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_the_strategy_of_the_other_namespace_is_refused_by_lightning(namespace: str) -> None:
    error = next(result for result in _alone(namespace) if "error" in result)
    assert error["error"] == "ValueError"
    assert "You selected an invalid strategy name" in error["message"]
    assert "lightning_megatp" in error["message"]


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_settings_that_do_not_fit(namespace: str) -> None:
    _, world, slurm = (result["message"] for result in _alone(namespace) if "error" in result)
    assert "world size 3 is not divisible by tp * pp = 2" in world
    assert "You set `devices=4` in Lightning, but the number of tasks per node configured in SLURM" in slurm


def _package(namespace: str) -> str:
    return "lightning_megatp" if namespace == "lightning.pytorch" else "lightning_megatp.pytorch_lightning"


# ---------------------------------------------------------------- the command line

ARGUMENTS = {
    "tp": "how many ranks share each layer",
    "pp": "how many ranks share the layers one after another",
    "microbatches": "Into how many microbatches a batch is split when pp > 1",
    "schedule": "Order of the microbatches",
    "dp": "Data-parallel size; by default what the devices leave",
    "plan": "How each layer is split",
    "sequence_parallel": "False ignores the plan's `sequence` entries",
    "parallelism": "A ParallelismPlugin, or a subclass of your own",
    "strict": "Raise where set-up would otherwise only warn about the plan",
    "summary": "Print at set-up who is where, what is split",
    "bucket_mb": "Size of the data-parallel gradient buckets in MiB",
    "timeout": "Of every collective",
    "process_group_backend": '"nccl" or "gloo"',
}


def test_the_help_of_the_strategy() -> None:
    command = _script("lightning.pytorch", "cli", "fit", "--trainer.strategy.help", "lightning_megatp.MegaTPStrategy")
    printed = " ".join(_finish(_start([*PYTHON, *command])).split())
    for name, description in ARGUMENTS.items():
        assert f"--trainer.strategy.{name}" in printed or f"--trainer.strategy.init_args.{name}" in printed, name
        assert description in printed, name


@pytest.mark.extended  # a process started for one message
def test_the_printed_config_with_an_override(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        """
        trainer:
          strategy:
            class_path: lightning_megatp.MegaTPStrategy
            init_args: {tp: 2, plan: {up: column, down: row}}
        """
    )
    arguments = ["fit", f"--config={config}", "--trainer.strategy.tp", "4", "--print_config"]
    printed = _finish(_start([*PYTHON, *_script("lightning.pytorch", "cli", *arguments)]))
    block = printed[printed.index("  strategy:") :].splitlines()
    assert block[1].strip() == "class_path: lightning_megatp.MegaTPStrategy"
    given = {name: value for name, _, value in (line.strip().partition(": ") for line in block[3:45])}
    assert ARGUMENTS.keys() <= given.keys() | {line.strip().removesuffix(":") for line in block}
    assert (given["tp"], given["dp"], given["up"], given["down"]) == ("4", "null", "column", "row")
    assert (given["sequence_parallel"], given["strict"], given["bucket_mb"]) == ("true", "false", "25.0")
