"""Steps by hand of an optimizer that is written in Python, beside one of torch's, over pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.training import PLAIN, PP2, TP2_PP2, Layout, make_trainer, run_program

WIDTH, CLASSES = 8, 5


class Momentum(torch.optim.Optimizer):
    """As projects write their own."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(p)
                mean = state["mean"].mul_(group["momentum"]).add_(p.grad)
                p.add_(mean, alpha=-group["lr"])
        return loss


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Classifier(LightningModule):
    """Its two optimizers share no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.blocks: Any = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        own, adam = self.optimizers()  # type: ignore[attr-defined]
        own.zero_grad()
        adam.zero_grad()
        self.manual_backward(loss)
        own.step()
        adam.step()
        self.log("loss", loss)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(float(self.trainer.logged_metrics["loss"]))

    def configure_optimizers(self) -> Any:
        down = [p for block in self.blocks for p in block.down.parameters()]
        rest = [p for block in self.blocks for p in block.up.parameters()]
        return [Momentum(down, lr=0.05, momentum=0.9), torch.optim.Adam([*rest, *self.head.parameters()], lr=0.01)]


def _trained(layout: Layout) -> tuple[list[float], int, dict[str, Tensor]]:
    """The losses of steps, their number, and the weights on rank 0."""
    torch.manual_seed(0)
    module, draw = Classifier(), torch.Generator().manual_seed(1)
    x = torch.randn(32, WIDTH, generator=draw, dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, torch.randint(0, CLASSES, (32,), generator=draw)), batch_size=8)
    plan = {"plan": "auto" if layout.tp > 1 else None}
    trainer = make_trainer(layout, strategy=plan, use_distributed_sampler=False)
    trainer.fit(module, loader)
    weights = trainer.strategy.lightning_module_state_dict()
    return module.seen, trainer.global_step, {name: x.clone() for name, x in weights.items()}


@pytest.mark.parametrize("layout", [PP2, TP2_PP2], ids=str)
def test_an_own_optimizer_beside_another(layout: Layout) -> None:
    ((losses, steps, weights),) = run_program(PLAIN, _trained)
    assert len(losses) == 4 and steps == 8
    found = run_program(layout, _trained)
    for own, at, _ in found:
        assert own == pytest.approx(losses, rel=1e-9) and at == steps
    torch.testing.assert_close(found[0][2], weights, rtol=1e-8, atol=1e-10)
