"""What was found for the blocks of a model."""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_megatp.auto_plan.blocks import Block
from lightning_megatp.auto_plan.simulate import BlockPlan
from lightning_megatp.plan.layer import UserOperation


@dataclass
class BlockResult:
    """What was found for one kind of block."""

    block: Block
    plan: BlockPlan = field(default_factory=BlockPlan)
    how: dict[str, str] = field(default_factory=dict)
    """Layer -> in words, how it is split."""
    whole: dict[str, str] = field(default_factory=dict)
    """Layer, or weight that belongs to none -> why it stays whole."""
    multiplied: set[str] = field(default_factory=set)
    """Of the weights that belong to no layer, and that were not tried, what is multiplied with."""
    problem: str | None = None
    """Why nothing could be probed, or proven; its layers are then split one by one."""
    errors: dict[str, float] = field(default_factory=dict)
    gathers: dict[str, int] = field(default_factory=dict)
    sequence_dim: int | None = None
    """The dim of the hidden states that may be divided between regions."""
    used_twice: set[str] = field(default_factory=set)
    """Modules in it whose parameters may there be used on whole values too."""
    couplings: frozenset[UserOperation] = frozenset()
    """What was seen in it that looks at several elements at once."""
    token_local: list[str] = field(default_factory=list)
    """Whole linear layers in it that widen, between regions: an adapter's second layer. Each rank runs them on its own
    tokens, since what they return is needed there."""
