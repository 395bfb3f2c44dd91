"""`megatp convert`: every form to every other, and never a whole tensor in memory."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_megatp.checkpoint.chunks import Chunks, whole
from lightning_megatp.checkpoint.convert import convert
from lightning_megatp.checkpoint.folder import save_folder, to_bytes
from lightning_megatp.checkpoint.safetensors import INDEX, SafetensorsFolder, write_safetensors
from lightning_megatp.checkpoint.sharded import NOT_TENSORS
from lightning_megatp.cli import main
from lightning_megatp.plan.shard import ShardedTensorSpec, ShardSpec
from tests.memory import TELLS, peak_mib, printed_alone


class Module(LightningModule):
    def __init__(self, groups: int = 1, width: int = 6) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 4))
        self.model[2].weight.data = self.model[2].weight.data.bfloat16().float()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.model(batch) - batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        own = list(self.parameters())
        half = len(own) // self.hparams["groups"]
        return torch.optim.AdamW([{"params": own[i : i + half]} for i in range(0, len(own), half)], lr=0.1)


def plain_trainer(**options: Any) -> Trainer:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(accelerator="cpu", devices=1, max_steps=3, enable_model_summary=False, **quiet, **options)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """What a plain Trainer has saved."""
    trainer = plain_trainer()
    trainer.fit(Module(), DataLoader(torch.randn(12, 4), batch_size=4))
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    return tmp_path / "plain.ckpt"


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) and a.dtype == b.dtype if isinstance(a, Tensor) else bool(a == b)


def test_to_a_folder_and_back(saved: Path, tmp_path: Path) -> None:
    convert(saved, tmp_path / "folder.ckpt", "folder")
    convert(tmp_path / "folder.ckpt", tmp_path / "again.ckpt", "file")
    before, after = torch.load(saved), torch.load(tmp_path / "again.ckpt")
    assert same(before, after)
    module = Module.load_from_checkpoint(tmp_path / "again.ckpt")
    assert torch.equal(module.model[0].weight, before["state_dict"]["model.0.weight"])
    plain_trainer().fit(Module(), DataLoader(torch.randn(12, 4), batch_size=4), ckpt_path=tmp_path / "again.ckpt")


def test_to_safetensors_and_back(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = torch.load(saved)["state_dict"]
    convert(saved, tmp_path / "folder.ckpt", "folder")
    for source in (saved, tmp_path / "folder.ckpt"):
        target = tmp_path / f"hf-{source.stem}"
        main(["convert", str(source), str(target), "--prefix", "model."])
        found = load_file(target / "model.safetensors")
        assert same(dict(sorted(found.items())), {n.removeprefix("model."): x for n, x in sorted(state.items())})
    main(["convert", str(target), str(tmp_path / "back.ckpt"), "--to", "file", "--prefix", "model."])
    assert same(Module.load_from_checkpoint(tmp_path / "back.ckpt", groups=1).state_dict(), state)
    assert "Wrote" in capsys.readouterr().out
    for words in (["--prefix", "other."], []):
        with pytest.raises(SystemExit, match=r"no name starts with 'other\.'|exists"):
            main(["convert", str(saved), str(tmp_path / "x") if words else str(target), *words])


def test_optimizers_whose_numbers_say_nothing(tmp_path: Path) -> None:
    trainer = plain_trainer()
    trainer.fit(Module(groups=2), DataLoader(torch.randn(12, 4), batch_size=4))
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(ValueError, match=r"optimizer 0 has 2 groups of \[3, 3\] parameters by number"):
        convert(tmp_path / "plain.ckpt", tmp_path / "folder.ckpt", "folder")
    convert(tmp_path / "plain.ckpt", tmp_path / "folder.ckpt", "folder", weights_only=True)
    convert(tmp_path / "folder.ckpt", tmp_path / "weights.ckpt", "file")
    assert Module.load_from_checkpoint(tmp_path / "weights.ckpt").hparams["groups"] == 2


CONVERSIONS = (
    ("a.ckpt", "b", "safetensors"),
    ("b", "c.ckpt", "file"),
    ("c.ckpt", "d.ckpt", "folder"),
    ("d.ckpt", "e.ckpt", "file"),
    ("rank.ckpt", "f.ckpt", "file"),  # whole tensors, as a rank writes them
)
SIZE = 64 << 20
"""Bytes of each tensor."""


def _print_memory(folder: str) -> None:
    """MiB that each conversion takes at its peak."""
    path = Path(folder)
    state = {f"layers.{i}.weight": torch.full((64, SIZE // 64 // 4), float(i)) for i in range(2)}
    torch.save({"state_dict": state, "pytorch-lightning_version": "2.6.0"}, path / "a.ckpt")
    whole_tensors = {f"state_dict.{n}": Chunks.to_write(x, whole(n, x), True) for n, x in state.items()}
    rest = to_bytes({"pytorch-lightning_version": "2.6.0", NOT_TENSORS: {}})
    save_folder(path / "rank.ckpt", whole_tensors, rest)
    del state, whole_tensors
    small = {"state_dict": {"x": torch.zeros(2)}, "pytorch-lightning_version": "2.6.0"}
    torch.save(small, path / "warm.ckpt")
    convert(path / "warm.ckpt", path / "warm", "folder")  # what the first use of code allocates
    for source, target, form in CONVERSIONS:
        print(peak_mib(lambda: convert(path / source, path / target, form)))  # noqa: B023


@pytest.mark.skipif(not TELLS, reason="only Linux tells")
def test_memory_stays_under_one_tensor(tmp_path: Path) -> None:
    peaks = [float(line) for line in printed_alone(_print_memory, str(tmp_path)).splitlines()]
    for (source, target, form), peak in zip(CONVERSIONS, peaks, strict=True):
        print(f"{source} -> {target} ({form}): {peak:.0f} MiB for tensors of {SIZE >> 20} MiB")
        assert peak < SIZE >> 20, (source, target, form)
    for name in ("a.ckpt", "e.ckpt", "f.ckpt"):
        found = torch.load(tmp_path / name, mmap=True)["state_dict"]
        assert [float(x[-1, -1]) for x in found.values()] == [0.0, 1.0]
        with zipfile.ZipFile(tmp_path / name) as archive:
            assert archive.testzip() is None and all(record.CRC for record in archive.infolist())


def test_slices_of_several_files(tmp_path: Path) -> None:
    full = {"a.qkv": torch.randn(24, 5), "a.bias": torch.randn(7), "scale": torch.tensor(3.0)}
    layout = {name: (tuple(x.shape), x.dtype) for name, x in full.items()}
    boxes = {name: tuple((0, size) for size in x.shape) for name, x in full.items()}
    write_safetensors(tmp_path / "hf", layout, lambda name: [(boxes[name], full[name])], most=100)
    assert (tmp_path / "hf" / INDEX).is_file()
    folder = SafetensorsFolder(tmp_path / "hf")
    assert folder.names == sorted(full)
    split = ShardedTensorSpec("other", (24, 5), 0, (((0, 4), (8, 12), (16, 20)), ((4, 8), (12, 16), (20, 24))))
    for rank in (0, 1):
        assert torch.equal(folder.read_shard("a.qkv", split.spec(rank)), split.spec(rank).take(full["a.qkv"]))
    two_dims = ShardSpec("x", (24, 5), (((3, 9), (20, 21)), ((1, 2), (3, 5))))
    assert torch.equal(folder.read_shard("a.qkv", two_dims), two_dims.take(full["a.qkv"]))
    assert folder.read_shard("scale", ShardSpec("scale", (), ())) == 3
    with pytest.raises(ValueError, match=r"`a.bias` is \(7,\) in .* and \(8,\) in the model"):
        folder.read_shard("a.bias", ShardSpec("a.bias", (8,), (((0, 8),),)))
    next(iter((tmp_path / "hf").glob("model-00001*"))).unlink()
    with pytest.raises(ValueError, match=r"names model-00001-of-0000\d.safetensors, which is missing"):
        SafetensorsFolder(tmp_path / "hf")


def test_what_safetensors_cannot_hold(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.zeros(2, dtype=torch.complex128)}}, tmp_path / "complex.ckpt")
    with pytest.raises(ValueError, match=r"`w` is torch.complex128. Of safetensors' dtypes there are F64"):
        convert(tmp_path / "complex.ckpt", tmp_path / "complex", "safetensors")
    torch.save({"state_dict": {"model.w": torch.zeros(2), "w": torch.ones(2)}}, tmp_path / "two.ckpt")
    with pytest.raises(ValueError, match=r"without 'model.' `model.w` would be called as another tensor is"):
        convert(tmp_path / "two.ckpt", tmp_path / "two", "safetensors", prefix="model.")
    assert not (tmp_path / "complex").exists() and not (tmp_path / "two").exists()
