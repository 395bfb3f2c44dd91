"""Files that are complete or not there at all, with checksums.

A checkpoint is written under a temporary name beside its own, brought to the disk, and renamed. What a crash leaves
under a temporary name is removed by the next save of that checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

MANIFEST = "megatp.json"
VERSION = 1
_BLOCK = 4 << 20
_PIECE = 1 << 20
"""What is read of a file at once."""


@dataclass
class Sums:
    """The size of a file, and the CRC-32 of each of its blocks."""

    size: int = 0
    blocks: list[int] = field(default_factory=list)

    def add(self, data: memoryview) -> None:
        """Go on with what follows in the file."""
        while data:
            room = _BLOCK - self.size % _BLOCK
            if room == _BLOCK:
                self.blocks.append(0)
            self.blocks[-1] = zlib.crc32(data[:room], self.blocks[-1])
            self.size += len(data[:room])
            data = data[room:]


class SummedFile:
    """A file open for writing whose checksums grow with it."""

    def __init__(self, raw: IO[bytes], sums: Sums) -> None:
        self._raw, self._sums = raw, sums
        self.flush, self.tell, self.fileno, self.close = raw.flush, raw.tell, raw.fileno, raw.close

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        written = self._raw.write(view)
        self._sums.add(view)
        return written


class Damaged(RuntimeError):
    """A checkpoint that isn't what was written."""


class Manifest:
    """What a folder consists of; the file that is written last.

    Args:
        folder: of the checkpoint.
        files: name -> sums.
    """

    def __init__(self, folder: Path, files: dict[str, Sums]) -> None:
        self.folder, self.files = folder, files
        self._good: set[tuple[str, int]] = set()

    def write(self) -> None:
        files = {name: {"size": sums.size, "crc32": sums.blocks} for name, sums in sorted(self.files.items())}
        text = json.dumps({"megatp_version": VERSION, "block_size": _BLOCK, "files": files}, indent=1)
        with durable(self.folder / MANIFEST) as file:
            file.write(text.encode())

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read it, and look whether all files are there in their size.

        Raises:
            Damaged: there is no such thing, or the folder isn't complete.
        """
        try:
            content = json.loads((folder / MANIFEST).read_bytes())
            version, block_size = int(content["megatp_version"]), int(content["block_size"])
            files = {str(name): Sums(int(f["size"]), list(f["crc32"])) for name, f in content["files"].items()}
        except FileNotFoundError:
            raise Damaged(
                f"MegaTPStrategy: {folder} is no complete checkpoint: {MANIFEST}, which is written last, is missing."
                " Load an older one."
            ) from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise _damaged(folder / MANIFEST, f"it can't be read ({type(error).__name__}: {error})") from error
        if version != VERSION or block_size != _BLOCK:
            raise Damaged(
                f"MegaTPStrategy: {folder / MANIFEST} says megatp_version {version} with blocks of {block_size} bytes,"
                f" and this version of lightning_megatp reads version {VERSION} with {_BLOCK}. Install a newer one."
            )
        for name, sums in files.items():
            path = folder / name
            if not path.is_file():
                raise _damaged(path, "it is missing")
            if path.stat().st_size != sums.size:
                raise _damaged(path, f"it has {path.stat().st_size} bytes and was written with {sums.size}")
        return cls(folder, files)

    def check(self, name: str, file: IO[bytes], start: int = 0, length: int | None = None) -> None:
        """Compare a part of a file, open for reading, with its checksums; each block is read once.

        Raises:
            Damaged: they differ.
        """
        sums = self.files.get(name)
        if sums is None:
            raise _damaged(self.folder / name, f"{MANIFEST} doesn't list it")
        stop = sums.size if length is None else start + length
        for index in range(start // _BLOCK, -(-stop // _BLOCK)):
            if (name, index) not in self._good:
                file.seek(index * _BLOCK)
                if _crc32_of_block(file) != sums.blocks[index]:
                    raise _damaged(self.folder / name, f"the checksum of block {index} is wrong")
                self._good.add((name, index))


def _crc32_of_block(file: IO[bytes]) -> int:
    """The CRC-32 of the next `_BLOCK` bytes, or those up to the end, without holding them all."""
    crc = 0
    for _ in range(_BLOCK // _PIECE):
        crc = zlib.crc32(file.read(_PIECE), crc)
    return crc


def check_zip(path: Path) -> None:
    """Compare the records of a `.ckpt`, which is a zip archive, with their CRC-32: torch.load does not (2.13).

    Raises:
        Damaged: they differ, or the file was cut short.
    """
    with path.open("rb") as file:
        if file.read(4) != b"PK\x03\x04":
            return  # torch's older format, or somebody else's: torch.load says what it thinks of it
    try:
        with zipfile.ZipFile(path) as archive:
            for record in archive.infolist():
                if record.CRC:  # 0 where torch.serialization.set_crc32_options(False) was chosen
                    with archive.open(record) as stream:
                        while stream.read(_BLOCK):
                            pass
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise _damaged(path, str(error)) from error


@contextlib.contextmanager
def durable(path: Path) -> Iterator[IO[bytes]]:
    """A file for writing, under a temporary name until it is complete and on the disk."""
    hidden = hidden_name(path)
    try:
        with hidden.open("w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        replace(hidden, path)
    except Exception:
        hidden.unlink(missing_ok=True)
        raise


def hidden_name(path: Path) -> Path:
    """A name beside `path` for what isn't complete. It has nothing of the name itself: `ckpt_path="last"` takes for a
    checkpoint whatever is called so."""
    return path.parent / f".megatp-{zlib.crc32(path.name.encode()):08x}.partial"


def previous_name(path: Path) -> Path:
    """Where a folder is for the moment in which another takes its place: a folder can't be replaced in one step. After
    a crash in that moment, `ckpt_path="last"` finds it here."""
    return path.with_name(f"{path.stem}.previous{path.suffix}")


def replace(new: Path, path: Path) -> None:
    """Let a complete file or folder take the place of another, and bring the change to the disk."""
    if path.is_symlink():  # ModelCheckpoint(save_last="link")
        path.unlink()
    aside = previous_name(path)
    in_two_steps = path.exists() and (path.is_dir() or new.is_dir())
    left = (aside / MANIFEST).is_file()  # by a crash
    if in_two_steps:
        if left:
            remove(aside)
        if aside.exists():
            raise FileExistsError(
                f"MegaTPStrategy: {path} can't be replaced while {aside} exists. Remove or rename the latter."
            )
        path.rename(aside)
    new.replace(path)
    sync_folder(path.parent)
    if in_two_steps or left:
        remove(aside)


def remove(path: Path) -> None:
    """Remove a file or a folder, the latter under another name: a half of it must not look like a checkpoint."""
    if path.is_dir() and not path.is_symlink():
        going = hidden_name(path.with_name(f"{path.name}.removed"))
        shutil.rmtree(going, ignore_errors=True)
        path.rename(going)
        shutil.rmtree(going)
    else:
        path.unlink(missing_ok=True)


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damaged(path: Path, how: str) -> Damaged:
    return Damaged(
        f"MegaTPStrategy: the checkpoint is damaged: {path}: {how}. Nothing was loaded; load an older checkpoint."
    )
