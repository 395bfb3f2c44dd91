"""The norm of all gradients, each element once, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.module import ParallelModule


def global_norm(parameters: Iterable[Tensor], parallel: ParallelModule, mesh: ParallelMesh, p: float = 2.0) -> Tensor:
    """The p-norm of the gradients of the unsplit model.

    Args:
        parameters: whole ones and shards; those without a gradient don't count.
        p: 2.0, any positive number, or inf.

    Returns:
        A scalar, the same on every rank.

    Communication: one all-reduce of one element over tp, and one over pp.
    """
    whole: list[Tensor] = []
    split: list[Tensor] = []
    for parameter in parameters:
        grad, spec = parameter.grad, parallel.spec(parameter)
        if grad is None or id(parameter) in parallel.counted_elsewhere:
            continue
        if spec is None:
            whole.append(grad)
        elif not spec.shared:
            split.append(grad)
        else:  # elements that n ranks own count 1 / n on each
            for start, stop, owners in spec.pieces(mesh.rank("tp")):
                piece = grad.narrow(spec.dim, start, stop - start)
                split.append(piece if p == torch.inf else piece / owners ** (1.0 / p))
    if mesh.size("tp") == mesh.size("pp") == 1:
        return get_total_norm(whole + split, p)
    like = whole[0] if whole else split[0] if split else torch.zeros((), device=mesh.device)
    parts = torch.stack([_norm(split, p, like), _norm(whole, p, like)])
    if p == torch.inf:
        dist.all_reduce(parts, op=dist.ReduceOp.MAX, group=mesh.group("pp", "tp"))
        return parts.amax()
    powers = parts**p
    if mesh.size("tp") > 1:
        dist.all_reduce(powers[0], group=mesh.group("tp"))
    total = powers.sum()
    if mesh.size("pp") > 1:
        dist.all_reduce(total, group=mesh.group("pp"))
    return total ** (1.0 / p)


def clip_by_norm(
    parameters: Iterable[Tensor], max_norm: float, parallel: ParallelModule, mesh: ParallelMesh, p: float = 2.0
) -> Tensor:
    """Scale all gradients by max_norm / norm where the norm is larger, as torch.nn.utils.clip_grad_norm_ does."""
    parameters = [parameter for parameter in parameters if parameter.grad is not None]
    norm = global_norm(parameters, parallel, mesh, p)
    clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def _norm(tensors: list[Tensor], p: float, like: Tensor) -> Tensor:
    dtype = torch.promote_types(like.dtype, torch.float32)
    return get_total_norm(tensors, p).to(dtype) if tensors else torch.zeros((), dtype=dtype, device=like.device)
