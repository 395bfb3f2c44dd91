"""Where random generators are: the default ones of a process, and those that users make; told, put back and seeded."""

from __future__ import annotations

import contextlib
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

# ---------------------------------------------------------------- all default generators of a process


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


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Leave the generators of torch (CPU and the current accelerator), Python and NumPy as they were found."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    host = HostState.now()
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            host.put()


# ---------------------------------------------------------------- those of the host beside torch


class HostState(NamedTuple):
    """Where the default generators of Python and NumPy are. States can be compared."""

    python: Any
    numpy: bytes

    @classmethod
    def now(cls) -> HostState:
        return cls(random.getstate(), pickle.dumps(np.random.get_state()))

    @classmethod
    def seeded(cls, seed: int) -> HostState:
        """Where they are after they were seeded."""
        return cls(random.Random(seed).getstate(), pickle.dumps(np.random.RandomState(seed % 2**32).get_state()))

    def put(self) -> None:
        """Put them there."""
        random.setstate(self.python)
        np.random.set_state(pickle.loads(self.numpy))


@contextlib.contextmanager
def host_seeded(seed: int) -> Iterator[Callable[[], bool]]:
    """Let Python and NumPy draw from a seed, and leave their generators as they were.

    Yields:
        A function that tells whether something was drawn.
    """
    before = HostState.now()
    HostState.seeded(seed).put()
    try:
        yield lambda: HostState.now() != HostState.seeded(seed)
    finally:
        before.put()


# ---------------------------------------------------------------- single generators


@contextlib.contextmanager
def seeded(seed: int, generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Draw from a seed, and leave the generators as they were.

    `torch.manual_seed` would do it for all devices; for every kind of device that isn't there it formats a stack trace,
    to be shown if one ever is.
    """
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed % 2**63)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


def is_generator(x: Any) -> bool:
    """Whether its state can be put back: a generator of torch, Python or NumPy."""
    if isinstance(x, random.Random):
        return not isinstance(x, random.SystemRandom)
    if type(x).__module__.startswith("numpy.random"):
        return hasattr(x, "set_state") or hasattr(x, "bit_generator")
    return isinstance(x, (torch.Generator, SobolEngine))


def is_host_generator(x: Any) -> bool:
    """Whether it is one of Python's or NumPy's."""
    return is_generator(x) and not isinstance(x, (torch.Generator, SobolEngine))


@contextlib.contextmanager
def host_generators_seeded(seed: int, generators: Sequence[Any]) -> Iterator[None]:
    """Let generators of Python and NumPy draw from a seed, and leave them as they were."""
    states = [generator_state(generator) for generator in generators]
    try:
        for generator in generators:
            _seed(generator, seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            set_generator_state(generator, state)


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed % 2**32)
    else:
        bits = getattr(generator, "bit_generator", generator)
        bits.state = type(bits)(seed % 2**64).state


def generator_state(generator: Any) -> Any:
    """Where a generator is; the same generator elsewhere has the same there."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, SobolEngine):
        return {name: x.numpy().copy() if isinstance(x, Tensor) else x for name, x in vars(generator).items()}
    return generator.get_state() if hasattr(generator, "get_state") else generator.bit_generator.state


def set_generator_state(generator: Any, state: Any) -> None:
    """Put a generator where one was."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, SobolEngine):
        arrays = {name: torch.from_numpy(x.copy()) for name, x in state.items() if isinstance(x, np.ndarray)}
        vars(generator).update(state | arrays)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state
