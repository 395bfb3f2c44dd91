"""The command `megatp`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from lightning_megatp.pipeline.drawing import draw_trace
from lightning_megatp.pipeline.trace import Trace


def main(arguments: Sequence[str] | None = None) -> None:
    """`megatp trace run.json [--png [PATH]]`: what a recorded step says of its pipeline.

    Args:
        arguments: those of the command line, unless given.
    """
    parser = argparse.ArgumentParser(prog="megatp", description="Tools for MegaTPStrategy.")
    commands = parser.add_subparsers(required=True, metavar="command")
    trace = commands.add_parser("trace", help="the bubble of a step that MegaTPStrategy(trace=...) recorded")
    trace.add_argument("file", type=Path, help="the trace, JSON")
    trace.add_argument(
        "--png", nargs="?", type=Path, const=Path(), metavar="PATH", help="draw it, by default beside the trace"
    )
    trace.set_defaults(run=_trace)
    options = parser.parse_args(arguments)
    options.run(options)


def _trace(options: argparse.Namespace) -> None:
    trace = Trace.read(options.file)
    print(f"{options.file}: {trace.describe()}.")
    if options.png is not None:
        path = options.file.with_suffix(".png") if options.png == Path() else options.png
        draw_trace(trace, path)
        print(f"Drew it to {path}.")
