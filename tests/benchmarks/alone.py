"""A rank of tp=2 without the other one: what the layers of ours and of the loop by hand cost in one process, forward,
backward and sums of gradients, where collectives are copies at once. Nobody waits, so that there is a tenth of the
noise of two ranks; no loop, data or optimizer is in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatp import MeshShape, ParallelismPlugin, ParallelMesh
from tests.benchmarks.hand import HandDecoder
from tests.benchmarks.models import Size, batch, decoder
from tests.benchmarks.ratios import OURS, Row, compare
from tests.benchmarks.standin import Wire, standin_world
from tests.benchmarks.turns import Taken, alternate, loop
from tests.ranks import run_ranks

PART, BY_HAND = "alone", "by hand"
PLAN = {f"model.blocks.*.attention.{name}": "column" for name in ("q", "k", "v")}
PLAN |= {"model.blocks.*.attention.o": "row", "model.blocks.*.mlp.fc1": "column", "model.blocks.*.mlp.fc2": "row"}
PLAN |= {"model.embed": "vocab", "model.head": {"style": "column_gather", "lazy": True}}  # type: ignore[dict-item]


def ours(size: Size, sequence: bool) -> Callable[[], Tensor]:
    """A step as MegaTPStrategy does it. The default process group is the tensor group."""
    module, given = decoder(size), batch(size)
    mesh = ParallelMesh(MeshShape(tp=dist.get_world_size()), "cpu", host_backend=dist.get_backend())
    plugin = ParallelismPlugin({**PLAN, **({"model.blocks.*": "sequence"} if sequence else {})})
    parallel = plugin.parallelize(module, mesh, torch.device("cpu"), sequence_parallel=sequence)
    parameters = list(module.parameters())

    def step() -> Tensor:
        with parallel.step(watch=False):
            loss = module.training_step(given, 0)
        parallel.partial.trace([loss])
        with parallel.user_code():
            loss.backward()
        plugin.finalize_gradients(parallel)
        parallel.partial.forget()
        for parameter in parameters:
            parameter.grad = None
        return loss.detach()

    return step


def by_hand(size: Size, sequence: bool) -> Callable[[], Tensor]:
    """The same of `tests/benchmarks/hand.py`."""
    module, given = HandDecoder(decoder(size).model, sequence), batch(size)

    def step() -> Tensor:
        loss = module(*given)
        loss.backward()
        module.sum_gradients()
        for parameter in module.parameters():
            parameter.grad = None
        return loss.detach()

    return step


def measure(rank: int, world_size: int, size: Size, sequence: bool, tp: int) -> dict[str, Taken]:
    """One round. Losses aren't compared: what imagined ranks send is this one's, and means nothing."""
    dist.destroy_process_group()  # the pool's
    with standin_world(tp, Wire(torch.device("cpu"), at_once=True)):
        taken = alternate({OURS: loop(ours(size, sequence)), BY_HAND: loop(by_hand(size, sequence))}, 2 * size.steps)
    for each in taken.values():
        each.loss = float("nan")
    return taken


def rows(sizes: list[Size], sequence: list[bool], tp: int) -> Iterator[Row]:
    for size in sizes:
        for split in sequence:
            rounds = [run_ranks(1, measure, size, split, tp, timeout=600) for _ in range(size.rounds)]
            what = f"a rank of tp={tp}{', sequence regions' if split else ''}, {size}"
            yield from compare(PART, what, rounds, {BY_HAND: None})
