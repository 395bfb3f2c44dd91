"""Whether what several ranks hold is the same."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

_PIECE = 2**22
"""Elements that are summed in float64 at a time: an embedding may have a billion of them."""


def differing(
    tensors: Mapping[str, Tensor | None], group: dist.ProcessGroup, device: torch.device | None, tolerance: float
) -> list[str]:
    """Which of some tensors are not the same on all ranks of a group that have them.

    Args:
        tensors: by name, the same names on all of these ranks; None where a rank has none.
        group: the ranks.
        device: of tensors that the group sends; None for where these are. Some may be offloaded, others not.
        tolerance: by how much their sums may differ, as a share of the sum of their absolute values.

    Memory: 16 bytes per element of a tensor, of `_PIECE` elements at most.
    Communication: two all-reduces of two float64 per tensor.
    """
    if group.size() == 1 or not tensors:
        return []
    sums = [None if x is None else sums_of(x.detach()).to(device) for x in tensors.values()]
    nothing = torch.full((2,), torch.inf, dtype=torch.float64, device=device)
    low = torch.stack([nothing if x is None else x for x in sums])
    high = torch.stack([-nothing if x is None else x for x in sums])
    dist.all_reduce(low, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, op=dist.ReduceOp.MAX, group=group)
    differs = ((high - low) > tolerance * high[:, 1:].abs()).any(1).tolist()
    return [name for name, wrong in zip(tensors, differs, strict=True) if wrong]


def sums_of(x: Tensor) -> Tensor:
    """(2,) float64: of the elements, and of their absolute values. Complex ones are two numbers each."""
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    pieces = (piece.double() for piece in x.reshape(-1).split(_PIECE))
    return torch.stack([torch.stack([piece.sum(), piece.abs().sum()]) for piece in pieces]).sum(0)
