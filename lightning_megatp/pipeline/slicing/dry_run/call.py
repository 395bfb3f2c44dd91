"""An operation of the step, while a dry run looks at it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatp.pipeline.slicing.dry_run.deeds import Deeds
from lightning_megatp.pipeline.slicing.dry_run.values import Value
from lightning_megatp.pipeline.slicing.late_hooks import Hook


@dataclass(eq=False)
class Call:
    """One operation while it is traced."""

    what: Any
    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    unit_stage: int | None = None
    """The stage of a unit; other operations go where their inputs are."""
    stage: int | None = None
    """Where it is carried out, once that is found; None: on every stage."""
    opaque: bool = False
    """An autograd function: its forward is seen, but is part of one operation."""
    gradient: bool = True
    """Whether gradients may come back through it."""
    units: list[str] = field(default_factory=list)
    """The units called: itself, or those inside of an autograd function."""
    collects: bool = False
    """A unit that returns what its layers collect, too."""
    hooks: Sequence[Hook] = ()
    """The user's on a unit."""
    where: str = ""
    """The user's line."""
    inputs: list[Value] = field(default_factory=list)
    given: tuple[Any, ...] = ()
    """As in the plan."""
    shape_only: bool = False
    """It is in SHAPE_ONLY, and its tensors are of stages."""
    random: bool = False
    """It is replicated, and draws random numbers."""
    changed: list[int] = field(default_factory=list)
    """Positions of the inputs that it has changed in place."""
    checkpoint: int | None = None
    """As in the plan."""
    deeds: Deeds = field(init=False, repr=False)
    """What it does."""

    @property
    def by(self) -> str:
        """For messages."""
        return f"`{self.name}` ({self.where})"

    @property
    def is_unit(self) -> bool:
        """Whether this is a call of a unit, or of a metric."""
        return self.unit_stage is not None


def sets_requires_grad(call: Call) -> bool:
    """`x.requires_grad = ...`, which returns no tensor, but does something for good."""
    return bool(call.what == torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]


def changed_statistics(call: Call) -> list[Tensor]:
    """The running mean and variance that a norm in training changes. Their versions don't tell."""
    names = _STATISTICS.get(call.what)
    if names is None:
        return []
    given = dict(zip(names.split(), call.args, strict=False)) | call.kwargs
    if not given.get("training", given.get("use_input_stats", call.what is F.instance_norm)):
        return []
    return [x for name in ("running_mean", "running_var") if isinstance(x := given.get(name), Tensor)]


_BUILT_IN = "input weight bias running_mean running_var"
_STATISTICS: dict[Any, str] = {
    F.batch_norm: "input running_mean running_var weight bias training",
    F.instance_norm: "input running_mean running_var weight bias use_input_stats",
    torch.batch_norm: f"{_BUILT_IN} training",
    torch.native_batch_norm: f"{_BUILT_IN} training",
    torch.instance_norm: f"{_BUILT_IN} use_input_stats",
}
"""Norms that keep statistics, and how their arguments are called in turn."""
