"""pp=2: ours, torch.distributed.pipelining, a 1F1B written by hand, and the schedule's formula."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from lightning_megatp.pipeline.schedules.check import simulate
from lightning_megatp.pipeline.schedules.generators import one_f_one_b, split_end
from lightning_megatp.pipeline.schedules.recorder import COMPUTING, HostClock, Recorder
from tests.benchmarks.models import LEARNING_RATE, Size, Transformer, batch, decoder, loader, loss, trainer
from tests.benchmarks.ratios import OURS, Figure, Row, compare, interval, python, seconds
from tests.benchmarks.turns import Pauses, Program, Taken, alternate, fit, loop
from tests.ranks import RankPool, run_ranks

TORCH, HAND, ZB_H1, TIMED = "torch pipelining", "1F1B by hand", "ours, zb_h1", "ours, timed"


class Stage(nn.Module):
    """A part of a `Transformer` cut by hand. (b, s) ids or (b, s, d) -> (b, s, d) or logits"""

    def __init__(self, model: Transformer, stage: int, stages: int) -> None:
        super().__init__()
        each = len(model.blocks) // stages
        self.embed = model.embed if stage == 0 else None
        self.blocks = model.blocks[stage * each : (stage + 1) * each]
        self.norm, self.head = (model.norm, model.head) if stage == stages - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            h = block(h)
        return h if self.head is None else self.head(self.norm(h))


def ours(
    size: Size, world_size: int, microbatches: int, schedule: str, timed: bool = False
) -> Callable[[Program], None]:
    """A LightningModule's own training_step under a Trainer, everything included.

    Args:
        timed: let each step say how long it computed.
    """

    def make(pauses: Pauses) -> Any:
        from lightning_megatp import MegaTPStrategy

        strategy = MegaTPStrategy(pp=world_size, microbatches=microbatches, schedule=schedule, summary=False)
        made = trainer(strategy, world_size, pauses)
        if timed:
            made.callbacks.append(Work(pauses.program))
        return made, decoder(size), loader(size, size.rows * microbatches)

    return fit(make)


class Work(Callback):
    """Takes the time of a stage's forwards and backwards, where they happen: by the recorder that draws timelines."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.executor = trainer.strategy.pipeline.executor
        self.executor.recorder = Recorder(HostClock())
        trainer.optimizers[0].register_step_post_hook(self._take)

    def _take(self, *args: Any) -> None:
        recorder = self.executor.recorder
        recorder.optimizer()
        parts = Counter[str]()
        for span in recorder.spans():
            parts["computing" if span.what in COMPUTING else span.what] += span.end - span.start
        self.program.parts = parts
        self.executor.recorder = Recorder(HostClock())


def torchs(size: Size, rank: int, world_size: int, microbatches: int) -> Callable[[Program], None]:
    """torch.distributed.pipelining, without Lightning."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    part = Stage(decoder(size).model, rank, world_size)
    stage = PipelineStage(part, rank, world_size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss)
    optimizer = torch.optim.AdamW(part.parameters(), lr=LEARNING_RATE)
    x, y = batch(size, size.rows * microbatches)

    def step() -> Tensor | None:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        schedule.step(*[x] * (rank == 0), target=y, losses=losses)
        optimizer.step()
        return torch.stack(losses).mean() if losses else None

    return loop(step)


class HandPipeline:
    """1F1B for fixed shapes: receives are posted one ahead, sends are waited for at the end.

    Source: Narayanan et al. 2021 (PipeDream-Flush), section 2.2.
    """

    def __init__(self, size: Size, rank: int, world_size: int, microbatches: int) -> None:
        self.rank, self.last, self.microbatches = rank, world_size - 1, microbatches
        self.part = Stage(decoder(size).model, rank, world_size)
        self.optimizer = torch.optim.AdamW(self.part.parameters(), lr=LEARNING_RATE)
        x, y = batch(size, size.rows * microbatches)
        self.ids, self.targets = x.chunk(microbatches), y.chunk(microbatches)
        self.shape = (size.rows, size.length, size.d)

    def step(self) -> Tensor | None:
        self.optimizer.zero_grad()
        self.sent: list[Any] = []
        self.held: list[tuple[Tensor, Tensor]] = []
        self.losses: list[Tensor] = []
        self.inputs = self._receive(self.rank - 1, self.rank > 0)
        self.gradients = self._receive(self.rank + 1, self.rank < self.last)
        warm = min(self.last - self.rank, self.microbatches)
        for i in range(warm):
            self._forward(i)
        for i in range(warm, self.microbatches):
            self._forward(i)
            self._backward(i - warm)
        for i in range(self.microbatches - warm, self.microbatches):
            self._backward(i)
        for work, _ in self.sent:
            work.wait()
        self.optimizer.step()
        return torch.stack(self.losses).mean() if self.losses else None

    def _forward(self, i: int) -> None:
        x = self.ids[i] if self.rank == 0 else next(self.inputs).requires_grad_()
        y = self.part(x)
        if self.rank < self.last:
            self._send(y.detach(), self.rank + 1)
        else:
            y = loss(y, self.targets[i]) / self.microbatches
            self.losses.append(y.detach() * self.microbatches)
        self.held.append((x, y))

    def _backward(self, i: int) -> None:
        x, y = self.held.pop(0)
        y.backward(next(self.gradients) if self.rank < self.last else None)
        if self.rank > 0:
            assert x.grad is not None
            self._send(x.grad, self.rank - 1)

    def _send(self, x: Tensor, to: int) -> None:
        self.sent.append((dist.isend(x, to), x))

    def _receive(self, source: int, wanted: bool) -> Iterator[Tensor]:
        """All microbatches' tensors from a neighbour, each receive posted before the one before it is used."""
        if not wanted:
            return
        ahead = torch.empty(self.shape)
        work = dist.irecv(ahead, source)
        for i in range(self.microbatches):
            work.wait()
            x = ahead
            if i + 1 < self.microbatches:
                ahead = torch.empty(self.shape)
                work = dist.irecv(ahead, source)
            yield x


def programs(size: Size, rank: int, world_size: int, microbatches: int) -> dict[str, Callable[[], Any]]:
    """What builds the body of each program."""
    return {
        OURS: lambda: ours(size, world_size, microbatches, "1f1b"),
        TORCH: lambda: torchs(size, rank, world_size, microbatches),
        HAND: lambda: loop(HandPipeline(size, rank, world_size, microbatches).step),
        ZB_H1: lambda: ours(size, world_size, microbatches, "zb_h1"),
        TIMED: lambda: ours(size, world_size, microbatches, "1f1b", timed=True),
    }


def measure(rank: int, world_size: int, size: Size, microbatches: int) -> dict[str, Taken]:
    """One round on one rank."""
    made = programs(size, rank, world_size, microbatches)
    steps = size.steps if microbatches < 16 else size.steps // 2
    return alternate({name: make() for name, make in made.items()}, steps, warm_up=2, profiled=4)


def measure_processor(rank: int, world_size: int, size: Size, microbatches: int) -> dict[str, Taken]:
    """The same of ours and the stage by hand alone."""
    made = programs(size, rank, world_size, microbatches)
    return alternate({name: made[name]() for name in (OURS, HAND)}, size.steps, profiled=0)


def peak(rank: int, world_size: int, size: Size, microbatches: int, name: str) -> int:
    """Bytes of resident memory that the third to fifth step of one program take above what it has once it is set up:
    gradients, optimizer state, activations, buffers. What torch loads at the first use is loaded before."""
    _use_once(size)
    program = Program(programs(size, rank, world_size, microbatches)[name]())
    start = _memory("VmRSS")
    for i in range(5):
        if i == 2:
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
        program.step()
    most = _memory("VmHWM") - start
    program.close()
    return most


def _use_once(size: Size) -> None:
    """A step of a tiny model: operations, autograd, the optimizer."""
    tiny = dataclasses.replace(size, d=size.heads, ffn=1, layers=1, rows=1, length=2)
    model = decoder(tiny)
    optimizer = model.configure_optimizers()
    model.training_step(batch(tiny), 0).backward()
    optimizer.step()


def rows(sizes: list[Size], counts: list[int], pp: int, small: Size) -> Iterator[Row | Figure]:
    for size in sizes:
        above: dict[int, float] = {}
        for microbatches in counts:
            what = f"pp={pp}, m={microbatches}, {size} a microbatch"
            rounds = [run_ranks(pp, measure, size, microbatches, timeout=600) for _ in range(size.rounds)]
            yield from compare("pipeline", what, rounds, {TORCH: 1.0, HAND: 1.03, ZB_H1: None})
            above[microbatches] = python(rounds, OURS) - python(rounds, HAND)
            yield from _figures(what, rounds, above[microbatches], microbatches, pp)
            yield from _memories(what, size, microbatches, pp)
        title = f"pp={pp}, {size} a microbatch: Python that one more microbatch adds, above the stage by hand"
        yield Figure("pipeline", title, _slope(above) / 1e3, "ms", 1.0)
    yield from _processor(small, counts, pp)


def _processor(size: Size, counts: list[int], pp: int) -> Iterator[Figure]:
    """The same without a profiler: by the processor time of the busier stage's thread."""
    above: dict[int, float] = {}
    for microbatches in counts:
        rounds = [run_ranks(pp, measure_processor, size, microbatches, timeout=600) for _ in range(size.rounds)]
        above[microbatches] = 1e3 * max(_above(rounds, rank) for rank in range(pp))
        what = f"pp={pp}, m={microbatches}, {size} a microbatch: processor time per microbatch above the stage by hand"
        yield Figure("pipeline", what, above[microbatches] / microbatches, "ms", 1.0)
    what = f"pp={pp}, {size} a microbatch: processor time that one more microbatch adds, above the stage by hand"
    yield Figure("pipeline", what, _slope(above), "ms", 1.0)


def _above(rounds: Sequence[Sequence[Mapping[str, Taken]]], rank: int) -> float:
    """The median of what the steps of ours take on one rank above their neighbours of the same stage by hand, whose
    stages lie the other way round: our last stage is on rank 0."""
    pairs = (zip(by[rank][OURS].processor, by[-1 - rank][HAND].processor, strict=True) for by in rounds)
    return interval([ours - hand for each in pairs for ours, hand in each]).median


def _slope(above: Mapping[int, float]) -> float:
    """From the least number of microbatches to the most."""
    (few, least), *_, (many, most) = sorted(above.items())
    return (most - least) / (many - few)


def _figures(what: str, rounds: list[Any], above: float, microbatches: int, pp: int) -> Iterator[Figure]:
    found, formula = idle(rounds), (pp - 1) / (microbatches + pp - 1)
    title = f"{what}: idle share of a step, above 1F1B's {100 * formula:.1f} %"
    yield Figure("pipeline", title, 100 * (found - formula), "points", 2.0)
    split = simulate(split_end(one_f_one_b(pp, microbatches))).bubble
    title = f"{what}: the same, above the {100 * split:.1f} % of a split end, if T_F = T_B = T_W"
    yield Figure("pipeline", title, 100 * (found - split), "points", None)
    each = above / microbatches / 1e3
    yield Figure("pipeline", f"{what}: Python per microbatch above the stage by hand", each, "ms", 1.0)


def idle(rounds: list[Any]) -> float:
    """The median share of a step in which the busiest stage runs neither a forward nor a backward.

    These are timed in the very steps whose share it is, side by side with the other stage: alone, they would have other
    caches and memory to themselves, and take another time. The optimizer is no part of the schedule: its time counts
    neither as work nor as a part of the step. All else does, so what Lightning's loop, messages and the pipeline's own
    Python add outside of forwards and backwards is idle time.
    """
    shares = []
    for by_rank in rounds:
        for i, step in enumerate(seconds([by_rank], TIMED)):
            parts = [taken[TIMED].parts[i] for taken in by_rank]
            shares.append(min(1 - p["computing"] / (step - p["optimizer"]) for p in parts))
    return interval(shares).median


def _memories(what: str, size: Size, microbatches: int, pp: int) -> Iterator[Figure]:
    found: dict[str, int] = {}
    with mock.patch.dict(
        os.environ, MALLOC_MMAP_THRESHOLD_="65536", MALLOC_TRIM_THRESHOLD_="0"
    ):  # no freed memory held
        for name in (OURS, TORCH, HAND):
            pool = RankPool(pp)
            found[name] = max(pool.run(peak, size, microbatches, name, timeout=300))
            pool.close()
    title = f"{what}: peak memory of a step above set-up, fuller stage"
    for name in (TORCH, HAND):
        goal = 1.0 if name == TORCH else None
        yield Figure(
            "pipeline", f"{title}, ours / {name} ({found[name] >> 20} MiB)", found[OURS] / found[name], "", goal
        )


def _memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
