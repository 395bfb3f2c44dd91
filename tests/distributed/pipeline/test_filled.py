"""Blocks that put tensors into what they are given, or set them on themselves: lists of skips, dicts of losses, a batch
that they go on with, an object that all share, an auxiliary loss that the step collects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.crossing import fewer
from tests.distributed.training import PLAIN, PP2, TP2, TP2_PP2, Layout, Losses, make_trainer, run_program

WIDTH, TOKENS, ROWS = 8, 4, 8


class MLP(nn.Module):
    """(b, s, WIDTH) -> (b, s, WIDTH)"""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(self.norm(x))))


class Skips(nn.Module):
    """Half of a U-net: the first blocks leave what they were given, the last ones take it, in reverse order."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.mlp, self.is_down = MLP(), index < 2

    def forward(self, x: Tensor, skips: list[Tensor], losses: dict[str, Tensor]) -> Tensor:
        if self.is_down:
            skips.append(x)
        else:
            x = x + 0.5 * skips.pop()
        x = x + self.mlp(x)
        losses["last"] = x.square().mean((1, 2))
        losses[f"{len(skips)} {self.is_down}"] = x.abs().mean((1, 2))
        return x


class OnBatch(nn.Module):
    """Goes on with a dict, and returns nothing."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.mlp, self.index = MLP(), index

    def forward(self, batch: dict[str, Any]) -> None:
        batch["x"] = batch["x"] + self.mlp(batch["x"])
        batch["aux"] = batch.get("aux", 0) + batch["x"].square().mean((1, 2))
        batch["depth"] = self.index
        if self.index == 1:
            del batch["first"]


class OnObject(nn.Module):
    """Goes on with an object that all blocks share, and with a list on it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: Tensor, shared: Any) -> Tensor:
        shared.total = shared.total + x if hasattr(shared, "total") else x
        shared.seen.append(x.mean((1, 2)))
        return x + self.mlp(shared.total)


class Shared:
    """What blocks share."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []


class OnItself(nn.Module):
    """Keeps a loss and a map of attention; its part, and an object, keep others."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.mlp, self.router = MLP(), nn.Linear(WIDTH, 2)
        self.last = SimpleNamespace(shares=None)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        self.aux_loss, self.mlp.seen = shares.square().mean((1, 2)), [x.mean((1, 2))]
        self.last.shares = shares[..., 0]
        self.map = (x @ x.transpose(1, 2)).softmax(-1)
        return x + self.mlp(self.map @ x) * shares[..., :1]


BLOCKS = {"lists": Skips, "batch": OnBatch, "object": OnObject, "namespace": OnObject, "itself": OnItself}


class Net(LightningModule):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(BLOCKS[way](i) for i in range(4))

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        match self.way:
            case "lists":
                skips: list[Tensor] = []
                losses: dict[str, Tensor] = {}
                for block in self.blocks:
                    h = block(h, skips, losses=losses)
                assert not skips and len(losses) == 5
                return F.mse_loss(self.head(h), y) + 0.1 * sum(loss.mean() for loss in losses.values())
            case "batch":
                batch = {"x": h, "y": y, "first": h}
                for block in self.blocks:
                    block(batch)
                assert "first" not in batch
                return F.mse_loss(self.head(batch["x"]), batch["y"]) + 0.1 * batch["aux"].mean()
            case "itself":
                for block in self.blocks:
                    h = block(h)
                out = self.head(h)
                kept: list[Any] = list(self.blocks)
                aux = sum(x.aux_loss.mean() for x in self.modules() if hasattr(x, "aux_loss"))
                maps = torch.stack([block.map for block in kept]).square().mean()
                seen = torch.stack([block.mlp.seen[0] + block.last.shares.sum(1) for block in kept]).square().mean()
                return F.mse_loss(out, y) + 0.1 * (aux + maps + seen)
            case _:
                shared: Any = Shared() if self.way == "object" else SimpleNamespace(seen=[])
                for block in self.blocks:
                    h = block(h, shared)
                return F.mse_loss(self.head(h), y) + 0.1 * torch.stack(shared.seen).square().mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._loss(*batch)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val", self._loss(*batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def _trained(layout: Layout, ways: list[str], options: dict[str, Any]) -> dict[str, list[float]]:
    """Losses, and what is logged at last."""
    found = {}
    for way in ways:
        x = torch.randn(3 * ROWS, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        loader, seen = DataLoader(TensorDataset(x, x.flip(0)), batch_size=ROWS), Losses()
        trainer = make_trainer(layout, strategy={"plan": "auto", **options}, callbacks=[seen], max_epochs=2)
        trainer.fit(Net(way), loader, loader)
        found[way] = [*seen.seen, trainer.callback_metrics["val"].item()]
    return found


LAYOUTS = [
    (PP2, {}),
    (TP2_PP2, {}),
    (TP2, {"recompute": "full"}),  # backward finds what was given then
    (Layout(pp=2, schedule="zb_v"), {}),
    (PP2, {"recompute": "full"}),
    (Layout(pp=4), {}),
]


@pytest.mark.parametrize(("layout", "options"), fewer(LAYOUTS, extended=LAYOUTS[3:]), ids=str)
def test_what_blocks_put_into_what_they_are_given_is_there(layout: Layout, options: dict[str, Any]) -> None:
    ways = list(BLOCKS)
    (plain,) = run_program(PLAIN, _trained, ways, {})
    for found in run_program(layout, _trained, ways, options):
        for way in ways:
            assert found[way] == pytest.approx(plain[way], rel=1e-12), way
