"""What a user asks for by `recompute`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_EXPECTED = 'Use "none", "selective", "full" or {"blocks": n}.'


@dataclass(frozen=True)
class RecomputeOptions:
    """What is recomputed.

    Args:
        kind: "none"; "selective", the attention core of every block; "full", blocks from their inputs.
        first: of "full", how many blocks of each pipeline stage; None for all.
    """

    kind: str = "none"
    first: int | None = None

    def of_block(self, index: int) -> str:
        """What is done to a block.

        Args:
            index: among the blocks of its pipeline stage.
        """
        return "none" if self.first is not None and index >= self.first else self.kind

    @classmethod
    def of(cls, value: Any) -> RecomputeOptions:
        """From what the user wrote.

        Raises:
            ValueError: it is none of the values there are.
        """
        if isinstance(value, str) and value in ("none", "selective", "full"):
            return cls(value)
        if isinstance(value, Mapping) and set(value) == {"blocks"}:
            first = value["blocks"]
            if isinstance(first, bool) or not isinstance(first, int) or first < 1:
                raise ValueError(
                    f'MegaTPStrategy: recompute={{"blocks": {first!r}}}, but a number of blocks is 1 or more. Use'
                    ' recompute="none" to recompute none.'
                )
            return cls("full", first)
        raise ValueError(f"MegaTPStrategy: recompute={value!r} is unknown. {_EXPECTED}")
