"""Attention and MLP bodies as people write them, for automatic plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, HEADS = 24, 6


class Separate(nn.Module):
    """q, k and v by layers of their own; `kv_heads` of them for keys and values."""

    def __init__(self, kv_heads: int = HEADS, heads: int = HEADS, bias: bool = True) -> None:
        super().__init__()
        self.head_dim, self.heads, self.kv_heads = HIDDEN // HEADS, heads, kv_heads
        self.q = nn.Linear(HIDDEN, heads * self.head_dim, bias=bias)
        self.k = nn.Linear(HIDDEN, kv_heads * self.head_dim, bias=bias)
        self.v = nn.Linear(HIDDEN, kv_heads * self.head_dim, bias=bias)
        self.out = nn.Linear(heads * self.head_dim, HIDDEN, bias=bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, -1, self.head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v))
        k, v = (y.repeat_interleave(q.shape[1] // k.shape[1], 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, t, -1))


class Fused(nn.Module):
    """[q | k | v] in one layer, sizes read from attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.n_head, self.n_embd = HEADS, HIDDEN
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).split(self.n_embd, dim=2)
        q, k, v = (y.view(b, t, self.n_head, -1).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).flatten(2))


class Interleaved(nn.Module):
    """q, k and v of each head beside each other."""

    def __init__(self) -> None:
        super().__init__()
        self.head_dim = HIDDEN // HEADS
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, -1, 3, self.head_dim).permute(3, 0, 2, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    """A gated MLP, gate and up fused."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class FullNorm(nn.Module):
    """A norm over all features, between column and row.

    Args:
        norm: of so many features.
    """

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(HIDDEN, 48), norm(48), nn.Linear(48, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


class ResponseNorm(nn.Module):
    """ConvNeXt-V2's, over tokens, beside the mean of all features."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.rand(features)), nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        size = x.norm(p=2, dim=1, keepdim=True)
        return self.gamma * (x * size / (size.mean(dim=-1, keepdim=True) + 1e-6)) + self.beta + x


class Directions(nn.Module):
    """A norm without parameters."""

    def __init__(self, features: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * x.shape[-1] ** 0.5


class Largest(Directions):
    """Divides by the largest feature, which has a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().amax(-1, keepdim=True)


class SideDoor(nn.Module):
    """A gate computed from the whole input meets split features."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(HIDDEN, 48), nn.Parameter(torch.ones(HIDDEN)), nn.Linear(48, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) * (x * self.gate).mean(-1, keepdim=True))


class Conditioned(nn.Module):
    """A projection that is added to what the first layer reads: their features are not split, those behind are."""

    def __init__(self, inner: int = 32) -> None:
        super().__init__()
        self.condition, self.up, self.down = (
            nn.Linear(HIDDEN, HIDDEN),
            nn.Linear(HIDDEN, inner),
            nn.Linear(inner, HIDDEN),
        )

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x + self.condition(x))))
        return y


class Three(Conditioned):
    """Layers one after another, of which the last two hold most of the weights."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(F.gelu(self.condition(x)))))
        return y


class Unnormed(nn.Module):
    """A residual without a norm between attention and perceptron: what attention returns is read as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.up, self.down = Separate(), nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        y: Tensor = x + self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """Pre-norm residual around a body."""

    def __init__(self, body: nn.Module, index: int = 0) -> None:
        super().__init__()
        self.index, self.norm, self.body = index, nn.LayerNorm(HIDDEN), body

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return x + self.body(self.norm(x), **options)


class Model(nn.Module):
    """An embedding, blocks, a head, and a step."""

    def __init__(self, make: Any = Separate, layers: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.tok = nn.Embedding(40, HIDDEN)
        self.blocks = nn.ModuleList(Block(make(), index) for index in range(layers))
        self.head = nn.Linear(HIDDEN, 40, bias=False)
        if tied:
            self.head.weight = self.tok.weight
        self.calls = 0

    def step(self, ids: Tensor) -> Tensor:
        self.calls += 1
        h = self.tok(ids)
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), ids.flatten())


class Joint(nn.Module):
    """Two streams of tokens, each with layers of its own, that attend to each other."""

    def __init__(self, returns_both: bool = True) -> None:
        super().__init__()
        self.returns_both, self.head_dim = returns_both, HIDDEN // HEADS
        for name in ("q", "k", "v", "q2", "k2", "v2", "out"):
            setattr(self, name, nn.Linear(HIDDEN, HIDDEN))
        if returns_both:
            self.out2 = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, other: Tensor) -> Any:
        own, others = (self.q, self.k, self.v), (self.q2, self.k2, self.v2)
        pairs = zip((layer(x) for layer in own), (layer(other) for layer in others), strict=True)
        heads = (torch.cat(pair, 1).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for pair in pairs)
        y = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        y, y2 = y[:, : x.shape[1]], y[:, x.shape[1] :]
        return (x + self.out(y), other + self.out2(y2)) if self.returns_both else x + self.out(y)


class OneOutput(nn.Module):
    """Attention and MLP beside each other, with one output layer for both."""

    def __init__(self, fused: bool, heads: int = HEADS) -> None:
        super().__init__()
        self.fused, self.heads = fused, heads
        self.norm, self.out = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN + 56, HIDDEN)
        if fused:
            self.all = nn.Linear(HIDDEN, 3 * HIDDEN + 2 * 56)
        else:
            self.q, self.k, self.v, self.up = (nn.Linear(HIDDEN, n) for n in (HIDDEN, HIDDEN, HIDDEN, 56))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.fused:
            q, k, v, gate, up = self.all(y).split([HIDDEN] * 3 + [56] * 2, -1)
            up = F.silu(gate) * up
        else:
            q, k, v, up = self.q(y), self.k(y), self.v(y), F.gelu(self.up(y))
        heads = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return x + self.out(torch.cat([y, up], -1))


class NormedHeads(Separate):
    """Queries and keys through a norm of all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = (nn.Sequential(layer, nn.RMSNorm(HIDDEN)) for layer in (self.q, self.k))  # type: ignore[assignment]


class TwoStreams(nn.Module):
    """One MLP for two streams of tokens, called for each."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x[:, :2], x[:, 2:]
        return torch.cat([self.down(F.gelu(self.up(y))) for y in (first, second)], 1)


class Routed(nn.Module):
    """Experts in a list; the last one gets no tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(TwoStreams() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.flatten(0, 1)
        chosen = torch.zeros(len(rows), dtype=torch.long)
        y = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            at = torch.where(chosen == i)[0]
            y = y.index_add(0, at, expert.down(F.gelu(expert.up(rows[at]))))
        return y.view_as(x)


class Modulated(nn.Module):
    """Scaled and shifted by a few features of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.modulation = nn.Linear(6, 4 * HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift, gate, more = self.modulation(condition)[:, None].chunk(4, -1)
        return gate * self.down(F.gelu(self.up(x * (1 + scale) + shift))) + more


class ValueResidual(Separate):
    """Mixes values that an earlier block has made into its own, by a gate for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(HIDDEN, HEADS)

    def forward(self, x: Tensor, first: Tensor) -> Tensor:  # type: ignore[override]
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, -1, self.head_dim).transpose(1, 2) for layer in (self.q, self.k, self.v))
        v = v.lerp(first, self.mix(x).sigmoid().transpose(1, 2).unsqueeze(-1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))
