"""What an optimizer keeps per parameter: asked of a tiny twin of it, which steps once."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatp.containers import parameters_of

_SIZES = (2, 3, 5, 7, 11, 13, 17, 19)
"""Sizes of the dims of a twin's parameters; all different, so that a state's dims can be told."""


@dataclass(frozen=True)
class StateTensor:
    """One tensor of an optimizer's state: a moment, a factor of one, a number of steps."""

    dims: tuple[int | None, ...]
    """For each of its dims the parameter's dim that it follows; None for one that has its own, fixed size."""
    sizes: tuple[int, ...]
    dtype: torch.dtype

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes for a parameter of a shape."""
        sizes = (own if dim is None else shape[dim] for dim, own in zip(self.dims, self.sizes, strict=True))
        return torch.Size(sizes).numel() * self.dtype.itemsize


States = Mapping[int, Sequence[StateTensor]]
"""id(parameter) -> the tensors of its state."""


def states_of(optimizers: Iterable[Optimizer]) -> dict[int, list[StateTensor]]:
    """What optimizers keep for each of their parameters; for none that don't require a gradient.

    Args:
        optimizers: not changed; their parameters may be on meta.

    Raises:
        Exception: of the optimizer's own code, whose step may need more than gradients.
    """
    found: dict[int, list[StateTensor]] = {}
    for optimizer in optimizers:
        parameters = parameters_of(optimizer)
        twins = {id(p): _twin(p) for p in parameters}
        memo: dict[int, Any] = dict(twins)
        memo[id(optimizer.state)] = defaultdict(dict)
        twin = copy.deepcopy(optimizer, memo)
        with torch.enable_grad():
            twin.step()
        for parameter in parameters:
            state = twin.state.get(twins[id(parameter)], {})
            tensors = [x for x in state.values() if isinstance(x, Tensor)]
            found[id(parameter)] = [_rule(x, parameter.dim()) for x in tensors]
    return found


def optimizers_in(configured: Any) -> list[Optimizer]:
    """The optimizers in whatever `configure_optimizers` returned."""
    if isinstance(configured, Optimizer):
        return [configured]
    if isinstance(configured, Mapping):
        return optimizers_in(configured.get("optimizer"))
    if isinstance(configured, (list, tuple)):
        return [optimizer for entry in configured for optimizer in optimizers_in(entry)]
    return []


def _twin(parameter: Tensor) -> nn.Parameter:
    twin = nn.Parameter(torch.ones(_SIZES[: parameter.dim()], dtype=parameter.dtype), parameter.requires_grad)
    twin.grad = torch.ones_like(twin) if parameter.requires_grad else None
    return twin


def _rule(x: Tensor, dims: int) -> StateTensor:
    follows = {size: dim for dim, size in enumerate(_SIZES[:dims])}
    return StateTensor(tuple(follows.get(size) for size in x.shape), tuple(x.shape), x.dtype)
