"""The command `megatp`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_megatp.checkpoint.convert import FORMS, convert
from lightning_megatp.commands import run_script
from lightning_megatp.pipeline.schedules.drawing import draw_trace
from lightning_megatp.pipeline.schedules.trace import Trace

_HUGGING_FACE = str(Path(__file__).parent / "commands" / "huggingface.py")


def main(arguments: Sequence[str] | None = None) -> None:
    """`megatp plan SCRIPT ARGUMENTS`: what would be split. `megatp estimate SCRIPT ARGUMENTS`: memory per rank. `megatp
    verify SCRIPT ARGUMENTS`: proof on real ranks. They also take `--hf MODEL --tp N` instead of a script. `megatp trace
    run.json [--png [PATH]]`: what a recorded step says of its pipeline. `megatp convert SOURCE TARGET`: a checkpoint in
    another form.

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
    converting = commands.add_parser("convert", help="a checkpoint in another form: file, folder, safetensors")
    converting.add_argument("source", type=Path, help="a .ckpt, a folder, or safetensors")
    converting.add_argument("target", type=Path, help="what is written")
    converting.add_argument("--to", choices=FORMS, default="safetensors", help="its form (default: safetensors)")
    converting.add_argument(
        "--prefix", default="", help="of the model's names: taken off for safetensors, put before them from safetensors"
    )
    converting.add_argument("--weights-only", action="store_true", help="leave out what only training needs")
    converting.set_defaults(run=_convert)
    for name, what in (
        ("plan", "what would be split and where, without starting ranks"),
        ("estimate", "memory per rank of each pipeline stage, without starting ranks"),
        (
            "verify",
            "compare the first batch, loss and every gradient, with the unsplit model, in float64 on real ranks",
        ),
    ):
        own = "[-h] [--layers N]" if name == "verify" else "[-h]"
        usage = f"megatp {name} {own} (SCRIPT ARGUMENTS | --hf MODEL OPTIONS)"
        command = commands.add_parser(
            name, help=what, description=f"{what}.", usage=usage, epilog=_hugging_face_options(name)
        )
        if name == "verify":
            command.add_argument(
                "--layers", type=_positive, help="keep so many layers of each kind in every list of the model"
            )
        command.add_argument("script", help="your training script; or --hf with a Hugging Face model's name or folder")
        command.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
        command.set_defaults(run=_run_script, command=name)
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] in (["plan"], ["estimate"], ["verify"]) and given[1:2] == ["--hf"]:
        given[1:2] = [_HUGGING_FACE]
    options = parser.parse_args(given)
    options.run(options)


def _hugging_face_options(command: str) -> str:
    more = ""
    if command == "estimate":
        more = ", --dp N (1), --zero LEVEL (0), --microbatch ROWS TOKENS (1 2048), --microbatches N, --schedule NAME"
        more += ", --recompute none|selective|full, --precision NAME (bf16-mixed)"
    return (
        f"Options behind --hf MODEL: --tp N (2), --pp N (1), --layers N (as many instead of the config's){more}. A"
        " script's layout is that of its own MegaTPStrategy."
    )


def _run_script(options: argparse.Namespace) -> None:
    run_script(options.command, Path(options.script), options.arguments, getattr(options, "layers", None))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of layers: 1 or more")
    return int(text)


def _convert(options: argparse.Namespace) -> None:
    try:
        convert(options.source, options.target, options.to, options.prefix, options.weights_only)
    except (ValueError, RuntimeError, OSError) as error:
        sys.exit(str(error))
    print(f"Wrote {options.target}.")


def _trace(options: argparse.Namespace) -> None:
    try:
        trace = Trace.read(options.file)
    except (ValueError, OSError) as error:
        sys.exit(f"megatp trace: {error}")
    print(f"{options.file}: {trace.describe()}.")
    if options.png is not None:
        path = options.file.with_suffix(".png") if options.png == Path() else options.png
        draw_trace(trace, path)
        print(f"Drew it to {path}.")


if __name__ == "__main__":
    main()
