"""Arguments of the strategy that nothing would look at before training, or only by an error of Python's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from numbers import Integral, Real
from typing import Any

from lightning_megatp.plugin import ParallelismPlugin

_WANTED: dict[str, tuple[type, str]] = {
    "microbatches": (Integral, "a whole number, such as 8"),
    "virtual_stages": (Integral, "a whole number, such as 2"),
    "bucket_mb": (Real, "a number of MiB, such as 25"),
    "zero": (Integral, "a whole number, such as 3"),
    "dp_replicate": (Integral, "a whole number, such as 2"),
    "timeout": (timedelta, "a timedelta, such as timedelta(minutes=30)"),
    "parallelism": (ParallelismPlugin, "a plugin, such as ParallelismPlugin(plan={...})"),
}


def check_types(**arguments: Any) -> None:
    """Raises:
    ValueError: a value that is not None, and of another type than the argument has to be.
    """
    for name, value in arguments.items():
        kind, words = _WANTED[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
            raise ValueError(f"MegaTPStrategy: {name}={value!r} ({type(value).__name__}) has to be {words}.")


def check_stages(stages: Sequence[Sequence[str]] | None) -> None:
    """Raises:
    ValueError: a plain list of names, or something else.
    """
    if stages is not None and (isinstance(stages, str) or not isinstance(stages, Sequence)):
        raise ValueError(
            f"MegaTPStrategy: stages={stages!r}, but it lists a list of modules per stage: [['embed', 'blocks.0'],"
            " ['blocks.1', 'head']]. How many there are, `pp` says."
        )
    if stages is not None and any(isinstance(names, str) for names in stages):
        lists = [[names] if isinstance(names, str) else names for names in stages]
        raise ValueError(f"MegaTPStrategy: stages={stages!r}, but it lists a list of modules per stage: {lists!r}.")
