"""Checkpoints behind an fsspec URL: files are saved and loaded at any layout, folders are refused in time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.distributed.checkpoint.test_trainer import Losses
from tests.distributed.training import (
    PLAIN,
    TP2,
    TP2_PP2,
    WEIGHTS_ONLY,
    Layout,
    make_trainer,
    run_program,
    train_loader,
)
from tests.parity.variants import variant
from tests.ranks import RankError


class Bucket(fsspec.AbstractFileSystem):
    """What a remote file system is to whoever uses it, over a folder: `bucket:///folder/file`."""

    protocol = "bucket"
    cachable = False

    def __init__(self, key: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.key, self._local = key, LocalFileSystem()

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if "w" in mode and path.endswith("secret.ckpt") and self.key != "right":
            raise PermissionError(path)
        return self._local.open(path, mode, autocommit=options.get("autocommit", True))

    def ls(self, path: str, detail: bool = True, **options: Any) -> Any:
        return self._local.ls(self._strip_protocol(path), detail)

    def info(self, path: str, **options: Any) -> Any:
        return self._local.info(self._strip_protocol(path))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._local.makedirs(self._strip_protocol(path), exist_ok)

    def rm_file(self, path: str) -> None:
        self._local.rm_file(self._strip_protocol(path))


def _trainer(layout: Layout, root: str, form: str, epochs: int) -> tuple[Any, Any, Losses]:
    fsspec.register_implementation("bucket", Bucket, clobber=True)
    keep = ModelCheckpoint(f"bucket://{root}", save_top_k=1, save_last=True, every_n_epochs=1)
    strategy, losses = {} if layout.plain else {"checkpoint": form}, Losses()
    callbacks = [keep, losses]
    options: dict[str, Any] = {"max_epochs": epochs, "callbacks": callbacks, "enable_checkpointing": True}
    return make_trainer(layout, strategy=strategy, **options), keep, losses


def _save(layout: Layout, root: str, form: str = "file") -> str:
    trainer, keep, _ = _trainer(layout, root, form, 1)
    trainer.fit(variant("untied").build().double(), train_loader(layout, 3))
    trainer.save_checkpoint(f"bucket://{root}/secret.ckpt", storage_options={"key": "right"})
    with pytest.raises((PermissionError, RuntimeError), match=r"secret\.ckpt"):
        trainer.save_checkpoint(f"bucket://{root}/secret.ckpt", storage_options={"key": "wrong"})
    return str(keep.best_model_path)


def _goes_on(layout: Layout, root: str, load: str | None) -> list[float]:
    trainer, _, losses = _trainer(layout, root, "file", 2)
    trainer.fit(variant("untied").build().double(), train_loader(layout, 3), ckpt_path=load, **WEIGHTS_ONLY)
    return losses.values


def test_a_file_behind_a_url(tmp_path: Path) -> None:
    expected = run_program(PLAIN, _goes_on, str(tmp_path / "plain"), None)[0]
    best = run_program(TP2_PP2, _save, str(tmp_path / "ours"))
    assert set(best) == {f"bucket://{tmp_path}/ours/epoch=0-step=3.ckpt"}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {"epoch=0-step=3.ckpt", "last.ckpt", "secret.ckpt"}
    for load in (best[0], f"bucket://{tmp_path}/ours/secret.ckpt"):
        for losses in run_program(TP2_PP2, _goes_on, str(tmp_path / "again"), load):
            assert losses == pytest.approx(expected[3:], abs=1e-9)


def test_a_folder_behind_a_url_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"writes to a file system that all ranks share, not to bucket://") as error:
        run_program(TP2, _save, str(tmp_path / "folder"), "folder")
    assert len(error.value.failures) == 2
