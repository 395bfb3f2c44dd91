"""What is the same for every run of a module's steps, dry or not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from lightning_megatp.pipeline.slicing.late_hooks import UserHooks
from lightning_megatp.pipeline.slicing.locator import Locator
from lightning_megatp.pipeline.slicing.state.ownership import Ownership
from lightning_megatp.shim.fakes import FakeTensorMode


@dataclass(frozen=True)
class Surroundings:
    """The module whose steps are run, and what is known of it."""

    module: nn.Module
    stage_of_unit: Mapping[str, int]
    """Unit name -> stage."""
    ownership: Ownership
    """Which stages the tensors of units are of."""
    fake_mode: FakeTensorMode
    """Makes the ghosts."""
    locator: Locator
    """Names where an operation is."""
    hooks: UserHooks
    """The user's on units."""
