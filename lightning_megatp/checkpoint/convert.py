"""`megatp convert`: from any form of a checkpoint to any other, a piece of a tensor at a time."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_megatp.checkpoint.chunks import Chunks, whole
from lightning_megatp.checkpoint.contents import MODEL
from lightning_megatp.checkpoint.files import check_zip, hidden_name, replace
from lightning_megatp.checkpoint.folder import Folder, is_folder, save_folder, to_bytes
from lightning_megatp.checkpoint.pieces import (
    Box,
    MappedFile,
    Place,
    part,
    places_in,
    row_boxes,
    row_boxes_of,
    write_checksums,
)
from lightning_megatp.checkpoint.safetensors import SafetensorsFolder, write_safetensors
from lightning_megatp.checkpoint.sharded import ELSEWHERE, NOT_TENSORS, optimizer_name
from lightning_megatp.shim.fakes import fake_tensor_mode
from lightning_megatp.shim.torch import tree_leaves

FORMS = ("safetensors", "file", "folder")
_Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Source(Protocol):
    """A checkpoint that is read: its tensors have the names of a folder, `state_dict.` before those of the model."""

    layout: _Layout
    rest: dict[str, Any]
    """All else, as in a folder's `meta.pt`."""

    def boxes(self, name: str) -> list[Box]:
        """The parts in which a tensor is read."""
        return row_boxes(*self.layout[name])

    def read(self, name: str, box: Box) -> Tensor:
        """One of them, which the next call may let go of."""
        ...


def convert(source: Path, target: Path, form: str, prefix: str = "", weights_only: bool = False) -> None:
    """Write a checkpoint in another form.

    Args:
        source: a `.ckpt` file, a folder of this package, or safetensors.
        target: what is written; it must not exist.
        form: one of FORMS.
        prefix: taken off the names of the model for safetensors (`model.` for a module that is `self.model`), put
            before them from safetensors.
        weights_only: leave out what only training needs.

    Raises:
        ValueError: it can't be done, and why.

    Memory: some pieces of 16 MiB, and what isn't a tensor.
    """
    if target.exists():
        raise ValueError(f"megatp convert: {target} exists. Choose another name, or remove it.")
    weights_only = weights_only or form == "safetensors"
    opened = _open(source, prefix, weights_only)
    if weights_only:
        opened.layout = {name: of for name, of in opened.layout.items() if name.startswith(MODEL)}
        opened.rest = {key: value for key, value in opened.rest.items() if key not in (*_TRAINING, ELSEWHERE)}
    if form == "safetensors":
        _to_safetensors(opened, target, "" if isinstance(opened, _FromSafetensors) else prefix)
    elif form == "file":
        _to_file(opened, target)
    else:
        chunks = {name: _Lazy(opened, name) for name in opened.layout}
        save_folder(target, chunks, to_bytes(opened.rest))


_TRAINING = (
    *("optimizer_states", "lr_schedulers", "callbacks", "random_states", "loops", "MixedPrecision"),
    *("current_model_state", "averaging_state"),
)


def _open(path: Path, prefix: str, weights_only: bool) -> Source:
    if is_folder(path) and (path / "megatp.json").exists():
        return _FromFolder(path)
    if path.is_dir() or path.suffix == ".safetensors":
        return _FromSafetensors(path, prefix)
    return _FromFile(path, weights_only)


class _FromFolder(Source):
    def __init__(self, path: Path) -> None:
        self._folder = Folder(path)
        self.rest = self._folder.meta()
        self.layout = {name: (tuple(t.size), t.properties.dtype) for name, t in self._folder.tensors.items()}

        self._files: dict[Path, MappedFile] = {}
        self._open: tuple[str, Box, MappedFile, Place] | None = None

    def boxes(self, name: str) -> list[Box]:
        dtype = self.layout[name][1]
        return [rows for stored in self._folder.chunks(name) for rows in row_boxes_of(stored, dtype)]

    def read(self, name: str, box: Box) -> Tensor:
        if self._open is None or self._open[0] != name or not _lies_in(box, self._open[1]):
            stored = next(stored for stored in self._folder.chunks(name) if _lies_in(box, stored))
            path, place = self._folder.place(name, [start for start, _ in stored])
            file = self._files[path] = self._files.get(path) or MappedFile(path)
            self._open = name, stored, file, place
        _, stored, file, place = self._open
        file.release()
        starts = [start for start, _ in stored]
        return part(file.tensor(place), tuple((a - at, b - at) for at, (a, b) in zip(starts, box, strict=True)))


def _lies_in(box: Box, other: Box) -> bool:
    return all(c <= a and b <= d for (a, b), (c, d) in zip(box, other, strict=True))


class _FromSafetensors(Source):
    def __init__(self, path: Path, prefix: str) -> None:
        self._folder, self._prefix = SafetensorsFolder(path), MODEL + prefix
        self.layout = {self._prefix + name: self._folder.shape_and_dtype(name) for name in self._folder.names}
        self.rest: dict[str, Any] = {"pytorch-lightning_version": version("lightning"), NOT_TENSORS: {}}

    def read(self, name: str, box: Box) -> Tensor:
        return self._folder.read_rows(name.removeprefix(self._prefix), slice(*box[0]) if box else slice(None))


class _FromFile(Source):
    """A `.ckpt`, mapped into memory."""

    def __init__(self, path: Path, weights_only: bool) -> None:
        check_zip(path)
        try:
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except pickle.UnpicklingError as error:
            raise ValueError(
                f"megatp convert: {path} holds objects that are not plain data, such as hyperparameters of own classes,"
                " and no code of a file is run. If you trust it, load it with torch.load(..., weights_only=False), turn"
                f" them into plain data and save it again. torch says: {str(error).splitlines()[0]}"
            ) from error
        if weights_only:
            content = {key: value for key, value in content.items() if key not in _TRAINING}
        state = content.pop("state_dict", None)
        if state is None:
            raise ValueError(f"megatp convert: {path} has no `state_dict`: it is no Lightning checkpoint.")
        states = content.get("optimizer_states", [])
        self._names = [_optimizer_names(i, optimizer, state) for i, optimizer in enumerate(states)]
        self.rest = {**content, NOT_TENSORS: {k: v for k, v in state.items() if not isinstance(v, Tensor)}}
        if states:
            self.rest["optimizer_states"] = [
                _by_name(optimizer, names) for optimizer, names in zip(states, self._names, strict=True)
            ]
        self.rest = _copied(self.rest)
        places = places_in(path)
        self._places = self._found(places["state_dict"], places.get("optimizer_states", []) if states else [])
        self.layout = {name: (place.shape, place.dtype) for name, place in self._places.items()}
        self._file = MappedFile(path)

    def read(self, name: str, box: Box) -> Tensor:
        self._file.release()
        return part(self._file.tensor(self._places[name]), box)

    def _found(self, state: dict[str, Any], states: list[dict[str, Any]]) -> dict[str, Place]:
        found = {MODEL + name: x for name, x in state.items() if isinstance(x, Place)}
        for index, (optimizer, names) in enumerate(zip(states, self._names, strict=True)):
            for number, values in optimizer["state"].items():
                for key, x in values.items():
                    if isinstance(x, Place):
                        found[optimizer_name(index, f"{names[number]}.{key}")] = x
        return found


class _Lazy(Chunks):
    """A tensor that is read, in parts, when it is written."""

    def __init__(self, source: Source, name: str) -> None:
        shape, dtype = source.layout[name]
        with fake_tensor_mode():
            stand_in = torch.empty(shape, dtype=dtype)
        super().__init__(stand_in, whole(name, stand_in), None)
        self._source, self._name = source, name
        self._of = {tuple(start for start, _ in box): box for box in source.boxes(name)}
        self._boxes = {at: tuple((start, stop, start) for start, stop in box) for at, box in self._of.items()}

    def view(self, offsets: Any) -> Tensor:
        return self._source.read(self._name, self._of[tuple(offsets)])


def _to_safetensors(source: Source, target: Path, prefix: str) -> None:
    names = {name.removeprefix(MODEL): name for name in source.layout}
    if prefix and not any(name.startswith(prefix) for name in names):
        raise ValueError(
            f"megatp convert: no name starts with {prefix!r}; they are {', '.join(list(names)[:3])}, ... ."
        )
    clash = [name for name in names if prefix and name.startswith(prefix) and name.removeprefix(prefix) in names]
    if clash:
        raise ValueError(
            f"megatp convert: without {prefix!r} `{clash[0]}` would be called as another tensor is. Leave --prefix out."
        )
    names = {name.removeprefix(prefix): full for name, full in names.items()}
    layout = {name: source.layout[full] for name, full in names.items()}
    write_safetensors(target, layout, lambda name: _pieces(source, names[name]))


def _pieces(source: Source, name: str) -> Iterator[tuple[Box, Tensor]]:
    for box in source.boxes(name):
        yield box, source.read(name, box)


def _to_file(source: Source, target: Path) -> None:
    """Let torch.save leave room for all tensors, then fill them in, through a map of the file."""
    content, reads = _content(source)
    storages = {leaf.untyped_storage()._cdata for leaf in tree_leaves(content) if isinstance(leaf, Tensor)}
    hidden = hidden_name(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(content, hidden)
        with zipfile.ZipFile(hidden) as archive:
            records = sum("/data/" in record.filename for record in archive.infolist())
        if records != len(storages):
            raise ValueError(
                "megatp convert: the checkpoint holds tensors inside of objects of their own classes, which can't be"
                " written as a stream. Leave them out with --weights-only."
            )
        _fill(hidden, content, reads, source)
        write_checksums(hidden)
        with hidden.open("rb") as file:
            os.fsync(file.fileno())
        replace(hidden, target)
    finally:
        hidden.unlink(missing_ok=True)


def _fill(path: Path, content: dict[str, Any], reads: dict[int, str], source: Source) -> None:
    mapped = MappedFile(path, write=True)
    for leaf, place in zip(tree_leaves(content), tree_leaves(places_in(path)), strict=True):
        if id(leaf) in reads:
            for box, values in _pieces(source, reads[id(leaf)]):
                mapped.fill(place, box, values)
        elif isinstance(leaf, Tensor):
            mapped.tensor(place).copy_(leaf)


def _content(source: Source) -> tuple[dict[str, Any], dict[int, str]]:
    """A `.ckpt` with stand-ins for tensors, and what is to be read for them: id -> name."""
    rest = dict(source.rest)
    reads: dict[int, str] = {}
    mode = fake_tensor_mode()

    def stand_in(name: str) -> Tensor:
        shape, dtype = source.layout[name]
        with mode:
            made = torch.empty(shape, dtype=dtype)
        reads[id(made)] = name
        return made

    model = {name.removeprefix(MODEL): stand_in(name) for name in source.layout if name.startswith(MODEL)}
    content = {**rest, "state_dict": {**model, **rest.pop(NOT_TENSORS)}}
    content.pop(NOT_TENSORS, None)
    for name, keys in content.pop(ELSEWHERE, {}).items():
        place = content
        for key in keys[:-1]:
            place[key] = dict(place[key])
            place = place[key]
        place[keys[-1]] = stand_in(name)
    if "optimizer_states" in content:
        content["optimizer_states"] = [
            _by_number(index, optimizer, source.layout, stand_in)
            for index, optimizer in enumerate(content["optimizer_states"])
        ]
    return content, reads


def _by_number(index: int, optimizer: dict[str, Any], layout: _Layout, stand_in: Any) -> dict[str, Any]:
    """An optimizer's state as on one device, from one by names."""
    names = [name for group in optimizer["param_groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    groups = [{**group, "params": [numbers[n] for n in group["params"]]} for group in optimizer["param_groups"]]
    state: dict[int, dict[str, Any]] = {}
    for full in layout:
        if full.startswith(optimizer_name(index)):
            name, _, key = full.removeprefix(optimizer_name(index)).rpartition(".")
            state.setdefault(numbers[name], {})[key] = stand_in(full)
    for full, value in optimizer["state"].items():
        name, _, key = full.rpartition(".")
        state.setdefault(numbers[name], {})[key] = value
    return {**optimizer, "state": dict(sorted(state.items())), "param_groups": groups}


def _by_name(optimizer: dict[str, Any], names: dict[int, str]) -> dict[str, Any]:
    groups = [{**group, "params": [names[i] for i in group["params"]]} for group in optimizer["param_groups"]]
    others = {
        f"{names[number]}.{key}": value
        for number, values in optimizer["state"].items()
        for key, value in values.items()
        if not isinstance(value, Tensor)
    }
    return {**optimizer, "state": others, "param_groups": groups}


def _optimizer_names(index: int, optimizer: dict[str, Any], state: dict[str, Any]) -> dict[int, str]:
    """Number -> name of an optimizer's parameters. A `.ckpt` has numbers only: they are those of the parameters in
    their order, if there is one group of all of them and every shape fits.

    Raises:
        ValueError: it can't be known.
    """
    groups = optimizer["param_groups"]
    if all("param_names" in group for group in groups):
        return {i: n for group in groups for i, n in zip(group["params"], group["param_names"], strict=True)}
    numbers = [number for group in groups for number in group["params"]]
    names = list(_parameters(state))
    pairs = [(optimizer["state"].get(i, {}), tuple(state[n].shape)) for i, n in zip(numbers, names, strict=False)]
    fits = all(_like(values, shape) in (None, shape) for values, shape in pairs)
    if len(groups) > 1 or len(numbers) != len(names) or not fits:
        raise ValueError(
            f"megatp convert: optimizer {index} has {len(groups)} groups of {[len(g['params']) for g in groups]}"
            f" parameters by number, and the model {len(names)} tensors: which is which is not in the file. Load it"
            ' with a Trainer and save with MegaTPStrategy(checkpoint="folder"), or convert with --weights-only.'
        )
    return dict(zip(numbers, names, strict=True))


def _parameters(state: dict[str, Any]) -> Iterator[str]:
    """Names of what may be parameters, each storage once. Batch norms' buffers are known by their counter."""
    seen = set()
    for name, x in state.items():
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.layout is not torch.strided:
            continue
        owner, _, leaf = name.rpartition(".")
        if leaf in ("running_mean", "running_var") and f"{owner}.num_batches_tracked".lstrip(".") in state:
            continue
        if x.untyped_storage().data_ptr() not in seen:
            seen.add(x.untyped_storage().data_ptr())
            yield name


def _like(values: dict[str, Any], shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of a parameter's state; None if none says anything, as Adafactor's rows and columns, which broadcast to
    the parameter's."""
    shapes = (tuple(x.shape) for x in values.values() if isinstance(x, Tensor) and x.dim())
    return next((found for found in shapes if found == shape or not _broadcasts(found, shape)), None)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(shape[::-1], to[::-1], strict=False))


def _copied(value: Any) -> Any:
    """Small tensors out of the map, in containers of any kind."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) is dict:
        return {key: _copied(x) for key, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return value
