"""What steps left on the module of the last stage, given to the others for a hook that all stages have to run: one that
puts averaged weights in, or others back, and also reads what a step of validation has kept."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_megatp.module import ParallelModule
from lightning_megatp.snapshots.leftovers import CONTAINERS, Attributes, is_plain
from lightning_megatp.snapshots.snapshot import is_small_array


class LeftState:
    """On the last stage, what steps, and hooks that run there alone, have left on the module: attributes of it, and of
    the user's own objects on it, that others were not told.

    Args:
        parallel: the module.
    """

    def __init__(self, parallel: ParallelModule) -> None:
        self._parallel = parallel
        self._before: dict[tuple[str, ...], Attributes] = {}
        """What has changed, by the names that lead to it; and the module before that."""

    def attributes(self) -> Attributes:
        """The module's attributes now, without averages of weights, which hooks find in another form than steps."""
        shadows = self._parallel.shadows
        return Attributes(self._parallel.module, frozenset() if shadows is None else shadows.slots)

    def note(self, before: Attributes) -> bool:
        """Note what has been changed since.

        Returns:
            Whether anything was.
        """
        paths = self.attributes().differing(before)
        known = list(self._before)
        for path in paths:
            if not any(path[: len(other)] == other for other in known):
                inside = [other for other in known if other[: len(path)] == path]
                self._before = {k: v for k, v in self._before.items() if k not in inside} | {path: before}
        return bool(paths)

    def remains(self) -> bool:
        """Whether anything is left still. What is not is forgotten."""
        self._before = {path: self._before[path] for path in self._paths()}
        return bool(self._before)

    def packed(self) -> bytes | None:
        """What is left, to be sent; see `packed`."""
        return packed(self._parallel.module, self._paths())

    def _paths(self) -> list[tuple[str, ...]]:
        if not self._before:
            return []
        now = self.attributes()
        changed = [path for path, then in self._before.items() if now.differ_at(path, then)]
        return [path for path in changed if not _is_plain_at(self._parallel.module, path)]


def packed(module: nn.Module, paths: Iterable[tuple[str, ...]]) -> bytes | None:
    """Attributes, to be sent; None if they are something else than tensors, arrays and plain values, in containers, or
    too large, or not there any more.

    Args:
        paths: each the names that lead from the module to an attribute, through the user's own objects.
    """
    found = {path: _held(module, path) for path in paths}
    if not all(path[-1] in held for path, held in found.items()):
        return None
    values = {path: held[path[-1]] for path, held in found.items()}
    if not all(map(_can_be_sent, values.values())) or sum(map(_size, values.values())) > _MOST:
        return None
    file = io.BytesIO()
    try:
        torch.save({path: _detached(value) for path, value in values.items()}, file)
    except (pickle.PicklingError, AttributeError, TypeError):  # an array of objects, of a class made inside a function
        return None
    return file.getvalue()


@contextlib.contextmanager
def given(module: nn.Module, sent: bytes, device: torch.device) -> Iterator[None]:
    """Meanwhile a module has the attributes that `packed` made `sent` of.

    Args:
        device: of tensors that were not on a CPU.
    """

    def placed(storage: Any, location: str) -> Any:
        return torch.serialization.default_restore_location(storage, location if location == "cpu" else str(device))

    values = torch.load(io.BytesIO(sent), map_location=placed, weights_only=False)
    holders = {path: _held(module, path) for path in values}
    before = {path: held[path[-1]] for path, held in holders.items() if path[-1] in held}
    for path, held in holders.items():
        held[path[-1]] = values[path]
    try:
        yield
    finally:
        for path, held in holders.items():
            held.pop(path[-1], None)
            if path in before:
                held[path[-1]] = before[path]


def _held(module: nn.Module, path: tuple[str, ...]) -> dict[str, Any]:
    """All attributes of what has this one."""
    holder: Any = module
    for name in path[:-1]:
        holder = getattr(holder, "__dict__", {}).get(name)
    return getattr(holder, "__dict__", {})


def _is_plain_at(module: nn.Module, path: tuple[str, ...]) -> bool:
    """Whether a number or the like, or containers of such, or a small array are there."""
    held = _held(module, path)
    return path[-1] in held and (is_plain(held[path[-1]]) or is_small_array(held[path[-1]]))


def _can_be_sent(value: Any) -> bool:
    if isinstance(value, CONTAINERS):
        return all(map(_can_be_sent, value.values() if isinstance(value, dict) else value))
    return type(value) is Tensor or isinstance(value, np.ndarray) or is_plain(value)


def _size(value: Any) -> int:
    """Bytes of tensors and arrays."""
    if isinstance(value, CONTAINERS):
        return sum(map(_size, value.values() if isinstance(value, dict) else value))
    return int(getattr(value, "nbytes", 0))


def _detached(value: Any) -> Any:
    """A copy of containers whose tensors have no graph, and keep no more memory than their own."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _detached(x) for key, x in value.items()}
    kind: Any = next((kind for kind in CONTAINERS if isinstance(value, kind)), None)  # Python's own, not derived ones
    return value if kind is None else kind(map(_detached, value))


_MOST = 2**28
"""Bytes that are sent for a hook."""
