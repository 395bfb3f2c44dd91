"""A Hugging Face model's own `tp_plan`, read into styles.

transformers 5 writes `{"model.layers.*.self_attn.q_proj": "colwise", ...}`; names are relative to the model.
"""

from __future__ import annotations

from torch import nn

from lightning_megatp.auto_plan.blocks import is_linear
from lightning_megatp.auto_plan.simulate import BlockPlan
from lightning_megatp.plan.layer import LayerPlan
from lightning_megatp.plan.ranges import deal_units
from lightning_megatp.plan.styles import Style, matches

_STYLES = {
    "colwise": "column",
    "rowwise": "row",
    "colwise_rep": "column_gather",
    "colwise_gather_output": "column_gather",
    "rowwise_rep": "row_split",
    "rowwise_split_input": "row_split",
}
_FOR_OTHERS = frozenset(
    [
        "embedding_rowwise",
        "embedding_colwise",
        "packed_colwise",
        "packed_rowwise",
        "grouped_gemm",
        "moe_tp_experts",
        "ep_dispatch_experts",
        "ep_router",
        "moe_identity_expert",
        "replicated_with_grad_allreduce",
        "mla_kv_a_proj",
        "all_reduce",
        "local_params",
        "replicate",
        "sequence_parallel",
        "local_colwise",
        "local_rowwise",
        "local",
        "gather",
    ]
)
"""Styles of what is no plain linear layer: embeddings, experts and parameters. They are planned by other means."""


def own_plan(module: nn.Module) -> tuple[dict[str, str], str | None]:
    """The plans of the Hugging Face models in a module, by names relative to it; and why one was refused."""
    found: dict[str, str] = {}
    problem = None
    inside: list[str] = []
    for name, child in module.named_modules():
        plan = getattr(child, "tp_plan", None)
        if not isinstance(plan, dict) or not plan or any(name.startswith(outer) for outer in inside):
            continue
        inside.append(f"{name}." if name else "")
        unknown = sorted(set(map(str, plan.values())) - set(_STYLES) - _FOR_OTHERS)
        if unknown:
            problem = f"the tp_plan of {type(child).__name__} uses the unknown style {unknown[0]!r}, so it is not used"
            continue
        found.update({f"{name}.{pattern}".lstrip("."): style for pattern, style in plan.items()})
    return found, problem


def plan_of_block(plan: dict[str, str], name: str, block: nn.Module, tp: int) -> BlockPlan | None:
    """What a model's own plan says about a block; None if it says nothing, or what can't be dealt out.

    Args:
        plan: from `own_plan`.
        name: of the block.
    """
    layers: dict[str, LayerPlan] = {}
    for inner, child in block.named_modules():
        style = next((s for p, s in plan.items() if is_linear(child) and matches(p, f"{name}.{inner}")), None)
        if style not in _STYLES:
            continue
        kind = _STYLES[style]
        features = child.in_features if kind in ("row", "row_split") else child.out_features
        parent = inner.rpartition(".")[0]
        unit = getattr(block.get_submodule(parent), "head_dim", 1) if kind in ("row", "column") else 1
        unit = unit if isinstance(unit, int) and features % unit == 0 else 1
        try:
            pieces = deal_units(features // unit, tp)
        except ValueError:
            return None
        by_rank = tuple(((start * unit, stop * unit),) if stop > start else () for start, stop in pieces)
        region = parent if kind in ("row", "column") else None
        layers[inner] = LayerPlan(inner, Style(inner, kind), by_rank, unit, region)
    kinds = {layer.style.style for layer in layers.values()}
    return BlockPlan(layers) if {"row", "column"} <= kinds else None
