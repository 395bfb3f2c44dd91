"""dp=2: ours beside DDPStrategy; zero=3 beside ModelParallelStrategy with FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from tests.benchmarks.models import Decoder, Size, decoder, loader, trainer
from tests.benchmarks.ratios import OURS, Row, compare
from tests.benchmarks.turns import Program, Taken, alternate, fit
from tests.ranks import run_ranks


class Sharded(Decoder):
    """The same module as a user of ModelParallelStrategy has to write it (Lightning's and torch's tutorials)."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def measure(rank: int, world_size: int, size: Size, zero: int) -> dict[str, Taken]:
    """One round on one rank."""

    def ours(callback: Any) -> Any:
        from lightning_megatp import MegaTPStrategy

        return trainer(MegaTPStrategy(zero=zero, summary=False), world_size, callback), decoder(size), loader(size)

    def ddp(callback: Any) -> Any:
        return trainer("ddp", world_size, callback), decoder(size), loader(size)

    def fsdp2(callback: Any) -> Any:
        from lightning.pytorch.strategies import ModelParallelStrategy

        torch.manual_seed(0)
        strategy = ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1)
        return trainer(strategy, world_size, callback), Sharded(size), loader(size)

    programs: dict[str, Callable[[Program], None]] = {OURS: fit(ours)}
    programs |= {"FSDP2": fit(fsdp2)} if zero else {"DDP": fit(ddp)}
    return alternate(programs, size.steps)


def rows(sizes: list[Size], dp: int) -> Iterator[Row]:
    for size in sizes:
        for zero, peer in ((0, "DDP"), (3, "FSDP2")):
            rounds = [run_ranks(dp, measure, size, zero, timeout=600) for _ in range(size.rounds)]
            yield from compare("data", f"dp={dp}, zero={zero}, {size}", rounds, {peer: 1.0})
