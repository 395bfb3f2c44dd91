"""Embeddings that can be split by their rows, and bags of them, by their columns."""

from __future__ import annotations

from torch import nn

from lightning_megatp.plan.embeddings import looks_up
from lightning_megatp.plan.layer import LayerPlan
from lightning_megatp.plan.layer_styles import runs_as
from lightning_megatp.plan.ranges import split_evenly
from lightning_megatp.plan.styles import Style


def can_split(table: nn.Embedding | nn.EmbeddingBag) -> bool:
    """Whether ranks can have some of its rows, or columns, each."""
    whole = table.sparse or table.max_norm or table.scale_grad_by_freq
    if isinstance(table, nn.EmbeddingBag):
        return not whole and runs_as(table, nn.EmbeddingBag)
    return not whole and (runs_as(table, nn.Embedding) or looks_up(table))


def tables_in(block: nn.Module, tp: int, least: float) -> dict[str, LayerPlan]:
    """The plans of the tables inside of a block.

    Args:
        least: tables with fewer weights stay whole.
    """
    found = {}
    for name, x in block.named_modules():
        exact = isinstance(x, nn.EmbeddingBag) or runs_as(x, nn.Embedding)
        if not isinstance(x, nn.Embedding | nn.EmbeddingBag) or x._parameters.get("weight") is None or not exact:
            continue
        bags = isinstance(x, nn.EmbeddingBag)
        size = x.embedding_dim if bags else x.num_embeddings
        if x.weight.numel() >= max(least, 1) and size >= tp and can_split(x):
            by_rank = tuple((piece,) for piece in split_evenly(size, tp))
            found[name] = LayerPlan(name, Style(name, "hidden" if bags else "vocab"), by_rank)
    return found


HOW = {"vocab": "by its rows", "hidden": "by its columns, gathered"}
"""Style of a table -> in words."""
