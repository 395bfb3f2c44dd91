"""verify=True: the first batch against the unsplit model; a split model that computes something else is stopped."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from tests.distributed.training import QUIET, Layout, train_loader
from tests.parity.models import GPT, GPTConfig
from tests.parity.variants import gpt_plan
from tests.parity.zoo import ZOO
from tests.ranks import RankError, run_ranks

CONFIG = GPTConfig(tied=False)


class Scaled(GPT):
    """Divides by a number of features that a plan divides too: a plan of the user that is wrong without an error."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.width = 32

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return super().loss(batch) / self.width


class Normed(GPT):
    """Its norm is computed by a hook, and held as a tensor with a graph, which deepcopy refuses."""

    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.norm = nn.Sequential(self.norm, nn.utils.weight_norm(nn.Linear(CONFIG.hidden, CONFIG.hidden)))


class Filter(nn.Module):
    """A convolution over features, of complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.full((CONFIG.hidden // 2 + 1,), 1 + 0.5j, dtype=torch.complex128))

    def forward(self, x_BLD: Tensor) -> Tensor:
        return torch.fft.irfft(self.spectrum * torch.fft.rfft(x_BLD), n=CONFIG.hidden)


class Filtered(GPT):
    def __init__(self) -> None:
        super().__init__(CONFIG)
        self.norm = nn.Sequential(self.norm, Filter())


def _fit(rank: int, world_size: int, name: str, tp: int, pp: int, dp: int, precision: Any) -> int:
    from lightning_megatp import MegaTPStrategy

    torch.manual_seed(0)
    plan: dict[str, Any] = gpt_plan(CONFIG) if tp > 1 else {}
    if name == "a wrong plan":
        plan["width"] = "divide"
    make = {"a wrong plan": Scaled, "weight norm": Normed, "dropout": lambda: GPT(GPTConfig(tied=False, dropout=0.2))}
    strategy = MegaTPStrategy(tp=tp, pp=pp, dp=dp, plan=plan, microbatches=2, verify=True, summary=False)
    options: dict[str, Any] = {"accelerator": "cpu", "precision": precision, "max_epochs": 1, **QUIET}
    trainer = Trainer(devices=world_size, strategy=strategy, **options)
    if name == "batch norm":
        trainer.fit(ZOO["resnet"].build(), ZOO["resnet"].loader(8, 4))
    elif name == "complex":
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Casting complex values")
            trainer.fit(Filtered(), train_loader(Layout(tp=tp, dp=dp), 2))
    else:
        trainer.fit(make.get(name, lambda: GPT(CONFIG))(), train_loader(Layout(tp=tp, dp=dp), 2))
    return int(trainer.global_step)


@pytest.mark.parametrize(
    ("name", "tp", "pp", "dp", "precision"),
    [
        ("gpt", 2, 1, 1, "64-true"), ("gpt", 1, 2, 1, "64-true"), ("gpt", 2, 2, 1, "32-true"),
        ("gpt", 1, 2, 2, "64-true"), ("gpt", 2, 2, 1, "bf16-mixed"), ("dropout", 1, 2, 1, "64-true"),
        ("batch norm", 1, 2, 1, "64-true"), ("weight norm", 1, 1, 1, "64-true"),
        ("complex", 2, 1, 1, "64-true"), ("complex", 1, 2, 1, "64-true"),
    ],
)  # fmt: skip
def test_what_is_right_goes_on(name: str, tp: int, pp: int, dp: int, precision: str) -> None:
    assert run_ranks(tp * pp * dp, _fit, name, tp, pp, dp, precision) == [2] * (tp * pp * dp)


def test_a_plan_that_changes_the_loss_is_stopped() -> None:
    with pytest.raises(RankError, match="verify=True: the first batch's loss is"):
        run_ranks(2, _fit, "a wrong plan", 2, 1, 1, "64-true")


def _wrong_gradient(rank: int, world_size: int) -> None:
    """The gradients of a tied weight are not summed over the stages."""
    from lightning_megatp import MegaTPStrategy
    from lightning_megatp.pipeline.shared import SharedParameters

    summed = SharedParameters.sum_gradients
    SharedParameters.sum_gradients = lambda self: None  # type: ignore[method-assign]
    try:
        strategy = MegaTPStrategy(pp=2, microbatches=2, verify=True, summary=False)
        options: dict[str, Any] = {"accelerator": "cpu", "precision": "64-true", "max_epochs": 1, **QUIET}
        Trainer(devices=2, strategy=strategy, **options).fit(GPT(), train_loader(Layout(), 2))
    finally:
        SharedParameters.sum_gradients = summed  # type: ignore[method-assign]


def test_a_gradient_that_is_wrong_is_named() -> None:
    with pytest.raises(RankError, match=r"the gradient of `tok.weight` is not"):
        run_ranks(2, _wrong_gradient)
