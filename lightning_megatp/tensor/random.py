"""Random numbers: the same on all tensor ranks for whole values, different ones where each rank has its own values.

The replicated stream is the process's default generator, untouched: at dp = 1 it is the stream of the one-device run.
Inside a sharded region the device's generator is reseeded from one number drawn from that stream and the tensor rank.
Nothing is remembered between calls, so activation checkpointing (which restores the default generators) and resuming
reproduce the same masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lightning_megatp.shim.autograd import current_backward_node

_MIX = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: neighbouring ranks get unrelated seeds


class RankStream:
    """This tensor rank's own random stream, entered and left around sharded values."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._outside: tuple[torch.Generator, torch.Tensor] | None = None
        self._owner: object = None

    @property
    def active(self) -> bool:
        """Whether this stream is entered, by the pass that runs now: a forward, or a recomputation inside backward. One
        left open where a checkpoint's recomputation stopped early is over, and its generator was restored."""
        if self._outside is not None and self._owner != current_backward_node():
            self._outside = None
        return self._outside is not None

    def enter(self, device: torch.device) -> None:
        """Draw one number from the replicated stream and go on from it mixed with the rank. No-op when inside."""
        if self.active:
            return
        self._owner = current_backward_node()
        drawn = int(torch.randint(0, 2**62, (), device="cpu", generator=torch.default_generator))
        generator = default_generator(device)
        self._outside = generator, generator.get_state()
        generator.manual_seed((drawn + (self._rank + 1) * _MIX) % 2**63)

    def leave(self) -> None:
        """Go back to the replicated stream. No-op when outside."""
        if self.active and self._outside is not None:
            generator, state = self._outside
            generator.set_state(state)
            self._outside = None

    @contextmanager
    def inside(self, device: torch.device) -> Iterator[None]:
        """One operation on sharded values; inside an open stream it simply goes on."""
        if self.active:
            yield
            return
        self.enter(device)
        try:
            yield
        finally:
            self.leave()

    @property
    def outside(self) -> torch.Tensor | None:
        """The state to which the device's generator goes back when this stream is left; None outside."""
        return self._outside[1] if self.active and self._outside is not None else None

    @contextmanager
    def repeated(self, device: torch.device, outside: torch.Tensor | None) -> Iterator[None]:
        """An operation that backward repeats, by generators that were put back to where they were for it.

        Args:
            outside: what the property of that name was then.
        """
        before = self._outside, self._owner
        self._outside = None if outside is None else (default_generator(device), outside)
        self._owner = current_backward_node()
        try:
            yield
        finally:
            self._outside, self._owner = before


def generators_on(device: torch.device) -> list[torch.Generator]:
    """The generators that a step draws from, each once."""
    return [torch.default_generator, *([] if device.type == "cpu" else [default_generator(device)])]


def default_generator(device: torch.device) -> torch.Generator:
    """The generator random operations on a device use when none is given."""
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator
