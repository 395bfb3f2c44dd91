"""Blocks without randomness, rounding and recomputation: probing and proving compare numbers in float64, and in the
backward of simulated ranks nobody runs a layer again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_megatp.shim.autograd import without_checkpoints
from lightning_megatp.tensor.draws import DROPOUTS, draws_random
from lightning_megatp.tensor.functions import operation_name, operation_names
from lightning_megatp.tensor.reentrant import without_reentrant

_RANDOM_IN_PLACE = operation_names("bernoulli_ normal_ random_ exponential_ geometric_ log_normal_ cauchy_")
_RANDOM = operation_names("rand randn rand_like randn_like")
_GROUPED = frozenset(["grouped_mm", "_grouped_mm"])
_CASTS = operation_names("float half bfloat16")
_NARROW = (torch.float32, torch.float16, torch.bfloat16)


class _Exact(TorchFunctionMode):
    """Dropout keeps everything, other random numbers are one half, and what asks for a narrower float gets float64:
    a norm that computes in float32 would hide differences below 1e-7.

    Args:
        draw: is told the first operand of every operation that would draw.
    """

    def __init__(self, draw: Callable[[Any], None] | None) -> None:
        super().__init__()
        self._draw = draw

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = {key: _wide(x) if key == "dtype" else x for key, x in (kwargs or {}).items()}
        name = operation_name(func)
        if self._draw is not None and args and draws_random(name, args, kwargs):
            self._draw(args[0])
        if name == "native_dropout":
            return args[0], torch.ones_like(args[0], dtype=torch.bool)
        if name in DROPOUTS and args:
            return args[0]
        if name == "scaled_dot_product_attention":
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs |= {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
        elif name == "multi_head_attention_forward":  # of nn.MultiheadAttention: what it calls is not seen
            kwargs |= {"training": False}
        elif name in ("to", "type", "softmax", "log_softmax"):
            args = tuple(map(_wide, args))
        elif name in _CASTS:
            return args[0].double()
        elif name == "uniform_" and args and isinstance(args[0], Tensor):  # torch.nn.init's has names alone
            return args[0].fill_(_middle(*args[1:], **kwargs))
        elif name in _RANDOM_IN_PLACE and args and isinstance(args[0], Tensor):
            return args[0].fill_(1)
        elif name in _RANDOM:
            return torch.zeros_like(func(*args, **kwargs)) + 0.5
        elif name == "multinomial":
            return _largest(*args, **kwargs)
        elif name == "gumbel_softmax":
            return _softmax(*args, **kwargs)
        elif name in _GROUPED and len(args) > 1 and args[1].dtype == torch.float64:
            return _grouped_product(*args, **kwargs)
        return func(*args, **kwargs)


def _largest(probabilities: Tensor, num_samples: int, replacement: bool = False, **_: Any) -> Tensor:
    """In place of samples of a distribution: what is most likely."""
    return probabilities.topk(1 if replacement else num_samples, -1)[1].expand(*probabilities.shape[:-1], num_samples)


def _softmax(logits: Tensor, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Tensor:
    """`F.gumbel_softmax` without noise."""
    odds = (logits / tau).softmax(dim)
    if not hard:
        return odds
    chosen = torch.zeros_like(odds).scatter(dim, odds.argmax(dim, keepdim=True), 1.0)
    return chosen - odds.detach() + odds


def _grouped_product(x: Tensor, weights: Tensor, offs: Tensor | None = None, **options: Any) -> Tensor:
    """Rows up to each offset times the group's weight, (n, k) x (groups, k, m) -> (n, m), which torch doesn't have in
    float64. Rows behind the last offset belong to no group."""
    if offs is None or options.get("bias") is not None or (x.dim(), weights.dim()) != (2, 3):
        raise NotImplementedError("a grouped product of other forms in float64")
    stops = offs.tolist()
    parts = [x[start:stop] @ weight for start, stop, weight in zip([0, *stops], stops, weights, strict=False)]
    return torch.cat([*parts, x.new_zeros(len(x) - stops[-1], weights.shape[-1])])


def _middle(start: float = 0.0, stop: float = 1.0, **bounds: Any) -> float:
    """The middle of what `uniform_` draws between: inside of the bounds, as an index that is made of it has to be."""
    return float(bounds.get("from", start) + bounds.get("to", stop)) / 2


def _wide(x: Any) -> Any:
    return torch.float64 if isinstance(x, torch.dtype) and x in _NARROW else x


@contextlib.contextmanager
def exact() -> Iterator[None]:
    """Around a block's run. New tensors are float64 too, and activation checkpoints keep everything; these are settings
    of the process, not of the thread."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with exact_in_thread(), without_checkpoints(), without_reentrant():
            yield
    finally:
        torch.set_default_dtype(before)


def exact_in_thread(draw: Callable[[Any], None] | None = None) -> contextlib.AbstractContextManager[Any]:
    """`exact`, without the settings of the process, for a thread that a thread in `exact` waits for."""
    return _Exact(draw)
