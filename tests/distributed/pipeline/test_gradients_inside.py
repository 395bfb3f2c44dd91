"""Blocks that differentiate inside of their forward, by what a batch holds: forces of a potential, in training and in
validation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.training import PLAIN, PP2, TP2_PP2, Layout, Losses, make_trainer, run_program


class Potential(nn.Module):
    """Energies of kinds of atoms by their distances, and forces."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.detached = detached
        self.table, self.net = nn.Embedding(4, 8), nn.Sequential(nn.Linear(9, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, places: Tensor, kinds: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            places = (places.detach() if self.detached else places).requires_grad_(True)
            distances = (places[:, :, None] - places[:, None]).square().sum(-1).add(1e-6).sqrt()
            kind = self.table(kinds)
            pairs = torch.cat([kind[:, :, None] * kind[:, None], distances[..., None]], -1)
            energies = (self.net(pairs)[..., 0] * (-distances).exp()).sum((1, 2))
            (slopes,) = torch.autograd.grad(energies.sum(), places, create_graph=self.training)
        return energies, -slopes


class Dynamics(LightningModule):
    def __init__(self, detached: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.potentials, self.scale = nn.ModuleList([Potential(detached)]), nn.Linear(1, 1)

    def loss(self, batch: list[Tensor]) -> Tensor:
        places, kinds, energies, forces = batch
        found, pulls = self.potentials[0](places, kinds)
        return F.mse_loss(self.scale(found[:, None])[:, 0], energies) + 10 * F.mse_loss(pulls, forces)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 0.01)


def _fit(layout: Layout, detached: bool) -> tuple[list[float], float]:
    draw = torch.Generator().manual_seed(1)
    places, forces = torch.randn(2, 24, 4, 3, dtype=torch.float64, generator=draw)
    energies = torch.randn(24, dtype=torch.float64, generator=draw)
    data = TensorDataset(places, torch.randint(0, 4, (24, 4), generator=draw), energies, forces)
    losses = Losses()
    trainer = make_trainer(layout, strategy={"plan": None}, callbacks=[losses])
    trainer.fit(Dynamics(detached), DataLoader(data, batch_size=8), DataLoader(data, batch_size=8))
    return losses.seen, float(trainer.callback_metrics["val"])


@pytest.mark.parametrize("layout", [PP2, TP2_PP2], ids=str)
@pytest.mark.parametrize("detached", [False, True])
def test_forces_are_those_of_one_device(layout: Layout, detached: bool) -> None:
    ((losses, val),) = run_program(PLAIN, _fit, detached)
    for found, found_val in run_program(layout, _fit, detached):
        assert found == pytest.approx(losses, rel=1e-9)
        assert found_val == pytest.approx(val, rel=1e-9)
