"""Recurrent layers that pack sequences inside of their forward, whose lengths are values, at pp > 1."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
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


def _encoding(layout: Layout, make: Callable[[], LightningModule]) -> list[float]:
    losses, generator = Losses(), torch.Generator().manual_seed(0)
    rows = [(torch.randn(TOKENS, 3, generator=generator, dtype=torch.float64), 1 + i % TOKENS) for i in range(12)]
    trainer = make_trainer(layout, "untied", {"plan": None}, callbacks=[losses])
    trainer.fit(make(), DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
    return losses.seen


@pytest.mark.parametrize("base", [nn.LSTM, nn.GRU])
def test_states_of_layers_that_pack_go_on(base: type[nn.RNNBase]) -> None:
    program = functools.partial(Encodes, base)
    ((losses),) = run_program(PLAIN, _encoding, program)
    for found in run_program(Layout(pp=2, microbatches=2), _encoding, program):
        assert found == pytest.approx(losses, abs=1e-12)


class Encoder(nn.Module):
    """Packs, runs and pads in one module that returns another width than it takes."""

    def __init__(self, base: type[nn.RNNBase], batch_first: bool) -> None:
        super().__init__()
        self.rnn = base(3, 5, num_layers=2, batch_first=batch_first, bidirectional=True)
        self.proj = nn.Linear(2 * 5, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = x if self.rnn.batch_first else x.transpose(0, 1)
        packed = pack_padded_sequence(x, lengths.cpu(), self.rnn.batch_first, enforce_sorted=False)
        y, lengths = pad_packed_sequence(self.rnn(packed)[0], self.rnn.batch_first, total_length=TOKENS)
        y = self.proj(y)
        return y if self.rnn.batch_first else y.transpose(0, 1), lengths


class EncodesToAnotherWidth(Encodes):
    def __init__(self, base: type[nn.RNNBase], batch_first: bool) -> None:
        super().__init__(base)
        del self.embed, self.rnn
        self.encoders, self.narrow = nn.ModuleList(Encoder(base, batch_first) for _ in range(2)), nn.Linear(WIDTH, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        y, lengths = self.encoders[0](*batch)
        y, lengths = self.encoders[1](self.narrow(y), lengths)
        mask = torch.arange(TOKENS) < lengths[:, None]
        return (self.head(y).square().mean(-1) * mask).sum() / mask.sum()


@pytest.mark.parametrize(("base", "batch_first"), [(nn.LSTM, True), (nn.GRU, False), (nn.RNN, True)])
def test_what_packs_may_return_another_width(base: type[nn.RNNBase], batch_first: bool) -> None:
    program = functools.partial(EncodesToAnotherWidth, base, batch_first)
    ((losses),) = run_program(PLAIN, _encoding, program)
    for found in run_program(Layout(pp=2, microbatches=2), _encoding, program):
        assert found == pytest.approx(losses, abs=1e-12)


@pytest.mark.parametrize("batch_first", [True, False])
def test_shapes_of_what_is_packed_and_padded(batch_first: bool) -> None:
    from lightning_megatp.pipeline.slicing.dry_run.packing import on_whole_sequences

    def made(name: str, *args: Any) -> tuple[Tensor, Tensor]:
        function, given = on_whole_sequences(name, getattr(torch._VF, name), args)
        return function(*given)  # type: ignore[no-any-return]

    x, lengths = torch.randn(3, 4, 2), torch.tensor([4, 4, 4] if batch_first else [3, 3, 3, 3])
    data, sizes, *_ = expected = pack_padded_sequence(x, lengths, batch_first)
    found = made("_pack_padded_sequence", x, lengths, batch_first)
    assert found[0].equal(data) and found[1].equal(sizes)
    whole = pad_packed_sequence(expected, batch_first, 0.0, 6)
    again = made("_pad_packed_sequence", data, sizes, batch_first, 0.0, 6)
    assert all(x.equal(y) and x.stride() == y.stride() for x, y in zip(again, whole, strict=True))


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
