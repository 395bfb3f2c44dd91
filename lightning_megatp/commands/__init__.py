"""`megatp plan`, `megatp estimate`, `megatp verify`: a user's own script, run up to where its model would be split.

The script starts as always and builds its Trainer. The strategy finds the command in the environment, so that the ranks
which Lightning starts find it too.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_VARIABLE, _LAYERS = "MEGATP_COMMAND", "MEGATP_LAYERS"
COMMANDS = ("plan", "estimate", "verify")


class Done(SystemExit):
    """A command has done what it was asked to, in the middle of a Trainer's run; the process ends with its code."""


def requested() -> str | None:
    """The command that this process was started for: "plan", "estimate", "verify" or None."""
    command = os.environ.get(_VARIABLE)
    return command if command in COMMANDS else None


def without_ranks() -> bool:
    """Whether that command looks at the model in one process, whatever the number of devices."""
    return requested() in ("plan", "estimate")


def layers_to_keep() -> int | None:
    """How many layers of each kind `megatp verify --layers` asks for; None for all."""
    asked = os.environ.get(_LAYERS)
    return int(asked) if asked and requested() == "verify" else None


def run_script(command: str, script: Path, arguments: Sequence[str], layers: int | None = None) -> None:
    """Run a user's script for a command, as `python script arguments` would.

    Args:
        layers: what `layers_to_keep` answers meanwhile.

    Raises:
        Done: when the command is done.
        SystemExit: there is no such script, or it ended before a Trainer with this strategy was run.
    """
    if not script.exists():
        sys.exit(f"megatp {command}: there is no script {script}.")
    with _as_main([str(script), *arguments], {_VARIABLE: command, _LAYERS: str(layers or "")}):
        runpy.run_path(str(script), run_name="__main__")
    sys.exit(
        f"megatp {command}: {script} ended before a Trainer with MegaTPStrategy at tp > 1 was run. Give the arguments"
        " that make it train, e.g. `fit --config config.yaml --trainer.strategy.tp 2`."
    )


@contextlib.contextmanager
def _as_main(argv: list[str], variables: dict[str, str]) -> Iterator[None]:
    before = sys.argv, sys.path[0], {name: os.environ.get(name) for name in variables}
    sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
    os.environ.update(variables)
    try:
        yield
    finally:
        sys.argv, sys.path[0] = before[:2]
        for name, value in before[2].items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
