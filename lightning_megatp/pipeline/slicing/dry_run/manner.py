"""What a dry run is told: how to follow a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_megatp.pipeline.slicing.dry_run.tail import Tail


@dataclass(frozen=True)
class Manner:
    """How a step is followed."""

    late_hooks: frozenset[Any] = frozenset()
    """Code of hooks that are called after their units."""
    past_masks: bool = False
    """Follow the step also behind an index by a mask of values that the last stage has."""
    guesses_parts: bool = False
    """What parts of units return is made up, where these read values inside."""
    tail: Tail | None = None
    """Which operations are a stage of their own, the last."""
