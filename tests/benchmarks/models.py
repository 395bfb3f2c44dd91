"""The model of the benchmarks: an ordinary LightningModule, which knows of no parallelism."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

VOCAB = 256
LEARNING_RATE = 1e-3


@dataclasses.dataclass(frozen=True)
class Size:
    """A size of `sizes.toml`."""

    name: str
    d: int
    ffn: int
    heads: int
    layers: int
    rows: int
    length: int
    rounds: int = 1
    steps: int = 1

    def __str__(self) -> str:
        return f"{self.name}: {self.layers} layers of {self.d}/{self.ffn}, {self.rows} x {self.length} tokens"


class Attention(nn.Module):
    """Causal self-attention. (b, s, d) -> (b, s, d)"""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.head = size.d // size.heads
        self.q, self.k, self.v = (nn.Linear(size.d, size.d) for _ in range(3))
        self.o = nn.Linear(size.d, size.d)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(attended.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """(b, s, d) -> (b, s, d)"""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(size.d, size.ffn), nn.Linear(size.ffn, size.d)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Block(nn.Module):
    """A pre-norm transformer block. (b, s, d) -> (b, s, d)"""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(size.d), Attention(size)
        self.norm2, self.mlp = nn.LayerNorm(size.d), MLP(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """(b, s) ids -> (b, s, VOCAB) logits"""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, size.d)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.d)
        self.head = nn.Linear(size.d, VOCAB, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


class Decoder(LightningModule):
    """A language model."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.model = Transformer(size)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return loss(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=LEARNING_RATE)


def loss(logits: Tensor, target: Tensor) -> Tensor:
    """(b, s, VOCAB), (b, s) -> mean cross-entropy"""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def decoder(size: Size) -> Decoder:
    """The model with the same weights for every program and rank."""
    torch.manual_seed(0)
    return Decoder(size)


def batch(size: Size, rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Ids and targets, (rows, length) each."""
    shape = (rows or size.rows, size.length + 1)
    ids = torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


class Endless(Dataset):
    """The same batch as often as it is asked for: loading costs nothing but the loader's own work."""

    def __init__(self, item: tuple[Tensor, Tensor]) -> None:
        self.item = item

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.item


def loader(size: Size, rows: int | None = None) -> DataLoader:
    return DataLoader(Endless(batch(size, rows)), batch_size=None, shuffle=False)


def trainer(strategy: object, devices: int, callback: Callback) -> Trainer:
    """Lightning without what only people need."""
    return Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=1, logger=False, callbacks=[callback],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
