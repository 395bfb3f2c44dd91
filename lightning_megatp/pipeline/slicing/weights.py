"""How much each microbatch counts in the loss of its batch.

A scalar loss does not say what it averaged. Where the step itself calls `F.cross_entropy` or `F.nll_loss` with a mean,
the number of targets counted there is the weight, so that a masked language model's loss is the batch's, and not the
mean of the microbatches' means. Otherwise the user's `loss_weight(batch)` says it, or else the number of samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_megatp.shim.torch import WithoutMode


class TargetCount(TorchFunctionMode):
    """Counts the targets over which the losses of one microbatch are averaged.

    A mean over no target at all is nan, with a gradient of nan. Here it is 0, since the other microbatches' targets
    make up the batch's mean.

    Args:
        look_inside: the units inside of which to look for losses; None for all. A mode costs time at every operation.
        closed: whether not to look inside of a unit, of those: the compiler takes a mode into its graphs.
    """

    def __init__(
        self, look_inside: Collection[str] | None = None, closed: Callable[[str], bool] = lambda unit: False
    ) -> None:
        super().__init__()
        self.with_losses: set[str] = set()
        """The units inside of which there were some."""
        self._look_inside, self._closed, self._unit = look_inside, closed, ""
        self._paused = False
        self.own_reduction: str | None = None
        """What the step asked for instead of a mean, to average by itself."""
        self.means: list[Tensor] = []
        """What was averaged."""
        self._by_target: dict[Hashable, tuple[Tensor, Tensor]] = {}

    @property
    def counts(self) -> list[Tensor]:
        """One scalar per kind of targets that was averaged over: their number, or the sum of their class weights."""
        return [count for count, _ in self._by_target.values()]

    def inside(self, unit: str) -> contextlib.AbstractContextManager[None]:
        """Around a call of a unit."""
        if (self._look_inside is not None and unit not in self._look_inside) or (unit and self._closed(unit)):
            return WithoutMode(self)
        return self._looking_inside(unit)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around a metric, whose averages are no losses."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @contextlib.contextmanager
    def _looking_inside(self, unit: str) -> Iterator[None]:
        self._unit = unit
        try:
            yield
        finally:
            self._unit = ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (func is F.cross_entropy or func is F.nll_loss) and not self._paused:
            self.with_losses.add(self._unit)
            return self._averaged(func, args, kwargs)
        return func(*args, **kwargs)

    def _averaged(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
        given = dict(zip(names, args, strict=False)) | kwargs
        legacy = given.get("size_average") is not None or given.get("reduce") is not None
        target, by_class = given["target"], given.get("weight")
        reduction = given.get("reduction", "mean")
        if legacy or reduction != "mean" or target.is_floating_point():
            self.own_reduction = None if legacy or reduction == "mean" else reduction
            return func(*args, **kwargs)
        ignored = given.get("ignore_index", -100)
        counted = target != ignored
        weights = counted if by_class is None else by_class[target.masked_fill(~counted, 0)] * counted
        count = weights.sum()
        by = target.data_ptr(), target.shape, target.stride(), ignored, None if by_class is None else id(by_class)
        self._by_target[by] = count, target  # kept alive, so that its address means it
        total = func(**{**given, "reduction": "sum"})
        mean: Tensor = total / torch.where(count > 0, count, torch.ones_like(count))
        self.means.append(mean.detach().clone())  # a step may add to it in place
        return mean

    def weight(self, samples: Callable[[], int]) -> Tensor | float:
        """The weight of the microbatch.

        Args:
            samples: its rows, for steps whose losses are averaged over nothing that was seen, or over different things.
        """
        return self.counts[0] if len(self.counts) == 1 else float(samples())
