"""Sizes that modules keep as ints: whoever counts heads or features outside of a block counts those of one device."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from tests.distributed.training import QUIET
from tests.ranks import run_ranks, run_reference

HIDDEN, HEADS = 32, 4
LAYOUTS = [{"tp": 2}, {"tp": 2, "pp": 2, "microbatches": 2}]
NAMES = ["tp2", "tp2-pp2"]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.head_dim = HEADS, HIDDEN // HEADS
        self.qkv = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).view(*x.shape[:2], self.heads, self.head_dim).transpose(1, 2) for layer in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(*x.shape[:2], self.heads * self.head_dim))


class Counted(Attention):
    """Counts its heads by the sizes of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        shape = *x.shape[:2], self.out.in_features // self.head_dim, self.qkv[0].out_features * self.heads // HIDDEN
        q, k, v = (layer(x).unflatten(-1, (shape[2], -1)).transpose(1, 2) for layer in self.qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.out(y.reshape(*x.shape[:2], self.out.in_features))


class Block(nn.Module):
    def __init__(self, attention: type[Attention]) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(HIDDEN), attention()
        self.mlp = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 64), nn.GELU(), nn.Linear(64, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x)


class Lit(LightningModule):
    """A GPT whose user counts.

    Args:
        counts: where heads and features are counted: in the `step`, in `configure_optimizers` (a learning rate for each
            width), in a hook that sets initial values.
    """

    def __init__(self, counts: str, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.counts, self.losses = counts, []  # type: ignore[var-annotated]
        self.tok = nn.Embedding(40, HIDDEN)
        self.blocks = nn.ModuleList(Block(attention) for _ in range(4))
        self.head = nn.Linear(HIDDEN, 40)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        if self.counts == "step":
            x = x * math.sqrt(self.blocks[0].attn.heads)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        if self.counts == "step":
            attn, mlp = self.blocks[-1].attn, self.blocks[1].mlp
            loss = loss / attn.heads + loss / mlp[1].out_features + loss / (mlp[3].in_features + attn.out.in_features)
        self.log("loss", loss)
        return loss

    def on_fit_start(self) -> None:
        if self.counts == "hook":
            for child in self.blocks.modules():
                if isinstance(child, nn.Linear):
                    with torch.no_grad():
                        child.weight.mul_(8 / child.in_features + 8 / child.out_features)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.counts != "optimizer":
            return torch.optim.AdamW(self.parameters(), lr=1e-2)
        linears = [child for child in self.modules() if isinstance(child, nn.Linear)]
        groups = [{"params": [child.weight], "lr": 0.3 / child.in_features} for child in linears]
        held = {id(child.weight) for child in linears}
        return torch.optim.AdamW([*groups, {"params": [p for p in self.parameters() if id(p) not in held]}], lr=1e-2)

    def train_dataloader(self) -> Any:
        ids = torch.randint(0, 40, (16, 7), generator=torch.Generator().manual_seed(3))
        return torch.utils.data.DataLoader(ids, batch_size=4)

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))


def fit(rank: int, world_size: int, counts: str, attention: type[Attention], layout: dict[str, int]) -> dict[str, Any]:
    strategy: Any = "auto"
    if layout:
        from lightning_megatp import MegaTPStrategy

        strategy = MegaTPStrategy(summary=False, **layout)
    torch.manual_seed(0)
    module = Lit(counts, attention)
    options: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true", "max_epochs": 1, **QUIET}
    Trainer(devices=world_size, strategy=strategy, **options).fit(module)
    held = sum(p.numel() for p in module.blocks.parameters())
    return {"losses": module.losses, "held": held}


def fit_one(counts: str, attention: type[Attention]) -> dict[str, Any]:
    return fit(0, 1, counts, attention, {})


@pytest.mark.parametrize("counts", ["step", "optimizer", "hook"])
@pytest.mark.parametrize("attention", [Attention, Counted])
@pytest.mark.parametrize("layout", LAYOUTS, ids=NAMES)
def test_sizes_outside_of_blocks_are_those_of_one_device(
    layout: dict[str, int], attention: type[Attention], counts: str
) -> None:
    expected = run_reference(fit_one, counts, attention)
    for found in run_ranks(2 * layout.get("pp", 1), fit, counts, attention, layout):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        assert found["held"] < 0.6 * expected["held"] / layout.get("pp", 1), "what is counted is split all the same"
