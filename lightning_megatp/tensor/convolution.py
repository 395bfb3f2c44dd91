"""torch's convolutions, of which each rank computes some output channels."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatp.plan.convolutions import channel_dim, input_ranges, own_groups
from lightning_megatp.plan.ranges import Ranges
from lightning_megatp.shim.modules import weight_norm_of
from lightning_megatp.tensor.features.shard import FeatureShard
from lightning_megatp.tensor.layers import ParallelLayer
from lightning_megatp.tensor.sequence import SequenceShard
from lightning_megatp.tensor.weight_norm import ComputesWeight, SplitWeightNorm, split_weight_norm


class ColumnParallelConvolution(ParallelLayer):
    """A convolution that runs its own forward on this rank's output channels, and gathers them.

    Input (batch, in_channels, ...) or (in_channels, ...), whole or a shard; output (batch, out_channels, ...) whole,
    with the channels last if they are in the input. `groups` and the numbers of channels stay those of the whole.

    Communication: an all-gather of the output forward; backward an all-reduce of the input's gradient, once for all
    convolutions that read the same tensor. With groups, of which a rank takes whole ones, each rank reads other
    channels, and their gradients are gathered: half the volume.
    """

    groups: int
    splits: dict[str, tuple[int, tuple[Ranges, ...]]]
    """Split parameter -> its dim and the ranges of every rank."""

    def _prepare(self) -> None:
        self._dim = channel_dim(self)
        self._inputs = input_ranges(self, self.by_rank)
        self._own_groups = own_groups(self, self.ranges)
        if (normed := weight_norm_of(self)) is not None:
            split_weight_norm(self, normed, SplitWeightNorm(self.context, normed.dim, self.splits[normed.direction]))

    @torch.compiler.disable
    def forward(self, input: Tensor, *output_size: Any, **options: Any) -> Tensor:
        self.context.meet(self.label)
        context = self.context
        with context.running(user_code=False):
            last = _is_channels_last(input, self._dim)
            x = self._enter(input)
            before = dict(self.__dict__)  # where a pipeline's dry run has what stands for freed parameters
            held: dict[str, Any] = dict(self._parameters)
            own = {name: self._own(name, *s) for name, s in self.splits.items() if name in held or name in before}
            for name in own:
                self.__dict__.pop(name, None)
            self.__dict__["_parameters"], self.groups = held | own, self._own_groups  # seen by the module's own code
            try:
                y = super(ParallelLayer, self).forward(x, *output_size, **options)
            finally:
                self.__dict__.update({name: before[name] for name in ("_parameters", "groups", *own) if name in before})
            return gather_channels(context.exchange, y, self._dim, self.by_rank, last)

    @property
    def any_weight(self) -> Tensor:
        weight: Tensor = operator.attrgetter(next(iter(self.splits)))(self)  # a weight norm's is not computed for this
        return weight

    def _enter(self, x: Tensor) -> Tensor:
        if self._inputs is None:
            return self.context.enter(x, self).value
        if isinstance(x, FeatureShard):
            x = x.whole("convolution")
        whole = x.whole() if isinstance(x, SequenceShard) else x
        own: Tensor = self.context.exchange.scatter(whole, self._dim, self._inputs)
        return own


def gather_channels(exchange: Any, y: Tensor, dim: int, by_rank: tuple[Ranges, ...], last: bool) -> Tensor:
    """All channels of what each rank computed some of.

    Args:
        exchange: a `GroupExchange`, or a simulated one.
        last: channels lie last, in what is sent and in the result. All ranks must say the same: their own outputs can't
            tell, since of a single channel both layouts look alike, and kernels may choose by the number of channels.
    """
    if last:
        gathered: Tensor = exchange.gather(y.movedim(dim, -1), -1, by_rank).movedim(-1, dim)
        return gathered
    whole: Tensor = exchange.gather(y, dim, by_rank)
    return whole


def _is_channels_last(x: Tensor, dim: int) -> bool:
    """Whether the channels of a whole input lie last, and so do those of torch's result, which a convolution over one
    dim always returns contiguous."""
    if isinstance(x, (FeatureShard, SequenceShard)) or dim == -2:
        return False
    return x.movedim(dim, -1).is_contiguous() and not x.is_contiguous()


def convolution_kind(layer: nn.Module) -> type[ColumnParallelConvolution]:
    """The parallel class for one of torch's convolutions."""
    normed = weight_norm_of(layer)
    computes = (ComputesWeight,) if normed is not None and normed.is_hook else ()
    kind: type[ColumnParallelConvolution] = _combined(type(layer), computes)  # type: ignore[arg-type]
    return kind


@functools.cache
def _combined(original: Any, more: tuple[type, ...]) -> Any:
    bases = (*more, ColumnParallelConvolution, original)
    return type(f"ColumnParallel{original.__name__}", bases, {"__module__": __name__})
