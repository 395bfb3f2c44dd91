"""A rank that raises or dies inside a real fit ends the job, and the screen names it: started by Lightning itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.training import LIGHTNING_2_6

SCRIPT = Path(__file__).parent / "scripts" / "trainer.py"
LIMIT_S = 90  # importing Lightning twice on a busy machine included; from the strike on it is a few seconds


def run_script(script: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    distributed = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in distributed}
    root = str(Path(__file__).parents[3])
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([root, environment.get("PYTHONPATH", "")])}
    # Both ranks write to one pipe: it is read to the end, which comes when the last of them is gone.
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("what", "point", "rank", "form"),
    [
        ("kill", "training_step", 1, ""),
        pytest.param("raise", "setup", 1, "", marks=pytest.mark.extended),
        pytest.param("raise", "training_step", 1, "file", marks=pytest.mark.extended),
        pytest.param("raise", "training_step", 1, "", marks=pytest.mark.extended),
        pytest.param("raise", "training_step", 0, "folder", marks=pytest.mark.extended),
        pytest.param("kill", "training_step", 0, "", marks=pytest.mark.extended),
        pytest.param("raise", "save", 1, "", marks=pytest.mark.extended),
        pytest.param("raise", "on_train_end", 0, "", marks=pytest.mark.extended),
    ],
)
def test_one_rank_ends_all_and_is_named(what: str, point: str, rank: int, form: str, tmp_path: Path) -> None:
    if form and not LIGHTNING_2_6:
        pytest.skip("Lightning 2.5 has no `save_on_exception`")
    ended = run_script(SCRIPT, tmp_path, what, point, str(rank), str(tmp_path), *filter(None, [form]))
    assert ended.returncode != 0, ended.stdout
    assert "finished" not in ended.stdout
    cause = f"ValueError: struck in {point}" if what == "raise" else "died first"
    verdicts = [line for line in ended.stdout.splitlines() if "MegaTPStrategy: rank" in line]
    assert verdicts, ended.stdout
    assert all(f"rank {rank} " in line and cause in line for line in verdicts), verdicts
    if form == "file":  # a folder in the background may not be complete
        assert (tmp_path / "last.ckpt").exists(), "the checkpoint before is still there"
        assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["epoch=0-step=2.ckpt", "last.ckpt"]
    if form:
        assert "no checkpoint was saved after the ValueError" in ended.stdout
        assert "not all ranks have raised within" in ended.stdout


def test_a_plan_that_does_not_fit_is_told_once_where_the_user_wrote_the_fit(tmp_path: Path) -> None:
    ended = run_script(SCRIPT.with_name("bad_plan.py"), tmp_path)
    lines = ended.stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if "Traceback" in line)
    assert ended.returncode == 1
    assert "the plan's pattern `layre` matches no module" in lines[-1], ended.stdout
    assert ended.stdout.count("matches no module") == ended.stdout.count("Traceback") == 1, ended.stdout
    frames = [line for line in lines[first:] if "File " in line]
    assert len(frames) == 1 and "bad_plan.py" in frames[0], ended.stdout
