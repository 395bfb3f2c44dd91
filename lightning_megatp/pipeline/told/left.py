"""What steps left on the module of the last stage, given to the others for a hook that all stages have to run: one that
puts averaged weights in, or others back, and also reads what a step of validation has kept."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_megatp.snapshots.leftovers import CONTAINERS, is_plain


def packed(values: Mapping[str, Any]) -> bytes | None:
    """Attributes, to be sent; None if they are something else than tensors, arrays and plain values, in containers, or
    too large."""
    if not all(map(_can_be_sent, values.values())) or sum(map(_size, values.values())) > _MOST:
        return None
    file = io.BytesIO()
    try:
        torch.save({name: _detached(value) for name, value in values.items()}, file)
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
    before = {name: vars(module)[name] for name in values if name in vars(module)}
    vars(module).update(values)
    try:
        yield
    finally:
        for name in values:
            vars(module).pop(name, None)
        vars(module).update(before)


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
