"""StepWatch: sees the operations of one step, to find what no plan can know.

Two things are looked for. A sharded parameter that the step also uses outside its own layer (a regulariser over
`self.parameters()`, `F.linear(h, self.tok.weight)`, `self.tok.weight.shape`): it is gathered on the spot, so this
step is right already, and reported, so that it stays whole from then on. And random operations between a column and a
row layer, which need a stream of their own on each tensor rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_megatp.plan.shard import ShardedTensorSpec
from lightning_megatp.shim.torch import tree_leaves, tree_map
from lightning_megatp.tensor.context import TensorContext
from lightning_megatp.tensor.parameters import gather_parameter
from lightning_megatp.tensor.sequence import operation_name, operation_names


class StepWatch(TorchFunctionMode):
    """Active around a user's step; costs Python time at every operation, so it is for single steps.

    Args:
        context: of the parallel layers.
        sharded: id(parameter) -> its shards.
    """

    def __init__(self, context: TensorContext, sharded: Mapping[int, ShardedTensorSpec]) -> None:
        super().__init__()
        self.context = context
        self.sharded = sharded
        self.outside: dict[int, tuple[Tensor, str]] = {}
        """id(parameter) -> (parameter, the operation it met outside its layer)."""
        self.paused = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused or self.context.inside_layer:
            return func(*args, **kwargs)
        name = operation_name(func)
        if name in _HARMLESS:
            return func(*args, **kwargs)
        if self.context.open_region is not None and not self.context.stream.active and _is_random(name, args, kwargs):
            self.context.draw_inside(_device(args, kwargs))
        if any(id(x) in self.sharded for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)):
            self.paused = True
            try:
                args, kwargs = tree_map(lambda x: self._whole(x, name), (args, kwargs))
            finally:
                self.paused = False
        return func(*args, **kwargs)

    def _whole(self, x: Any, operation: str) -> Any:
        if not isinstance(x, Tensor) or id(x) not in self.sharded:
            return x
        self.outside.setdefault(id(x), (x, operation))
        return gather_parameter(x, self.sharded[id(x)], self.context.group)


def _is_random(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if name == "scaled_dot_product_attention":
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    if name in ("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d", "dropout2d", "dropout3d"):
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        return bool(p) and bool(args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True)))
    return name in _RANDOM and kwargs.get("generator") is None


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    tensor = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), None)
    return tensor.device if tensor is not None else torch.device(kwargs.get("device") or "cpu")


_HARMLESS = operation_names(
    """
    dtype device layout requires_grad requires_grad_ is_leaf grad grad_fn is_cuda is_cpu is_meta is_sparse is_quantized
    is_nested is_floating_point is_complex is_inference names get_device backward register_hook __hash__
    register_post_accumulate_grad_hook
    """
)
_RANDOM = operation_names(
    """
    bernoulli bernoulli_ rand randn rand_like randn_like randint randint_like randperm normal normal_ uniform_ random_
    exponential_ geometric_ multinomial poisson rrelu gumbel_softmax
    """
)
