"""A copy of a part of the model, made by a hook during training and kept on the module, is in checkpoints as on one
device."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from tests.distributed.training import (
    PLAIN,
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
from tests.ranks import RankError


class Late(GPT):
    """Averages its blocks and its head from the second epoch on, and validates by these."""

    def __init__(self, keep_as: str) -> None:
        super().__init__(GPTConfig(tied=False))
        self.keep_as = keep_as
        self.averages: nn.ModuleList | None = None

    @torch.no_grad()
    def on_validation_start(self) -> None:
        if self.trainer.sanity_checking:
            return
        if self.averages is None or self.keep_as == "made anew":
            self.averages = nn.ModuleList(
                [copy.deepcopy(self.blocks), nn.ModuleDict({"last": copy.deepcopy(self.head)})]
            )
        for part, of in ((self.averages[0], self.blocks), (self.averages[1]["last"], self.head)):  # type: ignore[index]
            for mean, p in zip(part.parameters(), of.parameters(), strict=True):
                mean.lerp_(p, 0.5)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        blocks, head = self.blocks, self.head
        if self.averages is not None:
            self.blocks, self.head = self.averages[0], self.averages[1]["last"]  # type: ignore[index]
        try:
            self.log("val", self.loss(batch), sync_dist=True)
        finally:
            self.blocks, self.head = blocks, head


def _fit(layout: Layout, keep_as: str, root: str, strategy: dict[str, Any]) -> tuple[float, str]:
    torch.manual_seed(0)
    path = shared_directory(layout, keep_as, root)
    keep = ModelCheckpoint(path, filename="last", every_n_epochs=1, enable_version_counter=False)
    options = {"enable_checkpointing": True, "callbacks": [keep], "max_epochs": 3}
    trainer = make_trainer(layout, "untied", strategy, **options)
    trainer.fit(Late(keep_as), train_loader(layout, 2), eval_loader(layout, 1))
    return float(trainer.callback_metrics["val"]), str(path / "last.ckpt")


def _saved(path: str) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(path, weights_only=False)["state_dict"]
    return state


@pytest.mark.parametrize("form", ["file", "folder"])
@pytest.mark.parametrize("keep_as", ["made once", "made anew"])
@pytest.mark.parametrize("layout", [TP2, TP2_DP2], ids=str)
def test_late_copies_of_split_layers_are_saved_whole(layout: Layout, keep_as: str, form: str, tmp_path: Path) -> None:
    ((expected, file),) = run_program(PLAIN, _fit, keep_as, str(tmp_path), {})
    found = run_program(layout, _fit, keep_as, str(tmp_path), {"checkpoint": form})
    assert [value for value, _ in found] == pytest.approx([expected] * layout.ranks, abs=1e-12)
    path = found[0][1]
    if form == "folder":
        from lightning_megatp.checkpoint.convert import convert

        convert(Path(path), Path(f"{path}.file"), "file")
        path += ".file"
    whole, state = _saved(file), _saved(path)
    assert state.keys() == whole.keys() and any(name.startswith("averages.0.") for name in whole)
    for name, value in whole.items():  # a key bias has no gradient but rounding, which Adam makes steps of
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        (Layout(pp=2), r"`averages\..* is a copy, made after set-up, of a module of another pipeline stage"),
        (Layout(dp=2, zero=3), r"`averages\..* is a copy that was made after set-up, of a parameter that zero > 0"),
    ],
    ids=str,
)
def test_late_copies_of_what_is_not_here_are_refused(layout: Layout, why: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=why):
        run_program(layout, _fit, "made once", str(tmp_path), {})
