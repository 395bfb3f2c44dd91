"""Functions copied from torch, which hand over where somebody looks at operations, as torch's own do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from tests.ranks import RankError, run_ranks, run_reference


def renamed(x: Tensor) -> Tensor:
    """A changed copy of `F.relu` that still hands over to it."""
    if has_torch_function_unary(x):
        return handle_torch_function(F.relu, (x,), x)  # type: ignore[no-any-return]
    return F.relu(x).square()


def its_own(x: Tensor) -> Tensor:
    if has_torch_function_unary(x):
        return handle_torch_function(its_own, (x,), x)  # type: ignore[no-any-return]
    return F.relu(x).square()


class Lit(LightningModule):
    """A residual network.

    Args:
        act: of its blocks.
    """

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act, self.losses = act, []  # type: ignore[var-annotated]
        self.ups = nn.ModuleList(nn.Linear(8, 16) for _ in range(4))
        self.downs = nn.ModuleList(nn.Linear(16, 8) for _ in range(4))
        self.head = nn.Linear(8, 8)

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        y = x
        for up, down in zip(self.ups, self.downs, strict=True):
            y = y + down(self.act(up(y)))
        loss = (self.head(y) - x).square().mean()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.losses.append(float(self.trainer.callback_metrics["loss"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.randn(8, 8, generator=torch.Generator().manual_seed(1)), batch_size=4)


def fit(rank: int, world_size: int, act: Callable[[Tensor], Tensor], layout: dict[str, Any]) -> list[float]:
    strategy: Any = "auto"
    if layout:
        from lightning_megatp import MegaTPStrategy

        strategy = MegaTPStrategy(**layout, summary=False)
    torch.manual_seed(0)
    module = Lit(act)
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu", devices=world_size, strategy=strategy, precision="64-true", max_epochs=2, **quiet
    )
    trainer.fit(module)
    return module.losses


PLAN = {"ups.*": "column", "downs.*": "row"}
LAYOUTS: list[dict[str, Any]] = [{"tp": 2, "plan": PLAN}, {"pp": 2, "microbatches": 2}, {"zero": 3}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["tp2", "pp2", "zero3"])
def test_one_that_hands_over_to_another_is_refused(layout: dict[str, Any]) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(2, fit, renamed, layout)
    assert len(error.value.failures) == 2
    for failure in error.value.failures:
        assert "`renamed` (" in failure.message and "torch's `relu`" in failure.message


@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=["tp2", "pp2"])
def test_one_that_names_itself_runs(layout: dict[str, Any]) -> None:
    losses = run_reference(fit, 0, 1, its_own, {})
    for found in run_ranks(2, fit, its_own, layout):
        assert found == pytest.approx(losses, rel=1e-9)
