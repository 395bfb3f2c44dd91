"""What a run of the benchmarks found, as a table and a picture."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import lightning
import torch

from tests.benchmarks.ratios import Figure, Row

PARTS = {
    "tensor": "Tensor parallelism",
    "alone": "Tensor parallelism, one rank alone",
    "pipeline": "Pipelines",
    "data": "Data parallelism",
    "single": "One device",
    "optimizer": "Optimizer and clipping",
    "start": "Start-up",
    "gpu": "One GPU",
}
START, END = "<!-- figures: make bench writes from here -->", "<!-- figures: to here -->"


def write(found: Sequence[Row | Figure], page: Path, picture: Path) -> None:
    """Put the tables between the marks of a page, and draw the ratios beside it."""
    text = page.read_text()
    before, after = text[: text.index(START) + len(START)], text[text.index(END) :]
    page.write_text(f"{before}\n{machine()}\n\n{tables(found)}\n{after}")
    draw([row for row in found if isinstance(row, Row)], picture)


def machine() -> str:
    """Where it ran, in a sentence."""
    model = next((x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")), "")
    cores = torch.multiprocessing.cpu_count()
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU"
    name = model.partition(": ")[2] or platform.processor() or "an unnamed processor"
    return (
        f"{cores} cores of {name}, {gpu}; gloo, one thread per process, float32; torch {torch.__version__}, Lightning"
        f" {lightning.__version__}, Python {platform.python_version()}."
    )


def tables(found: Sequence[Row | Figure]) -> str:
    """Markdown: ratios, then single figures."""
    lines = []
    for part, title in PARTS.items():
        rows = [x for x in found if isinstance(x, Row) and x.part == part]
        figures = [x for x in found if isinstance(x, Figure) and x.part == part]
        if not rows and not figures:
            continue
        lines += ["", f"### {title}", ""]
        if rows:
            lines += ["| what | beside | ours / theirs (95 %) | goal | | ms a step | Python us a step |"]
            lines += ["|---|---|---|---|---|---|---|", *map(_line, rows)]
        if figures:
            lines += ["", "| what | found | goal | |", "|---|---|---|---|", *map(_figure_line, figures)]
    return "\n".join(lines)


def _line(row: Row) -> str:
    goal = "" if row.goal is None else f"{row.goal:g}"
    python = "" if row.python is None else "{:.0f} / {:.0f}".format(*row.python)
    return (
        f"| {row.what} | {row.peer} | **{row.ratio.median:.3f}** ({row.ratio.low:.3f}..{row.ratio.high:.3f}) | {goal}"
        f" | {_verdict(row.met)} | {row.ours:.2f} / {row.theirs:.2f} | {python} |"
    )


def _figure_line(figure: Figure) -> str:
    goal = "" if figure.goal is None else f"{figure.goal:g} {figure.unit}"
    return f"| {figure.what} | {figure.value:.3g} {figure.unit} | {goal} | {_verdict(figure.met)} |"


def _verdict(met: bool | None) -> str:
    return {None: "", True: "met", False: "missed"}[met]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Ratios with their intervals, on a logarithmic axis; 1 is the peer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import ScalarFormatter

    figure, axes = pyplot.subplots(figsize=(9, 0.32 * len(rows) + 1.2), layout="constrained")
    for at, row in enumerate(reversed(rows)):
        low, middle, high = row.ratio.low, row.ratio.median, row.ratio.high
        colour = {None: "tab:gray", True: "tab:green", False: "tab:red"}[row.met]
        axes.errorbar(middle, at, xerr=[[middle - low], [high - middle]], fmt="o", color=colour, capsize=3)
        if row.goal is not None:
            axes.plot(row.goal, at, marker="|", color="black", markersize=12)
    labels = [f"{row.what.replace(' tokens', '')}  /  {row.peer}" for row in reversed(rows)]
    axes.set_yticks(range(len(rows)), labels, fontsize=7)
    axes.set_xscale("log")
    ticks = [0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_formatter(ScalarFormatter())
    axes.minorticks_off()
    axes.axvline(1.0, color="tab:gray", linewidth=0.8)
    axes.set_xlabel("ours / theirs (bar: goal; whisker: 95 %)")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
