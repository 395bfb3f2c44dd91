"""When things happened: spans between two stamps of a clock that all ranks started together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lightning_megatp.pipeline.schedules.schedule import Action

COMPUTING = ("forward", "backward", "backward input", "wgrad")
"""What counts as work; in the time between the first and the last of it, all else is bubble."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that one rank did, in seconds since all ranks started."""

    what: str
    """One of `COMPUTING`, "send", "wait" (for a receive, or at the end for sends), "gradients" or "optimizer"."""
    stage: int
    """-1 where it belongs to none."""
    microbatch: int
    start: float
    end: float

    def __str__(self) -> str:
        at = [f"{name} {i}" for name, i in (("stage", self.stage), ("microbatch", self.microbatch)) if i >= 0]
        return ", ".join([self.what, *at])


class Clock(Protocol):
    """Stamps moments; what they were is read later, so that stamping delays nothing."""

    def stamp(self) -> Any:
        """Now."""

    def seconds(self, stamp: Any) -> float:
        """From the start of the clock to a stamp."""


class Recorder:
    """Collects the spans of one rank.

    Args:
        clock: of this rank.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = clock.stamp()
        self._stamps: list[tuple[str, Action | None, Any, Any]] = []

    @contextlib.contextmanager
    def span(self, what: str, action: Action | None = None) -> Iterator[None]:
        """Take the time of what happens inside."""
        start = self._clock.stamp()
        yield
        self._last = self._clock.stamp()
        self._stamps.append((what, action, start, self._last))

    def optimizer(self) -> None:
        """One more span, from the end of the last one until now: what the optimizer took."""
        self._stamps.append(("optimizer", None, self._last, self._clock.stamp()))

    def spans(self) -> tuple[Span, ...]:
        """All of them, in the order of their ends."""
        return tuple(
            Span(what, *((action.stage, action.microbatch) if action else (-1, -1)), *map(self._clock.seconds, stamps))
            for what, action, *stamps in self._stamps
        )


def start_together(device: torch.device) -> Clock:
    """Start a clock on every rank of the world, at one moment.

    Every rank looks at its own clock as it leaves a barrier, many times. One rank or another is woken up late each
    time; the median of the differences is what their clocks differ by.

    Communication: some barriers, and an all-gather of as many numbers.
    """
    readings = []
    for _ in range(_ROUNDS):
        dist.barrier(device_ids=[device.index] if device.type == "cuda" and device.index is not None else None)
        readings.append(time.perf_counter())
    own = torch.tensor(readings, dtype=torch.float64, device=device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    by_rank = torch.stack(every).cpu()
    ahead = (by_rank - by_rank[0]).median(1).values
    start = float((by_rank[:, -1] - ahead).min() + ahead[dist.get_rank()])
    return _DeviceClock(device, start) if device.type == "cuda" else HostClock(start)


_ROUNDS = 21


class HostClock:
    """Where operations are done when they return.

    Args:
        start: by this process's `time.perf_counter`.
    """

    def __init__(self, start: float = 0.0) -> None:
        self._start = start

    def stamp(self) -> float:
        return time.perf_counter()

    def seconds(self, stamp: float) -> float:
        return stamp - self._start


class _DeviceClock:
    """Where operations are queued on the current stream: events in that stream, so that nothing waits for them.

    Args:
        start: by this process's `time.perf_counter`.
    """

    def __init__(self, device: torch.device, start: float) -> None:
        torch.cuda.synchronize(device)
        self._first = self.stamp()
        self._first.synchronize()
        self._first_at = time.perf_counter() - start

    def stamp(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, stamp: torch.cuda.Event) -> float:
        stamp.synchronize()
        return self._first_at + float(self._first.elapsed_time(stamp)) / 1000
