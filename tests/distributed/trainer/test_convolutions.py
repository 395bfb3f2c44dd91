"""A small residual network of convolutions, fitted without a plan: the numbers of one device, statistics too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.distributed.training import PLAIN, Layout, make_trainer, run_program

BATCHES, ROWS = 2, 4


class Residual(nn.Module):
    def __init__(self, width: int, stride: int = 1) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(width, width, 3, padding=1, stride=stride), nn.BatchNorm2d(width)
        self.two, self.short = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.Conv2d(width, width, 1, stride)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.two(self.act(self.norm(self.one(x)))) + self.short(x))


class Images(LightningModule):
    """Splits its batches into parts, over which BatchNorm takes its statistics.

    Args:
        parts: how many.
        apart: whether each part takes every so-many-th row, as data-parallel ranks do.
    """

    def __init__(self, parts: int, apart: bool) -> None:
        super().__init__()
        self.parts, self.apart = parts, apart
        self.stem, self.head = nn.Conv2d(3, 8, 3), nn.Linear(8, 5)
        self.blocks = nn.Sequential(Residual(8), Residual(8, 2), Residual(8))
        nn.utils.parametrizations.weight_norm(self.blocks[1].one)
        with pytest.warns(FutureWarning, match="weight_norm"):
            nn.utils.weight_norm(self.blocks[2].one)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.parts == 1:
            return self._loss(*batch)
        split = [[x[i :: self.parts] for i in range(self.parts)] if self.apart else x.chunk(self.parts) for x in batch]
        return torch.stack([self._loss(image, label) for image, label in zip(*split, strict=True)]).mean()

    def _loss(self, image: Tensor, label: Tensor) -> Tensor:
        image = image.to(self.dtype, memory_format=torch.channels_last)
        return nn.functional.cross_entropy(self.head(self.blocks(self.stem(image)).mean((2, 3))), label)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(layout: Layout, parts: int, apart: bool, strategy: dict[str, Any], precision: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    images, labels = torch.randn(BATCHES * ROWS, 3, 9, 8, generator=generator), torch.arange(BATCHES * ROWS) % 5
    torch.manual_seed(1)
    module = Images(parts if layout.plain else 1, apart)
    trainer = make_trainer(layout, strategy={"plan": "auto", **strategy}, precision=precision)
    data = TensorDataset(images, labels)
    sampler = None if layout.dp > 1 else DistributedSampler(data, 1, 0, seed=0)  # the order of all dp ranks
    trainer.fit(module, DataLoader(data, batch_size=ROWS // layout.dp, sampler=sampler))
    if layout.plain:
        return module.state_dict()
    normed = {"blocks.1.one.parametrizations.weight.original1", "blocks.2.one.weight_g", "blocks.2.one.weight_v"}
    assert {"blocks.0.one.weight", "blocks.2.two.weight", *normed} <= set(trainer.strategy.parallel.plan.parameters)
    state: dict[str, Tensor] = trainer.strategy.lightning_module_state_dict()
    return state


LAYOUTS: list[Any] = [
    (Layout(tp=2), {}, "64-true"),
    (Layout(tp=2, pp=2, microbatches=2), {}, "64-true"),
    pytest.param(Layout(tp=2, pp=2, microbatches=2, schedule="zb_h1"), {}, "64-true", marks=pytest.mark.extended),
    pytest.param(Layout(tp=2, dp=2, zero=3), {}, "64-true", marks=pytest.mark.extended),
    pytest.param(Layout(tp=2), {"recompute": "full"}, "64-true", marks=pytest.mark.extended),
    pytest.param(Layout(tp=3), {}, "64-true", marks=pytest.mark.extended),
    pytest.param(Layout(tp=2), {}, "bf16-mixed", marks=pytest.mark.extended),
]


@pytest.mark.parametrize(("layout", "strategy", "precision"), LAYOUTS, ids=str)
def test_convolutions_train_as_on_one_device(layout: Layout, strategy: dict[str, Any], precision: str) -> None:
    parts, apart = layout.microbatches if layout.pp > 1 else layout.dp, layout.dp > 1
    expected = run_program(PLAIN, fit, parts, apart, {}, precision)[0]
    found = run_program(layout, fit, parts, apart, strategy, precision)[0]
    assert found.keys() == expected.keys()
    tolerance = {"64-true": 1e-9, "bf16-mixed": 2e-2}[precision]
    for name, value in expected.items():
        if not (apart and ("running" in name or "tracked" in name)):  # of the rank's own rows
            torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance)
