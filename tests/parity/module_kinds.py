"""LightningModules of torch's Transformer layers, of gated blocks, and of Hugging Face's Conv1D and stacked experts."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.models import AdamWModule


class TorchEncoder(AdamWModule):
    """nn.TransformerEncoder under a causal mask."""

    def __init__(self, vocab: int = 32, hidden: int = 18, heads: int = 6) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, hidden)
        layer = nn.TransformerEncoderLayer(hidden, heads, 20, 0.0, batch_first=True, norm_first=True)
        self.net = nn.TransformerEncoder(layer, 2, nn.LayerNorm(hidden), enable_nested_tensor=False)
        self.head = nn.Linear(hidden, vocab)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens_BL.size(1), device=tokens_BL.device)
        x_BLD = self.tok(tokens_BL)
        return self.head(self.net(x_BLD, mask.to(x_BLD.dtype), is_causal=True))


class Conv1DBlock(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.norm, self.up, self.down = nn.LayerNorm(hidden), Conv1D(4 * hidden, hidden), Conv1D(hidden, 4 * hidden)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return x_BLD + self.down(F.gelu(self.up(self.norm(x_BLD))))


class ExpertsBlock(nn.Module):
    """gpt_oss's experts, which know biases and alternate gate and up; its router keeps the model's dtype."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        from transformers import GptOssConfig
        from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

        config: Any = GptOssConfig(hidden_size=hidden, intermediate_size=10, num_local_experts=4, num_experts_per_tok=2)
        config._experts_implementation = (
            "batched_mm"  # a dry run of a pipeline knows no values, and eager asks for them
        )
        self.norm, self.moe = nn.LayerNorm(hidden), GptOssMLP(config)
        for parameter in self.moe.parameters():
            nn.init.normal_(parameter, std=0.3)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return x_BLD + self.moe(self.norm(x_BLD))[0]


class GatedBlock(nn.Module):
    """A gate computed by a row layer, of tokens, times features."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.gate, self.down = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, x_BLD: Tensor) -> Tensor:
        features_BLD = self.up(self.norm(x_BLD))
        return x_BLD + self.down(torch.sigmoid(self.gate(features_BLD)) * features_BLD)


class TorchDecoder(AdamWModule):
    """nn.TransformerDecoder: each layer takes tokens, and a whole memory."""

    def __init__(self, vocab: int = 32, hidden: int = 18, heads: int = 6) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, hidden)
        layer = nn.TransformerDecoderLayer(hidden, heads, 20, 0.0, batch_first=True, norm_first=True)
        self.net = nn.TransformerDecoder(layer, 2, nn.LayerNorm(hidden))
        self.head = nn.Linear(hidden, vocab)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.tok(tokens_BL)
        return self.head(self.net(x_BLD, torch.tanh(x_BLD)))


class Blocks(AdamWModule):
    """An embedding, blocks of one kind, a head."""

    def __init__(self, kind: type[nn.Module], vocab: int = 32, hidden: int = 8) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(kind(hidden) for _ in range(2))
        self.head = nn.Linear(hidden, vocab)

    def forward(self, tokens_BL: Tensor) -> Tensor:
        x_BLD = self.tok(tokens_BL)
        for block in self.blocks:
            x_BLD = block(x_BLD)
        return self.head(torch.tanh(x_BLD))


TORCH_PLAN: dict[str, Any] = {
    "tok": "vocab",
    "net.layers.*": "sequence",
    "net.layers.*.self_attn": "attention",
    "net.layers.*.linear1": "column",
    "net.layers.*.linear2": "row",
    "head": "column_gather",
}
DECODER_PLAN: dict[str, Any] = {**TORCH_PLAN, "net.layers.*.multihead_attn": "attention"}
GATED_PLAN: dict[str, Any] = {
    "blocks.*": "sequence",
    "blocks.*.up": {"style": "column", "global_sizes": True},
    "blocks.*.gate": "row",
    "blocks.*.down": "row",
}
CONV1D_PLAN: dict[str, Any] = {"blocks.*": "sequence", "blocks.*.up": "column", "blocks.*.down": "row"}
EXPERTS_PLAN: dict[str, Any] = {"blocks.*": "sequence", "blocks.*.moe.experts": "experts"}
