"""Hidden states and attention weights that Hugging Face's models collect from early blocks, in the loss of a pipeline:
the numbers of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.crossing import fewer
from tests.distributed.training import PLAIN, Layout, make_trainer, run_program, tokens
from tests.parity.zoo import ZOO

pytest.importorskip("transformers")

IN_FLOAT32 = {"llama", "t5"}
"""Their norms compute in float32 whatever the parameters are."""


class Probed(LightningModule):
    """Deep supervision: heads on early layers, squares of all hidden states, and what all heads attend to."""

    def __init__(self, name: str, checkpointing: bool, asked: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = ZOO[name].build().model
        self.model.set_attn_implementation("eager")
        if checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.probe = nn.Linear(16, 40)
        self.name, self.asked = name, asked

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids_BL, targets_BL = batch
        inputs = {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL)}
        if self.name == "t5":
            inputs["decoder_input_ids"] = targets_BL
        out = self.model(**inputs, output_hidden_states=self.asked, output_attentions=True)
        states = [out.get(key) or () for key in ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")]
        hidden = [x_BLD for found in states for x_BLD in found if x_BLD is not None]
        assert len(hidden) == (2 if isinstance(self.asked, list) else sum(map(len, states)))
        weights = [out.get(key) or () for key in ("attentions", "encoder_attentions", "cross_attentions")]
        loss = F.cross_entropy(out.logits.flatten(0, 1), targets_BL.flatten())
        loss = loss + 0.1 * F.cross_entropy(self.probe(hidden[1]).flatten(0, 1), targets_BL.flatten())
        loss = loss + sum(0.01 * (i + 1) * x_BLD.pow(2).mean() for i, x_BLD in enumerate(hidden))
        each = [x_BHLL for found in weights for x_BHLL in found]
        self.log("early", each[0].pow(3).mean())
        return loss + sum(0.02 * (i + 1) * (x_BHLL * x_BHLL).mean() for i, x_BHLL in enumerate(each))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.seen.append((float(outputs["loss"]), float(trainer.callback_metrics["early"])))


def _probing(layout: Layout, name: str, checkpointing: bool, asked: Any) -> tuple[list[Any], dict[str, Tensor]]:
    losses, module = Losses(), Probed(name, checkpointing, asked)
    trainer = make_trainer(layout, strategy={"plan": "auto" if layout.tp > 1 else None}, callbacks=[losses])
    trainer.fit(module, DataLoader(tokens(16), batch_size=4))
    state = module.state_dict() if layout.plain else trainer.strategy.lightning_module_state_dict()
    return losses.seen, state


CASES = [
    *((name, Layout(pp=2, microbatches=2), False, True) for name in ("gpt2", "t5")),
    ("llama", Layout(pp=2, schedule="zb_v"), False, True),
    ("llama", Layout(pp=2, microbatches=2), True, True),
    ("gpt2", Layout(pp=2, microbatches=2), False, [0, 1]),
    ("bert", Layout(tp=2, pp=2, microbatches=2, sequence=False), False, True),
    ("llama", Layout(tp=2, pp=2, microbatches=2), False, True),
]
MORE = [
    *((name, Layout(pp=2, microbatches=2), False, True) for name in ("bert", "llama")),
    ("gpt2", Layout(pp=4), False, True),
    *((name, Layout(tp=2, pp=2, microbatches=2, sequence=False), False, True) for name in ("gpt2", "llama")),
    *((name, Layout(tp=2, pp=2, microbatches=2), False, True) for name in ("gpt2", "bert")),
]


@pytest.mark.parametrize(("name", "layout", "checkpointing", "asked"), fewer([*CASES, *MORE], extended=MORE), ids=str)
def test_collected_values_of_early_blocks(name: str, layout: Layout, checkpointing: bool, asked: Any) -> None:
    ((losses, state),) = run_program(PLAIN, _probing, name, checkpointing, asked)
    tolerance = 1e-5 if name in IN_FLOAT32 else 1e-9
    for found, _ in (results := run_program(layout, _probing, name, checkpointing, asked)):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), atol=tolerance, rtol=0)
    assert results[0][1].keys() == state.keys()
    for key, value in state.items():
        torch.testing.assert_close(results[0][1][key], value, atol=tolerance, rtol=0, msg=key)
