"""What a dry run is told: how to follow a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_megatp.pipeline.slicing.dry_run.tail import Tail
from lightning_megatp.pipeline.slicing.errors import SideDoor
from lightning_megatp.pipeline.slicing.filled import Attribute


@dataclass(frozen=True)
class Manner:
    """How a step is followed."""

    late_hooks: frozenset[Any] = frozenset()
    """Code of hooks that are called after their units."""
    attributes: Mapping[str, tuple[Attribute, ...]] = field(default_factory=dict)
    """By units: those that they set, and of which the step takes tensors."""
    side_door: SideDoor | None = field(default=None, compare=False)
    """Why they have to be followed."""
    last_step: Sequence[Tensor] = field(default=(), compare=False)
    """What they have set in the step before, and may not read."""
    past_masks: bool = False
    """Follow the step also behind an index by a mask of values that the last stage has."""
    guesses_parts: bool = False
    """What parts of units return is made up, where these read values inside."""
    tail: Tail | None = None
    """Which operations are a stage of their own, the last."""
