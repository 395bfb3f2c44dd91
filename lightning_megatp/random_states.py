"""The states of all default random generators of a process, in plain types."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """The states of torch, numpy and Python in plain types, which `torch.load(weights_only=True)` takes."""
    numpy: Any = np.random.get_state(legacy=True)
    name, keys, *rest = numpy
    state = {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def is_random_state(state: dict[str, Any]) -> bool:
    """Whether nothing was drawn or seeded since `random_state` gave it."""
    return _same(state, random_state())


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def set_random_state(state: dict[str, Any]) -> None:
    """Go on from a state that `random_state` gave."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
