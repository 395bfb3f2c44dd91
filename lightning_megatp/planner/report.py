"""MemoryReport: bytes per rank, predicted beside measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from lightning_megatp.planner.sizes import Bytes
from lightning_megatp.tables import Titled

_PARTS = ("parameters", "gathered", "gradients", "optimizer", "activations", "total")


@dataclass(frozen=True)
class RankMemory:
    """One rank's bytes."""

    rank: int
    """Global."""
    stage: int
    """The stage of the pipeline; the first one, where a rank has several."""
    measured: Bytes
    predicted: Bytes | None
    allocator_peak: int | None = None
    """The most that the device's allocator had given out, since the process started; None on a CPU."""


@dataclass(frozen=True)
class MemoryReport:
    """What all ranks hold. Parameters, gradients and optimizer state are those between two batches, activations the
    peak of the last batch."""

    ranks: tuple[RankMemory, ...]
    problem: str = ""
    """Why something could not be predicted."""

    def table(self) -> Table:
        """The largest rank of each pipeline stage: a row of what was predicted, and one of what was measured."""
        table = Titled(title="Memory per rank (largest of each stage)")
        for column in ("stage", "", *_PARTS):
            table.add_column(column, justify="right" if column in _PARTS else "left")
        cuda = any(own.allocator_peak for own in self.ranks)
        if cuda:
            table.add_column("allocator's peak", justify="right")
        for stage in sorted({own.stage for own in self.ranks}):
            own = max((r for r in self.ranks if r.stage == stage), key=lambda r: r.measured.total)
            predicted = ["?" if own.predicted is None else size(getattr(own.predicted, part)) for part in _PARTS]
            measured = [size(getattr(own.measured, part)) for part in _PARTS]
            table.add_row(str(stage), "predicted", *predicted)
            table.add_row("", "measured", *measured, *([size(own.allocator_peak)] if cuda else []), end_section=True)
        captions = ["gradients: at the optimizer's step; gathered: predicted for the step, measured between steps"]
        table.caption = "; ".join(filter(None, [*captions, self.problem]))
        return table

    def print(self) -> None:
        """Print the table to the terminal."""
        Console().print(self.table())


def estimate_table(stages: Sequence[Bytes], title: str, notes: Iterable[str]) -> Table:
    """The prediction alone, a row per pipeline rank."""
    table = Titled(title=title)
    for column in ("pipeline rank", *_PARTS):
        table.add_column(column, justify="left" if column == "pipeline rank" else "right")
    for rank, own in enumerate(stages):
        table.add_row(str(rank), *(size(getattr(own, part)) for part in _PARTS))
    table.caption = "; ".join(notes) or None
    return table


def size(nbytes: int | None) -> str:
    """Bytes for people."""
    if nbytes is None:
        return "?"
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= factor:
            return f"{nbytes / factor:,.2f} {unit}"
    return f"{nbytes} B"
