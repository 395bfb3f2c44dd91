"""Weights from safetensors files, read when a rank makes its parameters: its own part alone.

transformers' `from_pretrained` builds on the meta device, takes a lazy slice of each tensor in the files, and renames,
casts and merges these. Here the slices are tensors of the recording, and so is all that is done with them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_megatp.building.recorder import Recorder
from lightning_megatp.building.recording import Source
from lightning_megatp.plan.shard import ShardSpec
from lightning_megatp.shim.torch import without_dispatch_modes
from lightning_megatp.shim.transformers import loading_in_this_thread, replaced_safe_open


@contextlib.contextmanager
def lazy_safetensors(recorder: Recorder) -> Iterator[None]:
    """Let transformers read safetensors files lazily, if it is there.

    Args:
        recorder: takes the tensors.
    """
    if importlib.util.find_spec("safetensors") is None:
        yield
        return
    from safetensors import safe_open

    def open_lazily(file: Any, *args: Any, **kwargs: Any) -> Any:
        reopen = functools.partial(safe_open, os.path.abspath(file), framework="pt")
        return _LazyFile(safe_open(file, *args, **kwargs), reopen, recorder)

    with replaced_safe_open(open_lazily), loading_in_this_thread():
        yield


class _LazyFile:
    """What `safe_open` returns, with slices that are read later."""

    def __init__(self, file: Any, reopen: Callable[[], Any], recorder: Recorder) -> None:
        self._file, self._reopen, self._recorder = file, reopen, recorder

    def __enter__(self) -> _LazyFile:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._file.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_slice(self, key: str) -> _LazySlice:
        return _LazySlice(self._file.get_slice(key), Stored(self._reopen, key), self._recorder)

    def get_tensor(self, key: str) -> Tensor:
        return self.get_slice(key)[...]


class _LazySlice:
    def __init__(self, found: Any, stored: Stored, recorder: Recorder) -> None:
        self._found, self._stored, self._recorder = found, stored, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._found, name)

    def __getitem__(self, index: Any) -> Tensor:
        shape = tuple(self._found.get_shape())
        with without_dispatch_modes():  # no public table has the dtypes of safetensors' names
            dtype = (self._found[0:0] if shape else self._found[...]).dtype
        whole = self._recorder.add(Source(shape, dtype, self._stored.read))
        return whole if index is Ellipsis else whole[index]


class Stored:
    """A tensor in a safetensors file."""

    def __init__(self, reopen: Callable[[], Any], key: str) -> None:
        self._reopen, self._key = reopen, key

    def read(self, spec: ShardSpec | None) -> Tensor:
        """All of it, or a rank's part: of the dims that are split, its ranges alone are read."""
        with self._reopen() as file:
            return file.get_tensor(self._key) if spec is None else _read_part(file.get_slice(self._key), spec)


def _read_part(stored: Any, spec: ShardSpec) -> Tensor:
    split = [dim for dim, ranges in enumerate(spec.ranges) if ranges != ((0, spec.shape[dim]),)]
    if len(split) != 1:
        return spec.take(stored[...])
    before = (slice(None),) * split[0]
    pieces = [stored[(*before, slice(start, stop))] for start, stop in spec.ranges[split[0]]]
    return torch.cat(pieces, split[0]) if pieces else stored[(*before, slice(0, 0))]
