"""Callbacks, schedulers and metrics decide and report on all ranks as on one device."""

from __future__ import annotations

import csv
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from tests.crossing import fewer
from tests.distributed.training import (
    DP2,
    PLAIN,
    PP2,
    TP2,
    TP2_DP2,
    Layout,
    eval_loader,
    make_trainer,
    run_program,
    shared_directory,
    train_loader,
)
from tests.parity.models import GPT, GPTConfig
from tests.parity.variants import variant

LAYOUTS = [TP2, DP2, TP2_DP2]


class Overfit(GPT):
    """Trained fast on little data: the validation loss soon rises."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(tied=False))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-2)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}


def _callbacks(layout: Layout, root: str) -> dict[str, Any]:
    torch.manual_seed(3)
    directory = shared_directory(layout, "callbacks", root)
    stopping = EarlyStopping("val_loss", patience=3)
    best = ModelCheckpoint(directory / "best", monitor="val_loss", save_top_k=2, filename="{epoch}-{val_loss:.4f}")
    logger = CSVLogger(directory, name="", version="log")
    trainer = make_trainer(
        layout, max_epochs=12, callbacks=[stopping, best, LearningRateMonitor()], logger=logger,
        enable_checkpointing=True, log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(Overfit(), train_loader(layout, 2), eval_loader(layout, 2))
    trainer.strategy.barrier()
    return {
        "stopped": stopping.stopped_epoch,
        "best": Path(best.best_model_path).name,
        "kept": sorted(path.name for path in (directory / "best").iterdir()),
        "rates": _column(directory / "log" / "metrics.csv", "lr-AdamW"),
        "losses": _column(directory / "log" / "metrics.csv", "val_loss"),
        "last_rate": trainer.optimizers[0].param_groups[0]["lr"],
    }


def _column(path: Path, name: str) -> list[float]:
    with path.open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


@pytest.mark.parametrize("layout", fewer(LAYOUTS, extended=[TP2, TP2_DP2]), ids=str)
def test_stopping_checkpoints_and_plateaus_are_those_of_one_device(layout: Layout, tmp_path: Path) -> None:
    expected = run_program(PLAIN, _callbacks, str(tmp_path))[0]
    assert 0 < expected["stopped"] < 11, "the case must stop early"
    assert len(set(expected["rates"])) > 1, "the case must reach a plateau"
    for found in run_program(layout, _callbacks, str(tmp_path)):
        for name in ("rates", "losses", "last_rate"):
            assert found.pop(name) == pytest.approx(expected[name], abs=1e-9), name
        assert found == {name: expected[name] for name in found}


class Metrics(GPT):
    """Logs in the ways users do."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(tied=False))
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=32)
        self.perplexity = torchmetrics.text.Perplexity()
        self.mean_loss = torchmetrics.MeanMetric()
        self.by_kind = {"validation": [torchmetrics.SumMetric()]}  # which is no ModuleDict

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_synced", loss.detach(), on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        logits_BLV = self(batch[0])
        self.accuracy(logits_BLV.flatten(0, 1), batch[1].flatten())
        self.perplexity(logits_BLV, batch[1])
        self.mean_loss(self.loss(batch))
        self.log("accuracy", self.accuracy)
        self.log_dict({"perplexity": self.perplexity, "mean_loss": self.mean_loss}, on_epoch=True)
        self.log("synced", self.loss(batch), sync_dist=True)
        self.log("samples", float(len(batch[0])), reduce_fx="sum", sync_dist=True)
        self.log("largest", batch[0].max().double(), reduce_fx="max", sync_dist=True)
        self.by_kind["validation"][0].update(len(batch[0]))

    def on_validation_epoch_end(self) -> None:
        self.log("counted", self.by_kind["validation"][0].compute())
        self.by_kind["validation"][0].reset()


class Counting(Callback):
    """Has a metric of its own."""

    def __init__(self) -> None:
        self.samples = torchmetrics.SumMetric()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.samples.update(len(batch[0]))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("trained", self.samples.compute())


def _metrics(layout: Layout) -> dict[str, float]:
    torch.manual_seed(3)
    trainer = make_trainer(layout, callbacks=[Counting()])
    trainer.fit(Metrics(), train_loader(layout, 3), eval_loader(layout, 3))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("layout", fewer(LAYOUTS, extended=[DP2, TP2_DP2]), ids=str)
def test_metrics_count_every_sample_once(layout: Layout) -> None:
    expected = run_program(PLAIN, _metrics)[0]
    assert expected["samples"] == expected["counted"] == expected["trained"] == 12
    for found in run_program(layout, _metrics):
        # What is not reduced is each dp rank's own.
        for name in expected.keys() - ({"loss"} if layout.dp > 1 else set()):
            # A metric keeps its sums in float32.
            assert found[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-9), name


class AsksPeers(GPT):
    """Uses the module's own collectives."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(tied=False))
        self.gathered: list[Any] = []

    def on_train_epoch_end(self) -> None:
        rank = self.trainer.global_rank
        decisions = [self.trainer.strategy.reduce_boolean_decision(rank == 0, all=all_) for all_ in (False, True)]
        reduced = self.trainer.strategy.reduce(torch.tensor(float(rank)), reduce_op="sum")
        matrix = torch.arange(6.0).view(2, 3) * rank
        of_columns = matrix.t().contiguous().t()  # the same, in another order in memory
        matrix = self.trainer.strategy.reduce(matrix if rank else of_columns, reduce_op="sum")
        gathered, broadcast = self.all_gather(torch.tensor(rank)), self.trainer.strategy.broadcast(rank)
        self.gathered = [gathered, broadcast, decisions, reduced, matrix.tolist()]


def _ask(layout: Layout) -> list[Any]:
    torch.manual_seed(3)
    module = AsksPeers()
    make_trainer(layout).fit(module, train_loader(layout, 1))
    return module.gathered


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_reduce_and_gather_run_over_dp_and_broadcast_and_decisions_over_all(layout: Layout) -> None:
    for rank, (gathered, broadcast, decisions, reduced, matrix) in enumerate(run_program(layout, _ask)):
        peers = [rank % layout.tp + layout.tp * index for index in range(layout.dp)]
        assert gathered.flatten().tolist() == (peers if layout.dp > 1 else [rank])
        assert float(reduced) == sum(peers)
        assert matrix == (torch.arange(6.0).view(2, 3) * sum(peers)).tolist()
        assert broadcast == 0
        assert decisions == [True, False]


class Contrastive(GPT):
    """Compares each sample with those of all dp ranks, whose gradients come back."""

    def loss(self, batch: Any) -> Any:
        x_ND = self.all_gather(self.trunk(batch[0]).mean(1), sync_grads=True).flatten(0, -2)
        return torch.nn.functional.cross_entropy(x_ND @ x_ND.T, torch.arange(len(x_ND)))


def _contrastive(layout: Layout) -> list[float]:
    torch.manual_seed(3)
    trainer = make_trainer(layout)
    trainer.fit(Contrastive(GPTConfig(tied=False)), train_loader(layout, 2))
    return [float(value.square().sum()) for value in trainer.strategy.lightning_module_state_dict().values()]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_of_what_was_gathered_come_back(layout: Layout) -> None:
    expected = run_program(PLAIN, _contrastive)[0]
    assert run_program(layout, _contrastive)[0] == pytest.approx(expected, abs=1e-9)


def _scheduled(layout: Layout) -> list[float]:
    """A scheduler per step, whose rate every step depends on."""
    module = variant("untied").build()

    def configure() -> Any:
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=7)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    module.configure_optimizers = configure  # type: ignore[method-assign]
    trainer = make_trainer(layout, max_epochs=2)
    trainer.fit(module, train_loader(layout, 3), eval_loader(layout, 2))
    return [float(trainer.callback_metrics["val_loss"]), trainer.optimizers[0].param_groups[0]["lr"]]


@pytest.mark.parametrize("layout", [TP2, TP2_DP2], ids=str)
def test_a_scheduler_per_step(layout: Layout) -> None:
    expected = run_program(PLAIN, _scheduled)[0]
    for found in run_program(layout, _scheduled):
        assert found == pytest.approx(expected, abs=1e-9)


class PerClass(GPT):
    """Counts each class in a metric, and keeps logits for its hook to send."""

    def __init__(self) -> None:
        super().__init__(GPTConfig(tied=False))
        self.recall = torchmetrics.classification.MulticlassRecall(32, top_k=3)
        self.kept: list[Tensor] = []
        self.sent: dict[str, Tensor] = {}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        logits_BLV = self(batch[0])
        self.recall.update(logits_BLV.flatten(0, 1), batch[1].flatten())
        self.log("recall", self.recall)
        self.kept.append(logits_BLV)

    def on_validation_epoch_end(self) -> None:
        self.sent = _sent(self, torch.stack(self.kept))
        self.kept.clear()


def _sent(module: LightningModule, logits: Tensor) -> dict[str, Tensor]:
    """What ranks of the dp axis send each other: by the module, the strategy, and torch."""
    strategy: Any = module.trainer.strategy
    found = [module.all_gather(logits), strategy.reduce(logits, reduce_op="sum")]
    if hasattr(strategy, "mesh"):
        group, total = strategy.mesh.group("dp"), logits.clone()
        parts = [torch.zeros_like(logits) for _ in range(group.size())]
        torch.distributed.all_gather(parts, logits, group=group)
        total_work = torch.distributed.all_reduce(total, group=group, async_op=True)
        assert total_work is not None
        total_work.wait()
    else:
        parts, total = [logits], logits
    each = found[0] if found[0].dim() > logits.dim() else found[0][None]
    whole = each.movedim(0, 2).flatten(1, 2), sum(each.unbind()), torch.stack(parts).movedim(0, 2).flatten(1, 2)
    names = ("module", "sum of module", "torch", "strategy", "torch reduced")
    return {k: torch.tensor(v.tolist()) for k, v in zip(names, (*whole, found[1], total), strict=True)}


def _per_class(layout: Layout) -> tuple[float, dict[str, Tensor], bool]:
    torch.manual_seed(3)
    module, options = PerClass(), {} if layout.plain else {"strategy": {"plan": "auto"}}
    trainer = make_trainer(layout, **options)
    recall = trainer.validate(module, eval_loader(layout, 3), verbose=False)[0]["recall"]
    return recall, module.sent, layout.plain or any("head" in name for name in trainer.strategy.parallel.plan.layers)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_each_tensor_rank_has_a_part_of_is_sent_whole(layout: Layout) -> None:
    recall, sent, _ = run_program(PLAIN, _per_class)[0]
    for found, values, split in run_program(layout, _per_class):
        assert found == pytest.approx(recall, rel=1e-6)
        assert split == (layout.tp > 1), "the case is about logits of which ranks have parts"
        for name in ("module", "torch"):
            torch.testing.assert_close(values[name], sent[name], rtol=1e-9, atol=1e-9)
        for name in ("strategy", "torch reduced"):
            torch.testing.assert_close(values[name], values["sum of module"], rtol=1e-9, atol=1e-9)


class ProfilesBatches(Callback):
    """A profiler for each batch, which ends before what the batch has begun ends on ranks that are late."""

    def __init__(self) -> None:
        self.begun: dict[str, dist.Work] = {}
        """Since the profiler began, by a name that is recorded if they are."""
        self.outlasted = 0
        """How many were under way when their profiler ended."""
        self.recorded: list[str] = []
        """Those of them that it had recorded."""
        self.trains = False

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.trains = True
        self._start()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        under_way = {name for name, work in self.begun.items() if not work.is_completed()}
        self.profile.stop()
        self.outlasted += len(under_way)
        self.recorded += under_way & {event.name for event in self.profile.events() or ()}
        self._start()

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.profile.stop()

    def begins(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        """Note what it begins and does not wait for. One rank comes late to all of it."""

        def begin(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
            if self.trains and dist.get_rank() == dist.get_world_size() - 1:
                time.sleep(0.05)
            work = collective(*args, async_op=async_op, **kwargs)
            if async_op:
                name = f"{collective.__name__} {len(self.begun)}"
                with record_function(name):
                    self.begun[name] = work
            return work

        return begin

    def _start(self) -> None:
        self.begun.clear()
        self.profile = profile(activities=[ProfilerActivity.CPU])
        self.profile.start()


def _profiled(layout: Layout, accumulate: int) -> tuple[int, list[str]]:
    watch = ProfilesBatches()
    with (
        mock.patch.object(dist, "broadcast", watch.begins(dist.broadcast)),
        mock.patch.object(dist, "all_reduce", watch.begins(dist.all_reduce)),
    ):
        trainer = make_trainer(layout, callbacks=[watch], accumulate_grad_batches=accumulate)
        trainer.fit(GPT(GPTConfig(tied=False)), train_loader(layout, 12))
    return watch.outlasted, watch.recorded


@pytest.mark.parametrize(("layout", "accumulate"), [(PP2, 1), (DP2, 2)], ids=str)
def test_what_ranks_tell_each_other_beyond_a_batch_is_not_recorded_by_profilers(
    layout: Layout, accumulate: int
) -> None:
    """A collective that ends after its profiler writes to memory that is no longer the profiler's."""
    found = run_program(layout, _profiled, accumulate)
    assert sum(outlasted for outlasted, _ in found) > 0
    assert [recorded for _, recorded in found] == [[], []]
