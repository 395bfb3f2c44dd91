"""Frozen parameters in pipelines: stages on which nothing is trained, and what is unfrozen later."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.crossing import crossed
from tests.distributed.training import PLAIN, Layout, make_trainer, run_program, train_loader
from tests.parity.models import GPT, GPTConfig

LAYOUTS = [
    Layout(pp=2),
    Layout(pp=2, schedule="zb_v"),
    Layout(tp=2, pp=2),
    Layout(pp=2, dp=2, microbatches=2, zero=2),
]


class HeadOnly(GPT):
    """Trains its last layer; the rest is frozen, or left out of the optimizer."""

    def __init__(self, freezes: bool, tied: bool = False) -> None:
        super().__init__(GPTConfig(tied=tied))
        if freezes:
            self.requires_grad_(False)
            self.head.requires_grad_(True)
        self.losses: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, *args: Any) -> None:
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.head.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Distilled(HeadOnly):
    """A small student first, a larger frozen teacher behind it."""

    def __init__(self) -> None:
        super().__init__(freezes=False)
        self.teacher = copy.deepcopy(self.blocks)
        self.teacher.extend(copy.deepcopy(self.blocks))
        self.teacher.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens_BL, targets_BL = batch
        with torch.no_grad():
            x_BLD = wanted_BLD = self.tok(tokens_BL).detach()
            for block in self.teacher:
                wanted_BLD = block(wanted_BLD)
        x_BLD = self.tok(tokens_BL)
        for block in self.blocks:
            x_BLD = block(x_BLD)
        loss = F.mse_loss(x_BLD, wanted_BLD) + F.cross_entropy(self.head(x_BLD).flatten(0, 1), targets_BL.flatten())
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([*self.tok.parameters(), *self.blocks.parameters()], lr=3e-3)


class Unfreezes(HeadOnly):
    """Block after block, in hooks."""

    def __init__(self) -> None:
        super().__init__(freezes=True)

    def on_train_epoch_start(self) -> None:
        for block in self.blocks[len(self.blocks) - self.current_epoch :]:
            block.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class Finetuned(HeadOnly):
    """Its optimizer gets the groups that a callback adds."""

    def __init__(self) -> None:
        super().__init__(freezes=False)
        self.backbone = nn.ModuleList([self.tok, self.blocks[0]])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=3e-3)


class Finetuning(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.tok, pl_module.pos, pl_module.blocks])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        for block in pl_module.blocks[len(pl_module.blocks) - epoch :] if epoch else []:
            self.unfreeze_and_add_param_group(block, optimizer, lr=1e-3 * epoch)


MODELS = {
    "frozen": lambda: HeadOnly(freezes=True),
    "frozen but for a tied weight": lambda: HeadOnly(freezes=True, tied=True),
    "left out": lambda: HeadOnly(freezes=False),
    "distilled": Distilled,
}


def _fit(layout: Layout, name: str, folder: str) -> tuple[list[float], dict[str, Tensor], dict[str, float]]:
    torch.manual_seed(3)
    root = Path(folder) / str(layout)
    module: Any = MODELS[name]()
    for epochs in (1, 2):
        callbacks = [ModelCheckpoint(root / "saved", save_last=True), LearningRateMonitor()]
        logger = CSVLogger(root)
        trainer = make_trainer(
            layout, max_epochs=epochs, gradient_clip_val=0.1, logger=logger, callbacks=callbacks,
            enable_checkpointing=True, log_every_n_steps=1,
        )  # fmt: skip
        trainer.fit(module, train_loader(layout, 3), ckpt_path=root / "saved" / "last.ckpt" if epochs > 1 else None)
        losses, module = module.losses, MODELS[name]()
        if epochs == 1:
            first = losses
    state = trainer.strategy.lightning_module_state_dict()
    return [*first, *losses], state, {k: float(v) for k, v in trainer.logged_metrics.items()}


@pytest.mark.parametrize(("name", "layout"), crossed(list(MODELS), LAYOUTS), ids=str)
def test_a_stage_without_anything_to_train(layout: Layout, name: str, tmp_path: Path) -> None:
    ((losses, state, logged),) = run_program(PLAIN, _fit, name, str(tmp_path))
    results = run_program(layout, _fit, name, str(tmp_path))
    for found, _, metrics in results:
        assert layout.dp > 1 or found == pytest.approx(losses, abs=1e-9)
        assert layout.dp > 1 or metrics == pytest.approx(logged, abs=1e-9)
    assert results[0][1].keys() == state.keys()
    for key, value in state.items():
        torch.testing.assert_close(results[0][1][key], value, atol=1e-9, rtol=0, msg=key)


def _clipped(layout: Layout) -> list[float]:
    torch.manual_seed(3)
    module = MODELS["frozen"]()
    make_trainer(layout, gradient_clip_val=0.001, gradient_clip_algorithm="value").fit(module, train_loader(layout, 3))
    return module.losses


def test_clipping_by_value_where_a_stage_trains_nothing() -> None:
    (expected,) = run_program(PLAIN, _clipped)
    for found in run_program(Layout(pp=2), _clipped):
        assert found == pytest.approx(expected, abs=1e-9)


def _tied(layout: Layout) -> Tensor:
    torch.manual_seed(3)
    trainer = make_trainer(layout, gradient_clip_val=0.1)
    trainer.fit(MODELS["frozen but for a tied weight"](), train_loader(layout, 3))
    weight: Tensor = trainer.strategy.parallel.names["tok.weight"].detach()  # type: ignore[attr-defined]
    return weight


def test_copies_of_a_tied_weight_are_clipped_by_the_same_number() -> None:
    """The first stage has no other gradient, and this one counts on the last."""
    first, second = run_program(Layout(pp=2), _tied)
    assert torch.equal(first, second)


FINETUNING = {
    "hook": (Unfreezes, lambda: []),
    "callback": (Finetuned, lambda: [Finetuning()]),
    "backbone": (Finetuned, lambda: [BackboneFinetuning(1, lambda epoch: 1.5, backbone_initial_lr=1e-3)]),
}


def _finetune(layout: Layout, name: str, folder: str) -> tuple[list[float], dict[str, Tensor], list[Any]]:
    root, losses, groups = Path(folder) / str(layout), [], []
    model, callbacks = FINETUNING[name]
    for epochs in (2, 4):  # resumed in the middle
        torch.manual_seed(3)
        module: Any = model()
        saving = ModelCheckpoint(root / "saved", save_last=True)
        options: dict[str, Any] = {"callbacks": [*callbacks(), saving], "enable_checkpointing": True}
        trainer = make_trainer(layout, max_epochs=epochs, **options)
        last = root / "saved" / "last.ckpt"
        trainer.fit(module, train_loader(layout, 2), ckpt_path=last if epochs > 2 else None)
        losses += module.losses
        saved = torch.load(last, weights_only=False)["optimizer_states"][0]["param_groups"]
        groups.append([(group["lr"], group["params"]) for group in saved])
    return losses, trainer.strategy.lightning_module_state_dict(), groups


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *crossed(["callback", "hook", "backbone"], [Layout(pp=2), Layout(dp=2, zero=3), Layout(pp=2, dp=2, zero=2)]),
        *(
            pytest.param(name, layout, marks=pytest.mark.extended)
            for name in FINETUNING
            for layout in (
                Layout(tp=2, pp=2, sequence=False),
                Layout(dp=2, zero=1),
                Layout(pp=2, dp=2, microbatches=2),
            )
        ),
    ],
    ids=str,
)
def test_unfrozen_later(layout: Layout, name: str, tmp_path: Path) -> None:
    ((losses, state, groups),) = run_program(PLAIN, _finetune, name, str(tmp_path))
    results = run_program(layout, _finetune, name, str(tmp_path))
    for found, _, saved in results:
        assert layout.dp > 1 or found == pytest.approx(losses, abs=1e-9)
        assert saved == groups
    for key, value in state.items():
        torch.testing.assert_close(results[0][1][key], value, atol=1e-9, rtol=0, msg=key)


class Patched(LightningModule):
    """A backbone with a class token, as vision transformers have it: a parameter used through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.token, self.backbone.place = nn.Parameter(torch.zeros(1, 1, 8)), nn.Parameter(torch.ones(1, 4, 8))
        blocks = (nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)) for _ in range(4))
        self.backbone.embed, self.backbone.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.backbone.blocks, self.head = nn.Sequential(*blocks), nn.Linear(8, 8)
        self.accuracy = torchmetrics.MetricCollection(
            {
                "micro": torchmetrics.Accuracy("multiclass", num_classes=8),
                "top": torchmetrics.Accuracy("multiclass", num_classes=8, top_k=3),
                "f1": torchmetrics.F1Score("multiclass", num_classes=8, average="macro"),
            }
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        net: Any = self.backbone
        token = net.token.expand(len(x_BTD), -1, -1)
        x_BTD = torch.cat([token, net.embed(x_BTD)], 1) + net.place
        logits: Tensor = self.head(net.norm(net.blocks(F.dropout(x_BTD, 0.0)))[:, 0])
        return logits

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.log("loss", F.cross_entropy(logits, batch[1]))
        self.accuracy.update(logits, batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.accuracy.compute())
        self.accuracy.reset()

    test_step, on_test_epoch_end = validation_step, on_validation_epoch_end

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def _tested_later(layout: Layout) -> dict[str, float]:
    """The last batch is smaller. `BackboneFinetuning` freezes once more where testing begins."""
    torch.manual_seed(3)
    module = Patched()
    rows, classes = torch.randn(20, 3, 8, dtype=torch.float64), torch.arange(20) % 8
    loader = DataLoader(TensorDataset(rows, classes), batch_size=8)
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=1, verbose=False)
    trainer = make_trainer(layout, strategy={"plan": None}, max_epochs=3, callbacks=[finetuning])
    trainer.fit(module, loader, loader)
    fitted = {f"fit {name}": float(x) for name, x in trainer.callback_metrics.items()}
    trainer.test(module, loader, verbose=False)
    return fitted | {name: float(x) for name, x in trainer.callback_metrics.items()}


def test_frozen_again_after_the_fit() -> None:
    (expected,) = run_program(PLAIN, _tested_later)
    assert "f1" in expected and "fit f1" in expected
    for found in run_program(Layout(pp=2, microbatches=2), _tested_later):
        assert found == pytest.approx(expected, rel=1e-6)  # metrics are of float32


def _scaled(layout: Layout) -> list[float]:
    torch.manual_seed(3)
    module = HeadOnly(freezes=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1000)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
    make_trainer(layout, precision=None, plugins=plugins, gradient_clip_val=0.1).fit(module, train_loader(layout, 4))
    return module.losses


def test_with_a_loss_scaler() -> None:
    ((losses),) = run_program(PLAIN, _scaled)
    for found in run_program(Layout(pp=2), _scaled):
        assert found == pytest.approx(losses, rel=2.0**-6), "the tolerance of tests/parity/compare.py"
