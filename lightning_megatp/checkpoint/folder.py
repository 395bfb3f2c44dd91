"""A checkpoint as a folder that all ranks write at once: torch.distributed.checkpoint's files, `meta.pt` for all that
isn't a tensor of the model or an optimizer, and `megatp.json` with the checksums."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan
from torch.distributed.checkpoint.planner import LoadPlanner as AnyLoadPlanner
from torch.distributed.checkpoint.planner import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from lightning_megatp.checkpoint.agree import together
from lightning_megatp.checkpoint.chunks import Chunks, LoadPlanner, SavePlanner
from lightning_megatp.checkpoint.files import (
    Manifest,
    SummedFile,
    Sums,
    durable,
    hidden_name,
    previous_name,
    replace,
    sync_folder,
)
from lightning_megatp.checkpoint.pieces import Place, places_in
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.shim.checkpoint import METADATA_FILE, file_view, read_dcp_metadata, written_item

META = "meta.pt"
_T = TypeVar("_T")


def save_folder(path: Path, tensors: Mapping[str, Any], meta: bytes, group: dist.ProcessGroup | None = None) -> None:
    """Write a checkpoint; every rank of the group has to call it.

    Args:
        path: the folder, on a file system that all ranks share.
        tensors: name -> Chunks.
        meta: the content of `meta.pt`; the first rank's counts.

    Raises:
        RuntimeError: on every rank, if one failed. What was at `path` before is still there then.

    Communication: plans and results of torch.distributed.checkpoint, and three small object all-gathers.
    """
    what, hidden = f"the checkpoint {path} was not saved", hidden_name(path)
    first = not dist.is_initialized() or dist.get_rank(group) == 0
    with together(what, group):
        if first:
            shutil.rmtree(hidden, ignore_errors=True)
            hidden.mkdir(parents=True)
    try:
        files = _gathered(_write(hidden, tensors, group, what), group)
        with together(what, group):
            if first:
                files[META] = Sums()
                with durable(hidden / META) as file:
                    SummedFile(file, files[META]).write(meta)
                _look_for(files, hidden)
                Manifest(hidden, files).write()
                sync_folder(hidden)
                replace(hidden, path)
    except Exception:
        if first:
            shutil.rmtree(hidden, ignore_errors=True)
        raise


class Folder:
    """A checkpoint folder that is read.

    Args:
        path: the folder. Where it is missing because a crash came between two renames, the one before it is taken.

    Raises:
        Damaged: it isn't complete.
    """

    def __init__(self, path: Path) -> None:
        if not path.exists() and previous_name(path).is_dir():
            warn_once_per_run(f"{path} is missing, since a save of it was interrupted. The one before it is loaded.")
            path = previous_name(path)
        self.path = path
        self.manifest = Manifest.read(path)
        self._reader = _Reader(path, self.manifest)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=False)
        self.tensors: dict[str, TensorStorageMetadata] = {
            name: entry
            for name, entry in self._metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def meta(self, weights_only: bool | None = None) -> dict[str, Any]:
        """All but the tensors of model and optimizers.

        Args:
            weights_only: False runs the code that the file asks for; by default it must not ask for any.

        Raises:
            RuntimeError: it holds objects, usually hyperparameters, which can't be loaded without running code.
        """
        with (self.path / META).open("rb") as file:
            self.manifest.check(META, file)
            file.seek(0)
            try:
                content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=weights_only is not False)
            except pickle.UnpicklingError as error:
                raise RuntimeError(
                    f"MegaTPStrategy: {self.path / META} holds objects, usually hyperparameters or a callback's state,"
                    " that can't be loaded without running code from the file. If you trust it, give"
                    f" `weights_only=False` to fit, validate, test or predict. {error}"
                ) from error
        return content

    def chunks(self, name: str) -> list[tuple[tuple[int, int], ...]]:
        """The parts in which a tensor is stored: start and stop per dim."""
        return [
            tuple((start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
            for chunk in self.tensors[name].chunks
        ]

    def place(self, name: str, offsets: Sequence[int]) -> tuple[Path, Place]:
        """Where the part that starts there is: a file, and the place in it, checked against its checksums."""
        return self._reader.place(MetadataIndex(name, offsets))

    def read(self, targets: Mapping[str, Chunks]) -> None:
        """Read parts of tensors, checked against their checksums.

        Memory: beside the targets, one stored chunk at a time.
        """
        planner = LoadPlanner(dict(targets), self._metadata)
        self._reader.read_data(planner.create_local_plan(), planner).wait()


def is_folder(path: Path) -> bool:
    """Whether there is a folder of this package at a path, complete or not."""
    return path.is_dir() or (not path.exists() and previous_name(path).is_dir())


def to_bytes(content: Any) -> bytes:
    """What `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _write(hidden: Path, tensors: Mapping[str, Any], group: dist.ProcessGroup | None, what: str) -> dict[str, Sums]:
    """Let torch.distributed.checkpoint write; the checksums of this rank's files."""
    writer = _Writer(hidden)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save(dict(tensors), storage_writer=writer, planner=SavePlanner(), process_group=group)
    except dcp.CheckpointException as error:  # the same on all ranks; not an Exception
        rank, (cause, _) = next(iter(error.failures.items()))
        message = f"MegaTPStrategy: {what}; on rank {rank}: {type(cause).__name__}: {cause}"
        raise RuntimeError(message) from error
    return writer.files.sums


def _gathered(files: dict[str, Sums], group: dist.ProcessGroup | None) -> dict[str, Sums]:
    if not dist.is_initialized():
        return files
    of_all: list[dict[str, Sums]] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(of_all, files, group=group)
    return {name: sums for of_rank in of_all for name, sums in of_rank.items()}


def _look_for(files: Mapping[str, Sums], hidden: Path) -> None:
    missing = [name for name in files if not (hidden / name).is_file()]
    if missing:
        raise RuntimeError(
            f"MegaTPStrategy: {', '.join(missing[:3])} of {len(missing)} files were written by other ranks and can't be"
            f" seen by rank 0 in {hidden.parent}. Save to a file system that all machines share."
        )


class _SummingFiles(FileSystem):
    """Files whose checksums are known once they are written."""

    def __init__(self) -> None:
        self.sums: dict[str, Sums] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        sums = self.sums[Path(path).name] = Sums()
        with Path(path).open(mode) as raw:
            yield SummedFile(raw, sums)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _Writer(dcp.FileSystemWriter):
    """One file per rank, one chunk in memory at a time: torch's own keeps a copy of each until the file is complete
    (2.13)."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.files = self.fs = _SummingFiles()

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()  # torch's says where it was written: a temporary name

    def write_data(self, plan: SavePlan, planner: AnySavePlanner) -> torch.futures.Future[list[WriteResult]]:
        written: list[WriteResult] = []
        name = f"{plan.storage_data.prefix}0.distcp"
        if plan.items:
            with self.files.create_stream(Path(self.path) / name, "wb") as file:
                for item in plan.items:
                    start = file.tell()
                    chunk = planner.resolve_data(item)
                    assert isinstance(chunk, Tensor)
                    torch.save(_alone(chunk), file)
                    written.append(written_item(item, name, start, file.tell() - start))
                file.flush()
                os.fsync(file.fileno())
        return _done(written)


class _Reader(dcp.FileSystemReader):
    """Reads each stored chunk once, and only if its checksums are right."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        super().__init__(path)
        self._manifest = manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / METADATA_FILE
        with path.open("rb") as file:
            self._manifest.check(METADATA_FILE, file)
            file.seek(0)
            return read_dcp_metadata(file)

    def read_data(self, plan: LoadPlan, planner: AnyLoadPlanner) -> torch.futures.Future[None]:
        by_file: dict[str, dict[tuple[int, int], list[ReadItem]]] = {}
        for item in plan.items:
            stored = self.storage_data[item.storage_index]
            by_file.setdefault(stored.relative_path, {}).setdefault((stored.offset, stored.length), []).append(item)
        for name, chunks in sorted(by_file.items()):
            with (Path(self.path) / name).open("rb") as file:
                for (offset, length), items in sorted(chunks.items(), key=lambda chunk: chunk[0]):
                    self._manifest.check(name, file, offset, length)
                    _take(self._load(file, offset, length), items, planner)
        return _done(None)

    def place(self, index: MetadataIndex) -> tuple[Path, Place]:
        stored = self.storage_data[index]
        path = Path(self.path) / stored.relative_path
        with path.open("rb") as file:
            self._manifest.check(stored.relative_path, file, stored.offset, stored.length)
            found: Place = places_in(file_view(file, stored.offset, stored.length))
        return path, replace_fields(found, offset=stored.offset + found.offset)

    def _load(self, file: IO[bytes], offset: int, length: int) -> Tensor:
        tensor: Tensor = torch.load(file_view(file, offset, length), map_location="cpu", weights_only=True)
        return tensor


def _alone(chunk: Tensor) -> Tensor:
    """In host memory, with nothing else in its storage: torch.save writes storages."""
    chunk = chunk.cpu()
    return chunk if chunk.untyped_storage().nbytes() == chunk.nbytes else chunk.clone()


def _done(value: _T) -> torch.futures.Future[_T]:
    future: torch.futures.Future[_T] = torch.futures.Future()
    future.set_result(value)
    return future


def _take(stored: Tensor, items: list[ReadItem], planner: AnyLoadPlanner) -> None:
    for item in items:
        part = stored
        for dim, (start, size) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            part = part.narrow(dim, start, size)
        target = planner.resolve_tensor(item)
        target.copy_(part)
        planner.commit_tensor(item, target)
