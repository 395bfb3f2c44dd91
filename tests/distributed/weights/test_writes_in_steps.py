"""What a training step writes into weights, as momentum encoders do: by whatever operation, as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import DataLoader

from tests.distributed.training import PLAIN, Layout, make_trainer, run_program
from tests.ranks import RankError

PLAN = {f"{head}.{i}": style for head in ("head", "key_head") for i, style in ((0, "column"), (2, "row"))}
WAYS = ["in place", "foreach", "data", "vector", "out", "index", "normalised"]


def _head() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))


class Momentum(LightningModule):
    """The keys' weights are moved between the forwards of queries and keys."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.net, self.head, self.key_head = nn.Linear(8, 8), _head(), _head().requires_grad_(False)

    @torch.no_grad()
    def move(self) -> None:
        queries, keys = list(self.head.parameters()), list(self.key_head.parameters())
        if self.way == "foreach":
            torch._foreach_mul_(keys, 0.9)
            torch._foreach_add_(keys, queries, alpha=0.1)
            return
        if self.way == "vector":
            vector_to_parameters(0.9 * parameters_to_vector(keys) + 0.1 * parameters_to_vector(queries), keys)
            return
        for p, q in zip(queries, keys, strict=True):
            if self.way == "in place":
                q.mul_(0.9).add_(p, alpha=0.1)
            elif self.way == "data":
                q.data = q.data * 0.9 + p.data * 0.1
            elif self.way == "out":
                torch.add(q * 0.9, p, alpha=0.1, out=q)
            elif self.way == "index":
                q.data[:] = q.data * 0.9 + p.data * 0.1
            elif q.dim() == 2:
                q.div_(q.norm(dim=1, keepdim=True))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        found = self.head(self.net(batch))
        self.move()
        with torch.no_grad():
            wanted = self.key_head(self.net(batch))
        return (found - wanted).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.net.parameters(), *self.head.parameters()], lr=0.1)


def _moved(layout: Layout, way: str, kind: type[Momentum] = Momentum) -> dict[str, Tensor]:
    rows = torch.randn(16 if layout.dp == 1 else 32, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    trainer = make_trainer(layout, strategy={"plan": PLAN if layout.tp > 1 else None})
    trainer.fit(kind(way), DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
    state: dict[str, Any] = trainer.strategy.lightning_module_state_dict()
    return {name: torch.as_tensor(x).clone() for name, x in state.items()}


@pytest.mark.parametrize(
    ("layout", "way"),
    [*((Layout(tp=2), way) for way in WAYS), *((Layout(pp=2, microbatches=1), way) for way in ("in place", "foreach"))],
    ids=str,
)
def test_as_on_one_device(layout: Layout, way: str) -> None:
    (expected,), (found, *_) = (run_program(each, _moved, way) for each in (PLAIN, layout))
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, atol=1e-12, rtol=0, msg=f"{way} {name}")


class Parts(Momentum):
    """Moves weights by arithmetic that makes new tensors, and sees that they stay split."""

    @torch.no_grad()
    def move(self) -> None:
        for p, q in zip(self.head.parameters(), self.key_head.parameters(), strict=True):
            if self.way == "data":
                q.data = q.data * 0.9 + p.data * 0.1
            else:
                q.copy_(torch.lerp(q, p, torch.tensor(0.1, dtype=q.dtype)) - 0 * (-q / 2))

    def on_train_end(self) -> None:
        held = [len(head[0]._parameters["weight"]) for head in (self.head, self.key_head)]
        split = "MegaTP" in type(self.trainer.strategy).__name__
        assert held == ([8, 8] if split else [16, 16])


@pytest.mark.parametrize("way", ["data", "copy"])
def test_weights_that_arithmetic_moves_stay_split(way: str) -> None:
    (expected,), (found, *_) = (run_program(each, _moved, way, Parts) for each in (PLAIN, Layout(tp=2)))
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, atol=1e-12, rtol=0, msg=name)


class Late(Momentum):
    """After the steps that are watched."""

    def move(self) -> None:
        if self.trainer.global_step >= 2:
            super().move()


@pytest.mark.parametrize("way", ["data", "foreach", "in place"])
def test_rows_that_a_step_would_lose_are_refused(way: str) -> None:
    with pytest.raises(RankError, match=r"`key_head\.0\.weight` was changed in place while it was gathered"):
        run_program(Layout(dp=2, zero=3), _moved, way)


def test_so_are_those_of_later_steps() -> None:
    with pytest.raises(RankError, match=r"`key_head\.0\.weight` was changed in place"):
        run_program(Layout(dp=2, zero=3), _moved, "data", Late)
    expected, found = (run_program(Layout(dp=2, zero=zero), _moved, "in place", Late)[0] for zero in (0, 3))
    for name, x in expected.items():  # rows are changed, and not lost
        torch.testing.assert_close(found[name], x, atol=1e-12, rtol=0, msg=name)


class Adversarial(Momentum):
    """FGM (Miyato et al. 2017), as many write it: a second backward with disturbed weights, which are then put back."""

    def __init__(self, way: str) -> None:
        super().__init__(way)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.head(self.net(batch)).square().mean())
        weights = [p for name, p in self.head.named_parameters() if "weight" in name and p.grad is not None]
        kept = [w.data.clone() for w in weights]
        for w in weights:
            assert w.grad is not None
            w.data.add_(0.1 * w.grad / w.grad.norm())
        self.manual_backward(self.head(self.net(batch)).square().mean())
        for w, values in zip(weights, kept, strict=True):
            w.data = values
        optimizer.step()


def test_disturbed_weights_are_put_back() -> None:
    (expected,), (found, *_) = (run_program(each, _moved, "", Adversarial) for each in (PLAIN, Layout(tp=2)))
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x, atol=1e-12, rtol=0, msg=name)
