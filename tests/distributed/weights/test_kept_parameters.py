"""Parameters that a module, its callbacks and its objects keep in lists of their own are those that are trained."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.distributed.training import PLAIN, Layout, Losses, make_trainer, run_program, shared_directory
from tests.ranks import RankError

WIDTH = 8


class Kept:
    """An object of the user's, as torch_ema's average is one."""

    def __init__(self, parameters: Any, how: str) -> None:
        every = list(parameters)
        self.how, self.groups = how, {"all": [tuple(every)] if how == "tuple" else every}
        if how == "weak":
            self.groups = {"all": [weakref.ref(p) for p in every]}

    def __call__(self) -> list[nn.Parameter]:
        (held,) = self.groups["all"] if self.how == "tuple" else (self.groups["all"],)
        return [x() if isinstance(x, weakref.ref) else x for x in held]

    @torch.no_grad()
    def decay(self) -> None:
        if self.how == "foreach":
            torch._foreach_mul_(self(), 0.9)
            return
        for parameter in self():
            parameter.mul_(0.9)


class Decays(Callback):
    def __init__(self, kept: Kept) -> None:
        self.kept = kept

    def on_train_batch_end(self, *args: Any) -> None:
        self.kept.decay()


class Model(LightningModule):
    def __init__(self, where: str, how: str = "list") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.where, self.kept = where, Kept(self.net.parameters(), how)
        self.clipped = list(self.net.parameters())

    def configure_callbacks(self) -> list[Callback]:
        return [Decays(Kept(self.net.parameters(), self.kept.how))] if self.where == "callback" else []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        return loss + 0.1 * sum(p.square().sum() for p in self.kept()) if self.where == "step" else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.clipped if self.where == "gradients" else ():
            if parameter.grad is not None:
                parameter.grad.clamp_(-1e-3, 1e-3)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.where == "hook":
            self.kept.decay()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.clipped, lr=0.1)


def _trained(layout: Layout, where: str, how: str, root: str) -> tuple[list[float], dict[str, Tensor]]:
    losses, module = Losses(), Model(where, how)
    x = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    trainer = make_trainer(layout, strategy={"plan": "auto"}, callbacks=[losses], use_distributed_sampler=False)
    trainer.fit(module, DataLoader(TensorDataset(x), batch_size=8))
    path = shared_directory(layout, where + how, root) / "last.ckpt"
    trainer.save_checkpoint(path)
    return losses.seen, torch.load(path)["state_dict"]


CASES = [
    *(("hook", how, layout) for how in ("list", "tuple", "weak") for layout in (Layout(dp=2, zero=3), Layout(pp=2))),
    *(("callback", "foreach", layout) for layout in (Layout(dp=2, zero=3), Layout(pp=2), Layout(tp=2, pp=2))),
    *(("callback", "list", layout) for layout in (Layout(dp=2, zero=1), Layout(pp=2), Layout(tp=2))),
    *(("gradients", "list", layout) for layout in (Layout(dp=2, zero=3), Layout(pp=2), Layout(dp=2, pp=2, zero=2))),
    *(("step", "list", layout) for layout in (Layout(pp=2), Layout(tp=2))),
]


@pytest.mark.parametrize(("where", "how", "layout"), CASES, ids=str)
def test_kept_parameters_are_those_that_are_trained(where: str, how: str, layout: Layout, tmp_path: Path) -> None:
    ((losses, state),) = run_program(PLAIN, _trained, where, how, str(tmp_path))
    for found, saved in run_program(layout, _trained, where, how, str(tmp_path)):
        assert found == pytest.approx(losses, abs=1e-9)
        for name, value in state.items():
            torch.testing.assert_close(saved[name], value, rtol=0, atol=1e-9)


def test_kept_rows_are_refused_in_a_step(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="uses a parameter that zero=3 has divided"):
        run_program(Layout(dp=2, zero=3), _trained, "step", "list", str(tmp_path))
