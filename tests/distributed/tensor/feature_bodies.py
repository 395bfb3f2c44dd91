"""Attention and MLP bodies as their users write them: code between column and row layers that counts whole heads.

Each is a module that runs on one device as it is. `columns` and `rows` say how its layers are split: name -> (parts,
unit), as `shard_ranges` takes them. `gathers` says how many gathers its body needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatp.plan.ranges import Ranges

Split = tuple[int | list[int], int] | Callable[[int], tuple[Ranges, ...]]
T, HD = 5, 4


class Body(nn.Module):
    """Hidden states (2, T, heads * HD) in and out."""

    columns: dict[str, Split]
    rows: dict[str, Split]
    gathers = 0

    def __init__(self, heads: int = 4, kv: int | None = None) -> None:
        super().__init__()
        self.heads, self.kv, self.width = heads, kv or heads, heads * HD
        self.rows = {"proj": (1, HD)}
        self.proj = nn.Linear(self.width, self.width)

    def separate(self) -> None:
        """q, k and v of their own."""
        self.q = nn.Linear(self.width, self.width)
        self.k, self.v = nn.Linear(self.width, self.kv * HD), nn.Linear(self.width, self.kv * HD, bias=False)
        self.columns = dict.fromkeys("qkv", (1, HD))

    def fused(self) -> None:
        self.qkv = nn.Linear(self.width, 3 * self.width)
        self.columns = {"qkv": (3, HD)}


class NanoGPT(Body):
    def __init__(self, heads: int = 4) -> None:
        super().__init__(heads)
        self.fused()
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.qkv(x).split(self.width, dim=2)
        k = k.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        q = q.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        v = v.view(B, T, self.heads, C // self.heads).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.drop(self.proj(y))


class NanoGPTByHand(NanoGPT):
    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (
            p.view(B, T, self.heads, C // self.heads).transpose(1, 2) for p in self.qkv(x).split(self.width, dim=2)
        )
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        bias = torch.tril(torch.ones(T, T)).view(1, 1, T, T)
        att = att.masked_fill(bias[:, :, :T, :T] == 0, float("-inf"))
        att = self.drop(F.softmax(att, dim=-1))
        y = att @ v
        return self.proj(y.transpose(1, 2).contiguous().view(B, T, C))


class ViT(Body):
    def __init__(self) -> None:
        super().__init__()
        self.fused()
        self.q_norm, self.k_norm = nn.LayerNorm(HD), nn.LayerNorm(HD)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, HD).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        q = q * HD**-0.5
        attn = (q @ k.mT).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


class ViTUnpacked(ViT):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).movedim(2, 0).swapaxes(2, 3)
        q, k = self.q_norm(q), self.k_norm(k)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def rotate_half(x: Tensor) -> Tensor:
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def repeat_kv(hidden_states: Tensor, n_rep: int) -> Tensor:
    batch, heads, slen, head_dim = hidden_states.shape
    if n_rep == 1:
        return hidden_states
    hidden_states = hidden_states[:, :, None, :, :].expand(batch, heads, n_rep, slen, head_dim)
    return hidden_states.reshape(batch, heads * n_rep, slen, head_dim)


class Llama(Body):
    """Hugging Face's, eager or sdpa; the rotary angles are computed from a parameter, to have a gradient."""

    def __init__(self, heads: int = 4, kv: int = 2, eager: bool = False, own: Split | None = None) -> None:
        super().__init__(heads, kv)
        self.separate()
        if own is not None:
            self.columns |= {"k": own, "v": own}
        self.eager = eager
        self.q_norm = nn.RMSNorm(HD)
        self.angles = nn.Parameter(torch.randn(T, HD))

    def forward(self, x: Tensor) -> Tensor:
        input_shape = x.shape[:-1]
        hidden_shape = (*input_shape, -1, HD)
        q = self.q_norm(self.q(x).view(hidden_shape)).transpose(1, 2)
        k = self.k(x).view(hidden_shape).transpose(1, 2)
        v = self.v(x).view(hidden_shape).transpose(1, 2)
        cos, sin = self.angles.cos()[None].unsqueeze(1), self.angles.sin()[None].unsqueeze(1)
        q, k = (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)
        mask = torch.full((T, T), float("-inf"), dtype=x.dtype).triu(1)[None, None]
        n_rep = self.heads // self.kv
        if self.eager:
            k, v = repeat_kv(k, n_rep), repeat_kv(v, n_rep)
            weights = torch.matmul(q, k.transpose(2, 3)) * HD**-0.5 + mask[:, :, :, : k.shape[-2]]
            weights = F.softmax(weights, dim=-1, dtype=torch.float64).to(q.dtype)
            out = torch.matmul(F.dropout(weights, p=0.0, training=self.training), v)
        else:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=HD**-0.5, enable_gqa=n_rep > 1)
        return self.proj(out.transpose(1, 2).contiguous().reshape(*input_shape, -1).contiguous())


class MQA(Body):
    """One key-value head, packed behind the queries (Falcon, StarCoder)."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.qkv = nn.Linear(self.width, self.width + 2 * HD)
        self.columns = {"qkv": ([self.width, HD, HD], HD)}

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, kv = self.qkv(x).split((self.width, 2 * HD), dim=2)
        k, v = kv.split((HD, HD), dim=-1)
        q = q.view(B, T, self.heads, HD).reshape(B, T * self.heads, HD)
        scores = torch.baddbmm(q.new_zeros(B, T * self.heads, T), q, k.transpose(-1, -2), beta=1, alpha=HD**-0.5)
        weights = scores.view(B, T, self.heads, T).softmax(dim=-1).view(B, T * self.heads, T)
        return self.proj(torch.bmm(weights, v).view(x.shape))


class Bert(Body):
    def __init__(self) -> None:
        super().__init__()
        self.separate()

    def shape(self, x: Tensor) -> Tensor:
        return x.view(*x.size()[:-1], self.heads, HD).permute(0, 2, 1, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = self.shape(self.q(x)), self.shape(self.k(x)), self.shape(self.v(x))
        mask = torch.zeros(x.size(0), 1, 1, T)
        mask[0, ..., -2:] = -1e9
        probs = nn.functional.softmax(torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(HD) + mask, dim=-1)
        context = torch.matmul(probs, v).permute(0, 2, 1, 3).contiguous()
        return self.proj(context.view(*context.size()[:-2], self.width)), probs


class BertMean(Bert):
    """Output weights, averaged over the heads, of which each rank adds up its own."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y, probs = super().forward(x)
        return y, probs.mean(1)


class NeoX(Body):
    """q, k and v interleaved per head; rotary angles on a quarter of the head."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(self.width, 3 * self.width)
        self.columns = {"qkv": (1, 3 * HD)}

    def forward(self, x: Tensor) -> Tensor:
        new = self.qkv(x).view(*x.shape[:2], -1, 3 * HD).transpose(1, 2)
        q, k, v = new.chunk(3, dim=-1)
        q = torch.cat((rotate_half(q[..., :2]), q[..., 2:]), dim=-1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(out.permute(0, 2, 1, 3).flatten(-2))


class PerHead3(NeoX):
    """(B, T, heads, 3, HD), as BLOOM and alibi's bias of shape (B * heads, 1, T)."""

    def __init__(self) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.rand(self.heads))

    def forward(self, x: Tensor) -> Tensor:
        B = x.shape[0]
        fused = self.qkv(x)
        fused = fused.view(B, T, self.heads, 3, HD)
        q, k, v = fused[..., 0, :].transpose(1, 2), fused[..., 1, :].transpose(1, 2), fused[..., 2, :].transpose(1, 2)
        alibi = (self.slopes[None, :, None] * torch.arange(T)[None, None]).expand(B, -1, -1).reshape(-1, 1, T)
        q, v = q.reshape(-1, T, HD), v.reshape(-1, T, HD)
        scores = alibi.baddbmm(batch1=q, batch2=k.reshape(-1, T, HD).transpose(-1, -2), beta=1.0, alpha=0.5)
        probs = F.softmax(scores.view(B, self.heads, T, -1), dim=-1).view(B * self.heads, T, -1)
        context = torch.bmm(probs, v).view(B, self.heads, T, HD).permute(0, 2, 1, 3)
        return self.proj(context.reshape(B, T, self.heads * HD))


class T5(Body):
    """A relative bias from an embedding, (1, heads, T, T), and inner dims that are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.separate()
        self.bias = nn.Embedding(2 * T, self.heads)

    def forward(self, x: Tensor) -> Tensor:
        B = x.shape[0]
        q, k, v = (layer(x).view(B, -1, self.heads, HD).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(3, 2))
        distance = torch.arange(T)[None, :] - torch.arange(T)[:, None] + T
        position_bias = self.bias(distance).permute([2, 0, 1]).unsqueeze(0)
        scores += position_bias
        weights = nn.functional.softmax(scores.float(), dim=-1).type_as(scores)
        out = torch.matmul(weights, v).transpose(1, 2).contiguous().view(B, -1, self.heads * HD)
        return self.proj(out)


class PerHeadParameters(Body):
    """Leaf parameters with an entry per head (temperature, gates, sinks)."""

    def __init__(self) -> None:
        super().__init__()
        self.separate()
        self.temperature = nn.Parameter(torch.rand(self.heads, 1, 1) + 0.5)
        self.sinks = nn.Parameter(torch.randn(self.heads))
        self.gate = nn.Parameter(torch.randn(self.width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, HD)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * self.temperature
        sinks = self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
        probs = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        out = torch.einsum("b h q k, b h k d -> b q h d", probs, v)
        return self.proj(out.flatten(2, 3) * self.gate)


class Olmo2(Body):
    """A norm over all heads together."""

    def __init__(self) -> None:
        super().__init__()
        self.separate()
        self.q_norm, self.k_norm = nn.RMSNorm(self.width), nn.RMSNorm(self.width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x)
        q, k, v = (p.view(B, T, self.heads, HD).transpose(1, 2) for p in (q, k, v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, -1))


class Complex(Body):
    """Rotary angles by complex numbers, and heads in the first dim."""

    def __init__(self) -> None:
        super().__init__()
        self.separate()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(2, T, self.heads, HD) for layer in (self.q, self.k, self.v))
        turn = torch.polar(torch.ones(T, HD // 2), torch.arange(T * HD // 2).view(T, -1) * 0.1).view(1, T, 1, -1)
        q = torch.view_as_real(torch.view_as_complex(q.reshape(*q.shape[:-1], -1, 2)) * turn).flatten(3)
        scores = torch.einsum("...qhd,...khd->h...qk", q, k)
        allowed = torch.ones(T, T, dtype=torch.bool).tril()
        probs = torch.where(allowed, scores, torch.finfo(scores.dtype).min).softmax(-1)
        return self.proj(torch.einsum("hbqk,bkhd->bqhd", probs, v).reshape(x.shape))


class InPlace(Body):
    def __init__(self) -> None:
        super().__init__()
        self.separate()

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.heads, HD)
        q, k, v = self.q(x).view(shape), self.k(x).view(shape), self.v(x).view(shape)
        q = q * 1.0
        q[..., : HD // 2] *= 2.0
        q[:, 0] = k[:, 1]
        q[:, :, :, -1] = 0.0
        scores = torch.matmul(q.transpose(1, 2), k.permute(0, 2, 3, 1))
        scores.div_(2.0).masked_fill_(torch.ones(T, T, dtype=torch.bool).triu(1), -1e9)
        scores += x.mean(-1)[:, None, None, :]
        out = scores.softmax(-1) @ v.transpose(1, 2)
        return self.proj(F.relu(out, inplace=True).transpose(1, 2).reshape(x.shape))


class GLU(Body):
    """Gate and value in one layer, split by hand, by chunk or by F.glu."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.rows = {"down": (1, 1)}
        self.columns = {"up": (2, 1)}
        self.up, self.down = nn.Linear(self.width, 2 * 14), nn.Linear(14, self.width)
        del self.proj

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.how == "glu":
            return self.down(F.glu(y, dim=-1))
        if self.how == "chunk":
            gate, value = y.chunk(2, dim=-1)
        else:
            gate, value = y[..., :14], y[..., 14:]
        return self.down(F.dropout(F.silu(gate) * value, 0.0))


class MLP(Body):
    """Plain, or with a norm over the whole hidden dim in it."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.rows, self.columns = {"down": (1, 1)}, {"up": (1, 1)}
        self.up, self.down = nn.Linear(self.width, 14), nn.Linear(14, self.width)
        self.norm = nn.LayerNorm(14) if norm else nn.Identity()
        del self.proj

    def forward(self, x: Tensor) -> Tensor:
        shape = x.size()
        y = F.gelu(self.up(x.view(-1, shape[-1])), approximate="tanh")
        return self.down(self.norm(y)).view(shape)


class LatentAttention(Body):
    """Low-rank queries (a lazy layer), keys of two parts, one of them whole and shared by the heads (DeepSeek)."""

    gathers = 1

    def __init__(self) -> None:
        super().__init__()
        self.qa, self.qb = nn.Linear(self.width, 6), nn.Linear(6, self.width)
        self.norm = nn.RMSNorm(6)
        self.kv, self.rope = nn.Linear(self.width, self.heads * (2 + HD)), nn.Linear(self.width, 2)
        self.columns = {"qb": (1, HD), "kv": (1, 2 + HD)}
        self.lazy: dict[str, Split] = {"qa": (1, 1)}

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.qb(self.norm(self.qa(x))).view(B, T, -1, HD).transpose(1, 2)
        kv = self.kv(x).view(B, T, -1, 2 + HD).transpose(1, 2)
        k_nope, v = torch.split(kv, [2, HD], dim=-1)
        k_rope = self.rope(x).view(B, 1, T, 2)
        k = torch.cat((k_nope, k_rope.expand(*k_nope.shape[:-1], -1)), dim=-1)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, -1).contiguous())


class Mixed(Body):
    """Operations without a rule, in the middle: they gather, and the row layer takes its part again."""

    gathers = 2

    def __init__(self) -> None:
        super().__init__()
        self.fused()
        self.mix = nn.Parameter(torch.randn(self.heads, self.heads))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, T, 3, self.heads, HD).permute(2, 0, 3, 1, 4)
        scores = torch.einsum("bhqk,hg->bgqk", q @ k.transpose(-1, -2), self.mix)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        return self.proj(y.flip(-1))


BODIES: dict[str, Callable[[], Any]] = {
    "nanoGPT": NanoGPT,
    "nanoGPT by hand": NanoGPTByHand,
    "ViT": ViT,
    "ViT unpacked": ViTUnpacked,
    "Llama sdpa": Llama,
    "Llama eager": lambda: Llama(eager=True),
    "MQA": MQA,
    "BERT": Bert,
    "BERT with mean weights": BertMean,
    "NeoX": NeoX,
    "BLOOM": PerHead3,
    "T5": T5,
    "per-head parameters": PerHeadParameters,
    "OLMo2": Olmo2,
    "complex rotary": Complex,
    "in place": InPlace,
    "glu": lambda: GLU("glu"),
    "glu by chunk": lambda: GLU("chunk"),
    "glu by slices": lambda: GLU("slices"),
    "MLP": lambda: MLP(False),
    "MLP with a norm": lambda: MLP(True),
    "latent attention": LatentAttention,
    "mixed heads": Mixed,
}


def straddling(ways: int) -> tuple[Ranges, ...]:
    """2 key-value heads for 6 query heads on 3 ranks: the second rank's queries need both."""
    return ((0, HD),), ((0, 2 * HD),), ((HD, 2 * HD),)


THREE_RANKS: dict[str, Callable[[], Any]] = {
    "uneven heads": lambda: NanoGPTByHand(5),
    "uneven heads in place": InPlace,
    "Llama sdpa, straddling": lambda: Llama(6, 2, own=straddling),
    "Llama eager, straddling": lambda: Llama(6, 2, True, straddling),
    "Llama eager, 1 kv head": lambda: Llama(4, 1, eager=True),
    "glu": lambda: GLU("glu"),
    "OLMo2": Olmo2,
}
FOUR_RANKS: dict[str, Callable[[], Any]] = {
    "Llama sdpa, 2 kv heads": lambda: Llama(8, 2),
    "Llama eager, 2 kv heads": lambda: Llama(8, 2, eager=True),
    "Llama sdpa, 1 kv head": lambda: Llama(4, 1),
    "MQA": MQA,
    "BLOOM": PerHead3,
    "mixed heads": Mixed,
    "latent attention": LatentAttention,
    "BERT with mean weights": BertMean,
}
