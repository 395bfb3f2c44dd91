"""What a Lightning user expects of a Trainer holds under pipeline parallelism: the numbers are those of one device."""

from __future__ import annotations

import csv
import dataclasses
import functools
import os
import subprocess
import sys
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from tests.crossing import crossed, fewer
from tests.distributed.failure.test_trainer import LIMIT_S
from tests.distributed.trainer.test_callbacks import _callbacks, _metrics, _scheduled
from tests.distributed.trainer.test_precision import Poison
from tests.distributed.trainer.test_stages import Sanity
from tests.distributed.training import (
    DP2_PP2,
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
from tests.parity.models import GPT, GPTConfig
from tests.parity.variants import variant
from tests.ranks import RankError

LAYOUTS = [PP2, TP2_PP2, DP2_PP2]
HOOKS = ("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")


def approx(expected: Any, tolerance: float = 1e-9) -> Any:
    return pytest.approx(expected, abs=tolerance, rel=tolerance)


# ---------------------------------------------------------------- callbacks that look


class KeepsOutputs(Callback):
    """Takes what steps return, as callbacks that log predictions do."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.kept: dict[str, list[float]] = defaultdict(list)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.names.append(outputs["name"])
        self._keep("train", outputs["loss"], outputs["hits"])

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self._keep("validation", *outputs)

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self._keep("predict", outputs.logits)

    def _keep(self, kind: str, *values: Tensor) -> None:
        self.kept[kind] += [float(x) for value in values for x in value.flatten()]


@dataclasses.dataclass
class Prediction:
    logits: Tensor


class ReturnsMore(GPT):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        hits = (self(batch[0]).argmax(-1) == batch[1]).any(1)
        return {"loss": super().training_step(batch, batch_idx), "hits": hits, "name": f"batch {batch_idx}"}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0]), batch[1]

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return Prediction(self(batch[0]))


def _kept(layout: Layout) -> tuple[list[str], dict[str, list[float]]]:
    torch.manual_seed(3)
    module, callback = ReturnsMore(GPTConfig(tied=False)), KeepsOutputs()
    trainer = make_trainer(layout, callbacks=[callback])
    trainer.fit(module, train_loader(layout, 2), eval_loader(layout, 2))
    trainer.predict(module, eval_loader(layout, 2))
    return callback.names, dict(callback.kept)


@pytest.mark.parametrize("layout", [PP2, TP2_PP2], ids=str)
def test_callbacks_get_outputs_on_all_stages(layout: Layout) -> None:
    names, expected = run_program(PLAIN, _kept)[0]
    assert names == ["batch 0", "batch 1"] and expected.keys() == {"train", "validation", "predict"}
    for found_names, found in run_program(layout, _kept):
        assert found_names == names and found.keys() == expected.keys()
        for kind, values in expected.items():
            assert found[kind] == approx(values), kind


# ---------------------------------------------------------------- callbacks that decide


@pytest.mark.parametrize("layout", fewer(LAYOUTS, extended=[TP2_PP2]), ids=str)
def test_stopping_checkpoints_and_plateaus_are_those_of_one_device(layout: Layout, tmp_path: Path) -> None:
    expected = run_program(PLAIN, _callbacks, str(tmp_path))[0]
    assert 0 < expected["stopped"] < 11 and len(set(expected["rates"])) > 1, "the case must stop and reach a plateau"
    for found in run_program(layout, _callbacks, str(tmp_path)):
        for name in ("rates", "losses", "last_rate"):
            assert found.pop(name) == approx(expected[name]), name
        assert found == {name: expected[name] for name in found}


@pytest.mark.parametrize("layout", fewer(LAYOUTS, extended=[DP2_PP2]), ids=str)
def test_metrics_count_every_sample_once(layout: Layout) -> None:
    expected = run_program(PLAIN, _metrics)[0]
    for found in run_program(layout, _metrics):
        for name in expected.keys() - ({"loss"} if layout.dp > 1 else set()):
            assert found[name] == pytest.approx(expected[name], rel=1e-6, abs=1e-9), name


def test_a_scheduler_per_step() -> None:
    expected = run_program(PLAIN, _scheduled)[0]
    for found in run_program(PP2, _scheduled):
        assert found == approx(expected)


# ---------------------------------------------------------------- random numbers


class Noisy(Dataset):
    """Random content, of the stream that the loading process has."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        ids = torch.randint(0, 32, (7,))
        return ids[:-1], ids[1:]


class Validating(GPT):
    validation_step = GPT.training_step


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *args: Any) -> None:
        self.seen.append(float(trainer.callback_metrics["loss"]))


def _drawn(layout: Layout) -> list[float]:
    torch.manual_seed(3)
    losses = Losses()
    trainer = make_trainer(layout, max_epochs=3, callbacks=[losses])
    trainer.fit(Validating(), DataLoader(Noisy(), batch_size=4, shuffle=True), eval_loader(layout, 2))
    return losses.seen


@pytest.mark.parametrize("layout", [PP2, TP2_PP2], ids=str)
def test_loaders_and_data_draw_what_they_draw_on_one_device(layout: Layout) -> None:
    expected = run_program(PLAIN, _drawn)[0]
    for found in run_program(layout, _drawn):
        assert found == approx(expected)


class Dropped(LightningModule):
    """Its losses are those of its masks; it learns nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(2)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0]
        for block in self.blocks:
            x = F.dropout(block(x), 0.5)
        loss = x.pow(2).mean()
        self.log("loss", loss)
        return loss

    validation_step = training_step

    def on_validation_epoch_start(self) -> None:
        torch.manual_seed(5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class Ones:
    """Draws nothing. A DataLoader would, at its start."""

    def __iter__(self) -> Iterator[list[Tensor]]:
        yield from [[torch.ones(4, 8, dtype=torch.float64)]] * 3


class Evaluated(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.seen.append(float(trainer.callback_metrics["loss"]))


def _masked(layout: Layout) -> tuple[list[float], list[float]]:
    losses, evaluated = Losses(), Evaluated()
    options = {"max_epochs": 2, "num_sanity_val_steps": 0, "callbacks": [losses, evaluated]}
    trainer = make_trainer(layout, strategy={"plan": None}, **options)
    trainer.fit(Dropped(), Ones(), Ones())  # type: ignore[arg-type]
    return losses.seen, evaluated.seen


def test_every_batch_has_masks_of_its_own_and_a_seed_before_an_evaluation_gives_the_same() -> None:
    for losses, evaluated in run_program(PP2, _masked):
        assert len(losses) == 6 and len(set(losses)) == 6
        assert len(evaluated) == 2 and len(set(evaluated)) == 1


# ---------------------------------------------------------------- all ways to log


class Logging(GPT):
    """Logs in the ways users do; with `keeps`, steps leave something on the module."""

    def __init__(self, keeps: bool) -> None:
        super().__init__(GPTConfig(tied=False))
        self.keeps = keeps
        self.outputs: list[Tensor] = []
        self.sums: dict[str, dict[str, float]] = {"train": defaultdict(float), "validation": defaultdict(float)}
        self.counts: Counter[str] = Counter()
        classes = {"task": "multiclass", "num_classes": 32}
        both = {"acc": torchmetrics.Accuracy(**classes), "top": torchmetrics.Accuracy(**classes, top_k=3)}
        self.stepped = torchmetrics.Accuracy(**classes)
        self.train_both = torchmetrics.MetricCollection(both, prefix="train_")
        self.val_both = self.train_both.clone(prefix="val_")
        self.perplexity = torchmetrics.text.Perplexity()
        self.by_hand = torchmetrics.MeanMetric()
        self.confusion = torchmetrics.ConfusionMatrix(**classes)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        logits_BLV = self(batch[0])
        loss = F.cross_entropy(logits_BLV.flatten(0, 1), batch[1].flatten())
        rows = len(batch[0])
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("sized", loss.detach() * 2, on_step=True, on_epoch=True, batch_size=rows)
        weight = batch[0].sum()  # another one in every batch
        weighted = batch[0].square().sum() / weight.double()
        self.log("weighted", weighted, on_step=True, on_epoch=True, batch_size=weight.item())  # type: ignore[arg-type]
        self.log("rows", float(rows), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("largest", batch[0].max().double(), True, True, None, True, torch.max)
        self.log("smallest", batch[0].min().double(), reduce_fx=min, on_epoch=True)
        self.log_dict({"synced": loss, "constant": 0.1, "whole": 3}, sync_dist=True)
        if batch_idx % 2 == 0:
            self.log("sometimes", loss)
        for factor in range(3):
            self.log("repeated", loss * factor, on_step=True, on_epoch=True)
        self.stepped(logits_BLV.flatten(0, 1), batch[1].flatten())
        self.log("stepped", self.stepped, on_step=True, on_epoch=True, prog_bar=True)
        self.train_both.update(logits_BLV.flatten(0, 1), batch[1].flatten())
        self.log_dict(self.train_both, on_step=False, on_epoch=True)
        self.by_hand.update(loss, weight=rows)
        if self.keeps:
            self.outputs.append(loss.detach() * rows)
            self.sums["train"]["rows"] += rows
        return {"loss": loss, "logits": logits_BLV.detach(), "rows": rows}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0) -> Any:
        logits_BLV = self(batch[0])
        loss = F.cross_entropy(logits_BLV.flatten(0, 1), batch[1].flatten())
        self.log("val_loss", loss, sync_dist=True)
        if dataloader_idx == 0:
            self.val_both(logits_BLV.flatten(0, 1), batch[1].flatten())
            self.log_dict(self.val_both, add_dataloader_idx=False)
            self.perplexity(logits_BLV, batch[1])
            self.log("perplexity", self.perplexity, add_dataloader_idx=False)
        self.confusion.update(logits_BLV.argmax(-1).flatten(), batch[1].flatten())
        if self.keeps:
            self.sums["validation"]["loss"] += float(loss) * len(batch[0])
        return {"predicted": logits_BLV.argmax(-1), "loss": loss}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        right = (outputs["predicted"] == batch[1]).double().mean()
        if dataloader_idx == 0:
            self.log("right", right, on_epoch=True, add_dataloader_idx=False, batch_size=len(batch[0]))

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("before", 2.0)

    def on_train_epoch_end(self) -> None:
        self.log("hand_mean", self.by_hand.compute())
        self.by_hand.reset()
        if self.keeps:
            self.log("kept", torch.stack(self.outputs).sum() / self.sums["train"]["rows"])
            self.outputs.clear()
            self.sums["train"].clear()

    def on_validation_epoch_end(self) -> None:
        table_CC = self.confusion.compute()
        self.log_dict({"diagonal": table_CC.diag().sum().double(), "total": table_CC.sum().double()})
        self.confusion.reset()
        if self.keeps:
            self.log("val_sum", self.sums["validation"]["loss"])
            self.sums["validation"].clear()


class Hooks(Callback):
    """Counts calls, and looks at what the Trainer passes on."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.losses: list[float] = []
        self.keys: set[str] = set()
        self.rows: list[int] = []
        self.before: list[bool] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.counts["on_before_backward"] += 1
        self.before.append(any(p.grad is not None for p in pl_module.parameters()))

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.counts["on_after_backward"] += 1

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.counts["on_before_optimizer_step"] += 1

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.counts["on_before_zero_grad"] += 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))
        self.keys |= set(outputs)
        if "logits" in outputs:
            self.rows.append(len(outputs["logits"]))


def _known_lists(trainer: Trainer) -> int:
    """How many lists of logged names stages keep for the batches to come."""
    logs = trainer.strategy.pipeline.logs  # type: ignore[attr-defined]
    return len(logs._known) + len(logs._lists)


def _log_everything(layout: Layout, keeps: bool, root: str) -> dict[str, Any]:
    torch.manual_seed(3)
    directory = shared_directory(layout, f"logs-{keeps}", root)
    hooks = Hooks()
    trainer = make_trainer(
        layout, max_epochs=2, callbacks=[hooks], logger=CSVLogger(directory, name="", version="log"),
        log_every_n_steps=1, accumulate_grad_batches=2, val_check_interval=2, enable_progress_bar=True,
    )  # fmt: skip
    loaders = [DataLoader(tokens(samples, seed=seed), batch_size=4) for samples, seed in ((15, 3), (7, 4), (4, 5))]
    module = Logging(keeps)
    trainer.fit(module, loaders[0], loaders[1:])
    trainer.strategy.barrier()
    results = trainer.validate(module, loaders[1:], verbose=False)
    with (directory / "log" / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {
        "rows": [{name: float(value) for name, value in row.items() if value} for row in rows],
        "callback_metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "results": results,
        "hooks": hooks.counts,
        "gradients": hooks.before,
        "losses": hooks.losses,
        "keys": hooks.keys,
        "logits": hooks.rows,
        "steps": trainer.global_step,
        "known": 0 if layout.plain else _known_lists(trainer),
        "own_methods": {"log", "on_train_epoch_end", "on_validation_batch_end"} & set(vars(module)),
    }


@pytest.mark.parametrize(
    ("keeps", "layout"), crossed([False, True], [PP2, Layout(pp=2, microbatches=3, schedule="zb_v"), TP2_PP2]), ids=str
)
def test_logs_are_those_of_one_device(layout: Layout, keeps: bool, tmp_path: Path) -> None:
    expected = run_program(PLAIN, _log_everything, keeps, str(tmp_path))[0]
    for found in run_program(layout, _log_everything, keeps, str(tmp_path)):
        assert len(found["rows"]) == len(expected["rows"]) > 8
        for ours, plain in zip(found["rows"], expected["rows"], strict=True):
            _compare_values(ours, plain)
        _compare_values(found["callback_metrics"], expected["callback_metrics"])
        for ours, plain in zip(found["results"], expected["results"], strict=True):
            _compare_values(ours, plain)
        assert found["losses"] == approx(expected["losses"])
        assert found["hooks"] == expected["hooks"]
        assert not any(found["gradients"]), "on_before_backward comes before the rank's first backward"
        assert found["steps"] == expected["steps"]
        assert found["known"] <= (8 if keeps else 6), "numbers of a batch are none of the names that are kept"
        assert found["keys"] == expected["keys"] and found["logits"] == expected["logits"]
        assert not found["own_methods"], "the module has its own methods back"


def _compare_values(found: dict[str, float], expected: dict[str, float]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Metrics keep their sums in float32.
        metric = any(part in name for part in ("stepped", "acc", "top", "perplexity", "hand_mean"))
        assert found[name] == approx(value, 1e-6 if metric else 1e-9), name


class Criterion(nn.Module):
    """Logs by what it was given for it."""

    def __init__(self, *logs: Any) -> None:
        super().__init__()
        self.logs = list(logs)

    def forward(self, logits: Tensor, targets: Tensor, name: str) -> Tensor:
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        for i, log in enumerate(self.logs):
            log(f"{name}{i or ''}", loss, on_epoch=True)
        return loss


class Around(LightningModule):
    """A LightningModule that trains another one, and hands its `log` on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = GPT(GPTConfig(tied=False))
        self.inner.log = self.log  # type: ignore[method-assign]
        self.criterion = Criterion(self.log, functools.partial(self.log, prog_bar=True), lambda *a, **k: log(*a, **k))
        log = self.log

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.criterion(self.inner(batch[0]), batch[1], "loss")
        self.inner.log("inner", loss * 2)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.criterion(self.inner(batch[0]), batch[1], "val")

    def configure_optimizers(self) -> Any:
        return self.inner.configure_optimizers()


def _handed_on(layout: Layout) -> tuple[list[float], dict[str, float], list[str]]:
    torch.manual_seed(3)
    losses = Losses()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(layout, strategy={"plan": "auto"}, max_epochs=2, callbacks=[losses])
        trainer.fit(Around(), train_loader(layout, 2), eval_loader(layout, 2))
    said = [str(w.message) for w in caught if "MegaTPStrategy" in str(w.message)]
    return losses.seen, {name: float(x) for name, x in trainer.callback_metrics.items()}, said


@pytest.mark.parametrize("layout", [TP2, PP2], ids=str)
def test_a_log_that_was_handed_on_is_that_of_one_device(layout: Layout) -> None:
    losses, logged, _ = run_program(PLAIN, _handed_on)[0]
    assert {"inner", "loss_epoch", "val2"} <= set(logged)
    for found, values, said in run_program(layout, _handed_on):
        assert found == approx(losses)
        assert values == approx(logged)
        assert not said


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return y


class Expert(nn.Module):
    """Two networks in one stack, and what both of them say."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(2, 4, 8)), nn.Parameter(torch.randn(2, 8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return sum(((x @ self.up[i]).tanh() @ self.down[i] for i in range(2)), torch.zeros_like(x))


NETWORKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "linears": (
        lambda: nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)),
        {"*.0": "column", "*.2": "row"},
    ),
    "attention": (Attends, {"*.attention": "attention"}),
    "convolution": (lambda: nn.Conv1d(6, 4, 3), {"*": "column_gather"}),
    "experts": (Expert, {"*": {"style": "experts", "parameters": {"up": 2, "down": 1}}}),
}


class Networks(LightningModule):
    """Two that read the batch itself, one on each stage."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b = (NETWORKS[kind][0]() for _ in range(2))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = batch[0].double().div(10).unsqueeze(-1) + torch.arange(4)
        return F.mse_loss(self.a(x), self.b(x) + 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def _networks(layout: Layout, kind: str) -> list[float]:
    torch.manual_seed(3)
    losses = Returned()
    plan = {f"{network}{name[1:]}": style for network in "ab" for name, style in NETWORKS[kind][1].items()}
    trainer = make_trainer(layout, strategy={"plan": plan}, callbacks=[losses])
    trainer.fit(Networks(kind), train_loader(layout, 3))
    return losses.seen


class Returned(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *args: Any) -> None:
        self.seen.append(float(outputs["loss"]))


@pytest.mark.parametrize("kind", NETWORKS)
def test_split_networks_of_several_stages_read_the_batch(kind: str) -> None:
    [expected] = run_program(PLAIN, _networks, kind)
    for found in run_program(TP2_PP2, _networks, kind):
        assert found == approx(expected)


class Collecting(GPT):
    """Keeps losses on the module for its hooks, one of which may change a parameter."""

    def __init__(self, changes: bool = False) -> None:
        super().__init__(GPTConfig(tied=False))
        self.changes = changes
        self.trained: list[Tensor] = []
        self.validated: list[Tensor] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        self.trained.append(loss.detach())
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.validated.append(super().training_step(batch, batch_idx))

    def on_train_epoch_end(self) -> None:
        self.log("trained", torch.stack(self.trained).mean(), sync_dist=True)
        self.trained.clear()
        if self.changes:
            self.head.weight.data.mul_(0.5)

    def on_validation_epoch_end(self) -> None:
        self.log("validated", torch.stack(self.validated).mean(), sync_dist=True)
        self.validated.clear()


def _collected(layout: Layout, changes: bool) -> dict[str, float]:
    torch.manual_seed(3)
    trainer = make_trainer(layout, max_epochs=2, num_sanity_val_steps=2, check_val_every_n_epoch=2)
    trainer.fit(Collecting(changes), train_loader(layout, 3), eval_loader(layout, 2))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize("zero", [2, pytest.param(3, marks=pytest.mark.extended)])
def test_hooks_that_read_what_steps_have_kept_beside_zero(zero: int) -> None:
    """On the last stage alone, or if they change weights on all."""
    layout = dataclasses.replace(DP2_PP2, zero=zero)
    for changes in (False, True):
        expected = run_program(PLAIN, _collected, changes)[0]
        for found in run_program(layout, _collected, changes):
            assert {name: found[name] for name in ("trained", "validated")} == approx(
                {name: expected[name] for name in ("trained", "validated")}
            )


class OfOtherSizes(Sampler[list[int]]):
    """A batch of four rows for the first copy of the model, and of one for the second; then of three each."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2, 3], [4, 5, 6]] if dist.get_rank() == 0 else [[7], [8, 9, 10]])

    def __len__(self) -> int:
        return 2


def _of_other_sizes(layout: Layout) -> list[list[int]]:
    """Lightning shares eleven rows out as six and five to predict: in batches of four the last has two, or one."""
    losses = Losses()
    trainer = make_trainer(layout, callbacks=[losses], use_distributed_sampler=False)
    module = GPT()
    trainer.fit(module, DataLoader(tokens(11), batch_sampler=OfOtherSizes()))
    trainer = make_trainer(layout)
    predicted = trainer.predict(module, DataLoader(tokens(11), batch_size=4))
    return [[len(losses.seen)], [len(x) for x in predicted or () if x is not None]]


def test_copies_of_the_model_may_have_other_numbers_of_rows_beside_zero() -> None:
    found = run_program(dataclasses.replace(DP2_PP2, zero=3), _of_other_sizes)
    assert found == [[[2], [4, 2]], [[2], [4, 1]], [[2], []], [[2], []]]


class Schedule(nn.Module):
    """In no unit: a buffer, and no parameters."""

    level: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.level


class Limits:
    def __init__(self) -> None:
        self.low = torch.zeros(8, dtype=torch.float64)


class SetsTensors(LightningModule):
    """Finds out at the end of an epoch what the first stage needs afterwards, of what steps have left."""

    factor: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
        self.schedule, self.limits = Schedule(), Limits()
        self.register_buffer("factor", torch.ones((), dtype=torch.float64))
        self.offset = torch.zeros((), dtype=torch.float64)
        self.losses: list[Tensor] = []

    def _loss(self, x: Tensor) -> Tensor:
        x = self.schedule(x) * self.factor + self.offset + self.limits.low
        return (self.blocks(x) - 1).square().mean()

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch[0])

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        self.losses.append(self._loss(batch[0]))

    def on_validation_epoch_end(self) -> None:
        loss = torch.stack(self.losses).mean()
        self.losses.clear()
        self.schedule.level.fill_(1 + loss)
        self.factor = self.factor * (1 + loss)
        self.offset = self.offset + loss
        self.limits.low[2:] += loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _sets_tensors(layout: Layout) -> dict[str, Tensor]:
    torch.manual_seed(3)
    module = SetsTensors()
    rows = torch.randn(16, 8, dtype=torch.float64)
    loader = DataLoader(TensorDataset(rows), batch_size=4)
    trainer = make_trainer(layout, strategy={"plan": None}, max_epochs=2, val_check_interval=2)
    trainer.fit(module, loader, loader)
    held = {"low": module.limits.low, "offset": module.offset}
    return {**trainer.strategy.lightning_module_state_dict(), **held}


def test_tensors_that_hooks_of_the_last_stage_set_are_known_on_all() -> None:
    expected = run_program(PLAIN, _sets_tensors)[0]
    for found in run_program(dataclasses.replace(PP2, microbatches=2), _sets_tensors):
        for name in found.keys() & expected.keys():
            torch.testing.assert_close(found[name], expected[name], atol=1e-9, rtol=0, msg=name)


# ---------------------------------------------------------------- the stages of a Trainer


def _all_stages(layout: Layout, model: str) -> dict[str, Any]:
    """Sanity check, fit, validate, test, predict and fit again; then a second Trainer with the same module."""
    sanity = Sanity()
    trainer = make_trainer(layout, model, max_epochs=2, callbacks=[sanity], num_sanity_val_steps=2)
    module = variant(model).build()
    ragged = DataLoader(tokens(9, seed=6), batch_size=4)
    train, validation = (train_loader(layout, 3), eval_loader(layout, 3)) if layout.dp > 1 else (ragged, ragged)
    trainer.fit(module, train, validation)
    seen: dict[str, Any] = {"fit": float(trainer.callback_metrics["val_loss"]), "sanity": sanity.batches}
    seen["validate"] = trainer.validate(module, validation, verbose=False)[0]["val_loss"]
    seen["test"] = trainer.test(module, eval_loader(layout, 2), verbose=False)[0]["test_loss"]
    seen["predict"] = trainer.predict(module, eval_loader(layout, 2))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, train, validation)
    seen["again"] = float(trainer.callback_metrics["val_loss"])
    seen["steps"] = trainer.global_step
    changed = dataclasses.replace(layout, microbatches=2, schedule="gpipe" if layout.schedule == "1f1b" else "zb_v")
    second = make_trainer(changed, model, max_epochs=1)
    second.fit(module, train, validation)
    seen["second"] = float(second.callback_metrics["val_loss"])
    return seen


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (PP2, "tied"),
        (DP2_PP2, "untied"),
        (Layout(pp=2, schedule="zb_v"), "tied"),
        pytest.param(TP2_PP2, "swiglu_rms", marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_all_stages_are_those_of_one_device(layout: Layout, model: str) -> None:
    expected = run_program(PLAIN, _all_stages, model)[0]
    if layout.dp > 1:
        expected = run_program(Layout(dp=2), _all_stages, model)[0]
    for rank, found in enumerate(run_program(layout, _all_stages, model)):
        predictions = found.pop("predict")
        assert found == approx({name: expected[name] for name in found})
        assert found["sanity"] == 2
        if rank == 0:
            torch.testing.assert_close(predictions, expected["predict"], atol=1e-9, rtol=0)
        elif rank >= layout.tp * layout.dp:
            assert predictions == [None, None], "predictions are on the last stage"


class Halves(LightningModule):
    """Trains an encoder and a decoder; tests the one, predicts with the other, and validates without either."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.decoder(self(batch[0] / 32)), batch[0] / 32)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_mean", batch[0].double().mean())

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_mean", self.decoder(batch[0][:, :4] / 32).mean())

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0] / 32)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def _halves(layout: Layout) -> dict[str, Any]:
    torch.manual_seed(4)
    module, loader = Halves(), DataLoader(tokens(8, length=8), batch_size=4)
    trainer = make_trainer(layout, strategy={"plan": "auto"})
    trainer.fit(module, loader, loader)
    found: dict[str, Any] = {name: float(x) for name, x in trainer.callback_metrics.items()}
    found |= trainer.test(module, loader, verbose=False)[0]
    return {**found, "predictions": trainer.predict(module, loader)}


@pytest.mark.parametrize("layout", [PP2, Layout(pp=2, schedule="zb_v")], ids=str)
def test_evaluations_may_leave_stages_without_work(layout: Layout) -> None:
    expected = run_program(PLAIN, _halves)[0]
    for rank, found in enumerate(run_program(layout, _halves)):
        predictions = found.pop("predictions")
        assert found == approx({name: expected[name] for name in found})
        assert found.keys() == {"val_mean", "test_mean"}
        if rank == 0:
            torch.testing.assert_close(predictions, expected["predictions"], atol=1e-9, rtol=0)


class TwoHeads(LightningModule):
    """Two layers that read one value, each on a stage of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.spread = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(16, 8)
        self.losses: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x = torch.tanh(self.body(batch[0] / 32))
        loss = F.mse_loss(self.mean(x), batch[0] / 32) + self.spread(x).pow(2).mean()
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    configure_optimizers = Halves.configure_optimizers


def _two_heads(layout: Layout) -> list[float]:
    torch.manual_seed(4)
    module, plan = TwoHeads(), {"mean": "column_gather", "spread": "column_gather"}
    stages = [["body", "mean"], ["spread"]]
    options = {"plan": plan, "stages": stages, "microbatches": 2, "schedule": "1f1b"} if layout.pp > 1 else {}
    trainer = make_trainer(layout, strategy=options, max_epochs=3)
    trainer.fit(module, DataLoader(tokens(8, length=8), batch_size=8))
    return module.losses


def test_layers_of_several_stages_read_one_value() -> None:
    expected = run_program(PLAIN, _two_heads)[0]
    for losses in run_program(TP2_PP2, _two_heads):
        assert losses == approx(expected)


class LogsItsRate(TwoHeads):
    """Its layers are defined the other way round than they are called, and its step reads the optimizer's rate."""

    def __init__(self) -> None:
        super().__init__()
        self.body = self._modules.pop("body")

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("rate", self.trainer.optimizers[0].param_groups[0]["lr"])
        return loss


def _logged_rate(layout: Layout) -> tuple[list[float], float]:
    torch.manual_seed(4)
    module = LogsItsRate()
    trainer = make_trainer(layout, strategy={"plan": None}, max_epochs=3)
    trainer.fit(module, DataLoader(tokens(8, length=8), batch_size=8))
    return module.losses, float(trainer.callback_metrics["rate"])


def test_the_order_of_units_is_found_where_a_step_reads_the_rate() -> None:
    losses, rate = run_program(PLAIN, _logged_rate)[0]
    for found in run_program(PP2, _logged_rate):
        assert found[0] == approx(losses) and found[1] == rate


# ---------------------------------------------------------------- batches


@dataclasses.dataclass
class Sample:
    """A batch as a user's own class."""

    ids: Tensor
    names: list[str]
    nothing: None = None
    spans: list[list[int]] = dataclasses.field(default_factory=list)


class Shapes(GPT):
    """Takes batches of all kinds, and says what it saw of each row."""

    def parts(self, batch: Any) -> tuple[Tensor, list[Any]]:
        if isinstance(batch, Sample):
            return batch.ids, [*zip(batch.names, batch.spans, strict=True)]
        if isinstance(batch, dict):
            assert batch["table"].shape == (3, 2) and batch["scale"].dim() == 0 and batch["mode"] == "all"
            return batch["ids"], [*zip(batch["names"], batch["boxes"], strict=True)]
        (ids, (flags, nothing)), *rest = batch
        assert nothing is None and not rest and len(flags) == len(ids)
        return ids, flags.tolist()

    def loss(self, batch: Any) -> Tensor:
        ids, _ = self.parts(batch)
        return super().loss((ids[:, :-1], ids[:, 1:]))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        ids, rows = self.parts(batch)
        logits = self(ids)
        return {"rows": rows, "pair": (logits.argmax(-1), logits.mean()), "whole": Sample(ids, [str(x) for x in rows])}


class OwnSplit(Shapes):
    """Splits a batch in which the batch dim is the second, and weighs by hand."""

    def split_batch(self, batch: Any, microbatches: int) -> list[Any]:
        return [(part.t().contiguous().t(), weight) for part, weight in zip(batch.split(2), (1.0, 3.0), strict=False)]

    def loss_weight(self, batch: Any) -> float:
        return batch[1]

    def loss(self, batch: Any) -> Tensor:
        if isinstance(batch, Tensor):  # one device
            parts = self.split_batch(batch, 2)
            return sum(self.loss_weight(part) * self.loss(part) for part in parts) / 4.0  # type: ignore[no-any-return]
        return GPT.loss(self, (batch[0][:, :-1], batch[0][:, 1:]))


def _collate(kind: str) -> Any:
    def collate(samples: list[Tensor]) -> Any:
        ids = torch.stack(samples)
        names = [f"text {int(row[0])}" for row in ids]
        spans = [[int(x) for x in row[: 1 + int(row[0]) % 3]] for row in ids]
        if kind == "dataclass":
            return Sample(ids, names, None, spans)
        if kind == "dict":
            boxes = [{"box": row[: 1 + int(row[0]) % 3]} for row in ids]
            table, scale = torch.zeros(3, 2), torch.tensor(1.0)
            return {"ids": ids, "names": names, "boxes": boxes, "table": table, "scale": scale, "mode": "all"}
        if kind == "own":
            return ids
        return ([ids, (ids[:, 0] % 2 == 0, None)],)

    return collate


def _fit_shapes(layout: Layout, kind: str) -> dict[str, Any]:
    data = [row for row, _ in tokens(10, length=7)]
    loader = DataLoader(data, batch_size=4, collate_fn=_collate(kind))  # type: ignore[arg-type]
    torch.manual_seed(3)
    module = (OwnSplit if kind == "own" else Shapes)()
    hooks = Hooks()
    trainer = make_trainer(layout, "tied", callbacks=[hooks])
    trainer.fit(module, DataLoader(data[:8], batch_size=4, collate_fn=_collate(kind)), loader)  # type: ignore[arg-type]
    found: dict[str, Any] = {"losses": hooks.losses}
    if kind != "own":
        found["val_loss"] = float(trainer.callback_metrics["val_loss"])
        found["predictions"] = trainer.predict(module, loader)
    return found


@pytest.mark.parametrize("kind", ["dict", "tuple", "dataclass", "own"])
def test_batches_of_any_kind(kind: str) -> None:
    expected = run_program(PLAIN, _fit_shapes, kind)[0]
    for rank, found in enumerate(run_program(PP2, _fit_shapes, kind)):
        assert found["losses"] == approx(expected["losses"])
        if kind != "own":
            assert found["val_loss"] == approx(expected["val_loss"])
        if rank == 0 and kind != "own":
            for ours, plain in zip(found["predictions"], expected["predictions"], strict=True):
                assert str(ours["rows"]) == str(plain["rows"]) and ours["whole"].names == plain["whole"].names
                torch.testing.assert_close(ours["pair"], plain["pair"], atol=1e-9, rtol=0)
                assert torch.equal(ours["whole"].ids, plain["whole"].ids)


# ---------------------------------------------------------------- microbatches of unequal weight


class Tempered(nn.Module):
    """A loss with a parameter: a unit of the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits / self.temperature, targets)


class Masked(GPT):
    """A masked language model: rows count different numbers of targets."""

    def __init__(self, criterion: str) -> None:
        super().__init__(GPTConfig(tied=False))
        kinds = {"function": lambda: F.cross_entropy, "unit": Tempered}
        self.criterion = kinds.get(criterion, lambda: nn.CrossEntropyLoss(label_smoothing=0.1))()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=32, ignore_index=-100)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits_BLV = self(batch[0])
        self.accuracy(logits_BLV.transpose(1, 2), batch[1])
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        loss: Tensor = self.criterion(logits_BLV.flatten(0, 1), batch[1].flatten())
        return loss

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("sized", loss, batch_size=len(batch[0]))  # as Lightning's warning about batch sizes asks for
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        self.log("val_sized", loss, batch_size=len(batch[0]))
        return loss


def _masked_data(layout: Layout) -> DataLoader:
    inputs, targets = (x.clone() for x in tokens(8).tensors)
    for row, kept in enumerate((6, 0, 1, 3, 0, 0, 2, 5)):  # a row, and so a microbatch, without any target
        targets[row, kept:] = -100
    return DataLoader(TensorDataset(inputs, targets), batch_size=4)


def _fit_masked(layout: Layout, criterion: str) -> dict[str, Any]:
    torch.manual_seed(3)
    hooks = Hooks()
    trainer = make_trainer(layout, max_epochs=3, callbacks=[hooks], gradient_clip_val=0.5)
    trainer.fit(Masked(criterion), _masked_data(layout), _masked_data(layout))
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {**found, "losses": hooks.losses}


@pytest.mark.parametrize(("criterion", "layout"), crossed(["module", "function", "unit"], [PP2, TP2_PP2]), ids=str)
def test_masked_targets_weigh_alike(layout: Layout, criterion: str) -> None:
    expected = run_program(PLAIN, _fit_masked, criterion)[0]
    for found in run_program(layout, _fit_masked, criterion):
        assert found.pop("accuracy") == approx(expected["accuracy"], 1e-6)
        assert found.pop("losses") == approx(expected["losses"])
        assert found == approx({name: expected[name] for name in found})


# ---------------------------------------------------------------- gradients of the batch before


class Old(Callback):
    """Which of the gradients that a batch left are still there in the forward of the next."""

    def __init__(self) -> None:
        self.left: list[weakref.ref[Tensor]] = []
        self.alive: list[bool] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for part in pl_module.modules():
            if isinstance(part, nn.LayerNorm):
                part.register_forward_pre_hook(self._look)

    def _look(self, *args: Any) -> None:
        self.alive += [any(gradient() is not None for gradient in self.left)] * bool(self.left)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.left = [weakref.ref(p.grad) for p in pl_module.parameters() if p.grad is not None]


class Looking(Callback):
    """Sees gradients before they are cleared."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append(any(p.grad is not None for p in pl_module.parameters()))


def _fit_and_look(layout: Layout, looks: bool) -> tuple[set[bool], list[bool]]:
    torch.manual_seed(3)
    old, looking = Old(), Looking()
    make_trainer(layout, callbacks=[old, *[looking] * looks]).fit(GPT(GPTConfig(tied=False)), train_loader(layout, 3))
    return set(old.alive), looking.seen


def test_gradients_that_nobody_looks_at_are_gone_before_the_next_batch() -> None:
    assert run_program(PP2, _fit_and_look, False) == [({False}, [])] * 2
    assert run_program(PP2, _fit_and_look, True) == [({True}, [False, True, True])] * 2
    assert run_program(PLAIN, _fit_and_look, True)[0][1] == [False, True, True]


# ---------------------------------------------------------------- precision


def _poisoned(layout: Layout) -> tuple[list[float], list[bool]]:
    """A loss scaler; one stage alone finds an inf in the third batch."""
    callback = Poison(1, 2, "tok.weight")
    plugins = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000))]
    options = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 1}
    trainer = make_trainer(layout, callbacks=[callback], precision=None, plugins=plugins, **options)
    trainer.fit(variant("untied").build(), train_loader(layout, 4))
    steps = zip(callback.weights, callback.weights[1:], strict=False)
    return callback.scales, [any(not torch.equal(b[name], a[name]) for name in b) for a, b in steps]


def test_an_inf_on_one_stage_makes_all_ranks_skip() -> None:
    for scales, moved in run_program(PP2, _poisoned):
        assert scales == [2.0**8, 2.0**8, 2.0**7, 2.0**7] and moved == [True, False, True]


def _mixed(layout: Layout) -> list[float]:
    hooks = Hooks()
    trainer = make_trainer(layout, callbacks=[hooks], precision="bf16-mixed", gradient_clip_val=0.1)
    trainer.fit(variant("untied").build(), train_loader(layout, 4))
    return hooks.losses


class Began(Callback):
    """Whether gradients were on their way to other data-parallel ranks when the batch's schedule ended."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append(trainer.strategy._buckets.began)


def _overlapped(layout: Layout, accumulate: int) -> list[bool]:
    began = Began()
    trainer = make_trainer(layout, callbacks=[began], accumulate_grad_batches=accumulate)
    trainer.fit(GPT(GPTConfig(tied=False)), train_loader(layout, 2))
    return began.seen


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_averaged_while_other_stages_work(accumulate: int) -> None:
    """That the averages are right is seen by parity."""
    assert all(
        found == [accumulate == 1] * (2 // accumulate) for found in run_program(DP2_PP2, _overlapped, accumulate)
    )


def test_bf16_mixed() -> None:
    expected = run_program(PLAIN, _mixed)[0]
    for found in run_program(PP2, _mixed):
        assert found == pytest.approx(expected, rel=2.0**-6), "the tolerance of tests/parity/compare.py"


class Encoder(LightningModule):
    """Of torch's layers, which have another way through an evaluation."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.tok, self.encoder, self.head = nn.Embedding(32, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 32)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        logits = self.head(self.encoder(self.tok(batch[0])))
        self.log("loss", F.cross_entropy(logits.flatten(0, 1), batch[1].flatten()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = self.tok(batch[0])
        for layer in self.encoder.layers:
            x = layer(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch[1].flatten())
        self.log("trained", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _trained_by_layers(layout: Layout) -> float:
    trainer = make_trainer(layout, precision="bf16-mixed", strategy={"plan": None})
    trainer.fit(Encoder(), train_loader(layout, 2))
    return float(trainer.callback_metrics["trained"])


def _evaluated(layout: Layout) -> float:
    trainer = make_trainer(layout, precision="bf16-mixed", strategy={"plan": None})
    return float(trainer.validate(Encoder(), eval_loader(layout, 2), verbose=False)[0]["loss"])


@pytest.mark.parametrize("run", [_evaluated, _trained_by_layers])
def test_torchs_own_layers_in_bf16_mixed(run: Any) -> None:
    expected = run_program(PLAIN, run)[0]
    for found in run_program(PP2, run):
        assert found == pytest.approx(expected, rel=2.0**-6), "the tolerance of tests/parity/compare.py"


# ---------------------------------------------------------------- hooks on the last stage, and the Trainer


class Talks(GPT):
    """Leaves its losses on itself, so that its hooks run on the last stage only, and stops the Trainer there."""

    def __init__(self, stops_in: str) -> None:
        super().__init__(GPTConfig(tied=False))
        self.losses: list[float] = []
        self.stops_in = stops_in

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss.detach()))
        if self.stops_in == "step" and self.global_step == 2:
            self.trainer.should_stop = True
        return loss

    def on_train_epoch_end(self) -> None:
        strategy = self.trainer.strategy
        strategy.barrier()
        self.log("told", strategy.broadcast(3.0 if self.trainer.is_global_zero else 4.0))
        if self.stops_in == "hook" and self.current_epoch == 1:
            self.trainer.should_stop = True

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, 0.5, "norm")
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)


def _talks(layout: Layout, stops_in: str) -> tuple[int, dict[str, float]]:
    torch.manual_seed(3)
    trainer = make_trainer(layout, max_epochs=4)
    trainer.fit(Talks(stops_in), train_loader(layout, 4))
    return trainer.global_step, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.parametrize(
    ("layout", "stops_in"),
    [(PP2, "step"), (PP2, "hook"), pytest.param(TP2_PP2, "hook", marks=pytest.mark.extended)],
    ids=str,
)
def test_a_run_is_stopped_on_the_last_stage(layout: Layout, stops_in: str) -> None:
    ((steps, expected),) = run_program(PLAIN, _talks, stops_in)
    for stopped, metrics in run_program(layout, _talks, stops_in):
        assert stopped == steps == (3 if stops_in == "step" else 8)
        assert metrics == pytest.approx(expected, rel=1e-9)


# ---------------------------------------------------------------- what is refused


class Refused(GPT):
    """Asks for what a pipeline can't do."""

    def __init__(self, what: str) -> None:
        super().__init__(GPTConfig(tied=what == "drawn"))
        self.what = what
        self.seen: list[Tensor] = []
        self.automatic_optimization = what != "manual"
        if what == "iterator":
            self.training_step = self._iterator_step  # type: ignore[method-assign]
        if what == "backward":
            self.__class__ = OwnBackward

    def _iterator_step(self, dataloader_iter: Any) -> Tensor:
        raise AssertionError

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        if self.what == "skip" and batch_idx == 1:
            return None
        if self.what == "barrier":
            self.trainer.strategy.barrier()
        loss = super().training_step(batch, batch_idx)
        if self.what == "reduce":
            self.log("reduced", loss, reduce_fx=torch.linalg.norm)
        if self.what.startswith("hook"):
            self.seen.append(loss.detach())
        if self.what == "mixed" and batch[0][0, 0] > 15:
            loss = loss + F.cross_entropy(loss.expand(3, 2), torch.zeros(3, dtype=torch.int64))
        unfit = {"none": None, "dict": {"los": loss}, "vector": loss.expand(3), "detached": loss.detach()}
        return unfit.get(self.what, loss)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.what == "hook":
            with torch.no_grad():
                self.head.weight.mul_(0.5)
        if self.what == "hook_of_data":
            self.head.weight.data.mul_(0.5)

    def on_train_epoch_end(self) -> None:
        if self.what == "hook_saves":
            self.trainer.save_checkpoint("saved.ckpt")

    def on_train_start(self) -> None:
        if self.what == "drawn":  # each stage what it has, and both the embedding, which is the head's weight
            for weight in reversed(list(self.parameters())):
                torch.nn.init.normal_(weight.data)
        if self.what == "device":
            self.seen.append(torch.zeros(1, device=next(self.head.parameters()).device))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.what == "forward":  # between a backward and its step
            self(torch.zeros(1, 6, dtype=torch.int64))
        if self.what == "gradient":
            self.head.weight.grad[:2] = 0  # type: ignore[index]
            self.tok.weight.grad[:2] = 0  # type: ignore[index]
            self.blocks[0].mlp.down.weight.grad[:2] = 0
            self.blocks[-1].mlp.down.weight.grad[:2] = 0
        if self.what == "clip":
            torch.nn.utils.clip_grad_norm_(self.blocks.parameters(), 1.0)

    def configure_optimizers(self) -> Any:
        if self.what == "lbfgs":
            return torch.optim.LBFGS(self.parameters())
        if self.what == "by_whole_norm":
            return ByWholeNorm(self.parameters(), lr=0.1)
        return super().configure_optimizers()

    def split_batch(self, batch: Any, microbatches: int) -> list[Any]:
        parts = zip(*(x.split(1) for x in batch), strict=True)
        return [] if self.what == "split" else [*parts]


class ByWholeNorm(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.1)
        super().step()
        return loss


class OwnBackward(Refused):
    def backward(self, loss: Tensor) -> None:
        loss.backward()


def _refused(layout: Layout, what: str, strategy: dict[str, Any]) -> None:
    torch.manual_seed(3)
    trainer = make_trainer(layout, strategy=strategy)
    module = Refused(what)
    if what == "compiled":
        module.compile()
    trainer.fit(module, train_loader(layout, 2))


@pytest.mark.parametrize(
    ("what", "strategy", "texts", "ranks"),
    [
        ("manual", {"whole_loss": True}, ["manual optimization", "whole_loss=False"], 2),
        ("backward", {}, ["own `backward`", "on_before_backward"], 2),
        ("iterator", {}, ["`dataloader_iter`", "takes a batch"], 2),
        ("none", {}, ["returned None instead of a loss", "leave it out"], 2),
        ("skip", {}, ["returned None before `", "DataLoader"], 1),
        pytest.param("dict", {}, ["returned a dict without `loss` (it has los)"], 2, marks=pytest.mark.extended),
        ("vector", {}, ["returned a loss of shape (3,)", "mean"], 2),
        ("detached", {}, ["returned a loss that needs no gradient", "detach"], 1),
        ("split", {}, ["split_batch", "at least one"], 2),
        ("reduce", {}, ["{min,max,mean,sum}"], 2),
        *(
            pytest.param(
                hook, {}, ["on_train_batch_end", "changes parameters", "callback"], 1, marks=pytest.mark.extended
            )
            for hook in ("hook", "hook_of_data")
        ),
        pytest.param("hook_saves", {}, ["a checkpoint needs all ranks", "callback"], 1, marks=pytest.mark.extended),
        ("barrier", {}, ["`strategy.barrier` waits for all ranks", "in a hook"], 2),
        ("forward", {}, ["is called outside of a step", "on another pipeline stage"], 2),
        ("drawn", {}, ["several pipeline stages have `tok.weight`", "drawn anew in a hook"], 2),
        ("device", {}, ["`on_train_start` raised StopIteration", "`self.device`"], 1),
        ("gradient", {}, ["`on_before_optimizer_step` failed", "`grad` is None"], 1),
        ("clip", {}, ["scales the gradient of", "gradient_clip_val"], 2),
        ("lbfgs", {}, ["LBFGS does not step each tensor by itself", "pp=1"], 2),
        ("by_whole_norm", {}, ["ByWholeNorm does not step each tensor by itself", "pp=1"], 2),
        ("compiled", {}, ["`Refused` is compiled as a whole", "block.compile()"], 2),
        pytest.param("mixed", {}, ["loss_weight(self, batch)"], 1, marks=pytest.mark.extended),
        ("", {"pp": 8}, ["8"], 2),
        ("", {"schedule": "zb"}, ["zb", "zb_h1"], 2),
        ("", {"virtual_stages": 3, "schedule": "zb_v"}, ["virtual_stages"], 2),
        ("", {"microbatches": 0}, ["microbatches"], 2),
        ("", {"schedule": "interleaved", "virtual_stages": 8}, ["units"], 2),
    ],
    ids=lambda value: str(value) if isinstance(value, (str, dict)) else "",
)
def test_what_is_refused(what: str, strategy: dict[str, Any], texts: list[str], ranks: int) -> None:
    with pytest.raises(RankError) as error:
        run_program(PP2, _refused, what, strategy)
    clear = [f for f in error.value.failures if all(text in f.message for text in texts)]
    assert len(clear) >= ranks, [f"{f.rank}: {f.type_name}: {f.message}" for f in error.value.failures]
    assert all(f.type_name != "Timeout" for f in error.value.failures), "what one rank finds ends the others"


def _other_layout(layout: Layout, second: Layout) -> None:
    module = variant("untied").build()
    make_trainer(layout).fit(module, train_loader(layout, 1))
    make_trainer(second).fit(module, train_loader(layout, 1))


@pytest.mark.parametrize("second", [Layout(pp=2, schedule="zb_v"), Layout(dp=2)], ids=str)
def test_a_second_trainer_with_other_stages_is_refused(second: Layout) -> None:
    with pytest.raises(RankError) as error:
        run_program(PP2, _other_layout, second)
    assert ["already cut into pipeline stages" in failure.message for failure in error.value.failures] == [True] * 2


# ---------------------------------------------------------------- frozen networks


class OnAFrozenOne(LightningModule):
    """Trained blocks behind frozen ones of the same names and shapes, which are no averaged copy of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base, self.top = (nn.ModuleDict({"blocks": nn.ModuleList(map(_block, range(n)))}) for n in (2, 3))
        self.base.requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        (x,) = batch
        for block in (*self.base["blocks"], *self.top["blocks"]):  # type: ignore[misc]
            x = x + block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.top.parameters(), 0.1)


def _block(_: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))


def _trained(layout: Layout) -> dict[str, Tensor]:
    module = OnAFrozenOne()
    rows = torch.randn(8, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    trainer = make_trainer(layout, strategy={"plan": {}})
    trainer.fit(module, DataLoader(TensorDataset(rows), batch_size=8))
    return {name: p.detach() for name, p in module.named_parameters() if p.numel()}


def test_frozen_blocks_that_trained_ones_read_come_first_and_outputs_may_change_in_place() -> None:
    expected = run_program(PLAIN, _trained)[0]
    for found in run_program(PP2, _trained):
        for name, parameter in found.items():
            torch.testing.assert_close(parameter, expected[name], rtol=1e-9, atol=1e-9)


# ---------------------------------------------------------------- a rank that fails


SCRIPT = Path(__file__).parents[1] / "failure" / "scripts" / "pipeline.py"


@pytest.mark.parametrize(
    ("what", "point", "rank"),
    [
        pytest.param("raise", "backward", 0, marks=pytest.mark.extended),
        pytest.param("kill", "forward", 0, marks=pytest.mark.extended),
        pytest.param("kill", "backward", 1, marks=pytest.mark.extended),
        *(  # global rank 0 holds the last stage
            pytest.param(what, point, rank, marks=pytest.mark.extended)
            for what in ("raise", "kill")
            for point, rank in [("F", 1), ("I", 0), ("W", 1), ("SF", 1), ("RF", 0), ("SB", 0), ("RB", 1)]
        ),
    ],
)
def test_one_rank_ends_all_and_is_named(what: str, point: str, rank: int, tmp_path: Path) -> None:
    """In the middle of a schedule, where the others wait for its messages."""
    distributed = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in distributed}
    root = str(Path(__file__).parents[3])
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([root, environment.get("PYTHONPATH", "")])}
    ended = subprocess.run(
        [sys.executable, str(SCRIPT), what, point, str(rank), str(tmp_path)],
        env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT_S,
        check=False,
    )  # fmt: skip
    assert ended.returncode != 0 and "finished" not in ended.stdout, ended.stdout
    cause = f"ValueError: struck in {point}" if what == "raise" else "died first"
    verdicts = [line for line in ended.stdout.splitlines() if "MegaTPStrategy: rank" in line]
    assert verdicts, ended.stdout
    assert all(f"rank {rank} " in line and cause in line for line in verdicts), verdicts
