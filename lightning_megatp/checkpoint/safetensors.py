"""Folders of safetensors, as Hugging Face keeps models: read by slices, straight into shards; written as a stream."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_megatp.checkpoint.chunks import Chunks
from lightning_megatp.checkpoint.files import durable
from lightning_megatp.checkpoint.pieces import Box, MappedFile, Place, contiguous_strides
from lightning_megatp.plan.shard import ShardSpec

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
"""As in https://github.com/huggingface/safetensors#format."""
_KNOWN = f"Of safetensors' dtypes there are {', '.join(_DTYPES.values())} here."


class SafetensorsFolder:
    """The tensors of a folder (or of one file), read one by one.

    Args:
        path: a folder with `*.safetensors` and, if there are several, their index; or one such file.

    Raises:
        ValueError: there are none, or the index names a file that is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = {name: file for file, names in _contents(path).items() for name in names}
        self.names = sorted(self._files)

    def shape_and_dtype(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """The shape and dtype of a full tensor.

        Raises:
            ValueError: torch has no such dtype, or it is not one of those that are read.
        """
        with self._open(name) as file:
            part = file.get_slice(name)
            found = next((dtype for dtype, text in _DTYPES.items() if text == part.get_dtype()), None)
            if found is None:
                raise ValueError(f"MegaTPStrategy: `{name}` in {self._files[name]} is {part.get_dtype()}. {_KNOWN}")
            return tuple(part.get_shape()), found

    def read_rows(self, name: str, rows: slice) -> Tensor:
        """Some rows of a tensor; all of one without dims."""
        with self._open(name) as file:
            full = file.get_slice(name)
            tensor: Tensor = full[rows] if full.get_shape() else file.get_tensor(name).clone()
        return tensor

    def read_shard(self, name: str, spec: ShardSpec) -> Tensor:
        """A rank's part of a tensor: only its slices are read from the disk.

        Args:
            name: in the files; the spec's own name doesn't count.

        Raises:
            ValueError: the tensor's shape isn't the spec's.
        """
        with self._open(name) as file:
            full = file.get_slice(name)
            shape = tuple(full.get_shape())
            if shape != spec.shape:
                raise ValueError(
                    f"MegaTPStrategy: `{name}` is {shape} in {self._files[name]} and {spec.shape} in the model. Build"
                    " the model from the configuration that belongs to these files."
                )
            if not shape:
                scalar: Tensor = file.get_tensor(name).clone()
                return scalar
            local = torch.empty(spec.local_shape, dtype=self.shape_and_dtype(name)[1])
            chunks = Chunks.to_read(local, spec)
            for chunk in chunks.__create_chunk_list__():
                index = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
                chunks.view(chunk.offsets).copy_(full[index])
        return local

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[Any]:
        """One tensor, one map of its file: what was read of a file isn't kept in memory."""
        from safetensors import safe_open  # not needed to train

        if name not in self._files:
            raise KeyError(f"MegaTPStrategy: there is no `{name}` in {self.path}")
        with safe_open(self._files[name], framework="pt") as file:
            yield file


def write_safetensors(
    folder: Path,
    layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    pieces: Callable[[str], Iterable[tuple[Box, Tensor]]],
    most: int = 5 << 30,
) -> None:
    """Write tensors one after another: safetensors' own writer wants those of a file all at once.

    Args:
        folder: made if need be.
        layout: name -> shape and dtype.
        pieces: gives a tensor by its name, in parts that are done with when the next is asked for.
        most: bytes of a file, if it holds more than one tensor.

    Raises:
        ValueError: before anything is written, where the format has no such dtype.

    Memory: one piece, and some MiB.
    """
    for name, (_, dtype) in layout.items():
        if dtype not in _DTYPES:
            raise ValueError(f"megatp convert: `{name}` is {dtype}. {_KNOWN}")
    folder.mkdir(parents=True, exist_ok=True)
    files = _divide(layout, most)
    names = (
        [SINGLE] if len(files) == 1 else [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    )
    for file_name, members in zip(names, files, strict=True):
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        places = {}
        for name in sorted(members, key=lambda name: -layout[name][1].itemsize):  # so that all are aligned
            shape, dtype = layout[name]
            end = at + torch.Size(shape).numel() * dtype.itemsize
            header[name] = {"dtype": _DTYPES[dtype], "shape": list(shape), "data_offsets": [at, end]}
            places[name] = at, end - at
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with durable(folder / file_name) as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + at)
            file.flush()
            mapped = MappedFile(Path(file.name), write=True)
            for name, (start, size) in places.items():
                shape, dtype = layout[name]
                place = Place(8 + len(text) + start, size, dtype, shape, contiguous_strides(shape))
                for box, values in pieces(name):
                    mapped.fill(place, box, values)
    if len(files) > 1:
        where = {name: file for file, members in zip(names, files, strict=True) for name in members}
        with durable(folder / INDEX) as file:
            total = sum(_size(layout[name]) for name in layout)
            file.write(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2).encode())


def _contents(path: Path) -> dict[Path, Sequence[str]]:
    """File -> names of its tensors."""
    from safetensors import safe_open

    if (path / INDEX).is_file():
        where: dict[str, str] = json.loads((path / INDEX).read_text())["weight_map"]
        missing = sorted({file for file in where.values() if not (path / file).is_file()})
        if missing:
            raise ValueError(f"MegaTPStrategy: {path / INDEX} names {missing[0]}, which is missing.")
        return {path / file: [name for name, f in where.items() if f == file] for file in sorted(set(where.values()))}
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise ValueError(f"MegaTPStrategy: there are no *.safetensors in {path}.")
    found: dict[Path, Sequence[str]] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found[file] = list(opened.keys())
    return found


def _divide(layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]], most: int) -> list[list[str]]:
    files: list[list[str]] = [[]]
    size = 0
    for name, of in layout.items():
        if files[-1] and size + _size(of) > most:
            files.append([])
            size = 0
        files[-1].append(name)
        size += _size(of)
    return files


def _size(of: tuple[tuple[int, ...], torch.dtype]) -> int:
    return torch.Size(of[0]).numel() * of[1].itemsize
