"""RandomWatch: sees which random operations of a step lie between a column and a row layer.

There every tensor rank has other features, so its random numbers need a stream of their own. The operations may be
functional (`F.dropout`, the dropout of scaled_dot_product_attention), so no look at the modules finds them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_megatp.shim.torch import is_fake, tree_leaves
from lightning_megatp.tensor.context import TensorContext
from lightning_megatp.tensor.functions import check_caller, operation_name, operation_names
from lightning_megatp.tensor.lineage import enters_region


class RandomWatch(TorchFunctionMode):
    """Active around a user's step; costs Python time at every operation, so it is for single steps.

    Args:
        context: of the parallel layers.
    """

    def __init__(self, context: TensorContext) -> None:
        super().__init__()
        self.context = context

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        check_caller(func)
        kwargs = kwargs or {}
        context = self.context
        if context.open_region is not None and not context.open_region.tracked and context.user_code:
            name = operation_name(func)
            if draws_random(name, args, kwargs):
                dry = any(map(is_fake, tree_leaves((args, kwargs))))
                if not dry:
                    self._check_operand(name, args)
                context.draw_inside(_device(args, kwargs), dry)
        return func(*args, **kwargs)

    def _check_operand(self, name: str, args: tuple[Any, ...]) -> None:
        """Whole values need the same random numbers on every rank, and there is one stream between the layers."""
        x = args[0] if args else None
        region = self.context.open_region
        if isinstance(x, Tensor) and x.grad_fn is not None and region is not None and not enters_region(x):
            raise RuntimeError(
                f"MegaTPStrategy: `{name}` draws random numbers for a value that is the same on all tensor ranks,"
                f" between the column and the row layers of `{region.name or 'the LightningModule'}`, where every rank"
                " has its own stream. Compute it before the column layers, give these `global_sizes: true`, or leave"
                " them out of the plan."
            )


def draws_random(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws from the default generator."""
    if name == "scaled_dot_product_attention":
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    if name in _DROPOUT:
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        return bool(p) and bool(args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True)))
    return name in _RANDOM and kwargs.get("generator") is None


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    tensor = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), None)
    return tensor.device if tensor is not None else torch.device(kwargs.get("device") or "cpu")


_DROPOUT = operation_names("dropout alpha_dropout feature_alpha_dropout dropout1d dropout2d dropout3d")
_RANDOM = operation_names(
    """
    bernoulli bernoulli_ rand randn rand_like randn_like randint randint_like randperm normal normal_ uniform_ random_
    exponential_ geometric_ multinomial poisson rrelu gumbel_softmax
    """
)
