"""What a dry run notes of a step beside its operations."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Traits:
    """What kind of step it is."""

    by_hand: bool = False
    """It optimizes by hand."""
    acts_first: bool = False
    """It does something by hand before its first operation of stages."""
    uses_functions: bool = False
    """It calls autograd functions, or functions of torch.jit."""
    converts: bool = False
    """It calls a module's `to(...)` or its like."""
    varies: bool = False
    """Batches of the same signature may find something else than values of tensors: texts, what was logged."""
    met_mask: bool = False
    """It met a mask that it does not go past."""
