"""How much each microbatch counts in the loss of its batch.

A scalar loss does not say what it averaged. Where the step itself calls `F.cross_entropy` or `F.nll_loss` with a mean,
the number of targets counted there is the weight, so that a masked language model's loss is the batch's, and not the
mean of the microbatches' means. Otherwise the user's `loss_weight(batch)` says it, or else the number of samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class TargetCount(TorchFunctionMode):
    """Counts the targets over which the losses of one microbatch are averaged.

    A mean over no target at all is nan, with a gradient of nan. Here it is 0, since the other microbatches' targets
    make up the batch's mean.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[Tensor] = []
        """One scalar per averaged loss: the number of its targets, or the sum of their class weights."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.cross_entropy or func is F.nll_loss:
            return self._averaged(func, args, kwargs)
        return func(*args, **kwargs)

    def _averaged(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
        given = dict(zip(names, args, strict=False)) | kwargs
        legacy = given.get("size_average") is not None or given.get("reduce") is not None
        target, by_class = given["target"], given.get("weight")
        if legacy or given.get("reduction", "mean") != "mean" or target.is_floating_point():
            return func(*args, **kwargs)
        counted = target != given.get("ignore_index", -100)
        weights = counted if by_class is None else by_class[target.masked_fill(~counted, 0)] * counted
        count = weights.sum()
        self.counts.append(count)
        total = func(**{**given, "reduction": "sum"})
        return torch.where(count > 0, total / count, total)

    def weight(self, samples: int) -> Tensor | float:
        """The weight of the microbatch.

        Args:
            samples: its rows, for steps whose losses are averaged over nothing that was seen, or over different things.
        """
        return self.counts[0] if len(self.counts) == 1 else float(samples)
