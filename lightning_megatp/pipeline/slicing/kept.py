"""What is kept from one part of a step that goes backward by hand to the next ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from lightning_megatp.pipeline.slicing.plan import Key, Relay, SlicePlan
from lightning_megatp.pipeline.slicing.reads import Answer


@dataclass
class Kept:
    """What a microbatch keeps on a rank, from one part of a step that goes backward by hand to later ones."""

    wanted: frozenset[Key] = frozenset()
    """What later parts take."""
    values: dict[Key, Tensor] = field(default_factory=dict)
    leaves: dict[tuple[int, Key], Tensor] = field(default_factory=dict)
    """By stage, what it has received, as the start of its graph."""
    answers: dict[int, Answer] = field(default_factory=dict)
    """To what the step reads of stages' values on the host, by the number of the read."""

    def recalled(self, plan: SlicePlan, stage: int) -> dict[Key, Tensor]:
        """The values that a part takes of earlier ones on a stage."""
        return {key: self.values[key] for key in plan.recalled_on(stage)}

    def take_leaves(self, stage: int, relays: Sequence[Relay], received: list[Tensor], begins: int) -> None:
        """Let a stage go on from what it has received in an earlier part, so that gradients come back to there.

        Args:
            relays: what it receives.
            received: that; replaced by what was received before.
            begins: the first operation of the part that is run.
        """
        for i, relay in enumerate(relays):
            before = self.leaves.get((stage, relay.key)) if relay.key.operation < begins else None
            if before is not None:
                received[i] = before
                before.grad = None
            elif relay.key in self.wanted:
                self.leaves[stage, relay.key] = received[i]
