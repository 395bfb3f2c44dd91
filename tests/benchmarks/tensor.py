"""tp=2: ours, Lightning's ModelParallelStrategy with a DTensor plan, and Megatron written by hand, without
Lightning and in its loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.benchmarks.hand import HandDecoder, HandModule
from tests.benchmarks.models import Decoder, Size, batch, decoder, loader, trainer
from tests.benchmarks.ratios import OURS, Row, compare
from tests.benchmarks.turns import Taken, alternate, fit, loop
from tests.ranks import run_ranks

GOALS = {"small": 0.15, "medium": 0.7, "large": None}
"""Of ours / DTensor's."""
LOOP = {"by hand in Lightning": None}
"""No goal: the difference of this row and the one above is what Lightning's loop costs."""


class WithPlan(Decoder):
    """The same module as a user of ModelParallelStrategy has to write it (Lightning's and torch's tutorials)."""

    def __init__(self, size: Size, sequence: bool) -> None:
        super().__init__(size)
        self.sequence = sequence

    def configure_model(self) -> None:
        mesh = self.device_mesh["tensor_parallel"]
        tokens: dict[str, Any] = {"output_layouts": Shard(1)} if self.sequence else {}
        block: dict[str, Any] = {f"attention.{name}": ColwiseParallel() for name in ("q", "k", "v")}
        block |= {"mlp.fc1": ColwiseParallel()}
        block |= {name: RowwiseParallel(**tokens) for name in ("attention.o", "mlp.fc2")}
        outer: dict[str, Any] = {
            "embed": RowwiseParallel(input_layouts=Replicate(), **tokens),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        if self.sequence:
            gathers = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
            block |= {"norm1": SequenceParallel(), "norm2": SequenceParallel(), "attention": gathers, "mlp": gathers}
            outer |= {"norm": SequenceParallel()}
            outer |= {"head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
        for layer in self.model.blocks:
            parallelize_module(layer, mesh, block)
        parallelize_module(self.model, mesh, outer)


def programs(size: Size, world_size: int, sequence: bool) -> dict[str, Any]:
    """The body of each program."""

    def ours(callback: Any) -> Any:
        from lightning_megatp import MegaTPStrategy

        strategy = MegaTPStrategy(tp=world_size, sequence_parallel=sequence, summary=False)
        return trainer(strategy, world_size, callback), decoder(size), loader(size)

    def dtensor(callback: Any) -> Any:
        import torch
        from lightning.pytorch.strategies import ModelParallelStrategy

        torch.manual_seed(0)
        strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=world_size)
        return trainer(strategy, world_size, callback), WithPlan(size, sequence), loader(size)

    def by_hand() -> Callable[[], Tensor]:
        model, (ids, target) = HandDecoder(decoder(size).model, sequence), batch(size)
        return lambda: model.step(ids, target)

    def in_lightning(callback: Any) -> Any:
        module = HandModule(HandDecoder(decoder(size).model, sequence))
        return trainer("auto", 1, callback), module, loader(size)

    bodies = {OURS: fit(ours), "DTensor": fit(dtensor)}
    return {**bodies, "by hand": loop(by_hand()), "by hand in Lightning": fit(in_lightning)}


def measure(rank: int, world_size: int, size: Size, sequence: bool) -> dict[str, Taken]:
    """One round on one rank."""
    return alternate(programs(size, world_size, sequence), size.steps)


def rows(sizes: list[Size], sequence: list[bool], tp: int) -> Iterator[Row]:
    for size in sizes:
        for split in sequence:
            rounds = [run_ranks(tp, measure, size, split, timeout=600) for _ in range(size.rounds)]
            what = f"tp={tp}{', sequence regions' if split else ''}, {size}"
            yield from compare("tensor", what, rounds, {"DTensor": GOALS[size.name], "by hand": 1.03, **LOOP})
