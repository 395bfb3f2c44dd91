"""Optimizers that share their parameters out over the ranks of torch.distributed by themselves: each steps some, and
all gather the rest (Keller Jordan's Muon). They take all ranks for copies of the model."""

from __future__ import annotations

from collections.abc import Iterable

from torch.optim import Optimizer

from lightning_megatp.optimizers.nested import with_inner
from lightning_megatp.user_hooks import mentions

_SENDING = frozenset(
    [
        *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "broadcast", "reduce_scatter"),
        *("all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single", "get_world_size", "get_rank"),
    ]
)


def shares_out(optimizer: Optimizer) -> bool:
    """Whether an optimizer's step, or that of one in it, has to do with ranks."""
    return any(mentions(each, _SENDING, "step") for each in with_inner([optimizer]))


def refuse_shared_out(optimizers: Iterable[Optimizer]) -> None:
    """With zero > 0.

    Raises:
        RuntimeError: one of them shares parameters out.
    """
    for optimizer in filter(shares_out, optimizers):
        raise RuntimeError(
            f"MegaTPStrategy: `{type(optimizer).__name__}` shares its parameters out over the ranks by itself (its step"
            " calls torch.distributed), and zero > 0 has divided them already. Take its variant for a single device, or"
            " zero=0."
        )
