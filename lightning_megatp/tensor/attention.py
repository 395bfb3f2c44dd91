"""`nn.MultiheadAttention` split by its heads.

Shapes: b batch, l queries, s keys, e embed_dim, h heads of all ranks, n heads of this rank, d head_dim.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from lightning_megatp.plan.ranges import shard_ranges
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.tensor.collectives import copy_to_region, gather_from_region, reduce_from_region
from lightning_megatp.tensor.entry import Entry
from lightning_megatp.tensor.layers import ParallelLayer, RowParallel


class OutputProjection(RowParallel, NonDynamicallyQuantizableLinear):
    """The output projection of a split attention: weight (e, n * d)."""


class ParallelAttention(ParallelLayer, nn.MultiheadAttention):
    """An nn.MultiheadAttention of which each rank computes some heads.

    Takes and returns whole values, or SequenceShards, as the original does; masks are those of all heads. `num_heads`
    and `embed_dim` stay those of the whole, since nothing outside of this module sees a part.

    Communication: `copy_to_region` or `gather_sequence` of each of query, key and value that is another tensor
    (gathered again in backward, see `Entry`), and the output projection's `reduce_from_region` or
    `reduce_scatter_sequence`; with `need_weights` (the default, which nn.TransformerEncoderLayer and its kin turn off)
    also `reduce_from_region` of b * l * s numbers, or, for the weights of each head, `gather_from_region` of h times as
    many.
    """

    sequence_dim: int | None = None

    def _prepare(self) -> None:
        self._packed = shard_ranges(3 * self.embed_dim, self.context.size, 3, self.head_dim)
        self._heads = [size // self.head_dim for size in self.sizes]
        self._first_head = self.ranges[0][0] // self.head_dim
        OutputProjection.adopt(
            self.out_proj, self.context, self.by_rank, f"{self.label}.out_proj", sequence_dim=self.sequence_dim
        )

    @torch.compiler.disable
    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As `nn.MultiheadAttention.forward`."""
        self.context.meet(self.label)
        with self.context.running(user_code=False):
            if is_causal and attn_mask is None:
                raise RuntimeError(
                    f"MegaTPStrategy: `{self.label}` needs `attn_mask` too where is_causal=True is given."
                )
            is_causal = is_causal and key_padding_mask is None and not need_weights
            mask = None if is_causal else self._mask(query, key, attn_mask, key_padding_mask)
            entered = self._enter(query, key, value)
            q, k, v = self._project(*entered)
            y, weights = self._attend(q, k, v, mask, is_causal, need_weights)
            output = self.out_proj.forward(self._joined(y, query.dim() == 3))
            if weights is not None:
                weights = self._all_heads(weights, average_attn_weights)
                weights = weights if query.dim() == 3 else weights.squeeze(0)
            return output, weights

    def _enter(self, *inputs: Tensor) -> list[Entry]:
        """Bring query, key and value into the region, one that is given twice once."""
        if any(x.is_nested for x in inputs):
            raise ValueError(f"MegaTPStrategy: `{self.label}` is split and takes no nested tensors; give padded ones.")
        distinct = {id(x): x for x in inputs}
        entered = {key: self.context.enter(x, self) for key, x in distinct.items()}
        return [entered[id(x)] for x in inputs]

    @property
    def any_weight(self) -> Tensor:
        weight: Tensor = self._held("in_proj_weight" if self._qkv_same_embed_dim else "q_proj_weight")
        return weight

    def _readers(self) -> Sequence[tuple[Tensor, Tensor | None]]:
        """Weight and bias of self-attention; others read parts of the packed weight."""
        weight, bias = (dict.get(self.__dict__["_parameters"], f"in_proj_{name}") for name in ("weight", "bias"))
        return [] if weight is None or self.whole_parameters else [(weight, bias)]

    def _project(self, query: Entry, key: Entry, value: Entry) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs (b, l, e), (l, b, e) or (l, e) -> q (b, n, l, d), k and v (b, n, s, d)."""
        bias = None if self.in_proj_bias is None else self._own("in_proj_bias", 0, self._packed)
        if self._qkv_same_embed_dim and query is key and key is value:
            q, k, v = query.linear(self._own("in_proj_weight", 0, self._packed), bias).chunk(3, -1)
        else:
            biases = (None, None, None) if bias is None else bias.chunk(3)
            inputs = zip((query, key, value), self._weights(), biases, strict=True)
            q, k, v = (entry.linear(weight, bias) for entry, weight, bias in inputs)
        q, k, v = (self._by_head(x) for x in (q, k, v))
        if self.bias_k is not None:
            own = (self._own(name, 2) for name in ("bias_k", "bias_v"))
            k, v = (self._one_more(x, y.view(1, -1, 1, self.head_dim)) for x, y in zip((k, v), own, strict=True))
        if self.add_zero_attn:
            k, v = (self._one_more(x, x.new_zeros(1, 1, 1, 1)) for x in (k, v))
        return q, k, v

    def _weights(self) -> Sequence[Tensor]:
        """This rank's part of the weights of q, k and v: (n * d, e), or the width of key and value instead of e."""
        if self._qkv_same_embed_dim:
            return self._own("in_proj_weight", 0, self._packed).chunk(3)
        return [self._own(name, 0) for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")]

    def _by_head(self, x: Tensor) -> Tensor:
        """(b, l, n * d), (l, b, n * d) or (l, n * d) -> (b, n, l, d)."""
        x = x.unflatten(-1, (-1, self.head_dim))
        if x.dim() == 3:
            return x.transpose(0, 1).unsqueeze(0)
        return x.transpose(1, 2) if self.batch_first else x.permute(1, 2, 0, 3)

    def _joined(self, y: Tensor, batched: bool) -> Tensor:
        """(b, n, l, d) -> what the inputs were, with n * d features."""
        if not batched:
            return y.squeeze(0).transpose(0, 1).flatten(-2)
        return (y.transpose(1, 2) if self.batch_first else y.permute(2, 0, 1, 3)).flatten(-2)

    @staticmethod
    def _one_more(x: Tensor, y: Tensor) -> Tensor:
        """A further key or value, the same in every sample."""
        return torch.cat([x, y.to(x.dtype).expand(x.shape[0], x.shape[1], 1, x.shape[3])], 2)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(b, n, l, d), and the weights (b, n, l, s) if they are asked for. Dropout draws from this rank's stream."""
        dropout = self.dropout if self.training else 0.0
        draws = dropout > 0.0 and not is_fake(q)
        with self.context.stream.inside(q.device) if draws else contextlib.nullcontext():
            if not need_weights:
                mask = mask if mask is None else mask.to(q.dtype)
                return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal), None
            scores = (q * math.sqrt(1.0 / self.head_dim)) @ k.transpose(-2, -1)
            weights = F.softmax(scores if mask is None else scores + mask.to(scores.dtype), -1)
            weights = F.dropout(weights, dropout) if dropout > 0.0 else weights
            return weights @ v, weights

    def _all_heads(self, weights: Tensor, average: bool) -> Tensor:
        """(b, n, l, s) of each rank -> (b, l, s), or (b, h, l, s), whole."""
        if average:
            return reduce_from_region(weights.sum(1) / self.num_heads, self.group)
        return gather_from_region(weights.movedim(1, -1), self.group, self._heads).movedim(-1, 1)

    def _mask(self, query: Tensor, key: Tensor, attn_mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """What is added to the scores of this rank's heads: (b, n, l, s), or 1 where a dim is the same for all."""
        extra = int(self.bias_k is not None) + int(self.add_zero_attn)
        batched, tokens = query.dim() == 3, 1 if self.batch_first and query.dim() == 3 else 0
        batch = query.shape[1 - tokens] if batched else 1
        length, keys = query.shape[tokens], key.shape[tokens]
        masks = []
        if attn_mask is not None:
            shape = (length, keys) if attn_mask.dim() == 2 else (batch * self.num_heads, length, keys)
            self._check_shape("attn_mask", attn_mask, shape)
            whole = self._additive(attn_mask, query.dtype, extra)
            own = whole.view(1 if attn_mask.dim() == 2 else batch, -1, length, whole.shape[-1])
            if attn_mask.dim() == 3:
                own = own.narrow(1, self._first_head, self._heads[self.context.rank])
            masks.append(own)
        if padding is not None:
            self._check_shape("key_padding_mask", padding, (batch, keys) if batched else (keys,))
            masks.append(self._additive(padding, query.dtype, extra).view(batch, 1, 1, -1))
        return sum(masks[1:], masks[0]) if masks else None

    def _check_shape(self, name: str, mask: Tensor, shape: tuple[int, ...]) -> None:
        if tuple(mask.shape) != shape:
            raise ValueError(
                f"MegaTPStrategy: the `{name}` of `{self.label}` has the shape {tuple(mask.shape)}, but should have"
                f" {shape}: masks are those of all {self.num_heads} heads and all tokens, as on one device."
            )

    def _additive(self, mask: Tensor, dtype: torch.dtype, extra: int) -> Tensor:
        """A mask as numbers to add, for `extra` more keys too; in the region, since each rank uses it for its heads."""
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, -math.inf)
        elif not mask.is_floating_point():
            raise ValueError(
                f"MegaTPStrategy: a mask of `{self.label}` is {mask.dtype}, but should be bool or floating."
            )
        if mask.requires_grad:
            mask = copy_to_region(mask, self.group)
        return F.pad(mask, (0, extra)) if extra else mask


def no_fused_paths(module: nn.Module) -> None:
    """Let the nn.TransformerEncoders with split layers call them: torch's fused path reads their weights, unless they
    have hooks, and takes nested tensors."""
    for encoder in module.modules():
        if isinstance(encoder, nn.TransformerEncoder) and _has_split_layers(encoder):
            encoder.use_nested_tensor = False
        if isinstance(encoder, nn.TransformerEncoderLayer):
            for layer in encoder.modules():
                if isinstance(layer, ParallelLayer):
                    layer.register_forward_pre_hook(_no_fused_path)


def _no_fused_path(layer: nn.Module, args: object) -> None:
    """A hook that only has to be there."""


def _has_split_layers(module: nn.Module) -> bool:
    return any(isinstance(layer, ParallelLayer) for layer in module.modules())
