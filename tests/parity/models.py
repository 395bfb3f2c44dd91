"""Ordinary LightningModules for the parity runs. Nothing here knows this package.

Shape suffixes: B batch, L sequence, D hidden, H heads, K head size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

LEARNING_RATE = 3e-3


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """A GPT of a few thousand parameters."""

    vocab: int = 32
    hidden: int = 16
    heads: int = 4
    kv_heads: int = 0
    """0: as many as heads."""
    feed_forward: int = 32
    layers: int = 2
    attention: str = "fused"
    """fused: one Linear for q, k, v. separate: three."""
    gate: str = ""
    """"": up, gelu, down. separate: gate and up are two Linears (SwiGLU). fused: one."""
    norm: str = "layer"
    """layer, rms (torch's) or own (a class of the user's)."""
    tied: bool = True
    bias: bool = True
    qk_norm: bool = False
    inside: str = ""
    """What a block does across tokens besides attention: "", positions, convolution or mean."""
    dropout: float = 0.0
    """After the embedding and before each residual add."""
    attention_dropout: float = 0.0
    """On attention weights and on the MLP's hidden values."""


class OwnRMSNorm(nn.Module):
    """Root-mean-square norm as many model files write it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x_BLD: Tensor) -> Tensor:
        return self.weight * (x_BLD * torch.rsqrt(x_BLD.pow(2).mean(-1, keepdim=True) + 1e-5))


def make_norm(kind: str, size: int) -> nn.Module:
    kinds: dict[str, Callable[[int], nn.Module]] = {"layer": nn.LayerNorm, "rms": nn.RMSNorm, "own": OwnRMSNorm}
    return kinds[kind](size)


class Attention(nn.Module):
    """Causal self-attention with one fused projection, or with three."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.n_head, self.n_kv_head = c.heads, c.kv_heads or c.heads
        self.head_size = c.hidden // c.heads
        self.dropout = c.attention_dropout
        q_size, kv_size = self.n_head * self.head_size, self.n_kv_head * self.head_size
        self.fused = c.attention == "fused"
        if self.fused:
            self.qkv = nn.Linear(c.hidden, q_size + 2 * kv_size, bias=c.bias)
        else:
            self.q = nn.Linear(c.hidden, q_size, bias=c.bias)
            self.k = nn.Linear(c.hidden, kv_size, bias=c.bias)
            self.v = nn.Linear(c.hidden, kv_size, bias=c.bias)
        self.out = nn.Linear(q_size, c.hidden, bias=c.bias)
        self.q_norm = make_norm("rms", self.head_size) if c.qk_norm else nn.Identity()
        self.k_norm = make_norm("layer", self.head_size) if c.qk_norm else nn.Identity()

    def forward(self, x_BLD: Tensor) -> Tensor:
        if self.fused:
            sizes = [n * self.head_size for n in (self.n_head, self.n_kv_head, self.n_kv_head)]
            q, k, v = self.qkv(x_BLD).split(sizes, dim=-1)
        else:
            q, k, v = self.q(x_BLD), self.k(x_BLD), self.v(x_BLD)
        q_BHLK, k_BHLK, v_BHLK = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in (q, k, v))
        q_BHLK, k_BHLK = self.q_norm(q_BHLK), self.k_norm(k_BHLK)
        repeats = q_BHLK.size(1) // k_BHLK.size(1)
        k_BHLK, v_BHLK = k_BHLK.repeat_interleave(repeats, 1), v_BHLK.repeat_interleave(repeats, 1)
        dropout = self.dropout if self.training else 0.0
        y_BHLK = F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLK, is_causal=True, dropout_p=dropout)
        return self.out(y_BHLK.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """The feed-forward part: plain, or gated with two Linears or a fused one."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.gate_kind = c.gate
        if c.gate == "fused":
            self.gate_up = nn.Linear(c.hidden, 2 * c.feed_forward, bias=c.bias)
        else:
            self.up = nn.Linear(c.hidden, c.feed_forward, bias=c.bias)
        if c.gate == "separate":
            self.gate = nn.Linear(c.hidden, c.feed_forward, bias=c.bias)
        self.down = nn.Linear(c.feed_forward, c.hidden, bias=c.bias)
        self.drop = nn.Dropout(c.attention_dropout)

    def forward(self, x_BLD: Tensor) -> Tensor:
        if self.gate_kind == "fused":
            gate, up = self.gate_up(x_BLD).chunk(2, dim=-1)
            return self.down(self.drop(F.silu(gate) * up))
        if self.gate_kind == "separate":
            return self.down(self.drop(F.silu(self.gate(x_BLD)) * self.up(x_BLD)))
        return self.down(self.drop(F.gelu(self.up(x_BLD))))


class Block(nn.Module):
    """A pre-norm transformer block; `inside` adds an operation that mixes or numbers tokens."""

    def __init__(self, c: GPTConfig) -> None:
        super().__init__()
        self.norm1, self.attn = make_norm(c.norm, c.hidden), Attention(c)
        self.norm2, self.mlp = make_norm(c.norm, c.hidden), MLP(c)
        self.drop = nn.Dropout(c.dropout)
        self.inside = c.inside
        if c.inside == "positions":
            self.position = nn.Parameter(0.1 * torch.randn(64, c.hidden))
        if c.inside == "convolution":
            self.convolution = nn.Conv1d(c.hidden, c.hidden, kernel_size=3, padding=1, groups=c.hidden)

    def forward(self, x_BLD: Tensor) -> Tensor:
        if self.inside == "positions":
            x_BLD = x_BLD + self.position[: x_BLD.size(1)]
        if self.inside == "convolution":
            x_BLD = x_BLD + self.convolution(x_BLD.transpose(1, 2)).transpose(1, 2)
        if self.inside == "mean":
            x_BLD = x_BLD - x_BLD.mean(1, keepdim=True) + x_BLD.mean(1).unsqueeze(1).square()
        x_BLD = x_BLD + self.drop(self.attn(self.norm1(x_BLD)))
        return x_BLD + self.drop(self.mlp(self.norm2(x_BLD)))


class Adapter(nn.Module):
    """LoRA: y = base(x) + 2 up(down(dropout(x))), the last two with `rank` features between."""

    def __init__(self, base: nn.Module, inputs: int, outputs: int, dropout: float = 0.0, rank: int = 2) -> None:
        super().__init__()
        self.base, self.dropout = base, nn.Dropout(dropout)
        self.down, self.up = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.up(self.down(self.dropout(x)))


def adapted(body: nn.Module, dropout: float = 0.0) -> nn.Module:
    """Put an adapter around every linear layer, which is frozen."""
    for name, child in body.named_children():
        if isinstance(child, nn.Linear):
            setattr(body, name, Adapter(child.requires_grad_(False), child.in_features, child.out_features, dropout))
        else:
            adapted(child, dropout)
    return body


class AdamWModule(LightningModule):
    """Training shared by the models: AdamW, and a loss logged under `loss`."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE, weight_decay=0.1)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self(batch[0])

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        logits_BLV = self(inputs)
        return F.cross_entropy(logits_BLV.flatten(0, -2), targets.flatten())


class GPT(AdamWModule):
    """Embedding, blocks, norm, head; tied or not."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        c = config or GPTConfig()
        self.tok, self.pos = nn.Embedding(c.vocab, c.hidden), nn.Embedding(64, c.hidden)
        self.drop = nn.Dropout(c.dropout)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = make_norm(c.norm, c.hidden)
        self.head = nn.Linear(c.hidden, c.vocab, bias=not c.tied and c.bias)
        if c.tied:
            self.head.weight = self.tok.weight

    def forward(self, tokens_BL: Tensor) -> Tensor:
        return self.head(self.trunk(tokens_BL))

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        positions_L = torch.arange(tokens_BL.size(1), device=tokens_BL.device)
        x_BLD = self.drop(self.tok(tokens_BL) + self.pos(positions_L))
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.norm(x_BLD)


class Pooled(GPT):
    """Mixes tokens between two blocks and pools them after the last: neither may happen on a shard of the sequence."""

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.tok(tokens_BL)
        for block in self.blocks:
            x_BLD = block(x_BLD)
            x_BLD = x_BLD + 0.5 * x_BLD.mean(1, keepdim=True) * x_BLD.size(1)
        return self.head(self.norm(x_BLD).mean(1))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]), batch[1][:, -1])


class Regularised(GPT):
    """The step touches a weight of the plan outside its own layer."""

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(batch) + 0.01 * self.blocks[0].mlp.up.weight.pow(2).sum()


class HeadOutside(GPT):
    """Uses the embedding's weight as the head without a layer of its own."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__(config)
        del self.head

    def forward(self, tokens_BL: Tensor) -> Tensor:
        return F.linear(self.trunk(tokens_BL), self.tok.weight)


class WithUnused(GPT):
    """Holds parameters that no step uses."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__(config)
        self.unused = nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.ones(7))


class Configured(AdamWModule):
    """Builds its layers in configure_model."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt: GPT | None = None

    def configure_model(self) -> None:
        if self.gpt is None:
            self.gpt = GPT()

    def forward(self, tokens_BL: Tensor) -> Tensor:
        assert self.gpt is not None
        return self.gpt(tokens_BL)


class Manual(GPT):
    """Two optimizers stepped by hand, on two losses."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__(config)
        self.automatic_optimization = False

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:  # type: ignore[override]
        embeddings = [*self.tok.parameters(), *self.pos.parameters()]
        rest = [p for p in self.parameters() if all(p is not q for q in embeddings)]
        return [torch.optim.AdamW(group, lr=LEARNING_RATE) for group in (embeddings, rest)]

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return loss
