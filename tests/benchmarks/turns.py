"""Programs that take turns in the same processes, a training step each.

Two programs timed one after the other differ by what the machine did meanwhile. Here they alternate step by step, so
that a ratio compares neighbours in time. Each program runs in a thread of its own, which sleeps while others have their
turn; a Lightning Trainer is stopped at the end of each batch, a loop after each call.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.profiler import ProfilerActivity, profile, record_function


@dataclass
class Taken:
    """What one program took on one rank."""

    seconds: list[float] = field(default_factory=list)
    """Of each timed step."""
    python: list[float] = field(default_factory=list)
    """Seconds of a profiled step outside of torch's operations and of waiting for collectives."""
    loss: float = float("nan")
    """Of the first step: programs that are compared compute the same."""
    parts: list[Mapping[str, float]] = field(default_factory=list)
    """Seconds of what each timed step did, by name, where the program tells."""
    processor: list[float] = field(default_factory=list)
    """Processor seconds of each timed step in the program's thread: its kernels and its Python, without waits."""


class Program:
    """One program, that pauses after every step.

    Args:
        body: the program; it gets this object, and calls `pause` once it is set up, and after each step with its loss.
    """

    def __init__(self, body: Callable[[Program], None]) -> None:
        self.taken = Taken()
        self.parts: Mapping[str, float] = {}
        """Seconds of what the last step did; for a program to set."""
        self.stopped = self.profiled = False
        self.processor = 0.0
        """Processor seconds of the last step."""
        self._losses: list[float] = []
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._error: BaseException | None = None
        self._profile: profile | None = None
        self._start = self._busy = 0.0
        self._thread = threading.Thread(target=self._run, args=(body,), daemon=True)
        self._thread.start()
        self._wait()

    def step(self) -> None:
        """Let the program run until it pauses again."""
        self._go.release()
        self._wait()

    def close(self) -> None:
        """Let the program end after one more step."""
        self.stopped = True
        self._go.release()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def pause(self, loss: torch.Tensor | None = None) -> None:
        """To be called by the program."""
        self.processor = time.thread_time() - self._busy
        if self._profile is not None:
            self._finish_profile(self._profile)
        if loss is not None and self.taken.loss != self.taken.loss:
            self.taken.loss = float(loss.detach())
        if self.stopped:
            return
        self._done.release()
        self._go.acquire()
        if self.profiled and not self.stopped:
            self._profile = profile(activities=[ProfilerActivity.CPU])
            self._profile.start()
            self._start = time.perf_counter()
        self._busy = time.thread_time()

    def _run(self, body: Callable[[Program], None]) -> None:
        try:
            body(self)
        except BaseException as error:
            self._error = error
        finally:
            self._done.release()

    def _wait(self) -> None:
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def _finish_profile(self, taken: profile) -> None:
        seconds = time.perf_counter() - self._start
        taken.stop()
        self._profile = None
        self.taken.python.append(seconds - _covered(_operations(taken)))


def loop(step: Callable[[], torch.Tensor]) -> Callable[[Program], None]:
    """The body of a program that is a function called again and again."""

    def body(program: Program) -> None:
        program.pause()
        while not program.stopped:
            program.pause(step())

    return body


def fit(make: Callable[[Pauses], tuple[Trainer, LightningModule, Any]]) -> Callable[[Program], None]:
    """The body of a program that is a `Trainer.fit`.

    Args:
        make: a trainer with the given callback, a module and a loader with more batches than are needed.
    """

    def body(program: Program) -> None:
        trainer, module, loader = make(Pauses(program))
        trainer.fit(module, loader)

    return body


class Pauses(Callback):
    """Lets a Trainer pause before its first batch and after every one."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def on_train_start(self, *args: Any) -> None:
        self.program.pause()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, *args: Any) -> None:
        self.program.pause(outputs["loss"] if isinstance(outputs, Mapping) else outputs)
        if self.program.stopped:  # on all ranks; set so that the strategy doesn't see to it that they agree
            vars(trainer).update({"should" + "_stop": True})


def alternate(
    programs: Mapping[str, Callable[[Program], None]], steps: int, warm_up: int = 3, profiled: int = 6
) -> dict[str, Taken]:
    """Run the programs in turn, in an order that goes round.

    Args:
        programs: the body of each, by its name; the same on every rank, in the same order.
        steps: timed steps of each.
        warm_up: steps before those.
        profiled: steps that are run once more under torch's profiler, untimed.
    """
    running = {name: Program(body) for name, body in programs.items()}
    names = list(running)
    for turn in range(warm_up + steps):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            running[name].step()
            seconds = time.perf_counter() - start
            if turn >= warm_up:
                running[name].taken.seconds.append(seconds)
                running[name].taken.processor.append(running[name].processor)
                running[name].taken.parts.append(running[name].parts)
    with _waits_are_seen():
        for program in running.values():
            program.profiled = True
            for _ in range(profiled):
                program.step()
            program.profiled = False
    for program in running.values():
        program.close()
    return {name: program.taken for name, program in running.items()}


@contextlib.contextmanager
def _waits_are_seen() -> Iterator[None]:
    """Meanwhile waiting for a collective is an event of its own in profiles; otherwise it looks like Python."""
    original = dist.Work.wait

    def wait(*args: Any, **kwargs: Any) -> Any:
        with record_function("wait"):
            return original(*args, **kwargs)

    with mock.patch.object(dist.Work, "wait", wait):
        yield


def _operations(taken: profile) -> Iterator[tuple[float, float]]:
    for event in taken.events() or ():
        if event.name == "wait" or event.name.startswith(("aten::", "c10d::", "_c10d_functional::")):
            yield event.time_range.start * 1e-6, event.time_range.end * 1e-6


def _covered(intervals: Iterator[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of the intervals."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
