"""What a dry run is told: how to follow a step, and what is the same for all steps of a module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning_megatp.pipeline.slicing.dry_run.late_hooks import UserHooks
from lightning_megatp.pipeline.slicing.dry_run.stage_states import SharedParts
from lightning_megatp.pipeline.slicing.dry_run.tail import Tail
from lightning_megatp.pipeline.slicing.locator import Locator
from lightning_megatp.shim.fakes import FakeTensorMode


@dataclass(frozen=True)
class Manner:
    """How a step is followed."""

    late_hooks: frozenset[Any] = frozenset()
    """Code of hooks that are called after their units."""
    past_masks: bool = False
    """Go past a mask of what the last stage has, too."""
    guesses_parts: bool = False
    """What parts of units return is made up, where these read values inside."""
    tail: Tail | None = None
    """Which operations are a stage of their own, the last."""


@dataclass(frozen=True)
class Setting:
    """What is the same for all steps of a module."""

    n_stages: int
    fake_mode: FakeTensorMode
    """Makes the ghosts."""
    locator: Locator
    """Names where an operation is."""
    hooks: UserHooks
    """The user's on units."""
    shared: SharedParts
    """Modules and objects of which each stage has its own state."""
