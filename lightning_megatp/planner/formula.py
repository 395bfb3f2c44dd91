"""What transformer blocks keep for backward by the formula of the literature, for steps that can't be rehearsed.

Source: Korthikanti et al. 2022, section 4, equations 1, 2 and 4: 16-bit values, masks of one byte, attention that keeps
its weights; s tokens, b rows, h hidden, a heads, t tensor ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from torch import nn

from lightning_megatp.auto_plan.blocks import find_blocks
from lightning_megatp.containers import tensors_in
from lightning_megatp.plan.parallel_plan import ParallelPlan
from lightning_megatp.planner.rehearsal import SavedForBackward, rehearse
from lightning_megatp.plugin import ParallelismPlugin
from lightning_megatp.recompute.options import RecomputeOptions

_HEADS = ("n_head", "n_heads", "num_heads", "num_attention_heads", "nhead", "heads")
NOTE = "activations are those of transformer blocks by the formula of Korthikanti et al. 2022, in 16 bits"


def rehearse_or_estimate(
    module: Any,
    plugin: ParallelismPlugin,
    plan: ParallelPlan,
    batch: Any,
    recompute: RecomputeOptions | None = None,
    stage_of_unit: Mapping[str, int] | None = None,
    **options: Any,
) -> tuple[SavedForBackward | None, str]:
    """`rehearse`, or the formula where the step can't be rehearsed, or None; and why, if so."""
    try:
        found = rehearse(module, plugin, plan, batch, recompute=recompute, stage_of_unit=stage_of_unit, **options)
        return found, ""
    except Exception as error:  # of the user's step, which may look at values
        why = f"the step could not be rehearsed ({type(error).__name__}: {str(error)[:200]})"
    try:
        return by_formula(module, plan, batch, recompute, stage_of_unit), f"{why}; {NOTE}"
    except ValueError as error:
        return None, f"{why}, and has {error}"


def by_formula(
    module: nn.Module,
    plan: ParallelPlan,
    batch: Any,
    recompute: RecomputeOptions | None,
    stage_of_unit: Mapping[str, int] | None = None,
) -> SavedForBackward:
    """In place of a rehearsal, whose arguments it takes.

    Args:
        batch: a microbatch, whose first tensor with two dims or more is (rows, tokens, ...).

    Raises:
        ValueError: no such tensor, or no blocks with norms.
    """
    shapes = [x.shape for x in tensors_in(batch) if x.dim() >= 2]
    blocks = {name: module.get_submodule(name) for name in find_blocks(module)}
    hidden = {name: _hidden(block) for name, block in blocks.items()}
    if not shapes or not all(hidden.values()) or not blocks:
        raise ValueError("no batch of (rows, tokens), or no transformer blocks")
    rows, tokens = shapes[0][:2]
    found, counts = SavedForBackward(), Counter[int]()
    for i, (name, block) in enumerate(blocks.items()):
        stage = 0 if stage_of_unit is None else stage_of_unit.get(name, 0)
        kind = "none" if recompute is None else recompute.of_block(counts[stage])
        counts[stage] += 1
        found.saved[name] = {i: layer_bytes(rows, tokens, hidden[name], _heads(block, hidden[name]), plan, name, kind)}
    return found


def layer_bytes(rows: int, tokens: int, hidden: int, heads: int, plan: ParallelPlan, block: str, recompute: str) -> int:
    """The bytes that one layer keeps for its backward on one tensor rank."""
    t, scores = plan.tp, 5 * heads * tokens / hidden
    if recompute == "full":
        return round(2 * tokens * rows * hidden / t)
    if recompute == "selective":
        scores = 0.0
    split_sequence = t == 1 or block in plan.sequences
    whole, divided = (0.0, 34.0) if split_sequence else (10.0, 24.0)
    return round(tokens * rows * hidden * (whole + (divided + scores) / t))


def _hidden(block: nn.Module) -> int:
    """The usual size of its norms and biases: that of the hidden states."""
    sizes = Counter(p.shape[0] for p in block.parameters() if p.dim() == 1)
    return sizes.most_common(1)[0][0] if sizes else 0


def _heads(block: nn.Module, hidden: int) -> int:
    found = (getattr(child, name, None) for child in block.modules() for name in _HEADS)
    return next((x for x in found if isinstance(x, int)), max(hidden // 64, 1))
