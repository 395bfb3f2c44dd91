"""`megatp plan` and `megatp verify` on a script, as a user calls them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from lightning_megatp import MegaTPStrategy
from tests.unit.auto_models import Gated, Model, Separate


class Lit(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Model({body}, layers=2)

    def training_step(self, batch, batch_idx):
        loss = self.net.step(batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1 / self.trainer.estimated_stepping_batches)


if __name__ == "__main__":
    data = DataLoader(torch.arange(40).view(8, 5), batch_size=4)
    strategy = MegaTPStrategy(tp=int(sys.argv[1]), plan={plan})
    trainer = Trainer(accelerator="cpu", devices=int(sys.argv[1]), strategy=strategy, max_steps=2, logger=False)
    trainer.fit(Lit(), data)
    print("trained")
"""
WRONG = """
from lightning_megatp.tensor import layers
layers.reduce_from_region = lambda x, group, spend=False: x
"""


def megatp(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    distributed = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in distributed}
    root = str(Path(__file__).parents[3])
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": root}
    command = [sys.executable, "-c", "from lightning_megatp.cli import main; main()", *arguments]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)


def script(tmp_path: Path, body: str = "Separate", plan: str = '"auto"', before: str = "") -> str:
    path = tmp_path / "train.py"
    path.write_text(before + SCRIPT.replace("{body}", body).replace("{plan}", plan))
    return str(path)


def test_plan_shows_what_would_be_split_and_trains_nothing(tmp_path: Path) -> None:
    ended = megatp(tmp_path, "plan", script(tmp_path), "4")
    assert ended.returncode == 0, ended.stderr
    assert "net.blocks.0 and 1 more, over tp=4" in ended.stdout
    assert "body.q" in ended.stdout and "8 of 24: [0:8]" in ended.stdout and "Proven in float64" in ended.stdout
    assert "trained" not in ended.stdout
    assert "activations unsplit" in ended.stdout and "could not be predicted" not in ended.stdout


def test_verify_compares_every_gradient(tmp_path: Path) -> None:
    ended = megatp(tmp_path, "verify", script(tmp_path, "Gated"), "2")
    assert ended.returncode == 0, ended.stderr
    assert "all 14 agree" in ended.stdout and "trained" not in ended.stdout


def test_verify_with_what_needs_a_logger(tmp_path: Path) -> None:
    """LearningRateMonitor raises without a logger."""
    path = Path(script(tmp_path, "Gated"))
    text = path.read_text().replace("logger=False", "logger=CSVLogger('logs'), callbacks=[LearningRateMonitor()]")
    imports = (
        "from lightning.pytorch.callbacks import LearningRateMonitor\nfrom lightning.pytorch.loggers import CSVLogger\n"
    )
    scheduled = "o = torch.optim.AdamW(self.parameters()); return [o], [torch.optim.lr_scheduler.StepLR(o, 1)]"
    old = "return torch.optim.AdamW"
    path.write_text(imports + text.replace(old, f"{scheduled}\n        {old}"))
    ended = megatp(tmp_path, "verify", str(path), "2")
    assert ended.returncode == 0, ended.stderr
    assert "all 14 agree" in ended.stdout


@pytest.mark.extended  # repeats test_verify_compares_every_gradient with fewer layers
def test_verify_with_fewer_layers(tmp_path: Path) -> None:
    """What the model's list has in all, and gradients of one layer instead of two."""
    ended = megatp(tmp_path, "verify", "--layers", "1", script(tmp_path, "Gated"), "2")
    assert ended.returncode == 0, ended.stderr
    assert "`net.blocks` keeps the first of each kind of its 2 layers" in ended.stdout
    assert "all 8 agree" in ended.stdout


def test_verify_fails_where_a_reduction_is_missing(tmp_path: Path) -> None:
    ended = megatp(tmp_path, "verify", script(tmp_path, "Gated", before=WRONG), "2")
    assert ended.returncode != 0
    assert "verify=True: the first batch's loss is" in ended.stderr


@pytest.mark.extended  # a process started for one message
def test_a_script_that_never_trains_is_told_so(tmp_path: Path) -> None:
    path = tmp_path / "idle.py"
    path.write_text("print('nothing')")
    ended = megatp(tmp_path, "plan", str(path))
    assert ended.returncode == 1 and "ended before a Trainer with MegaTPStrategy" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["plan", "nofile.py"], "megatp plan: there is no script nofile.py."),
        (["trace", "nope.json"], "megatp trace: [Errno 2] No such file or directory: 'nope.json'"),
        (
            ["trace", "train.py"],
            "megatp trace: train.py is not a trace that MegaTPStrategy(trace=...) wrote: Expecting",
        ),
    ],
)
def test_files_that_are_not_there_are_told_in_one_line(arguments: list[str], text: str, tmp_path: Path) -> None:
    script(tmp_path)
    ended = megatp(tmp_path, *arguments)
    assert ended.returncode == 1
    assert ended.stderr.startswith(text) and len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("module", ["lightning_megatp", "lightning_megatp.cli"])
def test_the_command_as_a_module_and_its_help(module: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "COLUMNS": "200"}
    command = [sys.executable, "-m", module, "estimate", "--help"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0
    assert "--hf MODEL" in ended.stdout and "--tp N (2)" in ended.stdout and "--zero LEVEL" in ended.stdout


@pytest.mark.extended  # repeats plan and verify of scripts with a config
@pytest.mark.parametrize("command", ["plan", "verify"])
def test_a_hugging_face_config(command: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path / "model")
    ended = megatp(tmp_path, command, "--hf", str(tmp_path / "model"), "--tp", "2")
    assert ended.returncode == 0, ended.stderr
    assert ("split_size divided" if command == "plan" else "agree (limit") in ended.stdout


def test_estimate_of_a_script_starts_no_ranks(tmp_path: Path) -> None:
    ended = megatp(tmp_path, "estimate", script(tmp_path, "Gated"), "2")
    assert ended.returncode == 0, ended.stderr
    assert "Memory per rank, predicted: tp=2, pp=1, dp=1, zero=0" in ended.stdout
    assert "could not" not in ended.stdout and "trained" not in ended.stdout
    assert "?" not in ended.stdout


@pytest.mark.extended
def test_estimate_of_a_hugging_face_config(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=64, n_positions=32)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path / "model")
    layout = ["--tp", "2", "--pp", "2", "--dp", "4", "--zero", "3", "--microbatch", "2", "32"]
    activations = []
    for recompute in ("none", "full"):
        ended = megatp(tmp_path, "estimate", "--hf", str(tmp_path / "model"), *layout, "--recompute", recompute)
        assert ended.returncode == 0, ended.stderr
        assert "tp=2, pp=2, dp=4, zero=3" in ended.stdout and "could not" not in ended.stdout
        row = next(line for line in ended.stdout.splitlines() if line.startswith(("│ 0", "| 0")))
        activations.append(row)
    assert activations[0] != activations[1]
