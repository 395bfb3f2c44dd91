"""Train the GPT: a LightningCLI program, and what it prints when training has ended.

python examples/gpt/train.py fit --config examples/gpt/tp2_pp2.yaml
"""

import csv
import math
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.environments import LightningEnvironment
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from torch.utils.data import DataLoader

from data import TextBytes
from model import GPT

PROMPTS = ["def ", "class ", "import "]


class TrainingClock(Callback):
    """Counts the tokens of training and the seconds they took, validation left out."""

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.resumed = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.tokens += batch[0].numel()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self.seconds += time.perf_counter() - self.resumed

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.resumed = time.perf_counter()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seconds += time.perf_counter() - self.resumed


class Main(LightningCLI):
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.link_arguments("data.context", "model.context")

    def after_fit(self) -> None:
        # From here on rank 0 is alone: the other ranks return and exit, so nothing below may wait for them.
        if self.trainer.is_global_zero:
            console = Console()
            report(self.trainer, console)
            show_samples(self.trainer, console)


def report(trainer: Trainer, console: Console) -> None:
    """Print who was where, the numbers of the run, and where its files are."""
    mesh = getattr(trainer.strategy, "mesh", None)  # only a parallel strategy has one
    if mesh is not None:
        console.print(mesh.table())

    full = local = sum(parameter.numel() for parameter in trainer.lightning_module.parameters())
    if hasattr(trainer.strategy, "parameter_counts"):
        full, local = trainer.strategy.parameter_counts()
    callbacks = trainer.callbacks  # type: ignore[attr-defined]  # Lightning sets it where mypy does not look
    clock = next(callback for callback in callbacks if isinstance(callback, TrainingClock))
    replicas = mesh.size("dp") if mesh is not None else trainer.world_size
    log = next((logger for logger in trainer.loggers if isinstance(logger, CSVLogger)), None)

    table = Table(show_header=False)
    table.add_column()
    table.add_column(overflow="fold")  # paths are for copying: never cut them short
    table.add_row("parameters in all", f"{full:,}")
    table.add_row("parameters on rank 0", f"{local:,}")
    table.add_row("tokens/s", f"{clock.tokens * replicas / clock.seconds:,.0f}")
    table.add_row("training", f"{trainer.global_step} steps in {clock.seconds:.0f} s, validation not counted")
    val_bpb = trainer.callback_metrics.get("val_bpb")
    table.add_row("validation bits per byte", "none: no validation ran" if val_bpb is None else f"{val_bpb:.4f}")
    table.add_row("checkpoint", best_checkpoint(trainer) or "none written")
    table.add_row("loss curve", draw_loss_curve(Path(log.log_dir)) if log else "none: no CSVLogger")
    console.print(table)


def best_checkpoint(trainer: Trainer) -> str:
    return getattr(trainer.checkpoint_callback, "best_model_path", "")


def draw_loss_curve(folder: Path) -> str:
    """Draw what the CSVLogger wrote in this folder, in bits per byte, and return the picture's path."""
    metrics = folder / "metrics.csv"
    if not metrics.exists():  # fewer steps than log_every_n_steps, and no validation
        return "none: nothing was logged"

    import matplotlib

    matplotlib.use("Agg")  # no screen needed
    from matplotlib import pyplot as plt

    with metrics.open() as file:
        rows = list(csv.DictReader(file))
    _, axes = plt.subplots(figsize=(7, 4))
    for name, scale, style in ("train_loss", 1 / math.log(2), "-"), ("val_bpb", 1.0, "o-"):
        points = [(int(row["step"]), float(row[name]) * scale) for row in rows if row.get(name)]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name.partition("_")[0], linewidth=1)
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, 8.5))
    axes.legend()
    axes.grid(alpha=0.3)
    picture = folder / "loss.png"
    plt.savefig(picture, dpi=150, bbox_inches="tight")
    plt.close()
    return str(picture)


def show_samples(trainer: Trainer, console: Console) -> None:
    """Let the best checkpoint write a few lines, in a plain Trainer on one device."""
    checkpoint = best_checkpoint(trainer)
    if not checkpoint:
        return
    model = GPT.load_from_checkpoint(checkpoint)
    plain = Trainer(
        strategy="auto",
        devices=1,
        # This process alone, even where torchrun or SLURM has started several.
        plugins=LightningEnvironment(),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    prompts = [torch.tensor(list(prompt.encode())) for prompt in PROMPTS]
    samples = plain.predict(model, DataLoader(prompts)) or []  # type: ignore[arg-type]
    for text in samples:
        console.print(Rule("sample", style="dim"))
        console.print(bytes(text[0].tolist()).decode(errors="replace"), markup=False, highlight=False)


def main() -> None:
    # Slicing bytes takes microseconds: more workers would only take the cores away from training.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    Main(GPT, TextBytes, trainer_defaults={"callbacks": [TrainingClock()]})


if __name__ == "__main__":
    main()
