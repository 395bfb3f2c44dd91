"""Operations on a shard that are no computation on its features: what it is asked about itself, and the cross-entropy.

Each takes (function, name, arguments, keyword arguments), the first argument a FeatureShard, and returns
(True, what the operation returns), or (False, None) where it runs as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from lightning_megatp.tensor.shards import METADATA, Shard, becomes_leaf

Special = Callable[[Callable[..., Any], str, tuple[Any, ...], dict[str, Any]], tuple[bool, Any]]


def _metadata(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    x = args[0]
    if becomes_leaf(func, name, args):
        return False, None
    return True, id(x) if name == "__hash__" else func(x.plain, *args[1:], **kwargs)


def _shape(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    x = args[0]
    shape = x.features.shape(x.plain.shape)
    if name == "size":
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        return True, shape if dim is None else shape[dim]
    if name == "__len__":
        return True, shape[0]
    return True, shape if name == "shape" else shape.numel()


def _data(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    x = args[0]
    if len(args) > 1:
        return False, None
    return True, x.wrap(x.plain.data, x.features)


def _new(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """A tensor of a shard's type and device: whole, or of this rank's features where it has as many in that dim, since
    it will be filled with such."""
    x, rest = args[0], args[1:]
    if any(isinstance(y, Shard) for y in rest):
        return False, None
    given, values = (rest[:1], rest[1:]) if name == "new_full" else (rest, ())
    size = [*given[0]] if len(given) == 1 and isinstance(given[0], (tuple, list)) else [*given]
    layout = x.features
    fits = len(size) == x.plain.dim() and all(type(n) is int for n in size) and size[layout.dim] == layout.size
    if name == "new_tensor" or not fits or layout.replicated or not layout.disjoint:
        return True, func(x.plain, *rest, **kwargs)
    size[layout.dim] = x.plain.shape[layout.dim]
    return True, x.wrap(func(x.plain, size, *values, **kwargs), layout)


def _iterate(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    return True, iter(args[0].unbind(0))


_CROSS_ENTROPY = ["input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing"]


def _cross_entropy(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, Any]:
    """F.cross_entropy of logits whose classes are split: no rank holds a whole row. What is asked wrongly goes to
    torch's."""
    given = {**dict(zip(_CROSS_ENTROPY, args, strict=False)), **kwargs}
    logits, target, weight = given.pop("input", None), given.pop("target", None), given.get("weight")
    if func is not F.cross_entropy or not _is_plain(target, False):
        return False, None
    layout, shape = logits.features, logits.features.shape(logits.plain.shape)
    ndim = len(shape)
    rows = shape[:1] + shape[2:] if ndim > 1 else shape[:0]
    classes_are_split = not layout.replicated and layout.disjoint and layout.dim == min(1, ndim - 1) - ndim
    legal = (
        target.shape == rows
        and given.pop("size_average", None) is None
        and given.pop("reduce", None) is None
        and given.get("reduction", "mean") in ("none", "mean", "sum")
        and 0.0 <= given.get("label_smoothing", 0.0) <= 1.0
        and (weight is None or (_is_plain(weight, True) and weight.shape == (layout.size,)))
    )
    exchange = layout.context.exchange
    if not classes_are_split or not legal or not hasattr(exchange, "cross_entropy"):
        return False, None
    local = logits.plain.movedim(layout.dim, -1)
    return True, exchange.cross_entropy(local, target, layout.own, **given)


def _is_plain(x: Any, floating: bool) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, Shard) and x.is_floating_point() == floating


SPECIAL: dict[str, Special] = {
    **dict.fromkeys(METADATA | {"is_contiguous"}, _metadata),
    **dict.fromkeys(["shape", "size", "numel", "nelement", "__len__"], _shape),
    **dict.fromkeys(["new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"], _new),
    "data": _data,
    "__iter__": _iterate,
    "cross_entropy": _cross_entropy,
}
