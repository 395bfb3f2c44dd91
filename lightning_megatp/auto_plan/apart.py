"""A block's run with what couples the features of a token, such as a norm, left aside: for a second probe."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_megatp.shim.torch import tree_leaves, tree_map
from lightning_megatp.tensor.functions import couples, operation_name


class StatisticsApart(TorchFunctionMode):
    """Numbers that stand for all features of a token (a mean, the size that a norm divides by) are constants: gradients
    reach what each feature itself is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.met = False
        """Whether there were any."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, operation_name(func)
        if name in _NORMS:
            self.met = True
            return _NORMS[name](*args, **kwargs)
        result = func(*args, **kwargs)
        if not couples(name) or not args or not _is_of_all_features(result, args[0]):
            return result
        self.met = True
        return tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, result)


def _is_of_all_features(result: Any, x: Any) -> bool:
    """Whether an operation made one number of the features of each token."""
    tensors = [y for y in tree_leaves(result) if isinstance(y, Tensor)]
    return (
        isinstance(x, Tensor)
        and x.dim() > 1
        and x.shape[-1] > 1
        and bool(tensors)
        and all(y.dim() == x.dim() and y.shape[-1] == 1 for y in tensors)
    )


def _layer_norm(
    x: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    *of_torch: Any,
) -> Tensor:  # fmt: skip
    return _scaled(x, F.layer_norm(x, normalized_shape, None, None, eps), weight, bias)


def _rms_norm(x: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return _scaled(x, F.rms_norm(x, normalized_shape, None, eps), weight)


def _normalize(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return _scaled(x, F.normalize(x, *args, **kwargs))


def _scaled(x: Tensor, y: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """The value y w + b, whose gradient is that of x w, element by element."""
    y = y.detach() + (x - x.detach())
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


_NORMS: dict[str, Callable[..., Tensor]] = {
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "normalize": _normalize,
}
