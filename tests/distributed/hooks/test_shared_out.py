"""Code behind Lightning's own methods, and in optimizers, that talks to other ranks: these are copies of the model."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import BaseFinetuning, BasePredictionWriter
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.training import PLAIN, PP2, TP2, TP2_DP2, Layout, Losses, make_trainer, run_program
from tests.ranks import RankError

ROWS: Any = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class SharedOut(torch.optim.Optimizer):
    """As Keller Jordan's Muon: each rank steps some parameters, and all gather the others.

    Args:
        how: by the sign of a momentum, or by its norm.
    """

    def __init__(self, params: Any, how: str) -> None:
        super().__init__(params, {"lr": 0.05})
        self.how = how

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        for group in self.param_groups:
            params = group["params"]
            padded = params + [torch.empty_like(params[-1])] * (ranks - len(params) % ranks)
            for first in range(0, len(params), ranks):
                if first + rank < len(params):
                    self._step_one(params[first + rank], group["lr"])
                if ranks > 1:
                    dist.all_gather(padded[first : first + ranks], padded[first + rank])
        return loss

    def _step_one(self, p: Tensor, lr: float) -> None:
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        momentum = state["momentum_buffer"].lerp_(p.grad, 0.5)
        p.sub_(momentum.sign() if self.how == "sign" else momentum / (momentum.norm() + 1e-7), alpha=lr)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Model(LightningModule):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(4)), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch) - 1).square().mean()

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)[:, 0]

    def configure_optimizers(self) -> Any:
        if not self.how:
            return torch.optim.SGD(self.parameters(), lr=0.1)
        return SharedOut([block.up.weight for block in self.blocks], self.how)  # type: ignore[union-attr]


class Writes(BasePredictionWriter):
    def __init__(self, interval: Any) -> None:
        super().__init__(interval)
        self.rows: list[float] = []

    def gather(self, values: list[float]) -> None:
        gathered: list[Any] = [values]
        if dist.is_initialized():
            gathered = [None] * dist.get_world_size()
            dist.all_gather_object(gathered, values)
        self.rows += [x for of_rank in gathered for x in of_rank]

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, *args: Any) -> None:
        self.gather(prediction.tolist())

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
        self.gather([1.0] * sum(map(len, predictions)))


class Finetunes(BaseFinetuning):
    """Draws a part of the weights anew."""

    def freeze_before_training(self, pl_module: Any) -> None:
        pass

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            nn.init.normal_(pl_module.blocks[1].up.weight, std=0.3)
            with torch.no_grad():
                pl_module.blocks[2].up.weight[:4] = 0.1


def _fit(layout: Layout, how: str, finetunes: bool = False) -> list[float]:
    torch.manual_seed(0)
    losses, callbacks = Losses(), [Finetunes()] if finetunes else []
    strategy = None if layout.plain else {"plan": "auto"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = make_trainer(
            layout, strategy=strategy, callbacks=[losses, *callbacks], max_epochs=2, use_distributed_sampler=False
        )
        trainer.fit(Model(how), DataLoader(ROWS, batch_size=4))
    return losses.seen


def _predict(layout: Layout, interval: str) -> list[float]:
    torch.manual_seed(0)
    writer = Writes(interval)
    strategy = None if layout.plain else {"plan": "auto"}
    trainer = make_trainer(layout, strategy=strategy, callbacks=[writer])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.predict(Model(), DataLoader(ROWS, batch_size=4))
    return writer.rows


@pytest.mark.parametrize("layout", [TP2, PP2, TP2_DP2], ids=str)
@pytest.mark.parametrize("how", ["sign", "norm"])
def test_an_optimizer_that_shares_parameters_out(how: str, layout: Layout) -> None:
    (expected,) = run_program(PLAIN, _fit, how)
    for found in run_program(layout, _fit, how):
        assert found == pytest.approx(expected, rel=1e-9)


def test_with_divided_parameters_it_is_refused() -> None:
    with pytest.raises(RankError, match="`SharedOut` shares its parameters out over the ranks by itself"):
        run_program(Layout(dp=2, zero=1), _fit, "sign")


@pytest.mark.parametrize("layout", [TP2, PP2], ids=str)
@pytest.mark.parametrize("interval", ["batch", "epoch"])
def test_a_writer_of_predictions_gathers_each_sample_once(interval: str, layout: Layout) -> None:
    (expected,) = run_program(PLAIN, _predict, interval)
    assert len(expected) == len(ROWS)
    found = run_program(layout, _predict, interval)[0]  # of a pipeline the last stage has predictions
    assert found == pytest.approx(expected, rel=1e-9)


def test_weights_that_are_finetuned_are_drawn_as_on_one_device() -> None:
    (expected,) = run_program(PLAIN, _fit, "", True)
    for found in run_program(TP2, _fit, "", True):
        assert found == pytest.approx(expected, rel=1e-9)
