"""Arguments of the strategy that nothing would look at before training, or only by an error of Python's."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from numbers import Integral, Real
from typing import Any, Concatenate, ParamSpec

import torch.distributed as dist

from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.pipeline.schedules.generators import make_schedule
from lightning_megatp.plugin import ParallelismPlugin

P = ParamSpec("P")

_WANTED: dict[str, tuple[type | tuple[type, ...], str]] = {
    "microbatches": (Integral, "a whole number, such as 8"),
    "virtual_stages": (Integral, "a whole number, such as 2"),
    "bucket_mb": (Real, "a number of MiB, such as 25"),
    "zero": (Integral, "a whole number, such as 3"),
    "dp_replicate": (Integral, "a whole number, such as 2"),
    **dict.fromkeys(
        (
            *("sequence_parallel", "offload_activations", "verify", "strict", "summary", "async_save", "memory"),
            "whole_loss",
        ),
        (bool, "True or False"),
    ),
    "trace": ((str, os.PathLike), "a file's name, such as 'run.json'"),
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
    """See whether arguments have the types that they need.

    Raises:
        ValueError: a value that is not None, and of another type than the argument has to be.
    """
    for name, value in arguments.items():
        kind, words = _WANTED[name]
        if value is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            raise ValueError(f"MegaTPStrategy: {name}={value!r} ({type(value).__name__}) has to be {words}.")


def schedule_for(name: str, whole_loss: bool) -> str:
    """The schedule of a run.

    Raises:
        ValueError: a loss that is made once for all microbatches needs another one.
    """
    if not whole_loss:
        return name
    if name not in ("1f1b", "gpipe"):
        raise ValueError(
            f"MegaTPStrategy: whole_loss=True waits for the forwards of all microbatches, and schedule={name!r} begins"
            ' backwards before. Leave schedule out, which is then "gpipe".'
        )
    return "gpipe"


def check_schedule(
    pp: int, name: str, microbatches: int | None, virtual_stages: int | None, stages: Sequence[Sequence[str]] | None
) -> None:
    """Look at the schedule that was asked for, of an example batch; at pp = 1 only at its name and numbers.

    Raises:
        ValueError: see `make_schedule`; or `stages` has another number of lists than there are stages.
    """
    made = make_schedule(name, pp, 1 if microbatches is None else microbatches, virtual_stages if pp > 1 else None)
    if pp > 1 and stages is not None and len(stages) != (needed := len(made.placement)):
        raise ValueError(
            f"MegaTPStrategy: stages lists {len(stages)} of {needed} stages, one list of modules each: pp={pp}, with"
            f" {needed // pp} of schedule={name!r} on each rank (virtual_stages)."
        )


def check_by_hand(verify: bool, trace: bool) -> None:
    """Refuse options that a module can't have which optimizes by hand.

    Raises:
        ValueError: an option that goes together with steps of automatic optimization alone.
    """
    found = "verify=True" if verify else "trace=..." if trace else ""
    if found:
        raise ValueError(
            f"MegaTPStrategy: {found} looks at a step as one forward and one backward, and this LightningModule"
            " optimizes by hand (automatic_optimization=False). Leave the option out, or try the module with a"
            " training_step that returns its loss."
        )


def check_backend(backend: str | None) -> None:
    """See whether torch has a backend for process groups.

    Raises:
        ValueError: torch doesn't know it, or was built without it.
    """
    for entry in (backend or "").lower().split(","):
        name = entry.rpartition(":")[-1]
        if name and not dist.is_backend_available(name):
            known = set(dist.Backend.backend_list) - {"undefined", "fake"}
            there = ", ".join(sorted(each for each in known if dist.is_backend_available(each)))
            raise ValueError(
                f"MegaTPStrategy: process_group_backend={backend!r}, but this torch has no {name!r}. It has: {there}."
                " Left out, it is what the devices need: nccl for GPUs, gloo for CPUs."
            )


def check_stages(stages: Sequence[Sequence[str]] | None) -> None:
    """See whether `stages` is a list of lists.

    Raises:
        ValueError: a plain list of names, or something else.
    """
    if stages is not None and (isinstance(stages, str) or not isinstance(stages, Sequence)):
        raise ValueError(
            f"MegaTPStrategy: stages={stages!r}, but it is a list with one list of module names per stage: [['embed',"
            " 'blocks.0'], ['blocks.1', 'head']]. Left out, `pp` stages are balanced by parameters."
        )
    if stages is not None and any(isinstance(names, str) for names in stages):
        lists = [[names] if isinstance(names, str) else names for names in stages]
        raise ValueError(
            f"MegaTPStrategy: stages={stages!r}, but it is a list with one list of module names per stage: {lists!r}."
        )
