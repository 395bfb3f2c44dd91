"""One GPU: the shard of a transformer layer as at tp=8, beside plain nn.Linear of the same shapes; training on it.

    python -c "import torch, lightning, rich, torchmetrics"  # what this package needs, here without being installed
    python -W ignore -m tests.benchmarks --only gpu --quick  # whether it runs at all
    python -W ignore -m tests.benchmarks --only gpu

Seven of the eight ranks are imagined (`standin.py`). *Silent* is a step whose collectives take no time at all: its
ratio to plain layers is what the parallel layers themselves cost, and by how much a step with collectives is longer,
how much of these is exposed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tests import devices
from tests.benchmarks.layer import LayerSize, Ours, Plain
from tests.benchmarks.models import Size, decoder, loader
from tests.benchmarks.ratios import OURS, Figure, Row, interval
from tests.benchmarks.standin import Wire, standin_world
from tests.ranks import RankError, free_port, pools, run_ranks

PART = "gpu"
SILENT, PLAIN, COMPILED = "ours, silent", "plain nn.Linear", ", compiled"
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
"""Kernels of all streams start in the order of their launches: a collective that was launched before a product gets its
multiprocessors first. Megatron-LM insists on it for sequence parallelism and asynchronous all-reduces."""
LAYER_GOAL, EXPOSED_GOAL, LOSS_GOAL = 1.01, 10.0, 1e-4


@dataclasses.dataclass(frozen=True)
class Bench:
    """What is measured, and where.

    Args:
        layer: the layer, and how many ranks share it.
        batch: the same with several sequences, of which each rank has some tokens of each.
        model: trained once with NCCL, and once by two processes on one device.
        square: side of the matrices whose product is the ceiling.
        gigabytes_per_second: of a rank's links, in one direction.
        rounds, steps: as in `sizes.toml`.
        device, dtype: of the layers.
        compiler: of `torch.compile`; None leaves those rows out.
    """

    layer: LayerSize
    batch: LayerSize
    model: Size
    square: int
    gigabytes_per_second: float
    rounds: int
    steps: int
    device: str = "cuda"
    dtype: str = "bfloat16"
    compiler: str | None = "inductor"


def rows(bench: Bench) -> Iterator[Row | Figure]:
    """All of it, one process after another; nothing without the device. What fails is said, and does not end the rest;
    what is likeliest to (the compiler) comes last."""
    if bench.device == "cuda" and not torch.cuda.is_available():
        print("gpu: needs a CUDA device, and there is none here: no rows", flush=True)
        return
    eager = dataclasses.replace(bench, compiler=None)
    setting = "".join(f", {name}={value}" for name, value in ONE_QUEUE.items())
    with started_with(bench.device):
        yield from _tried(ceiling, bench)
        yield from _tried(layers, eager, True, "")
        yield from _tried(layers, dataclasses.replace(eager, layer=bench.batch), True, "")
    with started_with(bench.device, **ONE_QUEUE):
        for sequence in (True, False):
            yield from _tried(layers, eager, sequence, setting)
    backends = {"nccl": (1, 2), "gloo": (2,)} if bench.device == "cuda" else {"gloo": (1, 2)}
    for backend, ranks in backends.items():
        with started_with(bench.device, **{devices.BACKEND: backend}):
            yield from same_losses(bench, ranks)
    with started_with(bench.device):
        yield from _tried(layers, bench, False, "")


def _tried(measure: Callable[..., list[Row | Figure]], *args: Any) -> list[Row | Figure]:
    """What one process measures; what it fails of is printed."""
    try:
        return run_ranks(1, measure, *args, timeout=600)[0]
    except RankError as error:
        print(f"gpu: no rows of {measure.__name__}{args[1:]}: {error}", flush=True)
        return []


@contextlib.contextmanager
def started_with(device: str, **environment: str) -> Iterator[None]:
    """New processes that see the first GPU, with these variables, which are read once. Other parts' see no GPU."""
    if device != "cuda":
        yield
        return
    pools.close()
    with mock.patch.dict(os.environ, {devices.VARIABLE: device, devices.GPUS: "1", **environment}):
        yield
    pools.close()


# ---------------------------------------------------------------- layers


def ceiling(rank: int, world_size: int, bench: Bench) -> list[Figure]:
    """What a large matrix product reaches, in TFLOP/s."""
    what = f"product of {bench.square} x {bench.square} {bench.dtype}"
    return [Figure(PART, what, _ceiling(bench) / 1e12, "TFLOP/s")]


def layers(rank: int, world_size: int, bench: Bench, sequence: bool, setting: str) -> list[Row | Figure]:
    """Ours and plain layers.

    Args:
        sequence: whether norms and sums see 1 / tp of the tokens, or all. Layers are compiled where tokens are whole
            only: compiled code meets no shards of a sequence.
        setting: what is special about this process, for the rows.
    """
    dist.destroy_process_group()  # the pool's
    device = torch.device(bench.device)
    wire = Wire(device, bench.gigabytes_per_second * 1e9)
    with standin_world(bench.layer.tp, wire):
        compiler = None if sequence else bench.compiler
        rounds = []
        for _ in range(bench.rounds):
            programs = _programs(bench, sequence, compiler, wire)
            rounds.append(turns(programs, bench.steps, device))
        seconds = {name: [x for found in rounds for x in found[name]] for name in rounds[0]}
        what = f"{bench.layer}, {bench.dtype}{', sequence regions' if sequence else ''}{setting}"
        found: list[Row | Figure] = [*_ratios(what, seconds, compiler)]
        top = _ceiling(bench)
        for name, program in programs.items():
            found += _account(f"{what}: {name}", bench, top, seconds[name], program)
        found += _exposure(what, bench, wire, seconds, programs)
        if compiler is not None:
            found.append(_graph_breaks(what, bench))
    return found


@dataclasses.dataclass(frozen=True)
class Program:
    """What takes turns with others.

    Args:
        step: what is timed.
        before: runs before each step, untimed.
        model: what it trains.
        forward: the first part of a step.
    """

    step: Callable[[], Tensor]
    before: Callable[[], object]
    model: nn.Module
    forward: Callable[[], Tensor] | None = None


def _programs(bench: Bench, sequence: bool, compiler: str | None, wire: Wire) -> dict[str, Program]:
    """Each runs once before it is timed. Silent ones then find the results of collectives where these had left them:
    the allocator hands out the same memory in the same order, and the products are of numbers of the usual size, which
    matters to a GPU at its power limit."""
    torch.compiler.reset()  # each round compiles anew
    gc.collect()
    found = {}
    for kind, suffix in [(None, ""), (compiler, COMPILED)][: 1 if compiler is None else 2]:
        arguments = bench.layer, sequence, torch.device(bench.device), getattr(torch, bench.dtype), kind
        ours, plain = Ours(*arguments), Plain(*arguments)
        if kind is None:
            found[OURS] = Program(ours.step, ours.step, ours.model, ours.forward)
        found[SILENT + suffix] = Program(functools.partial(_silently, wire, ours.step), ours.step, ours.model)
        found[PLAIN + suffix] = Program(plain.step, plain.step, plain.model)
    return found


def _silently(wire: Wire, step: Callable[[], Tensor]) -> Tensor:
    with wire.silent():
        return step()


def turns(
    programs: Mapping[str, Program], steps: int, device: torch.device, warm_up: int = 3
) -> dict[str, list[float]]:
    """Seconds of the steps of programs that alternate, in an order that goes round; each from an idle device to the
    next one."""
    names, seconds = list(programs), {name: list[float]() for name in programs}
    for turn in range(warm_up + steps):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            programs[name].before()
            taken = _seconds(programs[name].step, device)
            if turn >= warm_up:
                seconds[name].append(taken)
    return seconds


def _seconds(step: Callable[[], object], device: torch.device) -> float:
    _finish(device)
    start = time.perf_counter()
    step()
    _finish(device)
    return time.perf_counter() - start


def _ratios(what: str, seconds: Mapping[str, list[float]], compiler: str | None) -> Iterator[Row]:
    yield _row(f"{what}, silent", seconds, SILENT, PLAIN, LAYER_GOAL)
    yield _row(f"{what}, with collectives", seconds, OURS, PLAIN, None)
    if compiler is not None:
        yield _row(f"{what}, silent, compiled", seconds, SILENT + COMPILED, PLAIN + COMPILED, None)


def _row(what: str, seconds: Mapping[str, list[float]], ours: str, peer: str, goal: float | None) -> Row:
    ratio = interval([a / b for a, b in zip(seconds[ours], seconds[peer], strict=True)])
    medians = [statistics.median(seconds[name]) * 1e3 for name in (ours, peer)]
    return Row(PART, what, peer, ratio, goal, medians[0], medians[1])


def _account(what: str, bench: Bench, top: float, seconds: list[float], program: Program) -> Iterator[Figure]:
    layer, device = bench.layer, torch.device(bench.device)
    each = statistics.median(seconds) / layer.layers
    unit = "kernels" if device.type == "cuda" else "aten calls"
    yield Figure(PART, f"{what}: a layer", each * 1e6, "us")
    yield Figure(
        PART,
        f"{what}: through all {layer.layers}",
        layer.sequences * layer.tokens / statistics.median(seconds),
        "tokens/s",
    )
    yield Figure(PART, f"{what}: of the ceiling", 100 * layer.flops / each / top, "%")
    yield Figure(PART, f"{what}: launched a layer", _launched(program, device) / layer.layers, unit)
    yield Figure(PART, f"{what}: peak of weights and a step", _peak(program, device) / 2**30, "GiB")


def _exposure(
    what: str, bench: Bench, wire: Wire, seconds: Mapping[str, list[float]], programs: Mapping[str, Program]
) -> Iterator[Figure]:
    """How much longer a step is for its collectives, as a share of what these last by their bytes. On the stream they
    last longer where they wait for a free multiprocessor."""
    ours = programs[OURS]
    planned, taken = map(statistics.median, zip(*(wire.timed(ours.step) for _ in range(5)), strict=True))
    longer = _longer(seconds)
    shares = interval([100 * more / planned for more in longer])
    per_layer = 1e6 / bench.layer.layers
    speed = f"{bench.gigabytes_per_second:g} GB/s"
    yield Figure(PART, f"{what}: collectives of a layer at {speed}, by count", planned * per_layer, "us")
    yield Figure(PART, f"{what}: collectives of a layer, as they ran", taken * per_layer, "us")
    within = f"95 %: {shares.low:.1f}..{shares.high:.1f}"
    yield Figure(PART, f"{what}: of their time exposed ({within})", shares.median, "%", EXPOSED_GOAL)

    # A GPU at its power limit runs slower than when the stand-in's time was calibrated: what it plans lasts longer.
    yield Figure(PART, f"{what}: of their time as they ran exposed", shares.median * planned / taken, "%")

    assert ours.forward is not None
    silent = Program(functools.partial(_silently, wire, ours.forward), ours.forward, ours.model)
    again = {OURS: Program(ours.forward, ours.forward, ours.model), SILENT: silent}
    in_forward, _ = wire.timed(ours.forward)
    forward = statistics.median(_longer(turns(again, bench.steps, torch.device(bench.device))))
    backward = statistics.median(longer) - forward
    yield Figure(PART, f"{what}: of the forward's exposed", 100 * forward / in_forward, "%")
    yield Figure(PART, f"{what}: of the backward's exposed", 100 * backward / (planned - in_forward), "%")

    programs[SILENT].before()
    lost = 100 * (1 - programs[SILENT].step().isfinite().float().mean().item())
    yield Figure(PART, f"{what}: of a silent step's values not finite", lost, "%", 0.0)


def _longer(seconds: Mapping[str, list[float]]) -> list[float]:
    """By how much steps with collectives are longer than silent ones."""
    return [a - b for a, b in zip(seconds[OURS], seconds[SILENT], strict=True)]


def _graph_breaks(what: str, bench: Bench) -> Figure:
    ours = Ours(bench.layer, False, torch.device(bench.device), getattr(torch, bench.dtype))
    torch.compiler.reset()
    with ours.parallel.step(watch=False):
        explained = torch._dynamo.explain(ours.model.blocks[0].forward)(ours.x)  # documented, without a public name
    return Figure(PART, f"{what}: graph breaks of a compiled layer of ours", explained.graph_break_count, "breaks")


def _ceiling(bench: Bench) -> float:
    """FLOP/s of a large matrix product: the median of ten."""
    device, n = torch.device(bench.device), bench.square
    a, b = (torch.randn(n, n, device=device, dtype=getattr(torch, bench.dtype)) for _ in range(2))
    return 2 * n**3 / statistics.median([_seconds(lambda: a @ b, device) for _ in range(13)][3:])


def _launched(program: Program, device: torch.device) -> int:
    """Kernels of a step, copies and fills not counted; on the CPU calls of operations."""
    cuda = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as taken:
        program.step()
        _finish(device)
    events = taken.events() or []
    if not cuda:
        return sum(event.name.startswith("aten::") for event in events)
    kernels = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in kernels)


def _peak(program: Program, device: torch.device) -> float:
    """Bytes: the model's own, and what a step takes beside them at most. 0 on the CPU, which does not count them."""
    if device.type != "cuda":
        return 0.0
    _finish(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    program.step()
    _finish(device)
    return torch.cuda.max_memory_allocated() - before + sum(p.nbytes for p in program.model.parameters())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


# ---------------------------------------------------------------- training on the device


def same_losses(bench: Bench, ranks: Sequence[int]) -> Iterator[Figure]:
    """A Trainer on the device, alone or as ranks that share it, with NCCL (as if on machines of their own, through
    sockets) or gloo (through the host's memory, on streams of its own): losses beside those of one CPU process."""
    (_, expected), *_ = run_ranks(1, losses, bench.model, "cpu", False)
    for ways in ranks:
        try:
            (backend, found), *_ = run_ranks(ways, losses, bench.model, bench.device, True, timeout=300)
        except RankError as error:
            print(f"gpu: no losses of tp={ways}: {error}", flush=True)
            continue
        worst = max(abs(a - b) for a, b in zip(found, expected, strict=True))
        what = f"tp={ways} on one {bench.device} device by {backend}, {bench.model}"
        yield Figure(PART, f"{what}: {len(found)} losses beside one CPU process's", worst, "apart", LOSS_GOAL)


def losses(rank: int, world_size: int, size: Size, device: str, ours: bool) -> tuple[str, list[float]]:
    """The backend, and the losses of three steps; every rank sits on the machine's first device."""
    from lightning_megatp import MegaTPStrategy

    if world_size == 1:  # the strategy makes its own group, as the device needs it
        dist.destroy_process_group()
        os.environ["MASTER_PORT"] = str(free_port())
    os.environ |= {"LOCAL_RANK": "0", "NODE_RANK": str(rank)}  # a node of one device for each
    seen = _Losses()
    strategy: Any = MegaTPStrategy(tp=world_size, summary=False) if ours else "auto"
    trainer = Trainer(
        accelerator=device, devices=1, num_nodes=world_size, strategy=strategy, max_epochs=1, limit_train_batches=3,
        logger=False, callbacks=[seen], enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(decoder(size), loader(size))
    return seen.backend, seen.losses


class _Losses(Callback):
    def __init__(self) -> None:
        self.backend, self.losses = "", list[float]()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *args: Any) -> None:
        with contextlib.suppress(ValueError):  # one device without us has no group
            self.backend = dist.get_backend()
        self.losses.append(float(outputs["loss"] if isinstance(outputs, Mapping) else outputs))
