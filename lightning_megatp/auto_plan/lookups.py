"""Embeddings that can be split by their rows."""

from __future__ import annotations

from torch import nn

from lightning_megatp.plan.embeddings import looks_up
from lightning_megatp.plan.layer import LayerPlan
from lightning_megatp.plan.layer_styles import runs_as
from lightning_megatp.plan.ranges import split_evenly
from lightning_megatp.plan.styles import Style


def can_split(table: nn.Embedding) -> bool:
    """Whether ranks can have some of its rows each."""
    whole = table.sparse or table.max_norm or table.scale_grad_by_freq
    return not whole and (runs_as(table, nn.Embedding) or looks_up(table))


def tables_in(block: nn.Module, tp: int, least: float) -> dict[str, LayerPlan]:
    """The plans of the tables inside of a block, by rows.

    Args:
        least: tables with fewer weights stay whole.
    """
    tables = {name: x for name, x in block.named_modules() if isinstance(x, nn.Embedding) and "weight" in x._parameters}
    return {
        name: LayerPlan(name, Style(name, "vocab"), tuple((rows,) for rows in split_evenly(x.num_embeddings, tp)))
        for name, x in tables.items()
        if x.weight.numel() >= max(least, 1) and x.num_embeddings >= tp and runs_as(x, nn.Embedding) and can_split(x)
    }
