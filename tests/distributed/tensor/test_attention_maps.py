"""Attention weights that Hugging Face models collect are of all heads, where tensor ranks hold some of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaModel

from tests.distributed.training import PLAIN, TP2, TP2_PP2, Layout, Losses, make_trainer, run_program

EAGER: dict[str, Any] = {"attn_implementation": "eager", "vocab_size": 16}
SIZES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def _model(kind: str) -> Any:
    if kind == "bert":
        config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SIZES, **EAGER)
        return BertModel(config, add_pooling_layer=False)
    if kind == "gpt2":
        none = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        return GPT2Model(GPT2Config(n_embd=16, n_layer=2, n_head=4, **none, **EAGER))
    return LlamaModel(LlamaConfig(num_key_value_heads=2, **SIZES, **EAGER))


class Distilled(LightningModule):
    """A loss on attention weights, those of a frozen teacher and the student's own; others are looked at."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.student, self.teacher = _model(kind), _model(kind).requires_grad_(False).eval()
        for p in self.parameters():
            p.data.mul_(8 if p.dim() > 1 else 1)  # or all tokens look at all others alike

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        found = self.student(batch, output_attentions=True)
        with torch.no_grad():
            wanted = self.teacher(batch, output_attentions=True).attentions
        assert found.attentions[-1].shape[1] == wanted[0].shape[1] == 4
        apart = sum(F.mse_loss(*each) for each in zip(found.attentions, wanted, strict=True))
        return found.last_hidden_state.square().mean() + 100.0 * apart + wanted[0][:, 3].square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        maps = self.student(batch, output_attentions=True).attentions
        for i, attention in enumerate(maps):
            self.log(f"last_{i}", attention[:, 3, :, 0].mean(), batch_size=len(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.student.parameters(), 0.05)


def _fit(layout: Layout, kind: str) -> tuple[list[float], dict[str, float]]:
    module, losses = Distilled(kind), Losses()
    batches = torch.randint(1, 16, (12, 6), generator=torch.Generator().manual_seed(1))
    trainer = make_trainer(layout, strategy={"plan": "auto"}, callbacks=[losses])
    trainer.fit(module, DataLoader(batches, 4), DataLoader(batches[:4], 4))
    return losses.seen, {k: float(v) for k, v in trainer.callback_metrics.items()}


@pytest.mark.parametrize("kind", ["llama", "bert", "gpt2"])
@pytest.mark.parametrize("layout", [TP2, TP2_PP2], ids=["tp2", "tp2-pp2"])
def test_collected_attention_weights_are_of_all_heads(layout: Layout, kind: str) -> None:
    ((losses, logged),) = run_program(PLAIN, _fit, kind)
    for found in run_program(layout, _fit, kind):
        assert found[0] == pytest.approx(losses, rel=2e-6)  # their softmax is in float32
        assert found[1] == pytest.approx(logged, rel=2e-6)
