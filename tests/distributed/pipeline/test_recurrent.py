"""Recurrent layers that pack sequences inside of their forward, whose lengths are values, at pp > 1."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader

from tests.distributed.training import PLAIN, Layout, Losses, make_trainer, run_program

WIDTH, TOKENS = 8, 6


def _packing(base: type[nn.RNNBase]) -> type[nn.RNNBase]:
    class Packing(base):  # type: ignore[misc, valid-type]
        """As pytorch-forecasting's layers do: lengths go along, and the packing is the layer's business."""

        def forward(self, x: Tensor, hx: Any = None, lengths: Any = None) -> Any:
            if lengths is None or lengths.max() == 0:
                return super().forward(x, hx)
            packed = pack_padded_sequence(x, lengths.cpu(), enforce_sorted=False, batch_first=True)
            out, state = super().forward(packed, hx)
            return pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0], state

    return Packing


class Encodes(LightningModule):
    """An encoder's state starts the decoder, which is the same layer."""

    def __init__(self, base: type[nn.RNNBase]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.rnn = nn.Linear(3, WIDTH), _packing(base)(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, lengths = batch
        assert lengths.min() > 0
        _, state = self.rnn(self.embed(x), lengths=lengths)
        y, _ = self.rnn(self.embed(x * 2), state, lengths=lengths)
        return self.head(y).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _encoding(layout: Layout, base: type[nn.RNNBase]) -> list[float]:
    losses, generator = Losses(), torch.Generator().manual_seed(0)
    rows = [(torch.randn(TOKENS, 3, generator=generator, dtype=torch.float64), 1 + i % TOKENS) for i in range(12)]
    trainer = make_trainer(layout, "untied", {"plan": None}, callbacks=[losses])
    trainer.fit(Encodes(base), DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
    return losses.seen


@pytest.mark.parametrize("base", [nn.LSTM, nn.GRU])
def test_states_of_layers_that_pack_go_on(base: type[nn.RNNBase]) -> None:
    ((losses),) = run_program(PLAIN, _encoding, base)
    for found in run_program(Layout(pp=2, microbatches=2), _encoding, base):
        assert found == pytest.approx(losses, abs=1e-12)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_guesses_have_the_shapes_of_what_is_returned(kind: type[nn.RNNBase]) -> None:
    from lightning_megatp.pipeline.slicing.dry_run.guesses import guess

    for first, both, layers, rank in itertools.product((True, False), (True, False), (1, 2), (2, 3)):
        layer = kind(4, 5, num_layers=layers, bidirectional=both, batch_first=first)
        x = torch.randn(3, 2, 4)[(0,) if rank == 2 else ()]
        out, state = layer(x)
        made_up, guessed = guess(layer._call_impl, x)
        assert made_up.shape == out.shape and made_up.requires_grad
        of_layer = state if isinstance(state, tuple) else (state,)
        of_guess = guessed if isinstance(guessed, tuple) else (guessed,)
        assert [x.shape for x in of_guess] == [x.shape for x in of_layer]
    projected = nn.LSTM(4, 5, proj_size=2)
    assert [x.shape for x in guess(projected.forward, x)[1]] == [x.shape for x in projected(x)[1]]
