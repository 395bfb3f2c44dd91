"""Steps of evaluation that put averages of the weights in the weights' place, and afterwards the weights back, as
latent diffusion's do (`with self.ema_scope():`)."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.distributed.training import PLAIN, PP2, TP2, TP2_PP2, Layout, make_trainer, run_program

WIDTH, ROWS = 8, 8


class Buffers(nn.Module):
    """Keeps averages as buffers, and finds them by name."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.names = {name: name.replace(".", "") for name, _ in net.named_parameters()}
        for name, p in net.named_parameters():
            self.register_buffer(self.names[name], p.detach().clone())
        self.stored: list[Tensor] = []

    def update(self, net: nn.Module) -> None:
        average = dict(self.named_buffers())
        for name, p in net.named_parameters():
            average[self.names[name]].lerp_(p.detach(), 0.3)

    def put(self, net: nn.Module) -> None:
        self.stored = [p.clone() for p in net.parameters()]
        average = dict(self.named_buffers())
        for name, p in net.named_parameters():
            p.data.copy_(average[self.names[name]].data)

    def restore(self, net: nn.Module) -> None:
        for x, p in zip(self.stored, net.parameters(), strict=True):
            p.data.copy_(x.data)


class Entries:
    """Keeps them in a dict, made anew in each update."""

    def __init__(self, net: nn.Module) -> None:
        self.average = {name: p.detach().clone() for name, p in net.named_parameters()}
        self.stored: dict[str, Tensor] = {}

    def update(self, net: nn.Module) -> None:
        for name, p in net.named_parameters():
            self.average[name] = 0.7 * self.average[name] + 0.3 * p.detach()

    def put(self, net: nn.Module) -> None:
        self.stored = {name: p.data.clone() for name, p in net.named_parameters()}
        for name, p in net.named_parameters():
            p.data.copy_(self.average[name])

    def restore(self, net: nn.Module) -> None:
        for name, p in net.named_parameters():
            p.data.copy_(self.stored[name])


class Listed:
    """Keeps a list, beside weak references to the weights, and asks for no network, as torch_ema."""

    def __init__(self, net: nn.Module) -> None:
        self.average = [p.detach().clone() for p in net.parameters()]
        self.weights = [weakref.ref(p) for p in net.parameters()]
        self.stored: list[Tensor] = []

    def pairs(self, of: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        weights: list[Any] = [reference() for reference in self.weights]
        return zip(of, weights, strict=True)

    def update(self, net: nn.Module) -> None:
        for x, p in self.pairs(self.average):
            x.sub_(0.3 * (x - p.detach()))

    def put(self, net: nn.Module) -> None:
        self.stored = [p.clone() for _, p in self.pairs(self.average)]
        for x, p in self.pairs(self.average):
            p.data.copy_(x)

    def restore(self, net: nn.Module) -> None:
        for x, p in self.pairs(self.stored):
            p.data.copy_(x)


class Loaded(Entries):
    """Keeps a state dict, and loads it."""

    def put(self, net: nn.Module) -> None:
        self.stored = {name: x.clone() for name, x in net.state_dict().items()}
        net.load_state_dict(self.average)

    def restore(self, net: nn.Module) -> None:
        net.load_state_dict(self.stored)


KEEPERS: dict[str, Any] = {"buffers": Buffers, "entries": Entries, "listed": Listed, "loaded": Loaded}


class Block(nn.Module):
    """Draws in evaluation, too. (b, WIDTH) -> (b, WIDTH)"""

    def __init__(self, noise: float) -> None:
        super().__init__()
        self.noise = noise
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down(torch.tanh(self.up(x)))
        return y if self.training else y + self.noise * torch.randn_like(y)


class Averaging(LightningModule):
    """Evaluates with the weights, and with their averages."""

    def __init__(self, way: str, late: bool, noise: float) -> None:
        super().__init__()
        self.noise = noise
        self.net = nn.Sequential(*(Block(noise) for _ in range(4)), nn.Linear(WIDTH, WIDTH))
        self.way, self.late = way, late
        self.ema: Any = None if late else KEEPERS[way](self.net)
        self.seen: list[Tensor] = []

    def on_fit_start(self) -> None:
        if self.late:
            self.ema = KEEPERS[self.way](self.net)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("train", loss, sync_dist=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.ema.update(self.net)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        self.ema.put(self.net)
        try:
            yield
        finally:
            self.ema.restore(self.net)

    def evaluate(self, batch: list[Tensor]) -> Tensor:
        with self.averaged():
            return self.net(batch[0] + self.noise * torch.randn_like(batch[0]))

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("plain", F.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)
        found = self.evaluate(batch)
        self.log("averaged", F.mse_loss(found, batch[1]), sync_dist=True)
        self.seen.append(found)

    def on_validation_epoch_end(self) -> None:
        self.log("largest", torch.cat(self.seen).amax(), sync_dist=True, reduce_fx="max")
        self.seen.clear()

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.evaluate(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters(), lr=1e-2)


def _loader(layout: Layout, trains: bool) -> DataLoader:
    x = torch.randn(3 * ROWS, 2, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    data = TensorDataset(x[:, 0], x[:, 1])
    alone = trains and layout.dp == 1
    sampler: Any = DistributedSampler(data, 1, 0, shuffle=True, seed=0) if alone else None
    return DataLoader(data, ROWS // layout.dp, sampler=sampler)


def evaluated(layout: Layout, way: str, late: bool, noise: float) -> tuple[dict[str, float], list[Any]]:
    """What is logged in two epochs, and in a validation behind them, and what is predicted then."""
    torch.manual_seed(0)
    module = Averaging(way, late, noise)
    trainer = make_trainer(layout, strategy={"plan": "auto"}, max_epochs=2)
    trainer.fit(module, _loader(layout, trains=True), _loader(layout, trains=False))
    logged = {f"{name} in fit": float(x) for name, x in trainer.callback_metrics.items()}
    if layout.dp > 1:  # each data-parallel rank predicts for its own samples
        return logged, []
    torch.manual_seed(1)
    (validated,) = trainer.validate(module, _loader(layout, trains=False), verbose=False)
    return logged | validated, trainer.predict(module, _loader(layout, trains=False)) or []


def check(layout: Layout, way: str, late: bool) -> None:
    noise = 0.1 if layout.dp == 1 else 0.0  # data-parallel ranks draw for their own samples
    ((expected, predicted),) = run_program(PLAIN, evaluated, way, late, noise)
    found = run_program(layout, evaluated, way, late, noise)
    for logged, _ in found:
        assert logged == pytest.approx({name: expected[name] for name in logged}, rel=1e-9)
    if layout.dp == 1:
        torch.testing.assert_close(found[0][1], predicted, rtol=1e-9, atol=1e-12)


LAYOUTS = [TP2, PP2, TP2_PP2, Layout(dp=2, zero=3), Layout(pp=2, dp=2, zero=1, microbatches=2)]


@pytest.mark.parametrize("way", KEEPERS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.filterwarnings("ignore:.*has to do with averages")
def test_averages_stand_in_for_weights_in_steps(layout: Layout, way: str) -> None:
    check(layout, way, late=False)


@pytest.mark.parametrize("way", KEEPERS)
@pytest.mark.parametrize("layout", LAYOUTS[:3], ids=str)
@pytest.mark.filterwarnings("ignore:.*has to do with averages")
def test_averages_that_were_made_in_a_hook(layout: Layout, way: str) -> None:
    check(layout, way, late=True)
