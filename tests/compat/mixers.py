"""Ways to mix tokens beside plain attention, in one small language model; the code is our own.

Shapes: b batch, t tokens, d width, h heads, k features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.compat.handwritten import HEADS, LENGTH, MLP, VOCABULARY, WIDTH, RMSNorm, language, token_loss

HEAD = WIDTH // HEADS


def heads(x: Tensor) -> Tensor:
    """(b, t, d) -> (b, h, t, k)"""
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """(b, h, t, k) -> (b, t, d)"""
    return x.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """What several have in common: projections, and softmax attention of whatever these come to."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return heads(self.q(x)), heads(self.k(x)), heads(self.v(x))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        return self.o(joined(F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x))))

    def mask(self, x: Tensor) -> Tensor | None:
        return None


class RelativeBias(Attention):
    """T5: a learned bias for each distance and head."""

    def __init__(self) -> None:
        super().__init__()
        self.relative = nn.Embedding(2 * LENGTH, HEADS)

    def mask(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        return self.relative(at[:, None] - at + LENGTH).permute(2, 0, 1)


class Alibi(Attention):
    """A slope for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, HEADS + 1))

    def mask(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        return (-(at[:, None] - at).abs() * self.slopes[:, None, None]).to(x.dtype)


class Differential(Attention):
    """The difference of two attentions (Ye et al. 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.half = HEAD // 2
        self.mixing = nn.Parameter(0.1 * torch.randn(4, self.half))
        self.norm = RMSNorm(HEAD)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.q(x).view(b, t, 2 * HEADS, self.half).transpose(1, 2)
        k = self.k(x).view(b, t, 2 * HEADS, self.half).transpose(1, 2)
        causal = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        weights = (q @ k.transpose(-1, -2) * self.half**-0.5).masked_fill(causal, float("-inf")).softmax(-1)
        a, c = self.mixing.unflatten(0, (2, 2)).prod(1).sum(-1).exp()
        weights = weights.view(b, HEADS, 2, t, t)
        weights = weights[:, :, 0] - (a - c + 0.8) * weights[:, :, 1]
        return self.o(joined(self.norm(weights @ heads(self.v(x))) * 0.2))


class Delta(Attention):
    """The delta rule, written token by token (Yang et al. 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.beta, self.norm = nn.Linear(WIDTH, HEADS), RMSNorm(HEAD)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        q, k = F.normalize(F.silu(q), dim=-1), F.normalize(F.silu(k), dim=-1)
        beta = self.beta(x).sigmoid().transpose(1, 2).unsqueeze(-1)
        state, outputs = x.new_zeros(len(x), HEADS, HEAD, HEAD), []
        for t in range(x.shape[1]):
            told = torch.einsum("bhij,bhi->bhj", state, k[:, :, t])
            state = state + torch.einsum("bhi,bhj->bhij", k[:, :, t], (v[:, :, t] - told) * beta[:, :, t])
            outputs.append(torch.einsum("bhij,bhi->bhj", state, q[:, :, t]))
        return self.o(joined(self.norm(torch.stack(outputs, 2))))


class GatedLinear(Attention):
    """Linear attention with a decay for each feature, by a gate of low rank (Yang et al. 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Sequential(nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH))
        self.gate, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(HEAD)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        decay = heads(F.logsigmoid(self.decay(x)) / 16).cumsum(2)
        scores = (q * decay.exp()) @ (k * (-decay).exp()).transpose(-1, -2)
        return self.o(self.norm((scores.tril() @ v).transpose(1, 2)).flatten(2) * F.silu(self.gate(x)))


class Retention(Attention):
    """A fixed decay for each head, and a norm over each (Sun et al. 2023)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.norm = nn.Linear(WIDTH, WIDTH), nn.GroupNorm(HEADS, WIDTH)
        self.register_buffer("decay", 1 - 2.0 ** (-5 - torch.arange(HEADS)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        at = torch.arange(x.shape[1], device=x.device)
        distance = at[:, None] - at
        decay = torch.where(distance >= 0, self.decay[:, None, None] ** distance.clamp(min=0), 0.0)
        y = joined((q @ k.mT * decay / 8) @ v)
        return self.o(F.silu(self.gate(x)) * self.norm(y.flatten(0, 1)).view_as(y))


class RandomFeatures(Attention):
    """Performer: a kernel of random features, fixed in a buffer (Choromanski et al. 2020)."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("directions", torch.randn(HEAD, 12))

    def kernel(self, x: Tensor) -> Tensor:
        x = x / HEAD**0.25
        return torch.exp(x @ self.directions - x.square().sum(-1, keepdim=True) / 2) + 1e-4

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        q, k = self.kernel(q), self.kernel(k)
        state = torch.einsum("bhtr,bhtk->bhtrk", k, v).cumsum(2)
        total = torch.einsum("bhtr,bhtr->bht", q, k.cumsum(2))
        return self.o(joined(torch.einsum("bhtr,bhtrk->bhtk", q, state) / total.unsqueeze(-1)))


class CrossCovariance(nn.Module):
    """XCiT: features attend to features (El-Nouby et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).reshape(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 4, 1).unbind(0)
        weights = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.temperature).softmax(-1)
        return self.proj((weights @ v).permute(0, 3, 1, 2).reshape(b, t, d))


class LatentAttention(nn.Module):
    """Keys and values of a small latent, with a rotary part of the keys that heads share (DeepSeek-V2)."""

    def __init__(self) -> None:
        super().__init__()
        self.q_down, self.q_up = nn.Linear(WIDTH, 24, bias=False), nn.Linear(24, HEADS * 12, bias=False)
        self.kv_down, self.kv_up = nn.Linear(WIDTH, 16 + 4, bias=False), nn.Linear(16, HEADS * 16, bias=False)
        self.q_norm, self.kv_norm, self.o = RMSNorm(24), RMSNorm(16), nn.Linear(HEADS * 8, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = heads(self.q_up(self.q_norm(self.q_down(x))))
        latent, shared = self.kv_down(x).split([16, 4], -1)
        k, v = heads(self.kv_up(self.kv_norm(latent))).split([8, 8], -1)
        k = torch.cat([k, shared.unsqueeze(1).expand(-1, HEADS, -1, -1)], -1)
        return self.o(joined(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


class LinearUnit(nn.Module):
    """Griffin's recurrent block: a real-gated linear recurrence beside a gate (De et al. 2024)."""

    def __init__(self) -> None:
        super().__init__()
        inner = WIDTH + WIDTH // 2
        self.x, self.y, self.out = nn.Linear(WIDTH, inner), nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.conv = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.recurrence, self.input = nn.Linear(inner, inner), nn.Linear(inner, inner)
        self.rate = nn.Parameter(torch.rand(inner))

    def forward(self, x: Tensor) -> Tensor:
        u = self.conv(self.x(x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        decay = torch.exp(-8 * F.softplus(self.rate) * self.recurrence(u).sigmoid())
        drive = torch.sqrt(1 - decay.square() + 1e-6) * self.input(u).sigmoid() * u
        state, states = torch.zeros_like(u[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + drive[:, t]
            states.append(state)
        return self.out(torch.stack(states, 1) * F.gelu(self.y(x)))


class TestTime(Attention):
    """A linear model for each head, trained on the tokens as they come, four at a time (Sun et al. 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(0.1 * torch.randn(HEADS, HEAD, HEAD))
        self.rate = nn.Linear(WIDTH, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        rate = 0.1 * self.rate(x).sigmoid().transpose(1, 2).unsqueeze(-1)
        weight, outputs = self.start.expand(len(x), -1, -1, -1), []
        for first in range(0, x.shape[1], 4):
            some = slice(first, first + 4)
            error = (k[:, :, some] @ weight - v[:, :, some]) * rate[:, :, some]
            outputs.append(q[:, :, some] @ weight - (q[:, :, some] @ k[:, :, some].mT).tril() @ error)
            weight = weight - k[:, :, some].mT @ error
        return self.o(joined(torch.cat(outputs, 2)))


class Spatial(nn.Module):
    """gMLP: a gate that mixes tokens (Liu et al. 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = (
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.LayerNorm(2 * WIDTH),
        )
        self.spatial = nn.Conv1d(LENGTH, LENGTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        a, b = F.gelu(self.up(x)).chunk(2, -1)
        return self.down(a * self.spatial(self.norm(b)))


class Splines(nn.Module):
    """A Kolmogorov-Arnold layer, by radial functions on a grid (Liu et al. 2024)."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__()
        self.base, self.spline = nn.Linear(wide, narrow), nn.Linear(5 * wide, narrow, bias=False)
        self.register_buffer("grid", torch.linspace(-2, 2, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(F.silu(x)) + self.spline(torch.exp(-((x.unsqueeze(-1) - self.grid) ** 2)).flatten(-2))


class InducingPoints(nn.Module):
    """Inducing points between tokens (Set Transformer, Lee et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(1, 4, WIDTH))
        self.gather = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.scatter = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        points, _ = self.gather(self.points.expand(len(x), -1, -1), x, x, need_weights=False)
        return self.scatter(x, points, points, need_weights=False)[0]


class Depths(nn.Module):
    """The half of the tokens that a router likes best goes through an MLP (Raposo et al. 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.mlp = nn.Linear(WIDTH, 1), MLP(WIDTH, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        liking = self.router(x).squeeze(-1)
        chosen = liking.topk(x.shape[1] // 2, 1).indices.sort(1).values
        at = chosen.unsqueeze(-1).expand(-1, -1, x.shape[-1])
        y = self.mlp(x.gather(1, at)) * liking.gather(1, chosen).sigmoid().unsqueeze(-1)
        return torch.zeros_like(x).scatter_add(1, at, y)


class LowRank(nn.Module):
    """A frozen layer with an adapter, by parameters (Hu et al. 2021); with magnitudes, DoRA (Liu et al. 2024)."""

    def __init__(self, magnitudes: bool) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Parameter(0.1 * torch.randn(4, WIDTH)), nn.Parameter(0.1 * torch.randn(WIDTH, 4))
        self.magnitude = nn.Parameter(self.base.weight.norm(dim=1).detach()) if magnitudes else None

    def forward(self, x: Tensor) -> Tensor:
        if self.magnitude is None:
            return self.base(x) + 2 * (x @ self.a.T @ self.b.T)
        weight = self.base.weight + 2 * self.b @ self.a
        return F.linear(x, weight * (self.magnitude / weight.norm(dim=1)).unsqueeze(1), self.base.bias)


class Adapted(Attention):
    def __init__(self, magnitudes: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (LowRank(magnitudes) for _ in range(4))  # type: ignore[assignment]


class Mixed(nn.Module):
    """A mixer and an MLP, each behind a norm and beside a residual."""

    def __init__(self, mixer: nn.Module) -> None:
        super().__init__()
        self.norm1, self.mixer, self.norm2, self.mlp = RMSNorm(WIDTH), mixer, RMSNorm(WIDTH), MLP(WIDTH, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Normalized(Attention):
    """nGPT: hidden states are unit vectors, and so are queries and keys (Loshchilov et al. 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.rates = nn.Parameter(torch.full((2, WIDTH), 0.05))
        self.scale, self.inner = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(2, 4 * WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        scale = self.scale.view(1, HEADS, 1, HEAD)
        q, k = F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1) * scale
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=HEAD**0.5)
        x = self.towards(x, self.o(joined(attended)), self.rates[0])
        up, gate = self.inner[0] * self.up(x), self.inner[1] * self.gate(x) * WIDTH**0.5
        return self.towards(x, self.down(up * F.silu(gate)), self.rates[1])

    @staticmethod
    def towards(x: Tensor, y: Tensor, rate: Tensor) -> Tensor:
        return F.normalize(x + rate.abs() * (F.normalize(y, dim=-1) - x), dim=-1)


class MixerLM(nn.Module):
    """Two blocks of a kind between an embedding and a head."""

    def __init__(self, block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(block() for _ in range(2))
        self.norm, self.head = RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return token_loss(self.head(self.norm(x))[:, :-1], labels[:, 1:])


MIXERS: dict[str, Callable[[], nn.Module]] = {
    "alibi": Alibi,
    "cross_covariance": CrossCovariance,
    "delta_rule": Delta,
    "differential": Differential,
    "dora": lambda: Adapted(magnitudes=True),
    "gated_linear": GatedLinear,
    "gmlp": Spatial,
    "inducing_points": InducingPoints,
    "kan": lambda: nn.Sequential(Splines(WIDTH, 32), Splines(32, WIDTH)),
    "latent_attention": LatentAttention,
    "linear_recurrence": LinearUnit,
    "lora": lambda: Adapted(magnitudes=False),
    "mixture_of_depths": Depths,
    "random_features": RandomFeatures,
    "relative_bias": RelativeBias,
    "retention": Retention,
    "test_time_training": TestTime,
}


def _model(mixer: Callable[[], nn.Module]) -> Callable[[float], nn.Module]:
    return lambda dropout: MixerLM(lambda: Mixed(mixer()))


MODELS: dict[str, tuple[str, Callable[[float], nn.Module], Callable[[int, bool], Any]]] = {
    **{name: ("mixer", _model(mixer), language) for name, mixer in MIXERS.items()},
    "ngpt": ("mixer", lambda dropout: MixerLM(Normalized), language),
}
"""As `handwritten.MODELS`."""
