"""Arguments of the Trainer, callbacks and loggers that a model in parts is something else to."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.callbacks import BasePredictionWriter, BatchSizeFinder, ModelSummary, ThroughputMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.training import (
    LIGHTNING_2_6,
    PLAIN,
    PP2,
    TP2,
    TP2_PP2,
    Layout,
    eval_loader,
    make_trainer,
    run_program,
    shared_directory,
    tokens,
    train_loader,
)
from tests.parity.variants import variant
from tests.ranks import RankError

ZERO3 = Layout(dp=2, zero=3)


def _forward_outside(layout: Layout, root: str) -> tuple[int, list[int], list[str]]:
    """A fit in which the summary and the graph of TensorBoard would run the model's example."""
    torch.manual_seed(3)
    module = variant("untied").build()
    module.example_input_array = torch.zeros(2, 6, dtype=torch.int64)
    logger = TensorBoardLogger(root, log_graph=True)
    monitor = ThroughputMonitor(batch_size_fn=len)
    options: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1, "enable_model_summary": True}
    trainer = make_trainer(layout, callbacks=[ModelSummary(), monitor], **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, train_loader(layout, 2))
    assert module.example_input_array is not None
    devices = [counted.world_size for counted in monitor._throughputs.values()]
    return trainer.global_step, devices, [str(warning.message) for warning in caught]


@pytest.mark.parametrize("layout", [TP2, PP2, pytest.param(ZERO3, marks=pytest.mark.extended)], ids=str)
def test_an_example_is_not_run_by_one_rank(layout: Layout, tmp_path: Path) -> None:
    found = run_program(layout, _forward_outside, str(tmp_path))
    assert [found[:2] for found in found] == [(2, [layout.dp])] * layout.ranks
    assert any("log_graph=True draws nothing" in text for text in found[0][2])


class Sized(LightningDataModule):
    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout, self.batch_size = layout, 2

    def train_dataloader(self) -> Any:
        return DataLoader(tokens(32), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return []


def _found_size(layout: Layout, root: str) -> tuple[int, float]:
    torch.manual_seed(3)
    directory = str(shared_directory(layout, "size", root))
    options: dict[str, Any] = {"default_root_dir": directory, "max_steps": 2, "limit_val_batches": 0}
    finder = BatchSizeFinder(steps_per_trial=1, max_trials=2)
    trainer, data = make_trainer(layout, callbacks=[finder], **options), Sized(layout)
    trainer.fit(variant("untied").build(), data)
    assert not [*Path(directory).glob(".scale*")]
    return data.batch_size, float(trainer.callback_metrics["loss"])


@pytest.mark.parametrize("layout", [TP2, pytest.param(PP2, marks=pytest.mark.extended)], ids=str)
def test_the_batch_size_is_found_together(layout: Layout, tmp_path: Path) -> None:
    ((size, loss),) = run_program(PLAIN, _found_size, str(tmp_path))
    for found in run_program(layout, _found_size, str(tmp_path)):
        assert found == (size, pytest.approx(loss, rel=1e-9))


def _made_before(layout: Layout) -> list[float]:
    """The optimizer and its scheduler are made before the Trainer splits the module, as LightningCLI makes them."""
    torch.manual_seed(3)
    module = variant("untied").build()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    module.configure_optimizers = lambda: ([optimizer], [scheduler])  # type: ignore[method-assign]
    losses = Losses()
    trainer = make_trainer(layout, max_epochs=2, callbacks=[losses])
    trainer.fit(module, train_loader(layout, 3))
    return losses.values


class Losses(Callback):
    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.values.append(float(trainer.strategy.reduce(loss.detach())))


@pytest.mark.parametrize(
    "layout", [PP2, *(pytest.param(x, marks=pytest.mark.extended) for x in (TP2_PP2, ZERO3, TP2))], ids=str
)
def test_an_optimizer_that_was_made_before(layout: Layout) -> None:
    (expected,) = run_program(PLAIN, _made_before)
    for losses in run_program(layout, _made_before):
        assert losses == pytest.approx(expected, rel=1e-9)


class Marks(TorchCheckpointIO):
    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint({**checkpoint, "marked": True}, path, storage_options)


def _own_io(layout: Layout, kind: str, form: str, root: str) -> None:
    plugin = AsyncCheckpointIO() if kind == "async" else Marks()
    trainer = make_trainer(layout, strategy={} if layout.plain else {"checkpoint": form}, plugins=[plugin])
    trainer.fit(variant("untied").build(), train_loader(layout, 1))
    trainer.save_checkpoint(Path(root) / "saved.ckpt")
    plugin.teardown()  # what it does in the background is done then


@pytest.mark.parametrize("kind", ["async", "own"])
def test_a_plugin_for_checkpoints(kind: str, tmp_path: Path) -> None:
    if kind == "async" and not LIGHTNING_2_6:
        pytest.skip("AsyncCheckpointIO of Lightning 2.5 saves nothing after a fit")
    for layout in (PLAIN, TP2):
        (tmp_path / str(layout)).mkdir()
        run_program(layout, _own_io, kind, "file", str(tmp_path / str(layout)))
    plain, found = (torch.load(tmp_path / str(x) / "saved.ckpt", weights_only=False) for x in (PLAIN, TP2))
    assert found["state_dict"].keys() == plain["state_dict"].keys()
    assert found.get("marked") == plain.get("marked")


def test_a_plugin_for_files_and_folders(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r'checkpoint="folder" is written by the strategy, and the Marks') as error:
        run_program(TP2, _own_io, "own", "folder", str(tmp_path))
    assert len(error.value.failures) == 2


class Norms(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.down(self.norm(self.up(batch)).relu()).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _synchronized(layout: Layout) -> float:
    torch.manual_seed(3)
    data = torch.utils.data.DataLoader(torch.randn(16, 8, dtype=torch.float64), batch_size=8)  # type: ignore[var-annotated]
    strategy = {"plan": None} | ({"microbatches": 1} if layout.pp > 1 else {})
    trainer = make_trainer(layout, strategy={} if layout.plain else strategy, sync_batchnorm=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Norms(), data)
    assert not any("sync_dist=True" in str(warning.message) for warning in caught)
    return float(trainer.callback_metrics["loss"])


@pytest.mark.parametrize("layout", [PP2, pytest.param(TP2, marks=pytest.mark.extended)], ids=str)
def test_batch_norms_are_not_synchronized_where_all_ranks_see_the_same(layout: Layout) -> None:
    (expected,) = run_program(PLAIN, _synchronized)
    assert run_program(layout, _synchronized) == pytest.approx([expected] * 2, rel=1e-9)


class Writer(BasePredictionWriter):
    """Looks into what it is to write, as one for dicts does."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.sums: list[float] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, *args: Any) -> None:
        self.sums.append(prediction.sum().item())

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.sums.append(sum(prediction.sum().item() for prediction in predictions))


def _written(layout: Layout) -> list[float]:
    torch.manual_seed(3)
    writer = Writer()
    make_trainer(layout, callbacks=[writer]).predict(variant("untied").build(), eval_loader(layout, 2))
    return writer.sums


@pytest.mark.parametrize("layout", [TP2, PP2], ids=str)
def test_predictions_are_written_where_they_are(layout: Layout) -> None:
    (expected,) = run_program(PLAIN, _written)
    for rank, found in enumerate(run_program(layout, _written)):
        assert found == (pytest.approx(expected, rel=1e-9) if rank < layout.tp else [])


def _skip(layout: Layout, accumulate: int) -> tuple[list[float], int]:
    """A fit that leaves batches out, as steps do whose loss is not finite."""
    torch.manual_seed(3)
    module, losses = variant("untied").build(), list[float]()

    class Skips(type(module)):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
            loss: Tensor = super().training_step(batch, batch_idx)
            losses.append(float(loss))
            return None if batch_idx in (1, 4) else loss

    module.__class__ = Skips
    trainer = make_trainer(layout, accumulate_grad_batches=accumulate)
    trainer.fit(module, train_loader(layout, 6))
    return losses, trainer.global_step


@pytest.mark.parametrize("accumulate", [1, 2])
def test_steps_that_return_none_skip_their_batch(accumulate: int) -> None:
    losses, steps = run_program(PLAIN, _skip, accumulate)[0]
    for found, found_steps in run_program(TP2, _skip, accumulate):
        assert found == pytest.approx(losses, rel=1e-9)
        assert found_steps == steps


def test_copies_of_the_model_skip_no_batch() -> None:
    with pytest.raises(RankError, match="Skipping the `training_step` by returning None"):
        run_program(Layout(tp=2, dp=2), _skip, 1)
