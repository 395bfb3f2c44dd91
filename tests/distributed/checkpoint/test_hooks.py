"""What the user's hooks and Lightning's callbacks do with checkpoints besides saving and resuming."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from torch import Tensor

from tests.distributed.checkpoint.test_trainer import Losses
from tests.distributed.training import (
    DP2,
    LIGHTNING_2_6,
    PLAIN,
    PP2,
    TP2,
    Layout,
    make_trainer,
    run_program,
    train_loader,
)
from tests.parity.models import GPT, GPTConfig
from tests.parity.variants import gpt_plan
from tests.ranks import RankError

CONFIG = GPTConfig(tied=False)


def options(layout: Layout, **strategy: Any) -> dict[str, Any]:
    return {} if layout.plain else {"strategy": {"checkpoint": "folder", **strategy}}


class Searched(GPT):
    lr = 1e-3

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), self.lr)


def _searched(layout: Layout, root: str) -> list[float]:
    torch.manual_seed(3)
    finder = LearningRateFinder(min_lr=1e-3, max_lr=1e-1, num_training_steps=3, early_stop_threshold=None)
    losses = Losses()
    trainer = make_trainer(layout, callbacks=[finder, losses], default_root_dir=root, **options(layout))
    trainer.fit(Searched(CONFIG).double(), train_loader(layout, 4))
    return losses.values[-4:]


@pytest.mark.skipif(not LIGHTNING_2_6, reason="Lightning 2.5 goes on after a search with what it left of the epoch")
def test_a_folder_is_restored_in_the_middle_of_a_run(tmp_path: Path) -> None:
    expected = run_program(PLAIN, _searched, str(tmp_path))[0]
    for found in run_program(TP2, _searched, str(tmp_path)):
        assert found == pytest.approx(expected, abs=1e-9), "the search for a learning rate leaves the model as it was"


class Late(LightningModule):
    """Its layers are made in configure_model."""

    def __init__(self) -> None:
        super().__init__()
        self.model: GPT | None = None

    def configure_model(self) -> None:
        if self.model is None:
            self.model = GPT(CONFIG).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.model is not None
        return self.model.loss(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class WithoutHead(Late):
    """Changes what is loaded."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: x.zero_() if ".head." in name else x for name, x in state.items()}


class WithoutStates(Late):
    """Its optimizer begins anew."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"], checkpoint["lr_schedulers"] = [], []


def _resumed(layout: Layout, kind: type[Late], verify: bool, root: str) -> list[float]:
    """The losses after a folder was loaded."""
    path = Path(root) / str(layout)
    for epochs, make in ((1, Late), (2, kind)):
        torch.manual_seed(3)
        losses = Losses()
        chosen = options(layout, plan=gpt_plan(CONFIG, "model."), verify=verify and epochs == 2)
        trainer = make_trainer(layout, callbacks=[losses], max_epochs=epochs, **chosen)
        trainer.fit(make(), train_loader(layout, 2), ckpt_path=path if epochs == 2 else None)
        trainer.save_checkpoint(path)
    return losses.values


def test_a_hook_changes_what_is_loaded_from_a_folder(tmp_path: Path) -> None:
    expected = run_program(PLAIN, _resumed, WithoutHead, False, str(tmp_path))[0]
    assert expected[0] == pytest.approx(math.log(CONFIG.vocab)), "a head of zeros prefers nothing"
    for found in run_program(TP2, _resumed, WithoutHead, False, str(tmp_path)):
        assert found == pytest.approx(expected, abs=1e-9)


def test_a_hook_leaves_the_states_of_optimizers_out(tmp_path: Path) -> None:
    expected, going_on = (run_program(PLAIN, _resumed, kind, False, str(tmp_path))[0] for kind in (WithoutStates, Late))
    assert expected[1] != pytest.approx(going_on[1], abs=1e-6)
    for found in run_program(TP2, _resumed, WithoutStates, False, str(tmp_path)):
        assert found == pytest.approx(expected, abs=1e-9)


def test_verify_compares_with_what_is_loaded_from_a_folder(tmp_path: Path) -> None:
    expected = run_program(PLAIN, _resumed, Late, False, str(tmp_path))[0]
    for found in run_program(TP2, _resumed, Late, True, str(tmp_path)):
        assert found == pytest.approx(expected, abs=1e-9)


class Part(GPT):
    """Leaves some out of its checkpoints, and renames the rest."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        assert tuple(state.pop("blocks.0.mlp.up.weight").shape) == tuple(GPT(CONFIG).blocks[0].mlp.up.weight.shape)
        checkpoint["state_dict"] = {f"net.{name}": state[name].half() for name in state}


def _saved_in_part(layout: Layout, root: str) -> None:
    torch.manual_seed(3)
    keep = ModelCheckpoint(Path(root) / str(layout), filename="part", save_weights_only=layout.dp > 1)
    trainer = make_trainer(layout, callbacks=[keep], enable_checkpointing=True)
    trainer.fit(Part(CONFIG).double(), train_loader(layout, 1))


def test_a_hook_takes_names_out_of_a_file_on_all_ranks(tmp_path: Path) -> None:
    saved = []
    for layout in (PLAIN, TP2, PP2, DP2):
        run_program(layout, _saved_in_part, str(tmp_path))
        saved.append(torch.load(tmp_path / str(layout) / "part.ckpt")["state_dict"])
    assert all(list(found) == list(saved[0]) for found in saved)
    for name, value in saved[0].items():
        assert all(torch.allclose(found[name], value, atol=1e-3) for found in saved), name


class Looks(GPT):
    """Looks at what a checkpoint has of the optimizer, and notes it."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        [state] = checkpoint["optimizer_states"]
        [group] = state["param_groups"]
        self.found = group["lr"], group["params"], [tuple(x["exp_avg"].shape) for x in state["state"].values()]
        for of_parameter in state["state"].values():
            del of_parameter["exp_avg_sq"]


class Computes(GPT):
    """With values of all weights."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = sum(float(x.cpu().norm()) for x in checkpoint["state_dict"].values())


def _looked(layout: Layout, kind: type[GPT], folder: str) -> Any:
    torch.manual_seed(3)
    keep = ModelCheckpoint(folder, filename=str(layout))
    module, trainer = kind(CONFIG).double(), make_trainer(layout, callbacks=[keep], enable_checkpointing=True)
    trainer.fit(module, train_loader(layout, 1))
    return module.found


@pytest.mark.parametrize("layout", [TP2, PP2, DP2, Layout(tp=2, dp=2), Layout(dp=2, zero=3)], ids=str)
def test_hooks_look_at_optimizers_on_all_ranks(layout: Layout, tmp_path: Path) -> None:
    expected = run_program(PLAIN, _looked, Looks, str(tmp_path))[0]
    for found in run_program(layout, _looked, Looks, str(tmp_path)):
        assert found == expected
    [state] = torch.load(tmp_path / f"{layout}.ckpt")["optimizer_states"]
    assert all(set(x) == {"step", "exp_avg"} and x["exp_avg"].device.type == "cpu" for x in state["state"].values())


def test_hooks_have_values_where_a_rank_holds_the_whole_model(tmp_path: Path) -> None:
    first, second = run_program(DP2, _looked, Computes, str(tmp_path))
    assert first == second
    with pytest.raises(RankError, match=r"`on_save_checkpoint` looks at values of the whole model.*alone.*Do it there"):
        run_program(TP2, _looked, Computes, str(tmp_path))


class KeepsRank(Callback):
    def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["saved_by"] = trainer.global_rank


def _kept_by_one(layout: Layout, folder: str) -> None:
    keep = ModelCheckpoint(folder, filename="one")
    callbacks = [keep, *([KeepsRank()] if dist.get_rank() == 0 else [])]
    trainer = make_trainer(layout, callbacks=callbacks, enable_checkpointing=True)
    trainer.fit(GPT(CONFIG).double(), train_loader(layout, 1))


@pytest.mark.parametrize("layout", [TP2, PP2], ids=str)
def test_a_hook_of_one_rank_alone_waits_for_nobody(layout: Layout, tmp_path: Path) -> None:
    run_program(layout, _kept_by_one, str(tmp_path))
    assert torch.load(tmp_path / "one.ckpt")["saved_by"] == 0
