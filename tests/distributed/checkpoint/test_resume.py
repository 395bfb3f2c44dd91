"""A resumed run is the uninterrupted one, bit by bit, and ModelCheckpoint does with folders what it does with files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.checkpoint.test_trainer import Losses
from tests.distributed.training import (
    DP2,
    LIGHTNING_2_6,
    PLAIN,
    PP2,
    TP2,
    TP2_PP2,
    WEIGHTS_ONLY,
    Layout,
    eval_loader,
    make_trainer,
    run_program,
    shared_directory,
    tokens,
    train_loader,
)
from tests.parity.models import GPT, GPTConfig
from tests.parity.variants import gpt_plan, variant
from tests.ranks import RankError

ONE = Layout()
CONFIG = GPTConfig(dropout=0.1, attention_dropout=0.1)


class Scheduled(GPT):
    """Dropout, two groups, a schedule per step, a buffer, and what torch's modules save beside tensors."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.extra = Extra()

    def on_train_batch_start(self, *args: Any) -> None:
        self.seen += 1
        self.extra.steps += 1

    def configure_optimizers(self) -> Any:
        matrices = [p for p in self.parameters() if p.dim() > 1]
        vectors = [p for p in self.parameters() if p.dim() < 2]
        optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-2)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Extra(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


class StatefulLoader(DataLoader):
    """A shuffling loader that goes on where it was, as torchdata's does."""

    def __init__(self, samples: int, batch_size: int) -> None:
        super().__init__(tokens(samples), batch_size=batch_size)
        self.generator, self.start, self.order_state = torch.Generator().manual_seed(1), 0, None
        self.rows = batch_size

    def __iter__(self) -> Any:
        if self.order_state is None or self.start == 0:
            self.order_state = self.generator.get_state()
        self.generator.set_state(self.order_state)
        order = torch.randperm(len(self.dataset), generator=self.generator).split(self.rows)
        while self.start < len(order):
            rows = order[self.start]
            self.start += 1
            yield [torch.stack([self.dataset[i][part] for i in rows]) for part in (0, 1)]
        self.start = 0

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start, "order": self.order_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start, self.order_state = state["start"], state["order"]


def _resumed(layout: Layout, form: str, root: str, load: bool) -> dict[str, Any]:
    """20 steps with 7 batches in an epoch, from the 10th on if `load`."""
    torch.manual_seed(6 if load else 5)
    directory = shared_directory(layout, form, root)
    losses = Losses()
    keep = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=10, save_top_k=-1)
    strategy = {"checkpoint": form.removeprefix("async_"), "plan": gpt_plan(CONFIG), "async_save": "async" in form}
    trainer = make_trainer(
        layout, strategy=strategy, callbacks=[losses, keep], enable_checkpointing=True, max_epochs=-1, max_steps=20
    )
    module = Scheduled().double()
    loader = StatefulLoader(7 * 4, 4)
    trainer.fit(module, loader, ckpt_path=directory / "step=10.ckpt" if load else None, **WEIGHTS_ONLY)
    trainer.strategy.checkpoint = "file"
    trainer.save_checkpoint(directory / "end.ckpt")
    final = torch.load(directory / "end.ckpt") if trainer.is_global_zero else {}
    return {
        "losses": losses.values,
        "extra": module.extra.steps,
        "state": [final.get(key) for key in ("state_dict", "optimizer_states", "lr_schedulers")],
    }


@pytest.mark.parametrize(
    ("layout", "form"),
    [
        (TP2_PP2, "folder"),
        (TP2, "async_folder"),
        *(
            pytest.param(layout, form, marks=pytest.mark.extended)
            for layout, form in [
                (Layout(), "file"),
                (Layout(), "folder"),
                (TP2, "file"),
                (PP2, "file"),
                (PP2, "folder"),
            ]
        ),
        pytest.param(TP2_PP2, "async_folder", marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_resume_is_exact(layout: Layout, form: str, tmp_path: Path) -> None:
    whole = run_program(layout, _resumed, form, str(tmp_path), False)
    resumed = run_program(layout, _resumed, form, str(tmp_path), True)
    for once, twice in zip(whole, resumed, strict=True):
        assert len(once["losses"]) == 20 and once["losses"][10:] == twice["losses"]
        assert once["extra"] == twice["extra"] == 20
        assert same_bits(once["state"], twice["state"])
    assert len(set(whole[0]["losses"])) == 20


def same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same_bits, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


class FailsAt(Callback):
    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 5:
            raise ZeroDivisionError("the user's own")


def _keep(layout: Layout, root: str, form: str, link: bool) -> dict[str, Any]:
    """ModelCheckpoint with what people set."""
    directory = shared_directory(layout, f"{form}{link}", root)
    keep = ModelCheckpoint(
        directory, "{epoch}", monitor="val_loss", save_top_k=2, save_last="link" if link else True, mode="max"
    )
    strategy = {"checkpoint": form.removeprefix("async_"), "plan": variant("tied").plan, "async_save": "async" in form}
    trainer = make_trainer(layout, strategy=strategy, callbacks=[keep], enable_checkpointing=True, max_epochs=4)
    trainer.fit(variant("tied").build(), train_loader(layout, 2), eval_loader(layout, 1))
    best = trainer.validate(variant("tied").build(), eval_loader(layout, 1), ckpt_path="best", verbose=False)
    last = trainer.validate(variant("tied").build(), eval_loader(layout, 1), ckpt_path="last", verbose=False)
    trainer.save_checkpoint(directory / "weights.ckpt", weights_only=True)
    third = make_trainer(layout, strategy=strategy)
    weights = third.validate(
        variant("tied").build(), eval_loader(layout, 1), ckpt_path=directory / "weights.ckpt", verbose=False
    )
    kept = sorted(os.listdir(directory))
    return {"kept": kept, "val_loss": [x[0]["val_loss"] for x in (best, last, weights)], "best": keep.best_model_path}


@pytest.mark.parametrize(
    ("layout", "form", "link"),
    [
        (TP2, "async_folder", True),
        *(
            pytest.param(*case, marks=pytest.mark.extended)
            for case in [(TP2, "folder", False), (PP2, "folder", True), (DP2, "folder", False), (TP2, "file", True)]
        ),
    ],
    ids=str,
)
def test_model_checkpoint(layout: Layout, form: str, link: bool, tmp_path: Path) -> None:
    for found in run_program(layout, _keep, str(tmp_path), form, link):
        best, last, weights = found["val_loss"]
        assert best > last, "the largest loss is kept, so that the first epochs are"
        assert last == weights
        assert len(found["kept"]) == 4, found["kept"]
        assert Path(found["best"]).name in found["kept"]
        assert Path(found["best"]).is_dir() == ("folder" in form)


def _fails(layout: Layout, root: str, form: str) -> list[str]:
    directory = shared_directory(layout, form, root)
    keep = ModelCheckpoint(directory, every_n_train_steps=2, save_top_k=-1, save_on_exception=True)
    trainer = make_trainer(
        layout, strategy={"checkpoint": form}, callbacks=[keep, FailsAt()], enable_checkpointing=True
    )
    with pytest.raises(ZeroDivisionError):
        trainer.fit(variant("tied").build(), train_loader(layout, 8))
    return sorted(os.listdir(directory))


@pytest.mark.skipif(not LIGHTNING_2_6, reason="Lightning 2.5 has no `save_on_exception`")
def test_save_on_exception_at_one_rank(tmp_path: Path) -> None:
    for form in ("file", "folder"):
        assert len(run_program(ONE, _fails, str(tmp_path), form)[0]) == 3


def _other_optimizer(layout: Layout, path: str, how: str) -> None:
    module = variant("tied").build()
    groups = [[p for p in module.parameters() if p.dim() > 1], [p for p in module.parameters() if p.dim() < 2]]
    if how == "groups":
        module.configure_optimizers = lambda: torch.optim.AdamW([{"params": group} for group in groups])
    else:
        module.configure_optimizers = lambda: [torch.optim.AdamW(group) for group in groups]
    make_trainer(layout, "tied").fit(module, train_loader(layout, 1), ckpt_path=path)


def _save_only(layout: Layout, path: str) -> None:
    trainer = make_trainer(layout, "tied", strategy={"checkpoint": "folder"})
    trainer.fit(variant("tied").build(), train_loader(layout, 1))
    trainer.save_checkpoint(path)


@pytest.mark.parametrize("how", ["groups"])
def test_other_groups_are_refused(how: str, tmp_path: Path) -> None:
    path = str(tmp_path / "folder.ckpt")
    run_program(PP2, _save_only, path)
    with pytest.raises(RankError, match=r"groups of \[\d+\] parameters, and this one's are \[\d+, \d+\]") as error:
        run_program(TP2, _other_optimizer, path, how)
    assert len(error.value.failures) == 2


class Rows(LightningModule):
    """Notes which rows a batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 1)) for _ in range(2)))
        self.rows = list[list[float]]()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.rows.append(batch[0].flatten().tolist())
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def _shuffled(layout: Layout, root: str, resumes: bool) -> list[list[float]]:
    torch.manual_seed(0)
    module, rows = Rows(), TensorDataset(torch.arange(8.0).double()[:, None])
    loader = DataLoader(rows, batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
    trainer = make_trainer(layout, strategy={"plan": "auto"}, max_epochs=1 + resumes)  # looks at a batch before
    trainer.fit(module, loader, ckpt_path=f"{root}/first.ckpt" if resumes else None)
    if not resumes:
        trainer.save_checkpoint(f"{root}/first.ckpt")
    return module.rows


def test_persistent_workers_go_on_in_the_same_order(tmp_path: Path) -> None:
    """From a plain Trainer's checkpoint, since the ranks' own has their random state."""
    run_program(PLAIN, _shuffled, str(tmp_path), False)
    (expected,) = run_program(PLAIN, _shuffled, str(tmp_path), True)
    assert run_program(Layout(tp=2), _shuffled, str(tmp_path), True) == [expected, expected]
