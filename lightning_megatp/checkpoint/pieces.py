"""Tensors in files, a piece at a time: converting a checkpoint needs no more memory than that."""

from __future__ import annotations

import mmap
import os
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from lightning_megatp.shim.checkpoint import storage_offset_in_file
from lightning_megatp.shim.fakes import fake_tensor_mode
from lightning_megatp.shim.torch import tree_map

Box = tuple[tuple[int, int], ...]
"""A part of a tensor: start and stop per dim."""

_PIECE = 16 << 20
_BLOCK = 4 << 20


def row_boxes(shape: tuple[int, ...], dtype: torch.dtype) -> list[Box]:
    """A tensor in blocks of rows, of 16 MiB unless a row is larger."""
    if not shape:
        return [()]
    row = torch.Size(shape[1:]).numel() * dtype.itemsize
    rows = max(1, _PIECE // max(1, row))
    rest = tuple((0, size) for size in shape[1:])
    return [((start, min(start + rows, shape[0])), *rest) for start in range(0, max(1, shape[0]), rows)]


def row_boxes_of(box: Box, dtype: torch.dtype) -> list[Box]:
    """A part of a tensor in blocks of rows, of 16 MiB unless a row is larger."""
    starts = [start for start, _ in box]
    shape = tuple(stop - start for start, stop in box)
    return [
        tuple((at + a, at + b) for at, (a, b) in zip(starts, rows, strict=True)) for rows in row_boxes(shape, dtype)
    ]


def part(tensor: Tensor, box: Box) -> Tensor:
    """The view of a tensor that a box describes."""
    for dim, (start, stop) in enumerate(box):
        tensor = tensor.narrow(dim, start, stop - start)
    return tensor


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of a tensor whose elements lie one after another."""
    return torch.empty(shape, device="meta").stride()


@dataclass(frozen=True)
class Place:
    """Where a tensor is in a file."""

    offset: int
    """Where its storage begins, in bytes."""
    nbytes: int
    """The size of its storage."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    start: int = 0
    """Where the tensor begins in its storage, in elements."""


class MappedFile:
    """A file mapped into memory, of which only what was touched since `release` counts as this process's.

    Args:
        path: a file that has its size.
        write: what is done to its tensors is done to the file.
    """

    def __init__(self, path: Path, write: bool = False) -> None:
        with path.open("r+b" if write else "rb") as file:
            if write:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)  # or a full disk would be a SIGBUS, later
            flags = mmap.MAP_SHARED if write else mmap.MAP_PRIVATE
            self._map = mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)

    def tensor(self, place: Place) -> Tensor:
        """A tensor of the file."""
        if place.nbytes == 0:
            return torch.empty(place.shape, dtype=place.dtype)
        storage = torch.frombuffer(self._map, dtype=torch.uint8, count=place.nbytes, offset=place.offset)
        return storage.view(place.dtype).as_strided(place.shape, place.stride, place.start)

    def fill(self, place: Place, box: Box, values: Tensor) -> None:
        """Write a part of a tensor, some rows at a time."""
        target = part(self.tensor(place), box)
        for rows in row_boxes(tuple(target.shape), target.dtype):
            part(target, rows).copy_(part(values, rows))
            self.release()

    def release(self) -> None:
        """Let go of what was touched; the file, or the system's cache of it, has it."""
        self._map.madvise(mmap.MADV_DONTNEED)


def places_in(file: Path | IO[bytes]) -> Any:
    """What a `.ckpt` holds, with a Place for each tensor. No tensor is read, and no code of the file is run."""
    with fake_tensor_mode():
        content = torch.load(file, map_location="cpu", weights_only=True)

    def place(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        storage = x.untyped_storage()
        size = storage.nbytes()
        start = int(x.storage_offset())
        return Place(storage_offset_in_file(storage), size, x.dtype, tuple(x.shape), x.stride(), start)

    return tree_map(place, content)


def write_checksums(path: Path) -> None:
    """Give the records of a `.ckpt` that were filled in later their CRC-32.

    A zip archive as torch writes it has them in two places: after a record's data, and in the directory at the end.
    Source: PKWARE's APPNOTE.TXT, sections 4.3.9 and 4.3.12.
    """
    with zipfile.ZipFile(path) as archive:
        directory, records = archive.start_dir, {record.header_offset: record for record in archive.infolist()}
    with path.open("r+b") as file:
        for entry, header in _directory(file, directory, len(records)):
            record = records[header]
            if record.CRC or not record.file_size:
                continue
            file.seek(header + 26)
            names = file.read(4)
            file.seek(header + 30 + int.from_bytes(names[:2], "little") + int.from_bytes(names[2:], "little"))
            checksum, left = 0, record.file_size
            while left:
                block = file.read(min(left, _BLOCK))
                checksum, left = zlib.crc32(block, checksum), left - len(block)
            found = checksum.to_bytes(4, "little")
            after = file.tell()
            if file.read(4) == b"PK\x07\x08":
                file.seek(after + 4)
            else:
                file.seek(header + 14)
            file.write(found)
            file.seek(entry + 16)
            file.write(found)


def _directory(file: Any, start: int, count: int) -> Iterator[tuple[int, int]]:
    """Where each entry of the directory is, and where its record begins."""
    for _ in range(count):
        file.seek(start)
        fixed = file.read(46)
        sizes = [int.from_bytes(fixed[at : at + 2], "little") for at in (28, 30, 32)]
        header = int.from_bytes(fixed[42:46], "little")
        if header == 0xFFFFFFFF:
            header = _large_offset(fixed, file.read(sum(sizes))[sizes[0] : sizes[0] + sizes[1]])
        yield start, header
        start += 46 + sum(sizes)


def _large_offset(fixed: bytes, extra: bytes) -> int:
    """The offset of a record beyond 4 GiB: the last of the 64-bit numbers that the zip64 field has room for."""
    before = sum(fixed[at : at + 4] == b"\xff\xff\xff\xff" for at in (20, 24))
    at = 0
    while int.from_bytes(extra[at : at + 2], "little") != 1:
        at += 4 + int.from_bytes(extra[at + 2 : at + 4], "little")
    at += 4 + 8 * before
    return int.from_bytes(extra[at : at + 8], "little")
