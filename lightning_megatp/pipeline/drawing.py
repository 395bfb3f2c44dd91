"""Timelines as pictures: one row per rank, one bar per forward and backward, the bubble blank.

The same picture of what was measured (`Trace`) and of what a schedule promises (`Timeline`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_megatp.pipeline.check import Timeline
from lightning_megatp.pipeline.recorder import Span
from lightning_megatp.pipeline.schedule import Kind
from lightning_megatp.pipeline.trace import Trace

COLORS = {
    "forward": "#4c78a8",
    "backward": "#54a24b",
    "backward input": "#88d27a",
    "wgrad": "#f58518",
    "wait": "#e4e4e4",
    "send": "#333333",
    "gradients": "#b279a2",
    "optimizer": "#9d755d",
}
"""In the order of the legend."""
_COMPUTATIONS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward input",
    Kind.BACKWARD_WEIGHT: "wgrad",
}


def draw_trace(trace: Trace, path: Path) -> None:
    """Draw a measured step as a PNG (or whatever the path's suffix says).

    Raises:
        ImportError: without matplotlib.
    """
    rows = [(row.name, row.spans) for row in trace.rows]
    expected = trace.expected_bubble(trace.times)
    title = f"{_title(trace.schedule, trace.microbatches, trace.ranks)}: bubble {trace.bubble:.0%}"
    _draw(rows, path, f"{title} measured, {expected:.0%} expected from the mean times", "ms", 1e3)


def draw_timeline(timeline: Timeline, path: Path) -> None:
    """Draw a simulated schedule likewise; its messages take no room.

    Raises:
        ImportError: without matplotlib.
    """
    schedule = timeline.schedule
    rows = []
    for rank, (actions, starts, ends) in enumerate(zip(schedule.actions, timeline.start, timeline.end, strict=True)):
        spans = [
            Span(_COMPUTATIONS[action.kind], action.stage, action.microbatch, start, end)
            for action, start, end in zip(actions, starts, ends, strict=True)
            if action.kind in _COMPUTATIONS
        ]
        rows.append((f"rank {rank}", spans))
    title = f"{_title(schedule.name, schedule.microbatches, schedule.ranks)}: bubble {timeline.bubble:.0%}"
    _draw(rows, path, title, "time", 1)


def _title(schedule: str, microbatches: int, ranks: int) -> str:
    return f"{schedule}, {microbatches} microbatches over {ranks} ranks"


def _draw(rows: Sequence[tuple[str, Sequence[Span]]], path: Path, title: str, unit: str, scale: float) -> None:
    """Args:
    rows: the name of a rank, and what it did.
    scale: from the spans' time to the axis'.
    """
    try:
        from matplotlib.figure import Figure  # without pyplot: no window, no state
    except ImportError as error:
        raise ImportError("Drawing a timeline needs matplotlib: pip install 'lightning_megatp[plots]'.") from error

    figure = Figure(figsize=(16, 1.5 + 0.45 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    origin = min(span.start for _, spans in rows for span in spans)
    length = scale * (max(span.end for _, spans in rows for span in spans) - origin)
    for row, (_, spans) in enumerate(rows):
        for span in spans:
            start, duration = scale * (span.start - origin), scale * (span.end - span.start)
            _bar(axes, row, span, start, duration, labelled=duration > 0.012 * length)
    axes.set(
        yticks=range(len(rows)), yticklabels=[name for name, _ in rows], xlim=(0, length), xlabel=unit, title=title
    )
    axes.invert_yaxis()
    axes.spines[["top", "right", "left"]].set_visible(False)
    shown = {span.what for _, spans in rows for span in spans}
    handles = [axes.barh(0, 0, color=color, label=what) for what, color in COLORS.items() if what in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _bar(axes: Any, row: int, span: Span, start: float, duration: float, labelled: bool) -> None:
    """A computation is labelled stage.microbatch; a send is a tick below the bars."""
    computing = span.what in _COMPUTATIONS.values()
    height, middle = (0.12, row + 0.46) if span.what == "send" else (0.8, row)
    axes.barh(
        middle, duration, height, start, color=COLORS[span.what], edgecolor="white" if computing else "none",
        linewidth=0.6,
    )  # fmt: skip
    if labelled and span.microbatch >= 0 and computing:
        axes.text(start + duration / 2, row, f"{span.stage}.{span.microbatch}", ha="center", va="center", fontsize=7)
