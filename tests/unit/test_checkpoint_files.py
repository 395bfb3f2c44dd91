"""What a crash, a full disk or a flipped byte leaves of a checkpoint: the one before, and a message."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_megatp.checkpoint import files
from lightning_megatp.checkpoint.chunks import Chunks, whole
from lightning_megatp.checkpoint.files import MANIFEST, Damaged, Manifest, check_zip, durable, previous_name
from lightning_megatp.checkpoint.folder import META, Folder, save_folder, to_bytes
from lightning_megatp.plan.ranges import shard_ranges
from lightning_megatp.plan.shard import ShardedTensorSpec

EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree")
"""Audit events of what changes a folder."""


def tensors(value: float) -> dict[str, Chunks]:
    found = {}
    for name, shape in (("state_dict.a", (300, 7)), ("state_dict.b", (5,)), ("optimizer.0.state.a.step", ())):
        tensor = torch.full(shape, value)
        found[name] = Chunks.to_write(tensor, whole(name, tensor), True)
    return found


def save(path: Path, value: float) -> None:
    save_folder(path, tensors(value), to_bytes({"value": value}))


def load(path: Path) -> float:
    """The value that all tensors and the rest have."""
    folder = Folder(path)
    values = {folder.meta()["value"]}
    targets = {name: torch.empty(tuple(found.size)) for name, found in folder.tensors.items()}
    folder.read({name: Chunks.to_read(tensor, whole(name, tensor)) for name, tensor in targets.items()})
    values |= {float(x) for tensor in targets.values() for x in tensor.unique()}
    assert len(values) == 1, values
    return values.pop()


def save_single(path: Path, value: float) -> None:
    with durable(path) as file:
        torch.save({"a": torch.full((1000,), value)}, file)


def load_single(path: Path) -> float:
    check_zip(path)
    return float(torch.load(path)["a"].mean())


FORMS = {"folder": (save, load), "file": (save_single, load_single)}


@pytest.mark.parametrize("parts", [[16], [16, 4, 4]])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_element_is_written_once(parts: list[int], ranks: int) -> None:
    """Key-value heads that several ranks hold, beside query heads: two heads of 2, for up to 8 ranks."""
    by_rank = shard_ranges(sum(parts), ranks, parts, 2)
    sharded = ShardedTensorSpec("qkv", (3, sum(parts)), 1, by_rank)
    full = torch.zeros(3, sum(parts))
    for rank in range(ranks):
        spec = sharded.spec(rank)
        chunks = Chunks.to_write(spec.take(torch.arange(full.numel()).view(full.shape)), spec, True)
        for chunk in chunks.__create_chunk_list__():
            place = full[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))]
            assert not place.any(), "nobody else wrote it"
            place.copy_(chunks.view(chunk.offsets) + 1)
    assert torch.equal(full.flatten(), torch.arange(1.0, full.numel() + 1))


def test_a_folder_comes_back(tmp_path: Path) -> None:
    save(tmp_path / "x.ckpt", 1.0)
    assert load(tmp_path / "x.ckpt") == 1.0
    assert sorted(os.listdir(tmp_path)) == ["x.ckpt"]
    save(tmp_path / "x.ckpt", 2.0)
    assert load(tmp_path / "x.ckpt") == 2.0
    assert sorted(os.listdir(tmp_path)) == ["x.ckpt"]


def test_a_folder_and_a_file_take_each_others_place(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    for _ in range(2):
        save_single(path, 1.0)
        assert load_single(path) == 1.0
        save(path, 2.0)
        assert load(path) == 2.0
    assert os.listdir(tmp_path) == ["x.ckpt"]
    previous_name(path).write_text("the user's own")
    with pytest.raises(FileExistsError, match=r"can't be replaced while .*x.previous.ckpt exists"):
        save(path, 3.0)
    assert load(path) == 2.0 and previous_name(path).read_text() == "the user's own"


def test_killed_at_any_point(tmp_path: Path) -> None:
    """One child per kill, forked from a warm one: at each change of a file or a name, and in the middle of files."""
    script = [sys.executable, "-W", "ignore", __file__, str(tmp_path)]
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(script, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    points = [int(word) for word in done.stdout.split()]
    assert points[0] > 30 and points[1] > 5, "kills that hit something"


def _kill_at_each(form: str, root: Path) -> int:
    """Save 1, save 2 with a kill at the n-th event, look, save 3, look; until no event is left to be killed at."""
    write, read = FORMS[form]
    root.mkdir()
    write(root / "first.ckpt", 1.0)
    for point in range(1000):
        path = root / f"{point}" / "last.ckpt"
        path.parent.mkdir()
        subprocess.run(["cp", "-r", root / "first.ckpt", path], check=True)
        child = os.fork()
        if child == 0:
            _die_at(point)
            write(path, 2.0)
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        seen = [p for p in path.parent.iterdir() if p.suffix == ".ckpt" and p.stem.startswith("last")]
        found = [read(p) for p in seen]  # as `ckpt_path="last"` looks for them: none of them is a half
        assert found and set(found) <= {1.0, 2.0}, (point, found)
        assert read(path if path.exists() or form == "file" else previous_name(path)) in (1.0, 2.0)
        if point % 3 == 0:  # the next save leaves nothing of the one that was killed
            write(path, 3.0)
            assert read(path) == 3.0
            assert os.listdir(path.parent) == ["last.ckpt"], os.listdir(path.parent)
        shutil.rmtree(path.parent)
        if not killed:
            return point
    raise AssertionError("it never ended")


def _die_at(point: int) -> None:
    count = 0

    def pass_by() -> None:
        nonlocal count
        if count == point:
            os._exit(9)
        count += 1

    def hook(event: str, args: Any) -> None:
        if event in EVENTS and not (event == "open" and str(args[1]) == "r"):
            pass_by()

    sys.addaudithook(hook)
    fsync = os.fsync

    def watched_fsync(descriptor: int) -> None:
        pass_by()
        fsync(descriptor)
        pass_by()

    os.fsync = watched_fsync
    add, writes = files.Sums.add, 0

    def watched_add(self: Any, data: memoryview) -> None:
        nonlocal writes
        writes += 1
        if writes % 16 == 1:  # in the middle of files: torch.save writes many small pieces
            pass_by()
        add(self, data)

    files.Sums.add = watched_add  # type: ignore[method-assign]


@pytest.mark.parametrize("form", FORMS)
def test_a_full_disk(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = FORMS[form]
    path = tmp_path / "last.ckpt"
    write(path, 1.0)
    with monkeypatch.context() as patch:

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        patch.setattr(os, "fsync", full)
        with pytest.raises((RuntimeError, OSError), match="No space left"):
            write(path, 2.0)
    assert read(path) == 1.0
    assert os.listdir(tmp_path) == ["last.ckpt"], "nothing half is left"


def _flips(path: Path) -> Iterator[Path]:
    """The folder with one bit changed, in each file at some places."""
    for file in sorted(path.iterdir()):
        content = file.read_bytes()
        for at in {0, len(content) // 3, len(content) // 2, len(content) - 1}:
            file.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
            yield file
        file.write_bytes(content)


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    save(path, 1.0)
    for file in _flips(path):
        with contextlib.suppress(Damaged):
            load(path)  # the manifest's own text has bits that mean nothing: a blank, a letter of a name's escape
            assert file.name == MANIFEST
        if file.name != MANIFEST:
            with pytest.raises(Damaged, match=rf"{file.name}: the checksum of block 0 is wrong"):
                load(path)
    assert load(path) == 1.0


def test_missing_short_and_strange_files(tmp_path: Path) -> None:
    save(tmp_path / "good.ckpt", 1.0)
    for name, damage, message in (
        ("__0_0.distcp", lambda file: file.unlink(), r"__0_0.distcp: it is missing"),
        ("__0_0.distcp", lambda file: os.truncate(file, 100), r"__0_0.distcp: it has 100 bytes and was written with"),
        (META, lambda file: os.truncate(file, 0), r"meta.pt: it has 0 bytes"),
        (MANIFEST, lambda file: file.unlink(), r"no complete checkpoint: megatp.json"),
        (MANIFEST, lambda file: file.write_text("{"), r"megatp.json: it can't be read"),
        (MANIFEST, lambda file: file.write_text(file.read_text().replace(": 1,", ": 2,", 1)), "megatp_version 2"),
    ):
        path = tmp_path / "bad.ckpt"
        shutil.copytree(tmp_path / "good.ckpt", path)
        damage(path / name)
        with pytest.raises(Damaged, match=message):
            Folder(path)
        shutil.rmtree(path)


def test_a_damaged_single_file(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    save_single(path, 1.0)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        record = next(i for i in archive.infolist() if i.filename.endswith("data/0"))
    at = content.index(torch.ones(8).numpy().tobytes(), record.header_offset)
    path.write_bytes(content[: at + 9] + b"\x55" + content[at + 10 :])
    assert torch.load(path)["a"].mean() != 1.0, "torch alone does not see it"
    with pytest.raises(Damaged, match=r"x.ckpt: Bad CRC-32 for file 'x/data/0'|Bad CRC-32"):
        check_zip(path)
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(Damaged, match=r"x.ckpt: File is not a zip file"):
        check_zip(path)
    torch.serialization.set_crc32_options(False)
    try:
        save_single(path, 1.0)
    finally:
        torch.serialization.set_crc32_options(True)
    assert load_single(path) == 1.0, "who chose no checksums gets none"


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_no_code_from_a_strangers_folder(tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    save_folder(path, tensors(1.0), to_bytes({"hyper_parameters": _Evil()}))
    with pytest.raises(RuntimeError, match=r"meta.pt holds objects.*weights_only=False"):
        Folder(path).meta()
    (path / ".metadata").write_bytes(pickle.dumps(_Evil()))
    found = {p.name: files.Sums() for p in path.iterdir() if p.name != MANIFEST}
    for name, each in found.items():
        each.add(memoryview((path / name).read_bytes()))
    Manifest(path, found).write()
    with pytest.raises(pickle.UnpicklingError, match=r"asks for posix.system"):
        Folder(path)


if __name__ == "__main__":
    torch.set_num_threads(1)  # none may be lost in a fork
    print(*(_kill_at_each(form, Path(sys.argv[1]) / form) for form in FORMS))
