"""Arguments of the strategy that nothing would look at before training, or only by an error of Python's."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from numbers import Integral, Real
from typing import Any, Concatenate, ParamSpec

from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.plugin import ParallelismPlugin

P = ParamSpec("P")

_WANTED: dict[str, tuple[type, str]] = {
    "microbatches": (Integral, "a whole number, such as 8"),
    "virtual_stages": (Integral, "a whole number, such as 2"),
    "bucket_mb": (Real, "a number of MiB, such as 25"),
    "zero": (Integral, "a whole number, such as 3"),
    "dp_replicate": (Integral, "a whole number, such as 2"),
    **dict.fromkeys(
        ("sequence_parallel", "offload_activations", "verify", "strict", "summary", "async_save", "memory"),
        (bool, "True or False"),
    ),
    "timeout": (timedelta, "a timedelta, such as timedelta(minutes=30)"),
    "parallelism": (ParallelismPlugin, "a plugin, such as ParallelismPlugin(plan={...})"),
}


_ELSEWHERE = {
    "tensor": "tp",
    "model_parallel": "tp",
    "pipeline": "pp",
    "data_parallel": "dp",
    "checkpointing": "recompute",
    "fsdp": "zero",
    "sharding": "zero",
}
"""Parts of the names that arguments have elsewhere -> what they are called here."""


def with_known_names(init: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """A constructor whose callers learn what the argument is called that they mean."""
    names = [name for name in inspect.signature(init).parameters if name != "self"]

    @functools.wraps(init)
    def named(self: Any, *args: P.args, **kwargs: P.kwargs) -> None:
        for name in kwargs:
            if name not in names:
                raise TypeError(f"MegaTPStrategy has no argument `{name}`.{_meant(name, names)}")
        init(self, *args, **kwargs)

    return named


def _meant(name: str, names: Sequence[str]) -> str:
    if name == "cp" or "context" in name:
        return " There is no context parallelism; with tp, `sequence_parallel` divides tokens between layers."
    close = difflib.get_close_matches(name, names, 1)
    meant = [ours for theirs, ours in _ELSEWHERE.items() if theirs in name] + close
    meant += [axis for axis in ("tp", "pp", "dp") if axis in name.split("_")]
    return f" Did you mean `{meant[0]}`?" if meant else f" It has: {', '.join(names)}."


def warn_of_unused(pp: int, **options: Any) -> None:
    """Say which of a pipeline's options do nothing, since there is none.

    Args:
        options: what was given for each; None for nothing.
    """
    given = [f"{name}={value!r}" for name, value in options.items() if value is not None]
    if pp == 1 and given:
        warn_once_per_run(
            f"no effect at pp=1, where there is no pipeline: {', '.join(given)}. There,"
            " Trainer(accumulate_grad_batches=...) makes one step of several smaller batches."
        )


def check_types(**arguments: Any) -> None:
    """Raises:
    ValueError: a value that is not None, and of another type than the argument has to be.
    """
    for name, value in arguments.items():
        kind, words = _WANTED[name]
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
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
