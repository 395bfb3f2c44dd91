"""LightningModules that create their layers in `configure_model`, in the ways models are initialised. Nothing here
knows this package."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parity.models import GPT, AdamWModule, GPTConfig


class NanoGPT(GPT):
    """Initialised as nanoGPT is: all by `apply`, then the residual projections once more; and in a few further ways."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__(config)
        c = config or GPTConfig(layers=4)
        self.register_buffer("mask", torch.triu(torch.ones(8, 8).bool(), 1).view(1, 1, 8, 8))  # a view
        self.register_buffer("rotary", 1.0 / 10000 ** (torch.arange(0, 8, 2).float() / 8), persistent=False)
        self.scale = nn.Parameter(1 + torch.randn(c.hidden) * 0.02)
        self.rates = [x.item() for x in torch.linspace(0, 0.1, c.layers)]
        self.apply(self._init)
        for name, p in self.named_parameters():
            if name.endswith(("out.weight", "down.weight")):
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * c.layers))
        self.pos.weight.data[0].zero_()
        for block in self.blocks:
            block.attn.qkv.weight.data.mul_(1.5)

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, mean=0.0, std=0.2)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def trunk(self, tokens_BL: Tensor) -> Tensor:
        return super().trunk(tokens_BL) * self.scale


class Pixels(nn.Sequential):
    """With BatchNorm, truncated normal and orthogonal weights."""

    def __init__(self) -> None:
        hidden = nn.Linear(16, 16)
        nn.init.orthogonal_(hidden.weight)
        table = nn.Embedding(32, 16, padding_idx=0)
        nn.init.trunc_normal_(table.weight, std=1.0, a=-1.0, b=1.0)
        norm = nn.BatchNorm1d(16)
        norm.running_mean.normal_()  # type: ignore[union-attr]
        super().__init__(table, hidden, nn.Flatten(0, 1), norm, nn.GELU(), nn.Linear(16, 32))


def llama() -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(llama_config())  # type: ignore[no-any-return]


def llama_config() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip


def pretrained(folder: str) -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).train()  # type: ignore[no-any-return]


class Resized(GPT):
    """Does what is not recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("odd", torch.rand(3).resize_(5))
        self.odd.fill_(1.0)  # type: ignore[operator, union-attr]


def large() -> nn.Module:
    """400 MiB in float32, after a table that makes hidden states of tokens."""
    parts = (nn.Sequential(nn.Linear(1024, 6400), nn.GELU(), nn.Linear(6400, 1024)) for _ in range(8))
    return nn.Sequential(nn.Embedding(32, 1024), *parts, nn.Linear(1024, 32))


MODELS: dict[str, Callable[..., nn.Module]] = {
    "nano": NanoGPT,
    "tied": GPT,
    "pixels": Pixels,
    "llama": llama,
    "resized": Resized,
    "large": large,
    "pretrained": pretrained,
}


class Late(AdamWModule):
    """Creates a model of a kind, or by a function, in `configure_model`."""

    def __init__(self, kind: str, *args: Any) -> None:
        super().__init__()
        self.model: nn.Module | None = None
        self._make = functools.partial(MODELS[kind], *args)

    def configure_model(self) -> None:
        if self.model is None:
            self.model = self._make()

    def forward(self, tokens_BL: Tensor) -> Tensor:
        assert self.model is not None
        if hasattr(self.model, "config"):
            return self.model(input_ids=tokens_BL, use_cache=False).logits  # type: ignore[no-any-return]
        return self.model(tokens_BL)  # type: ignore[no-any-return]

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(self(batch[0]).flatten(0, -2), batch[1].flatten())
