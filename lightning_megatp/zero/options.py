"""What a user chooses of ZeRO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Offload = Literal["optimizer", "parameters"]


@dataclass(frozen=True)
class ZeroOptions:
    """What a user chooses.

    Raises:
        ValueError: values that mean nothing, or don't go together.
    """

    level: int = 0
    offload: Offload | None = None
    """Keep this rank's part of the parameters, and so the optimizer's state and step, in the host's memory."""
    replicas: int = 1
    """Copies of the divided state among the data-parallel ranks (HSDP); 1 divides it over all of them."""
    reduce_dtype: str | None = None
    """In which gradients are summed, whatever the level; None for the parameters' own."""

    def __post_init__(self) -> None:
        if self.level not in (0, 1, 2, 3):
            raise ValueError(f"MegaTPStrategy: zero={self.level!r}, but the levels are 0, 1, 2 and 3.")
        if self.offload not in (None, "optimizer", "parameters"):
            raise ValueError(
                f'MegaTPStrategy: offload={self.offload!r}, but what can be offloaded is "optimizer" or "parameters".'
            )
        if self.offload is not None and self.level != (3 if self.offload == "parameters" else min(self.level, 2) or 1):
            need = "zero=3" if self.offload == "parameters" else "zero=1 or zero=2"
            raise ValueError(f'MegaTPStrategy: offload="{self.offload}" needs {need}, not zero={self.level}.')
        if self.reduce_dtype not in (None, "float32"):
            raise ValueError(f'MegaTPStrategy: reduce_dtype={self.reduce_dtype!r}, but there is "float32", or None.')
        if self.replicas < 1 or (self.replicas > 1 and self.level == 0):
            raise ValueError(
                f"MegaTPStrategy: dp_replicate={self.replicas} copies of what is divided need zero > 0, and at least 1."
            )
