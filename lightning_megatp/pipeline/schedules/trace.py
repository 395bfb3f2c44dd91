"""A measured step of all ranks: recorded, written as a Chrome trace (chrome://tracing, ui.perfetto.dev), read again."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console

from lightning_megatp.mesh import AXES, ParallelMesh
from lightning_megatp.pipeline.schedules.check import Times, simulate
from lightning_megatp.pipeline.schedules.generators import make_schedule, split_end
from lightning_megatp.pipeline.schedules.recorder import COMPUTING, Recorder, Span, start_together
from lightning_megatp.pipeline.schedules.schedule import Schedule

if TYPE_CHECKING:
    from lightning_megatp.pipeline.pipeline import Pipeline


@dataclass(frozen=True)
class Row:
    """What one rank did."""

    name: str
    """`rank 3 (stages 1, 3; tp 1)`."""
    rank: int
    """Global."""
    pipeline: int
    """Which of the pipelines, of tp * dp, the rank belongs to."""
    pipeline_rank: int
    spans: tuple[Span, ...]

    @property
    def computing(self) -> list[Span]:
        """Forwards and backwards."""
        return [span for span in self.spans if span.what in COMPUTING]


@dataclass(frozen=True)
class Trace:
    """One step of every rank, and the schedule it was run by."""

    schedule: str
    ranks: int
    virtual_stages: int
    microbatches: int
    rows: tuple[Row, ...]
    """One pipeline after the other, each in the order of its ranks."""
    splits_end: bool = False
    """See `split_end`."""

    @property
    def bubble(self) -> float:
        """The share of all ranks' time, from a pipeline's first forward to its last backward, without computation."""
        busy = total = 0.0
        for pipeline in {row.pipeline for row in self.rows}:
            computing = [row.computing for row in self.rows if row.pipeline == pipeline]
            busy += sum(map(_duration, computing))
            start, end = (limit(of(span) for spans in computing for span in spans) for limit, of in _LIMITS)
            total += (end - start) * len(computing)
        return 1 - busy / total

    @property
    def times(self) -> Times:
        """The mean time of each kind of computation, in seconds."""
        mean = {what: self._mean(what) for what in COMPUTING}
        halves = mean["backward input"], mean["wgrad"]
        whole = mean["backward"] or sum(halves)
        own = halves[0] / sum(halves) if any(halves) else 0.5  # without halves it makes no difference to the bubble
        return Times(mean["forward"], own * whole, (1 - own) * whole)

    def expected_bubble(self, times: Times | None = None) -> float:
        """The schedule's own: by its order alone, on ranks that never wait for anything else."""
        stages = self.virtual_stages if self.schedule == "interleaved" else None
        schedule = make_schedule(self.schedule, self.ranks, self.microbatches, stages)
        return simulate(split_end(schedule) if self.splits_end else schedule, times).bubble

    def describe(self) -> str:
        """The measured bubble beside the schedule's own."""
        return (
            f"bubble {self.bubble:.0%} measured; {self.schedule} of {self.microbatches} microbatches over {self.ranks}"
            f" ranks has {self.expected_bubble():.0%} if forward, backward for the input and backward for the weights"
            f" take equally long, {self.expected_bubble(self.times):.0%} if every stage takes the mean time measured"
        )

    def write(self, path: Path) -> None:
        """Write the file. Its events are what a viewer shows; `otherData` has the rest of what `read` needs."""
        data = {"bubble": self.bubble, "schedule bubble": self.expected_bubble(), **_without(asdict(self), "rows")}
        data["rows"] = [_without(asdict(row), "spans") for row in self.rows]
        events = [event for row in self.rows for event in _events(row)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": data}))

    @classmethod
    def read(cls, path: Path) -> Trace:
        """Read a file that `write` wrote.

        Raises:
            ValueError: another Chrome trace.
        """
        try:
            content = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is not a trace that MegaTPStrategy(trace=...) wrote: {error}.") from None
        data = content.get("otherData", {}) if isinstance(content, dict) else {}
        if "virtual_stages" not in data:
            raise ValueError(f"{path} is not a trace that MegaTPStrategy(trace=...) wrote.")
        spans: dict[int, list[Span]] = {}
        for event in content["traceEvents"]:
            if event["ph"] == "X":
                start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
                spans.setdefault(event["pid"], []).append(Span(event["cat"], **event["args"], start=start, end=end))
        rows = tuple(Row(**row, spans=tuple(spans.get(row["rank"], ()))) for row in data["rows"])
        return cls(
            data["schedule"],
            data["ranks"],
            data["virtual_stages"],
            data["microbatches"],
            rows,
            data.get("splits_end", False),
        )

    def _mean(self, what: str) -> float:
        found = [span.end - span.start for row in self.rows for span in row.spans if span.what == what]
        return fmean(found) if found else 0.0


class StepTrace:
    """Records the second optimizer step of a run on every rank: the last batch of it (with accumulation there are
    several), forward to update. The first step also plans, allocates and connects, and would show that.

    Args:
        path: of the file, which global rank 0 writes.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._steps = 0

    @contextlib.contextmanager
    def step(self, pipeline: Pipeline, mesh: ParallelMesh) -> Iterator[None]:
        """Around an optimizer step.

        Communication: at the recorded one `start_together`, and an object gather over the world.
        """
        self._steps += 1
        if self._steps != 2:
            yield
            return
        executor = pipeline.executor
        executor.recorder = recorder = Recorder(start_together(mesh.device))
        try:
            yield
        finally:
            executor.recorder = None
        recorder.optimizer()
        spans = recorder.spans()
        schedule = pipeline.settings.schedule(1 + max(span.microbatch for span in spans))
        rows = mesh.exchange(_row(schedule, executor.transport.rank, mesh, spans), *AXES)
        if mesh.global_rank == 0:
            trace = trace_of(schedule, rows)
            trace.write(self.path)
            Console().print(f"Wrote the trace of optimizer step {self._steps} to {self.path}: {trace.describe()}.")


def _row(schedule: Schedule, pipeline_rank: int, mesh: ParallelMesh, spans: tuple[Span, ...]) -> Row:
    stages = schedule.stages_of(pipeline_rank)
    places = ["stage " + str(stages[0]) if len(stages) == 1 else "stages " + ", ".join(map(str, stages))]
    places += [f"{axis} {mesh.rank(axis)}" for axis in ("tp", "dp") if mesh.size(axis) > 1]
    pipeline = mesh.rank("dp") * mesh.size("tp") + mesh.rank("tp")
    return Row(f"rank {mesh.global_rank} ({'; '.join(places)})", mesh.global_rank, pipeline, pipeline_rank, spans)


def trace_of(schedule: Schedule, rows: Iterable[Row]) -> Trace:
    """Put the ranks' rows together."""
    ordered = tuple(sorted(rows, key=lambda row: (row.pipeline, row.pipeline_rank)))
    stages = schedule.stages // schedule.ranks
    return Trace(schedule.name, schedule.ranks, stages, schedule.microbatches, ordered, schedule.splits_end)


_LIMITS = ((min, lambda span: span.start), (max, lambda span: span.end))


def _duration(spans: Sequence[Span]) -> float:
    return sum(span.end - span.start for span in spans)


def _events(row: Row) -> Iterator[dict[str, Any]]:
    def event(name: str, phase: str, thread: int = 0, **fields: Any) -> dict[str, Any]:
        return {"name": name, "ph": phase, "pid": row.rank, "tid": thread, **fields}

    yield event("process_name", "M", args={"name": row.name})
    yield event("process_sort_index", "M", args={"sort_index": row.pipeline_rank})
    for thread, title in enumerate(("stages", "sends")):
        yield event("thread_name", "M", thread, args={"name": title})
    for span in row.spans:
        times = {"ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6}
        at = {"stage": span.stage, "microbatch": span.microbatch}
        yield event(str(span), "X", int(span.what == "send"), cat=span.what, **times, args=at)


def _without(values: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name != key}
