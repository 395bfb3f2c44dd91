"""Rules of operations over the sharded dim itself, where a few numbers stand for all features: sums, means, spreads,
norms. Each rank computes those of its own features, and they are added up; features stay where they are.

Communication: one all-reduce of a number per token for a sum, two where a mean comes before it; in backward as many for
norms, whose numbers are used on features again. Sixteen bits are added up in 32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatp.tensor.features.call import Call, Operand
from lightning_megatp.tensor.features.decision import Decision, Enter
from lightning_megatp.tensor.features.layout import FeatureLayout
from lightning_megatp.tensor.features.rules.operands import align, dims_of, single

_EUCLIDEAN = (None, 2, 2.0, "fro")


@dataclass(frozen=True)
class _Features:
    """Dims of a tensor, one of them sharded.

    Args:
        size: elements in them, on all ranks together.
    """

    layout: FeatureLayout
    dims: tuple[int, ...]
    keepdim: bool
    size: int

    @staticmethod
    def of(x: Operand, dims: Sequence[int], keepdim: bool = True) -> _Features | None:
        """None where ranks don't add up: several own the same, or there are no numbers to add."""
        layout = x.layout
        if layout is None or layout.dim not in dims or not layout.disjoint or not x.dtype.is_floating_point:
            return None
        return _Features(layout, tuple(dims), keepdim, math.prod(x.shape[dim] for dim in set(dims)))

    def sum(self, x: Tensor, keepdim: bool | None = None) -> Tensor:
        """Over all features, on every rank."""
        kept = self.keepdim if keepdim is None else keepdim
        total: Tensor = self.layout.context.exchange.reduce(x.sum(self.dims, keepdim=kept))
        return total

    def use(self, x: Tensor) -> Tensor:
        """A number for all features, on this rank's."""
        return Enter(self.layout.context)(x)

    def centred(self, x: Tensor) -> Tensor:
        """Without the mean."""
        return x - self.use(self.sum(x, keepdim=True) / self.size)

    def length(self, x: Tensor) -> Tensor:
        """The Euclidean norm."""
        return _root(self.sum(x.square()))


def total(call: Call) -> Decision | None:
    """sum and mean."""
    features = _reduced(call, 1, 2)
    given = call.argument(3, "dtype")
    if features is None:
        return None

    def run(tensors: Sequence[Tensor]) -> Tensor:
        result = features.sum(wide(tensors[0] if given is None else tensors[0].to(given)))
        result = result / features.size if call.name == "mean" else result
        return result.to(given or dtype_of(tensors[0], torch.sum if call.name == "sum" else torch.mean))

    return Decision(None, run=run)


def length(call: Call) -> Decision | None:
    """norm and vector_norm: Euclidean ones."""
    features = _reduced(call, 2, 3)
    if features is None or call.argument(1, "p", "ord") not in _EUCLIDEAN or call.argument(4, "dtype") is not None:
        return None
    return Decision(
        None, run=lambda tensors: features.length(wide(tensors[0])).to(dtype_of(tensors[0], torch.linalg.vector_norm))
    )


def spread(call: Call) -> Decision | None:
    """var and std; with the mean, too."""
    features = _reduced(call, 1, 2)
    if features is None or len(call.args) > 2:
        return None
    correction = call.kwargs.get("correction", int(bool(call.kwargs.get("unbiased", True))))

    def run(tensors: Sequence[Tensor]) -> Any:
        x = wide(tensors[0])
        found = features.sum(features.centred(x).square()) / max(features.size - (correction or 0), 0)
        found = (_root(found) if call.name.startswith("std") else found).to(tensors[0].dtype)
        return (found, (features.sum(x) / features.size).to(found.dtype)) if call.name.endswith("_mean") else found

    return Decision(None, run=run)


def normalise(call: Call) -> Decision | None:
    """layer_norm and rms_norm over dims of which one is sharded."""
    x, shape = call.operands[0], call.argument(1, "normalized_shape")
    features = None
    if x.sharded and isinstance(shape, (tuple, list)) and tuple(shape) == tuple(x.shape[-len(shape) :]):
        features = _Features.of(x, range(-len(shape), 0))
    aligned = align(call, [call.layout.dim] * len(call.operands))
    centred = call.name == "layer_norm"
    eps = call.argument(4, "eps", default=1e-5) if centred else call.argument(3, "eps")
    if features is None or aligned is None or aligned[1] != call.layout.by_rank:
        return None
    if eps is None:
        if x.dtype.itemsize < 4:
            return None
        eps = torch.finfo(x.dtype).eps
    weight, bias = call.argument(2, "weight"), call.argument(3, "bias") if centred else None

    def run(tensors: Sequence[Tensor]) -> Tensor:
        y = wide(tensors[x.position])
        y = features.centred(y) if centred else y
        y = y * features.use(torch.rsqrt(features.sum(y.square()) / features.size + eps))
        y = y if weight is None else y * tensors[weight.position]
        y = y if bias is None else y + tensors[bias.position]
        return y.to(dtype_of(tensors[x.position], _LIKE[call.name]))

    return Decision(call.layout, aligned[0], run)


def directions(call: Call) -> Decision | None:
    """F.normalize."""
    x, dims = single(call), dims_of(call.operands[0], call.argument(2, "dim", default=1))
    features = None if x is None or not dims else _Features.of(x, dims)
    if features is None or call.argument(1, "p", default=2.0) not in _EUCLIDEAN[1:3]:
        return None
    eps = call.argument(3, "eps", default=1e-12)

    def run(tensors: Sequence[Tensor]) -> Tensor:
        y = wide(tensors[0])
        y = y / features.use(features.length(y).clamp_min(eps))
        return y.to(dtype_of(tensors[0], F.normalize))

    return Decision(call.layout, run=run)


_LIKE: dict[str, Callable[..., Tensor]] = {
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
}


def _reduced(call: Call, at: int, keep_at: int) -> _Features | None:
    x, given = single(call), call.argument(at, "dim", "axis")
    if x is None:
        return None
    everything = given is None or (isinstance(given, (tuple, list)) and not given)
    dims = [*range(-x.ndim, 0)] if everything else dims_of(x, given)
    return None if dims is None else _Features.of(x, dims, bool(call.argument(keep_at, "keepdim", "keepdims")))


def wide(x: Tensor) -> Tensor:
    """In at least 32 bits."""
    return x.float() if x.dtype.itemsize < 4 else x


def dtype_of(x: Tensor, operation: Callable[..., Tensor]) -> torch.dtype:
    """The dtype of what an operation makes of such a tensor; autocast has a say in it."""
    return operation(x.new_zeros(1, 1)).dtype if torch.is_autocast_enabled(x.device.type) else x.dtype


def _root(x: Tensor) -> Tensor:
    """The square root; where it is zero, so is its gradient, as that of torch's norms and deviations."""
    positive = x != 0
    return torch.where(positive, x, 1.0).sqrt() * positive
