"""A process group of eight ranks, of which seven are imagined: what a rank of a large machine does, on one device.

Collectives are copies on a stream of their own (on the CPU a thread of its own) that last as long as a ring needs for
their bytes. As with NCCL they begin when the caller's stream gets there, run one after another, and `wait` holds up the
stream that needs the result, not the process. The imagined ranks send copies of what this one does; sums are this
rank's own part. So values are finite and of the usual size, and mean nothing.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "standin"


class Wire:
    """What the collectives of all groups go through, one after another.

    Args:
        device: where the tensors are.
        bytes_per_second: of a rank, in one direction.
        poison: fill results with NaN until they are there, so that a missing `wait` shows. On the CPU.
        at_once: results are there when a collective has been called, and no time passes. On the CPU.
    """

    def __init__(
        self,
        device: torch.device,
        bytes_per_second: float = math.inf,
        poison: bool = False,
        at_once: bool = False,
    ) -> None:
        self.device, self.bytes_per_second, self.poison, self.at_once = device, bytes_per_second, poison, at_once
        self.idle = False
        """Whether collectives send nothing and take no time: their results are what lay in that memory."""
        self._line: _Stream | _Thread = _Stream(device) if device.type == "cuda" else _Thread()
        self._sent: list[tuple[float, Any, Any]] | None = None

    def send(self, nbytes: float, result: Tensor, value: Tensor) -> dist.Work:
        """One collective.

        Args:
            nbytes: that a rank receives by a ring.
            result: what it writes.
            value: what is written; for a collective in place the same tensor.
        """
        if self.at_once and result is not value:
            result.copy_(value)
        if self.idle or self.at_once:
            return _Work()
        if self.poison and result.is_floating_point():
            value = value.clone()
            result.fill_(torch.nan)
        return self._line.run(result, value, nbytes / self.bytes_per_second, self._log)

    def _log(self, seconds: float, start: Any, end: Any) -> None:
        if self._sent is not None:
            self._sent.append((seconds, start, end))

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """Meanwhile collectives take no time."""
        self.idle = True
        try:
            yield
        finally:
            self.idle = False

    def timed(self, step: Callable[[], object]) -> tuple[float, float]:
        """Seconds that the collectives of a step take: as planned, and as it turns out, waiting for their turn on the
        line not counted."""
        self._sent = []
        step()
        self._line.finish()
        sent, self._sent = self._sent, None
        return sum(planned for planned, _, _ in sent), sum(self._line.between(start, end) for _, start, end in sent)

    def close(self) -> None:
        self._line.finish()
        self._line.close()


class StandIn(dist.ProcessGroup):
    """The process group: rank `rank` of `size`, the others imagined.

    The methods are those that `torch.distributed` calls; four have one name in torch 2.11 and another one in 2.13.
    """

    def __init__(self, wire: Wire, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.wire, self._name = wire, ""

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:
        return NAME

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        x = tensors[0].detach()
        return self.wire.send(2 * self._share(x), x, x)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        whole, own = output.detach().view(self.size(), -1), input.detach().reshape(1, -1)
        return self.wire.send(self._share(whole), whole, own)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        whole, own = input.detach(), output.detach()
        part = whole.view(self.size(), *own.shape)[self.rank()]
        return self.wire.send(self._share(whole), own, part)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        return _last(map(self.all_gather_single, outputs, inputs))

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return _last(map(self.reduce_scatter_single, outputs, inputs))

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        return _Work()  # of set-up: from this rank, and so there

    def barrier(self, opts: Any = None) -> dist.Work:
        return _Work()

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def _share(self, whole: Tensor) -> float:
        """Bytes that a ring brings to a rank. (t - 1) / t of all"""
        return (self.size() - 1) / self.size() * whole.nbytes


@contextlib.contextmanager
def standin_world(size: int, wire: Wire) -> Iterator[None]:
    """Meanwhile this process is rank 0 of a world of stand-ins."""

    def make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StandIn:
        return StandIn(wire, rank, size)

    dist.Backend.register_backend(NAME, make, devices=["cpu", "cuda"])
    dist.init_process_group(NAME, store=dist.HashStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        wire.close()
        dist.destroy_process_group()


def _last(works: Iterator[dist.Work]) -> dist.Work:
    """Of several, which run one after another: the wait for the last is one for all, if it keeps their tensors."""
    *before, last = works
    return _Work(last.wait, before)


class _Work(dist.Work):
    """What a collective returns.

    Args:
        held_up: makes the caller wait for it.
        tensors: that have to live until then.
    """

    def __init__(self, held_up: Callable[[], object] | None = None, tensors: object = None) -> None:
        super().__init__()
        self._held_up, self._tensors = held_up, tensors

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._held_up is not None:
            self._held_up()
        self._held_up = self._tensors = None
        return True


class _Stream:
    """A CUDA stream for communication.

    Args:
        move: copies and takes its time, as `tests.benchmarks.moving` has it.
    """

    def __init__(self, device: torch.device, move: Callable[[Tensor, Tensor, float], None] | None = None) -> None:
        if move is None:
            from tests.benchmarks.moving import move
        self._move = move
        self.stream = torch.cuda.Stream(device)

    def run(self, result: Tensor, value: Tensor, seconds: float, log: Callable[..., None]) -> dist.Work:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            start = self._event()
            self._move(value, result, seconds)
            end = self._event()
        log(seconds, start, end)
        return _Work(lambda: torch.cuda.current_stream().wait_event(end), (result, value))

    def finish(self) -> None:
        torch.cuda.synchronize()

    def between(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) * 1e-3

    def close(self) -> None:
        """Nothing to end."""

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Thread:
    """The same on the CPU: a thread that copies, and sleeps for the rest of the time."""

    def __init__(self) -> None:
        self.pool = ThreadPoolExecutor(1)

    def run(self, result: Tensor, value: Tensor, seconds: float, log: Callable[..., None]) -> dist.Work:
        def job() -> None:
            start = time.perf_counter()
            time.sleep(seconds)
            with torch.no_grad():
                result.copy_(value)
            log(seconds, start, time.perf_counter())

        done: Future[None] = self.pool.submit(job)
        return _Work(done.result)

    def finish(self) -> None:
        self.pool.submit(int).result()

    def between(self, start: float, end: float) -> float:
        return end - start

    def close(self) -> None:
        self.pool.shutdown()
