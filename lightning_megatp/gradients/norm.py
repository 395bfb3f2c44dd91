"""The norm of all gradients, each element once, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.module import ParallelModule
from lightning_megatp.plan.shard import ShardedTensorSpec


def global_norm(
    parameters: Iterable[Tensor], parallel: ParallelModule, mesh: ParallelMesh, order: float = 2.0
) -> Tensor:
    """The norm of the gradients of the unsplit model.

    Args:
        parameters: whole ones and shards; those without a gradient don't count.
        order: of the norm, above 0; may be infinite.

    Returns:
        A scalar, the same on every rank.

    Communication: one all-reduce of two elements over the ranks that divide parameters by rows (zero > 0), one of one
    element over tp, and one over pp.
    """
    found: dict[tuple[bool, bool], list[Tensor]] = {
        (rows, split): [] for rows in (True, False) for split in (True, False)
    }
    parameters = list(parameters)
    sharded, all_divided, elsewhere = parallel.sharded, parallel.divided, parallel.counted_elsewhere
    for parameter in parameters:  # there may be thousands
        grad, key = parameter.grad, id(parameter)
        if grad is None or key in elsewhere:
            continue
        spec, divided = sharded.get(key), all_divided.get(key)
        rows = None if divided is None else divided.rows
        found[divided is not None, spec is not None] += own_elements(grad, spec, mesh.rank("tp"), rows, order)
    if mesh.size("tp") == mesh.size("pp") == 1 and not all_divided:
        return get_total_norm(found[False, False] + found[False, True], order)
    # Of one that is counted elsewhere, too: copies of a tied weight are clipped by the same number on all stages.
    like = next((p.grad for p in parameters if p.grad is not None), next(iter(parameters), torch.zeros(())))
    dtype = torch.promote_types(like.dtype, torch.float32)
    # Norms are added up by their powers, or the largest is taken.
    power, add, over_ranks = (
        (1.0, torch.maximum, dist.ReduceOp.MAX) if math.isinf(order) else (order, torch.add, dist.ReduceOp.SUM)
    )
    # Sent is float64: a stage may have another dtype than the next, or no gradient at all.
    *rest, last = found.values()
    powers = torch.stack([_norm(parts, mesh.device, order) for parts in rest]) ** power
    if parallel.rows_group is not None:
        dist.all_reduce(powers[:2], over_ranks, group=parallel.rows_group)
    split, whole = add(powers[0], powers[2]), powers[1]
    work = None
    if mesh.size("tp") > 1:
        work = dist.all_reduce(split, over_ranks, group=mesh.group("tp"), async_op=True)
    whole = add(whole, _norm(last, mesh.device, order) ** power)  # meanwhile
    if work is not None:
        work.wait()
    total = add(split, whole)
    if mesh.size("pp") > 1:
        dist.all_reduce(total, over_ranks, group=mesh.group("pp"))
    return (total ** (1 / power)).to(dtype)


def own_elements(
    grad: Tensor,
    spec: ShardedTensorSpec | None,
    rank: int,
    rows: tuple[int, int] | None,
    order: float = 2.0,
) -> list[Tensor]:
    """A gradient as pieces whose norms, over the tensor ranks, make the whole one's: elements that n ranks own count
    1 / n on each.

    Args:
        grad: of a shard, or of the given rows of it.
        spec: how the parameter is split, if it is.
        rank: the tensor rank.
        rows: first row and one after the last.
        order: of the norms.
    """
    if spec is None or not spec.shared:
        return [grad]
    first, last = rows or (0, spec.spec(rank).local_shape[0])
    parts = []
    for start, stop, owners in spec.pieces(rank):
        if spec.dim == 0:
            start, stop = (min(max(edge, first), last) - first for edge in (start, stop))
        piece = grad.narrow(spec.dim, start, stop - start)
        parts.append(piece / owners ** (1 / order))
    return parts


def clip_by_norm(parameters: Iterable[Tensor], max_norm: float, parallel: ParallelModule, mesh: ParallelMesh) -> None:
    """Scale all gradients by max_norm / norm where the norm is larger, as torch.nn.utils.clip_grad_norm_ does."""
    parameters = list(parameters)
    clip_grads_with_norm_(parameters, max_norm, global_norm(parameters, parallel, mesh))


def _norm(tensors: list[Tensor], device: torch.device, order: float) -> Tensor:
    """() float64, on a device; rows may be offloaded, and what is not divided is not."""
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    return get_total_norm(tensors, order).double().to(device, non_blocking=True)
