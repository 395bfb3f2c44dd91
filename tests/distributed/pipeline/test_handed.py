"""Blocks that return functions and objects which hold tensors of theirs: what undoes a scaling (RevIN), what adds a
residual (hyper-connections), a rotation with a shift, a distribution. They are used by the step, or by a block of
another stage."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.crossing import fewer
from tests.distributed.training import PLAIN, Layout, Losses, make_trainer, run_program, shared_directory

WIDTH, ROWS = 8, 8
Undo = Callable[[Tensor], Tensor]


class Size:
    """An object of the user's, that holds another one."""

    def __init__(self, size: Tensor, inner: Any = None) -> None:
        self.size, self.inner, self.name = size, inner, "size"

    @property
    def whole(self) -> Tensor:
        return self.size if self.inner is None else self.size + self.inner.size

    def __call__(self, z: Tensor) -> Tensor:
        return z * self.whole


class Scaling(nn.Module):
    """Scales, and returns what undoes it; in several ways. (b, WIDTH) -> (b, WIDTH), and a function of that"""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.calls = way, 0
        self.gain, self.learned = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Any:
        """By numbers of the batch alone, or some that learn."""
        size = x.std(-1, keepdim=True)
        if self.way != "of the batch":
            size = size + self.learned(x).sigmoid()
        y = x / size * self.gain
        match self.way:
            case "default":
                return y, lambda z, size=size: z * size
            case "keyword":

                def keyword(z: Tensor, *, size: Tensor = size) -> Tensor:
                    return z * size

                return y, keyword
            case "partial":
                return y, functools.partial(torch.mul, size)
            case "partial of a function":
                return y, functools.partial(lambda a, z: a * z * size, 2.0)
            case "nested":
                sizes = {"of": [size]}
                inner = lambda z: z * sizes["of"][0]  # noqa: E731
                return {"y": y, "undo": [lambda z: inner(z) + inner(2 * z)]}
            case "recursive":

                def often(z: Tensor, times: int = 2) -> Tensor:
                    return often(z * size, times - 1) if times else z

                return y, often
            case "method":  # of the module, with weights of its own
                return y, lambda z: self.undo(z, size)
            case "first":  # before the tensor that goes on
                return (lambda z: z * size), y
            case "object":
                return y, Size(size)
            case "objects":
                return y, Size(size, Size(2 * size))
            case "in a list":
                return y, [{"size": Size(size)}]
            case "namespace":
                return y, SimpleNamespace(size=size, name="size")
            case "distribution":
                return y, torch.distributions.Normal(size.expand_as(x), 1 + size.expand_as(x))
            case "distributions":
                inner = torch.distributions.Normal(size.expand_as(x), 1 + size.expand_as(x))
                return y, torch.distributions.Independent(inner, 1)
            case "plain":  # a function that holds nothing of the batch
                return y, lambda z: 2 * z
            case _:
                return y, lambda z: z * size

    def undo(self, y: Tensor, size: Tensor) -> Tensor:
        return y * size / self.gain + self.learned.bias


class Block(nn.Module):
    """(b, WIDTH) -> (b, WIDTH)"""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Last(nn.Module):
    """Undoes it by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, undo: Undo | None = None) -> Tensor:
        return self.linear(x) if undo is None else undo(self.linear(x))


class Model(LightningModule):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.scaling = Scaling(way)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.last = Last()

    def _undone(self, x: Tensor) -> Tensor:
        match self.way:
            case "nested":
                made = self.scaling(x)
                y, undo = made["y"], made["undo"][0]
            case "first":
                undo, y = self.scaling(x)
            case "in a list":
                y, made = self.scaling(x)
                undo = made[0]["size"]
            case "namespace":
                y, size = self.scaling(x)
                undo = lambda z: z * size.size  # noqa: E731
            case "distribution" | "distributions":
                y, normal = self.scaling(x)
                undo = lambda z: z * normal.mean + normal.log_prob(z).view(len(z), -1) / normal.variance  # noqa: E731
            case _:
                y, undo = self.scaling(x)
        if self.way == "early":  # on its own stage
            y = undo(y)
        for block in self.blocks:
            y = block(y)
        return self.last(y, undo) if self.way in ("by a block", "objects") else undo(self.last(y))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self._undone(x), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", F.mse_loss(self._undone(x), y))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def _loader(layout: Layout) -> DataLoader:
    """Shuffled as Lightning does it for several ranks."""
    x = torch.randn(4 * ROWS, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    data = TensorDataset(x, x.flip(1))
    sampler = None if layout.dp > 1 else DistributedSampler(data, 1, 0, shuffle=True, seed=0)
    return DataLoader(data, batch_size=ROWS // layout.dp, sampler=sampler)


def _trained(
    layout: Layout, ways: list[str], options: dict[str, Any], root: str
) -> dict[str, tuple[list[float], float, dict[str, Tensor]]]:
    """Losses, what is logged in validation, and parameters."""
    found = {}
    for way in ways:
        torch.manual_seed(0)
        losses = Losses()
        trainer = make_trainer(layout, strategy={"plan": None, **options}, callbacks=[losses], max_epochs=2)
        trainer.fit(Model(way).double(), _loader(layout), _loader(layout))
        path = shared_directory(layout, way, root) / "last.ckpt"
        trainer.save_checkpoint(path)
        found[way] = losses.seen, trainer.callback_metrics["val"].item(), torch.load(path)["state_dict"]
    return found


WAYS = [
    "of the batch",
    "learned",
    "default",
    "keyword",
    "partial",
    "partial of a function",
    "nested",
    "recursive",
    "method",
    "first",
    "plain",
    "early",
    "by a block",
    "object",
    "objects",
    "in a list",
    "namespace",
    "distribution",
    "distributions",
]
LAYOUTS = [
    (Layout(pp=2), {}),
    (Layout(pp=2, schedule="zb_v"), {}),
    (Layout(tp=2, pp=2), {"plan": "auto"}),
    (Layout(pp=2, dp=2, zero=3), {}),
    (Layout(pp=2), {"recompute": "full"}),
    (Layout(pp=4), {}),
]


@pytest.mark.parametrize(("layout", "options"), fewer(LAYOUTS, extended=[LAYOUTS[1], *LAYOUTS[4:]]), ids=str)
def test_what_blocks_hand_on_is_used_on_other_stages(layout: Layout, options: dict[str, Any], tmp_path: Path) -> None:
    ways = [way for way in WAYS if way != "method" or layout.zero == 0]  # it takes weights on another stage
    (plain,) = run_program(PLAIN, _trained, ways, {}, str(tmp_path))
    runs = run_program(layout, _trained, ways, options, str(tmp_path))
    for way, (losses, logged, state) in plain.items():
        found = [run[way] for run in runs]
        assert [statistics.mean(x) for x in zip(*(run[0] for run in found), strict=True)] == pytest.approx(losses), way
        assert statistics.mean(run[1] for run in found) == pytest.approx(logged), way
        for _, _, saved in found:
            for name, value in state.items():
                torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-11, msg=f"{way}: {name}")
