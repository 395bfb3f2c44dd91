"""After an exception on all ranks all of them save together, and what they save is one device's."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from tests.distributed.checkpoint.test_averages import _ordered
from tests.distributed.checkpoint.test_trainer import assert_same
from tests.distributed.training import (
    LIGHTNING_2_6,
    PLAIN,
    PP2,
    TP2,
    TP2_DP2,
    Layout,
    make_trainer,
    run_program,
    train_loader,
)
from tests.parity.variants import variant


class RaisesOnAll(Callback):
    """After three steps, on every rank: in a hook, or in the middle of a forward, where values are gathered."""

    def __init__(self, what: type[BaseException], inside: bool) -> None:
        self.what, self.inside = what, inside

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            if not self.inside:
                raise self.what("on all ranks")
            module.blocks[1].register_forward_pre_hook(self._raise)

    def _raise(self, *args: Any) -> None:
        raise self.what("on all ranks")


def _saves_after_exception(layout: Layout, root: str, form: str, what: type[BaseException], inside: bool) -> None:
    strategy = {} if layout.plain else {"checkpoint": form.split()[0], "async_save": "async" in form}
    keep = ModelCheckpoint(
        root, every_n_train_steps=2, save_top_k=-1, save_weights_only=False, save_last=True, save_on_exception=True
    )
    also = OnExceptionCheckpoint(root)
    callbacks = [keep, also, RaisesOnAll(what, inside)]
    trainer = make_trainer(layout, "untied", strategy=strategy, callbacks=callbacks, enable_checkpointing=True)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit if what is KeyboardInterrupt else what):
        trainer.fit(variant("untied").build().double(), train_loader(layout, 8))
    signal.signal(signal.SIGINT, handler)  # Lightning ignores it from then on


@pytest.mark.skipif(not LIGHTNING_2_6, reason="Lightning 2.5 has no `save_on_exception`")
@pytest.mark.parametrize(
    ("layout", "form", "what", "inside"),
    [
        (TP2, "folder async", ValueError, True),
        *(
            pytest.param(*case, marks=pytest.mark.extended)
            for case in [
                (TP2, "file", ValueError, True),
                (PP2, "folder", KeyboardInterrupt, False),
                (PP2, "file", ValueError, False),
                (TP2_DP2, "file", KeyboardInterrupt, False),
                (Layout(dp=2), "file", ValueError, True),
                (Layout(dp=2, zero=3), "folder async", ValueError, True),
                (Layout(tp=2, dp=2, zero=1), "file", ValueError, True),
            ]
        ),
    ],
    ids=str,
)
def test_all_ranks_save_after_an_exception_on_all(
    layout: Layout, form: str, what: type[BaseException], inside: bool, tmp_path: Path
) -> None:
    from lightning_megatp.checkpoint.convert import convert  # the process without this package imports this file

    for where, own in ((PLAIN, "file"), (layout, form)):
        (tmp_path / str(where)).mkdir()
        run_program(where, _saves_after_exception, str(tmp_path / str(where)), own, what, inside)
    names = ["epoch=0-step=2.ckpt", "epoch=0-step=3.ckpt", "last.ckpt", "on_exception.ckpt"]
    assert sorted(os.listdir(tmp_path / str(layout))) == sorted(os.listdir(tmp_path / "plain")) == names
    expected = torch.load(tmp_path / "plain" / names[1], weights_only=False)
    for name in names[1:]:
        found = tmp_path / str(layout) / name
        if found.is_dir():
            convert(found, found.with_suffix(".file.ckpt"), "file")
            found = found.with_suffix(".file.ckpt")
        content = torch.load(found, weights_only=False)
        assert content["global_step"] == 3
        for key in ("state_dict", "optimizer_states"):
            assert_same(_ordered(content[key]), _ordered(expected[key]), f"{name}: {key}")
