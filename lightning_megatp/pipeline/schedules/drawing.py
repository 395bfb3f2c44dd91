"""Timelines as pictures: one row per rank, one bar per forward and backward, the bubble blank.

The same picture of what was measured (`Trace`) and of what a schedule promises (`Timeline`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_megatp.pipeline.schedules.check import Timeline
from lightning_megatp.pipeline.schedules.recorder import Span
from lightning_megatp.pipeline.schedules.schedule import Kind
from lightning_megatp.pipeline.schedules.trace import Trace

Row = tuple[str, Sequence[Span]]
"""The name of a rank, and what it did."""

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
    _draw([(f"{title} measured, {expected:.0%} expected from the mean times", rows)], path, "ms", 1e3)


def draw_timelines(timelines: Sequence[Timeline], path: Path) -> None:
    """Draw simulated schedules likewise, one below the other over the same time; their messages take no room.

    Raises:
        ImportError: without matplotlib.
    """
    _draw([(_simulated_title(timeline), _rows(timeline)) for timeline in timelines], path, "time", 1)


def _rows(timeline: Timeline) -> list[Row]:
    rows: list[Row] = []
    schedule = timeline.schedule
    for rank, (actions, starts, ends) in enumerate(zip(schedule.actions, timeline.start, timeline.end, strict=True)):
        spans = [
            Span(_COMPUTATIONS[action.kind], action.stage, action.microbatch, start, end)
            for action, start, end in zip(actions, starts, ends, strict=True)
            if action.kind in _COMPUTATIONS
        ]
        rows.append((f"rank {rank}", spans))
    return rows


def _simulated_title(timeline: Timeline) -> str:
    schedule = timeline.schedule
    return f"{_title(schedule.name, schedule.microbatches, schedule.ranks)}: bubble {timeline.bubble:.0%}"


def _title(schedule: str, microbatches: int, ranks: int) -> str:
    return f"{schedule}, {microbatches} microbatches over {ranks} ranks"


def _draw(pictures: Sequence[tuple[str, Sequence[Row]]], path: Path, unit: str, scale: float) -> None:
    """Draw timelines, one below the other.

    Args:
        pictures: a title and the ranks of each.
        scale: from the spans' time to the axis'.
    """
    try:
        from matplotlib.figure import Figure  # without pyplot: no window, no state
    except ImportError as error:
        raise ImportError("Drawing a timeline needs matplotlib: pip install 'lightning_megatp[plots]'.") from error

    heights = [1 + 0.45 * len(rows) for _, rows in pictures]
    figure = Figure(figsize=(16, 0.5 + sum(heights)), layout="constrained")
    every = [[span for _, spans in rows for span in spans] for _, rows in pictures]
    origins = [min(span.start for span in spans) for spans in every]
    length = scale * max(max(span.end for span in spans) - origin for spans, origin in zip(every, origins, strict=True))
    below = figure.subplots(len(pictures), height_ratios=heights, squeeze=False)[:, 0]
    for (title, rows), origin, axes in zip(pictures, origins, below, strict=True):
        for row, (_, spans) in enumerate(rows):
            for span in spans:
                start, duration = scale * (span.start - origin), scale * (span.end - span.start)
                _bar(axes, row, span, start, duration, labelled=duration > 0.012 * length)
        axes.set(yticks=range(len(rows)), yticklabels=[name for name, _ in rows], xlim=(0, length), title=title)
        axes.invert_yaxis()
        axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel(unit)
    shown = {span.what for spans in every for span in spans}
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
