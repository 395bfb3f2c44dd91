"""One device: ours with nothing to divide, beside strategy="auto"."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.benchmarks.models import Size, decoder, loader, trainer
from tests.benchmarks.ratios import OURS, Row, compare
from tests.benchmarks.turns import Taken, alternate, fit
from tests.ranks import run_ranks

AUTO = "auto"


def measure(rank: int, world_size: int, size: Size) -> dict[str, Taken]:
    """One round."""

    def ours(callback: Any) -> Any:
        from lightning_megatp import MegaTPStrategy

        return trainer(MegaTPStrategy(summary=False), 1, callback), decoder(size), loader(size)

    def auto(callback: Any) -> Any:
        return trainer("auto", 1, callback), decoder(size), loader(size)

    return alternate({OURS: fit(ours), AUTO: fit(auto)}, size.steps)


def rows(sizes: list[Size]) -> Iterator[Row]:
    for size in sizes:
        rounds = [run_ranks(1, measure, size, timeout=600) for _ in range(size.rounds)]
        yield from compare("single", f"one device, {size}", rounds, {AUTO: 1.01})
