"""A small GPT on bytes, as any Lightning user would write it. Nothing here knows about parallelism.

Letters in comments: B batch, T time (bytes in the window), C channels (d_model).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics.text import Perplexity

VOCABULARY = 256  # a token is a byte


class CausalSelfAttention(nn.Module):
    def __init__(self, d_model: int, n_head: int) -> None:
        super().__init__()
        self.n_head, self.head_dim = n_head, d_model // n_head
        self.qkv = nn.Linear(d_model, 3 * d_model)  # queries, keys and values of all heads in one matmul
        self.proj = nn.Linear(d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        # (B, T, 3 C) -> three of (B, heads, T, head_dim)
        q, k, v = (part.view(B, T, self.n_head, self.head_dim).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, self.n_head * self.head_dim))


class MLP(nn.Module):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, 4 * d_model)
        self.down = nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, d_model: int, n_head: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(d_model)
        self.attn = CausalSelfAttention(d_model, n_head)
        self.norm2 = nn.LayerNorm(d_model)
        self.mlp = MLP(d_model)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(LightningModule):
    """Predicts the next byte.

    Args:
        n_layer: blocks of attention and MLP.
        n_head: attention heads of each block.
        d_model: channels; a multiple of n_head.
        context: bytes that the model sees at once.
        lr: the highest learning rate, reached at the end of the warm-up.
        warmup_steps: steps over which the learning rate rises; a cosine then takes it to a tenth.
        weight_decay: of AdamW.
    """

    def __init__(
        self,
        n_layer: int = 4,
        n_head: int = 4,
        d_model: int = 128,
        context: int = 64,
        lr: float = 3e-3,
        warmup_steps: int = 100,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__()
        if d_model % n_head:
            raise ValueError(f"GPT: d_model {d_model} is not a multiple of n_head {n_head}. Change one of them.")
        self.save_hyperparameters()
        self.tok = nn.Embedding(VOCABULARY, d_model)
        self.pos = nn.Embedding(context, d_model)
        self.blocks = nn.ModuleList(Block(d_model, n_head) for _ in range(n_layer))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, VOCABULARY, bias=False)
        self.perplexity = Perplexity()
        self.apply(small_weights)

    def forward(self, x: Tensor) -> Tensor:
        """Bytes (B, T) to the logits of each next byte (B, T, 256)."""
        h = self.tok(x) + self.pos(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x).flatten(0, 1), y.flatten())
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        self.perplexity(logits, y)
        self.log("val_loss", loss, prog_bar=True, sync_dist=True)
        self.log("val_bpb", loss / math.log(2), prog_bar=True, sync_dist=True)  # bits per byte: 8 is knowing nothing
        self.log("val_perplexity", self.perplexity)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.generate(batch, n_new=240, temperature=0.7)

    def configure_optimizers(self) -> Any:
        hp = self.hparams
        optimizer = torch.optim.AdamW(self.parameters(), hp["lr"], betas=(0.9, 0.95), weight_decay=hp["weight_decay"])
        warmup, total = hp["warmup_steps"], int(self.trainer.estimated_stepping_batches)

        def share_of_lr(step: int) -> float:
            if step < warmup:
                return (step + 1) / warmup
            done = min((step - warmup) / max(total - warmup, 1), 1.0)
            return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share_of_lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    @torch.no_grad()
    def generate(self, x: Tensor, n_new: int, temperature: float = 1.0) -> Tensor:
        """Append `n_new` sampled bytes to each row of x (B, T). No key-value cache: it is short, and it is clear."""
        for _ in range(n_new):
            logits = self(x[:, -self.hparams["context"] :])[:, -1] / temperature
            x = torch.cat([x, torch.multinomial(logits.softmax(dim=-1), 1)], dim=1)
        return x


def small_weights(module: nn.Module) -> None:
    """GPT-2's start: weights this small make the first loss that of a uniform guess, 8 bits per byte."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
