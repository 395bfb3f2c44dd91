"""More LightningModules for the parity runs: a sequence-first encoder and a regression MLP."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.models import AdamWModule


class EncoderLayer(nn.Module):
    """Post-norm, bidirectional, sequence first."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.n_head = heads
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x_LBD: Tensor) -> Tensor:
        x_LBD = self.norm1(x_LBD + self.attend(x_LBD))
        return self.norm2(x_LBD + self.down(F.relu(self.up(x_LBD))))

    def attend(self, x_LBD: Tensor) -> Tensor:
        length, batch, _ = x_LBD.shape
        q, k, v = (
            part.reshape(length, batch, self.n_head, -1).permute(1, 2, 0, 3) for part in self.qkv(x_LBD).chunk(3, -1)
        )
        y_BHLK = F.scaled_dot_product_attention(q, k, v)
        return self.out(y_BHLK.permute(2, 0, 1, 3).flatten(2))


class Encoder(AdamWModule):
    """Labels each token; the layers see (sequence, batch, hidden)."""

    def __init__(self, vocab: int = 32, hidden: int = 16, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, hidden)
        self.pos = nn.Parameter(0.1 * torch.randn(64, 1, hidden))
        self.layers = nn.ModuleList(EncoderLayer(hidden, heads) for _ in range(layers))
        self.head = nn.Linear(hidden, vocab)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_LBD = self.tok(tokens_BL.T) + self.pos[: tokens_BL.size(1)]
        for layer in self.layers:
            x_LBD = layer(x_LBD)
        return self.head(x_LBD).transpose(0, 1)


class Regression(AdamWModule):
    """Biases everywhere, an embedding with a padding row split on its hidden dim, row layers of both kinds."""

    def __init__(self, vocab: int = 32) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, 10, padding_idx=0)
        self.net = nn.Sequential(nn.Linear(10, 14), nn.Tanh(), nn.Linear(14, 12), nn.ReLU())
        self.middle = nn.Linear(12, 9)
        self.wide = nn.Linear(9, 11)
        self.last = nn.Linear(11, 1)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        h_BLD = self.net(self.tok(tokens_BL))
        return self.last(torch.tanh(self.wide(torch.tanh(self.middle(h_BLD))))).squeeze(-1)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        prediction_BL = self(batch[0])
        return F.mse_loss(prediction_BL, batch[1].to(prediction_BL.dtype) / 32)
