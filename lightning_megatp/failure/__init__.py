"""Failure: one rank's end ends all ranks, and the first cause is what the screen says."""

from lightning_megatp.failure.parent import ParentWatch
from lightning_megatp.failure.watch import FailureWatch

__all__ = ["FailureWatch", "ParentWatch"]
