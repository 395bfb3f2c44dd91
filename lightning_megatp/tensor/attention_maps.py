"""Attention weights that a Hugging Face model collects (`output_attentions=True`), of layers that are split by heads.

Its hooks take them inside of a tensor region, of which nobody else asks for them: a rank has those of its own heads.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_megatp.shim.transformers import attention_recorders, collects_attentions
from lightning_megatp.tensor.collectives import gather_from_region
from lightning_megatp.tensor.layers import ColumnParallel
from lightning_megatp.tensor.shards import gathered

_HEADS = 1
"""The dim of the heads in attention weights (batch, heads, queries, keys)."""


class WholeMaps:
    """Forward hook of an attention: while its model collects attention weights, those that it returns are of all heads.

    Args:
        index: of them in what the module returns.
        layer: the first one inside that is split by heads.

    Communication: of a map with n numbers on t ranks, where it is collected, (t - 1) / t * n forward; none backward.
    """

    def __init__(self, index: int, layer: ColumnParallel) -> None:
        self.index, self.layer = index, layer

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not isinstance(output, tuple) or not collects_attentions():
            return None
        weights = output[self.index]
        if not isinstance(weights, Tensor) or weights.dim() <= _HEADS:
            return None
        index = self.index % len(output)
        return (*output[:index], self._whole(weights), *output[index + 1 :])

    def _whole(self, weights: Tensor) -> Tensor:
        if self.layer.global_sizes:
            return gathered(weights)
        own, sizes, context = weights.shape[_HEADS], self.layer.sizes, self.layer.context
        heads = [own * size // sizes[context.rank] for size in sizes]
        return gather_from_region(weights.movedim(_HEADS, -1), context.group, heads).movedim(-1, _HEADS)


def return_whole_maps(module: nn.Module) -> None:
    """Let the attentions of Hugging Face models return whole weights where these are collected.

    Args:
        module: split by now.
    """
    for part, index in attention_recorders(module):
        columns = (x for x in part.modules() if isinstance(x, ColumnParallel) and not x.gather_output)
        if (layer := next(columns, None)) is not None:
            part.register_forward_hook(WholeMaps(index, layer), prepend=True)  # the model's own may be there
