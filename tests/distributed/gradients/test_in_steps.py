"""Steps that look at the gradients of the batch before, to log their norm, say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from tests.distributed.training import QUIET
from tests.ranks import RankError, run_ranks, run_reference

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "microbatches": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero3": {"dp": 2, "zero": 3},
}


class Lit(LightningModule):
    """Args:
    reads: how its step looks at gradients.
    """

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.reads = reads
        self.norms: list[float] = []
        self.start, self.end = nn.Linear(6, 8), nn.Linear(8, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.start(batch)
        for block in self.blocks:
            x = x + block(x)
        loss = (self.end(x) - batch).square().mean()
        if self.reads == "after a value" and loss > 1e9:
            return loss
        if self.reads == "full_gradients" and hasattr(self.trainer.strategy, "full_gradients"):
            gradients = list(self.trainer.strategy.full_gradients().values())
        elif self.reads == "clip":
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
            gradients = []
        elif self.reads == "data" and (gradient := self.blocks[0][0].weight.grad) is not None:
            gradients = [gradient.data.mul_(0.5)]
        elif self.reads == "detach" and (gradient := self.blocks[0][0].weight.grad) is not None:
            gradients = [gradient.detach().clamp_(-0.1, 0.1)]
        elif self.reads == "numpy" and (gradient := self.blocks[0][0].weight.grad) is not None:
            gradient.numpy()[:] = 0
            gradients = []
        elif self.reads == "a block's":
            gradients = [p.grad for p in self.blocks[1].parameters() if p.grad is not None]
        elif self.reads == "zero_grad":
            self.zero_grad()
            gradients = []
        else:
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.norms.append(sum(float(x.square().sum()) for x in gradients))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        rows = torch.randn(12, 6, generator=torch.Generator().manual_seed(3)).double()
        return torch.utils.data.DataLoader(rows, batch_size=4)


def train(rank: int, world_size: int, reads: str, layout: dict[str, Any]) -> list[float]:
    strategy: Any = "auto"
    if layout:
        from lightning_megatp import MegaTPStrategy

        strategy = MegaTPStrategy(**{"summary": False, **layout})
    torch.manual_seed(0)
    module = Lit(reads)
    options: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true", "use_distributed_sampler": False, **QUIET}
    Trainer(devices=world_size, strategy=strategy, max_epochs=1, **options).fit(module)
    return module.norms


def train_one(reads: str) -> list[float]:
    return train(0, 1, reads, {})


@pytest.mark.parametrize("layout", ["pp2", "zero1", "zero3"])
@pytest.mark.parametrize("reads", ["grad", "after a value", "a block's"])
def test_a_step_that_reads_gradients_is_refused_before_training(reads: str, layout: str) -> None:
    with pytest.raises(RankError, match=r"the step (reads the gradient|uses `grad`).*on_before_optimizer_step"):
        run_ranks(2, train, reads, LAYOUTS[layout])


@pytest.mark.parametrize("reads", ["grad", "after a value"])
def test_gradients_that_a_step_of_tensor_ranks_reads(reads: str) -> None:
    expected = run_reference(train_one, reads)
    assert expected[1] > 0
    for norms in run_ranks(2, train, reads, LAYOUTS["tp2"]):
        assert norms == pytest.approx(expected, rel=1e-9)


def test_a_gradient_that_a_step_of_tensor_ranks_changes() -> None:
    with pytest.raises(RankError, match=r"the step changes a gradient in place \(`mul_`\)"):
        run_ranks(2, train, "clip", LAYOUTS["tp2"])


@pytest.mark.parametrize("way", ["data", "detach"])
def test_a_gradient_that_is_changed_through_another_tensor(way: str) -> None:
    with pytest.raises(RankError, match="the step changes a gradient in place"):
        run_ranks(2, train, way, LAYOUTS["tp2"])


def test_a_gradient_that_is_changed_through_an_array() -> None:
    with pytest.raises(RankError, match="read-only"):
        run_ranks(2, train, "numpy", LAYOUTS["tp2"])


@pytest.mark.parametrize("layout", ["tp2", "zero1", "zero3"])
def test_full_gradients_in_a_step_are_those_of_one_device(layout: str) -> None:
    expected = run_reference(train_one, "full_gradients")
    for norms in run_ranks(2, train, "full_gradients", LAYOUTS[layout]):
        assert norms == pytest.approx(expected, rel=1e-9)


def test_full_gradients_in_a_step_of_a_pipeline_are_refused() -> None:
    with pytest.raises(RankError, match="`full_gradients` can't be used inside of a step"):
        run_ranks(2, train, "full_gradients", LAYOUTS["pp2"])


@pytest.mark.parametrize("layout", ["zero1", "zero3"])
def test_a_step_may_clear_gradients(layout: str) -> None:
    run_ranks(2, train, "zero_grad", LAYOUTS[layout])
