"""Models as people write them by hand, each in the idiom of the code it imitates; the code is our own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS, LENGTH, ROWS = 128, 64, 4, 16, 4
LENGTHS = torch.tensor([16, 13, 9, 5])
Batch = dict[str, Tensor]


class Handwritten(LightningModule):
    """Training shared by them all: each model's `forward` returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.model(**batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class TorchEncoder(nn.Module):
    """nn.TransformerEncoder over tokens, one loss for each of them."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids) + self.position(torch.arange(input_ids.size(1), device=input_ids.device))
        padding = None if attention_mask is None else attention_mask == 0
        return token_loss(self.head(self.encoder(x, src_key_padding_mask=padding)), labels)


class TorchTransformer(nn.Module):
    """nn.Transformer from source to target."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.transformer = nn.Transformer(WIDTH, HEADS, 2, 2, 2 * WIDTH, dropout, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        padding = None if attention_mask is None else attention_mask == 0
        target = self.target(labels[:, :-1].clamp(min=0))
        causal = torch.ones(target.size(1), target.size(1), dtype=torch.bool, device=target.device).triu(1)
        masks = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        x = self.transformer(self.source(input_ids), target, tgt_mask=causal, tgt_is_causal=True, **masks)
        return token_loss(self.head(x), labels[:, 1:])


class CausalSelfAttention(nn.Module):
    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        assert n_embd % n_head == 0
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)
        self.resid_dropout = nn.Dropout(dropout)
        self.n_head, self.n_embd, self.dropout = n_head, n_embd, dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, n_embd: int, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * n_embd, n_embd)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, n_embd: int, n_head: int, dropout: float) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn, self.mlp = CausalSelfAttention(n_embd, n_head, dropout), MLP(n_embd, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class NanoGPT(nn.Module):
    """A GPT with a fused c_attn and the head's weight tied to the embedding's."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(VOCABULARY, WIDTH),
                "wpe": nn.Embedding(LENGTH, WIDTH),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList([Block(WIDTH, HEADS, dropout) for _ in range(2)]),
                "ln_f": nn.LayerNorm(WIDTH),
            }
        )
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        _, t = idx.size()
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def apply_rotary_complex(x: Tensor, angles: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    turned = pairs * torch.polar(torch.ones_like(angles), angles)[None, :, None]
    return torch.view_as_real(turned).flatten(3)


def apply_rotary_real(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = angles.cos()[None, :, None], angles.sin()[None, :, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(3)


class LlamaAttention(nn.Module):
    def __init__(self, dim: int, n_heads: int, n_kv_heads: int, rotate: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim, self.rotate = n_heads, n_kv_heads, dim // n_heads, rotate
        self.n_rep = n_heads // n_kv_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(dim, n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        bsz, seqlen, _ = x.shape
        xq = self.rotate(self.wq(x).view(bsz, seqlen, self.n_heads, self.head_dim), angles)
        xk = self.rotate(self.wk(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim), angles)
        xv = self.wv(x).view(bsz, seqlen, self.n_kv_heads, self.head_dim)
        keys, values = (t.repeat_interleave(self.n_rep, dim=2).transpose(1, 2) for t in (xk, xv))
        scores = torch.matmul(xq.transpose(1, 2), keys.transpose(2, 3)) / math.sqrt(self.head_dim)
        output = torch.matmul(F.softmax(scores + mask, dim=-1), values)
        return self.wo(output.transpose(1, 2).contiguous().view(bsz, seqlen, -1))


class LlamaBlock(nn.Module):
    def __init__(self, dim: int, rotate: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.attention = LlamaAttention(dim, HEADS, 2, rotate)
        self.w1, self.w3 = (nn.Linear(dim, 2 * dim, bias=False) for _ in range(2))
        self.w2 = nn.Linear(2 * dim, dim, bias=False)
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), angles, mask)
        y = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


class MiniLlama(nn.Module):
    """wq, wk, wv, wo with grouped keys, rotary positions computed once for the model, an explicit mask."""

    def __init__(self, rotate: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(LlamaBlock(WIDTH, rotate) for _ in range(2))
        self.norm, self.output = RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        half = WIDTH // HEADS // 2
        angles = torch.outer(torch.arange(LENGTH).float(), 10000.0 ** (-torch.arange(half).float() / half))
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        _, seqlen = tokens.shape
        h = self.tok_embeddings(tokens)
        mask = torch.full((seqlen, seqlen), float("-inf"), device=h.device, dtype=h.dtype).triu(diagonal=1)
        for layer in self.layers:
            h = layer(h, self.angles[:seqlen], mask)
        return token_loss(self.output(self.norm(h))[:, :-1], labels[:, 1:])


class ViTAttention(nn.Module):
    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        self.attn_drop, self.proj_drop = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = self.attn_drop((q * self.head_dim**-0.5 @ k.transpose(-2, -1)).softmax(dim=-1))
        return self.proj_drop(self.proj((attn @ v).transpose(1, 2).reshape(B, N, C)))


class ViTBlock(nn.Module):
    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = ViTAttention(dim, num_heads, dropout)
        self.fc1, self.act, self.fc2 = nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(torch.full((dim,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma * self.attn(self.norm1(x))
        return x + self.fc2(self.act(self.fc1(self.norm2(x))))


class ViT(nn.Module):
    """qkv fused with the three outermost, a class token, a learned position."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, WIDTH, 8, 8)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, WIDTH) * 0.02)
        self.blocks = nn.Sequential(*[ViTBlock(WIDTH, HEADS, dropout) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.patch_embed(images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        return F.cross_entropy(self.head(self.norm(self.blocks(x))[:, 0]), labels)


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp_tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.mlp_channels = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp_channels(self.norm2(x))


class Mixer(nn.Module):
    """MLP-Mixer: a Linear over the tokens' dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 8, 8)
        self.blocks = nn.Sequential(*[MixerBlock(16, WIDTH) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.blocks(self.stem(images).flatten(2).transpose(1, 2))
        return F.cross_entropy(self.head(self.norm(x).mean(1)), labels)


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm, self.act = nn.LayerNorm(dim), nn.GELU()
        self.pwconv1, self.pwconv2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(torch.full((dim,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dwconv(x).permute(0, 2, 3, 1))
        y = self.gamma * self.pwconv2(self.act(self.pwconv1(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    """Depthwise convolutions, then Linears over channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 32, 4, 4), nn.Conv2d(32, 64, 2, 2)
        self.stage1, self.stage2 = ConvNeXtBlock(32), ConvNeXtBlock(64)
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 4)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stage2(self.down(self.stage1(self.stem(images))))
        return F.cross_entropy(self.head(self.norm(x.mean((-2, -1)))), labels)


class PlainMLP(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        layers = [m for _ in range(2) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(dropout))]
        self.net = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), *layers, nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.net(x).squeeze(-1), y)


class DLRM(nn.Module):
    """Tables of categories, a bottom and a top MLP, the products of every pair between."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(50, 16, mode="sum") for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(16 + 6, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, sparse: Tensor, clicked: Tensor) -> Tensor:
        x = self.bottom(dense)
        features = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        i, j = torch.tril_indices(4, 4, -1, device=x.device)
        pairs = (features @ features.transpose(1, 2))[:, i, j]
        return F.binary_cross_entropy_with_logits(self.top(torch.cat([x, pairs], 1)).squeeze(-1), clicked)


class LSTMClassifier(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 32)
        self.lstm = nn.LSTM(32, 32, num_layers=2, batch_first=True, dropout=dropout, bidirectional=True)
        self.head = nn.Linear(64, 4)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        h, _ = self.lstm(self.embed(input_ids))
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        pooled = (h * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return F.cross_entropy(self.head(pooled), labels)


class MambaBlock(nn.Module):
    """A selective state space: in_proj fused, a depthwise convolution, a scan over time in Python."""

    def __init__(self, dim: int, state: int = 8, rank: int = 4) -> None:
        super().__init__()
        inner = 2 * dim
        self.state, self.rank = state, rank
        self.norm = RMSNorm(dim)
        self.in_proj, self.out_proj = nn.Linear(dim, 2 * inner, bias=False), nn.Linear(inner, dim, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, 4, padding=3, groups=inner)
        self.x_proj, self.dt_proj = nn.Linear(inner, rank + 2 * state, bias=False), nn.Linear(rank, inner)
        self.A_log = nn.Parameter(torch.arange(1, state + 1).float().log().repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))

    def forward(self, hidden: Tensor) -> Tensor:
        length = hidden.size(1)
        x, z = self.in_proj(self.norm(hidden)).chunk(2, dim=-1)
        x = F.silu(self.conv1d(x.transpose(1, 2))[..., :length].transpose(1, 2))
        dt, b, c = self.x_proj(x).split([self.rank, self.state, self.state], dim=-1)
        dt = F.softplus(self.dt_proj(dt))
        decay = torch.exp(dt[..., None] * -self.A_log.exp())
        drive = (dt * x)[..., None] * b[:, :, None]
        h, outputs = torch.zeros_like(drive[:, 0]), []
        for t in range(length):
            h = decay[:, t] * h + drive[:, t]
            outputs.append((h * c[:, t, None]).sum(-1))
        return hidden + self.out_proj((torch.stack(outputs, 1) + x * self.D) * F.silu(z))


class MiniMamba(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(MambaBlock(WIDTH) for _ in range(2))
        self.norm_f, self.lm_head = RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return token_loss(self.lm_head(self.norm_f(x))[:, :-1], labels[:, 1:])


def _tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(10, VOCABULARY, (ROWS, LENGTH), generator=generator)


def _pad(batch: Batch, *labels: str) -> Batch:
    mask = torch.arange(LENGTH) < LENGTHS[:, None]
    padded = {key: value.masked_fill(~mask, -100) if key in labels else value for key, value in batch.items()}
    return {**padded, "input_ids": batch["input_ids"] * mask, "attention_mask": mask.long()}


def language(seed: int, padding: bool, names: tuple[str, str] = ("input_ids", "labels")) -> Batch | None:
    tokens = _tokens(torch.Generator().manual_seed(seed))
    targets = tokens.roll(-1, 1) if names[1] == "targets" else tokens.clone()
    return None if padding else {names[0]: tokens, names[1]: targets}


def pairs(seed: int, padding: bool) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    batch = {"input_ids": _tokens(generator), "labels": _tokens(generator)}
    return _pad(batch, "labels") if padding else batch


def sentences(seed: int, padding: bool) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    batch = {"input_ids": _tokens(generator), "labels": torch.randint(0, 4, (ROWS,), generator=generator)}
    return _pad(batch) if padding else batch


def images(seed: int, padding: bool) -> Batch | None:
    generator = torch.Generator().manual_seed(seed)
    batch = {"images": torch.randn(ROWS, 3, 32, 32, generator=generator)}
    return None if padding else {**batch, "labels": torch.randint(0, 4, (ROWS,), generator=generator)}


def features(seed: int, padding: bool) -> Batch | None:
    generator = torch.Generator().manual_seed(seed)
    batch = {"x": torch.randn(ROWS, 16, generator=generator), "y": torch.randn(ROWS, generator=generator)}
    return None if padding else batch


def clicks(seed: int, padding: bool) -> Batch | None:
    generator = torch.Generator().manual_seed(seed)
    batch = {
        "dense": torch.randn(ROWS, 8, generator=generator),
        "sparse": torch.randint(0, 50, (ROWS, 3, 2), generator=generator),
        "clicked": torch.randint(0, 2, (ROWS,), generator=generator).float(),
    }
    return None if padding else batch


def mini_llama(seed: int, padding: bool) -> Batch | None:
    return language(seed, padding, ("tokens", "labels"))


def nano_gpt(seed: int, padding: bool) -> Batch | None:
    return language(seed, padding, ("idx", "targets"))


MODELS: dict[str, tuple[str, Callable[[float], nn.Module], Callable[[int, bool], Any]]] = {
    "torch_encoder": ("encoder", TorchEncoder, pairs),
    "torch_transformer": ("encoder-decoder", TorchTransformer, pairs),
    "nanogpt": ("decoder", NanoGPT, nano_gpt),
    "minillama_complex": ("decoder", lambda dropout: MiniLlama(apply_rotary_complex), mini_llama),
    "minillama_real": ("decoder", lambda dropout: MiniLlama(apply_rotary_real), mini_llama),
    "timm_vit": ("vision", ViT, images),
    "mlp_mixer": ("vision", lambda dropout: Mixer(), images),
    "convnext_like": ("vision", lambda dropout: ConvNeXt(), images),
    "plain_mlp": ("other", PlainMLP, features),
    "dlrm": ("other", lambda dropout: DLRM(), clicks),
    "lstm_classifier": ("other", LSTMClassifier, sentences),
    "mamba_like": ("decoder", lambda dropout: MiniMamba(), language),
}
"""Kind, model by its dropout, batches by seed and padding."""
