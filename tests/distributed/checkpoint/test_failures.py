"""One rank that can't save or load stops all of them, and nothing is half saved or half loaded."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from tests.distributed.training import TP2, WEIGHTS_ONLY, Layout, make_trainer, run_program, train_loader
from tests.memory import TELLS, peak_mib
from tests.parity.variants import variant


@contextmanager
def _no_space(here: bool) -> Iterator[None]:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    fsync = os.fsync
    os.fsync = full if here else fsync
    try:
        yield
    finally:
        os.fsync = fsync


def _message(call: Any, *args: Any, **options: Any) -> str:
    try:
        call(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def _save_and_fail(layout: Layout, root: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for form in ("folder", "file"):
        trainer = make_trainer(layout, "tied", strategy={"checkpoint": form})
        trainer.fit(variant("tied").build(), train_loader(layout, 1))
        path = Path(root) / f"{form}.ckpt"
        trainer.save_checkpoint(path)
        with _no_space(trainer.global_rank == (1 if form == "folder" else 0)):
            found[form] = _message(trainer.save_checkpoint, path)
        trainer.strategy.barrier()
    found["left"] = sorted(os.listdir(root))
    found["loads"] = [
        _message(_fit, layout, "tied", {"checkpoint": "file"}, load=Path(root) / f"{form}.ckpt")
        for form in ("folder", "file")
    ]
    return found


def _fit(layout: Layout, model: str, strategy: dict[str, Any], load: Any = None, callbacks: Any = ()) -> None:
    trainer = make_trainer(layout, model, strategy=strategy, max_epochs=2, callbacks=list(callbacks))
    data = train_loader(layout, 1, vocab=variant(model).vocab)
    trainer.fit(variant(model).build(), data, ckpt_path=load, **WEIGHTS_ONLY)


def test_all_ranks_say_that_one_could_not_save(tmp_path: Path) -> None:
    for rank, found in enumerate(run_program(TP2, _save_and_fail, str(tmp_path))):
        for form in ("folder", "file"):
            assert "No space left" in found[form], (rank, found[form])
        assert "on rank 1" in found["folder"]
        assert found["left"] == ["file.ckpt", "folder.ckpt"]
        assert found["loads"] == ["nothing was raised"] * 2, "the checkpoint before is still there"


class SavesInBackground(Callback):
    """A save that fails on rank 1 while training goes on; the next one, or the end of fit, says so."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == 0:
            with _no_space(trainer.global_rank == 1):
                trainer.save_checkpoint(self.path)
                trainer.strategy._background._running.exception()  # the thread is through with the patched function


def _background(layout: Layout, root: str) -> str:
    return _message(
        _fit, layout, "tied", {"checkpoint": "folder", "async_save": True},
        callbacks=[SavesInBackground(Path(root) / "x.ckpt")],
    )  # fmt: skip


def _load_bad(layout: Layout, root: str) -> list[str]:
    """Folders that don't fit, and one that is damaged; what the module holds after the attempt."""
    trainer = make_trainer(layout, "tied", strategy={"checkpoint": "folder"})
    trainer.fit(variant("tied").build(), train_loader(layout, 1))
    path = Path(root) / "good.ckpt"
    trainer.save_checkpoint(path)
    messages = [_message(_fit, layout, "uneven", {}, load=path)]
    if trainer.global_rank == 0:
        shard = path / "__1_0.distcp"
        content = bytearray(shard.read_bytes())
        content[len(content) // 2] ^= 1
        shard.write_bytes(content)
    trainer.strategy.barrier()
    again = make_trainer(layout, "tied")
    module = variant("tied").build()
    before = {name: x.clone() for name, x in module.state_dict().items()}
    messages.append(_message(again.fit, module, train_loader(layout, 1), ckpt_path=path, **WEIGHTS_ONLY))
    spec = again.strategy.parallel.spec_of
    after = module.state_dict()
    rank = again.strategy.mesh.rank("tp")
    same = [torch.equal(after[n], spec(n).spec(rank).take(x) if spec(n) else x) for n, x in before.items()]
    messages.append("unchanged" if all(same) else "changed")
    return messages


def _background_and_bad(layout: Layout, root: str) -> tuple[str, list[str]]:
    return _background(layout, root), _load_bad(layout, root)


def test_a_background_save_that_fails_and_folders_that_do_not_fit(tmp_path: Path) -> None:
    for background, (other, damaged, state) in run_program(TP2, _background_and_bad, str(tmp_path)):
        assert "No space left" in background
        assert "does not fit the model" in other and "`blocks.0.attn.out.weight` is (16, 16)" in other
        assert "__1_0.distcp: the checksum of block 0 is wrong" in damaged
        assert state == "unchanged"
    assert not (tmp_path / "x.ckpt").exists()


def _memory(layout: Layout, root: str) -> tuple[float, float, float]:
    """Of a model of 32 MiB on each rank: how far memory rises while it is saved and loaded, in MiB."""
    from lightning_megatp.checkpoint.chunks import Chunks
    from lightning_megatp.checkpoint.folder import Folder, save_folder, to_bytes
    from lightning_megatp.plan.shard import ShardedTensorSpec

    rows = 1 << 10
    by_rank = (((0, rows // 2), (rows, rows * 3 // 2)), ((rows // 2, rows), (rows * 3 // 2, rows * 2)))
    rank = torch.distributed.get_rank()
    specs = {f"state_dict.{i}": ShardedTensorSpec(f"{i}", (2 * rows, 1024), 0, by_rank).spec(rank) for i in range(8)}
    held = {name: torch.full(spec.local_shape, float(i)) for i, (name, spec) in enumerate(specs.items())}
    chunks = {name: Chunks.to_write(x, specs[name], True) for name, x in held.items()}
    save_folder(Path(root) / "warm.ckpt", chunks, to_bytes({}))
    saved = peak_mib(lambda: save_folder(Path(root) / "x.ckpt", chunks, to_bytes({})))
    folder = Folder(Path(root) / "x.ckpt")
    targets = {name: Chunks.to_read(x, specs[name]) for name, x in held.items()}
    return sum(x.nbytes for x in held.values()) / 2**20, saved, peak_mib(lambda: folder.read(targets))


@pytest.mark.skipif(not TELLS, reason="only Linux tells")
def test_memory_beside_the_shard(tmp_path: Path) -> None:
    for held, saved, loaded in run_program(TP2, _memory, str(tmp_path)):
        print(f"a shard of {held:.0f} MiB in chunks of 2 MiB: +{saved:.1f} MiB to save, +{loaded:.1f} MiB to load")
        assert held == 32
        assert saved < 8 and loaded < 8, "a chunk, and a block of a file"


def test_arguments() -> None:
    from lightning_megatp import MegaTPStrategy

    with pytest.raises(ValueError, match=r'checkpoint=\'zip\', but there are "file"'):
        MegaTPStrategy(checkpoint="zip")
    with pytest.raises(ValueError, match=r'async_save=True needs checkpoint="folder"'):
        MegaTPStrategy(async_save=True)
