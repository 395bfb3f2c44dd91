"""Optimizers whose states are not tensors in a dict: what a checkpoint has of them is what one device would save."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.crossing import crossed
from tests.distributed.training import PLAIN, Layout, Losses, make_trainer, run_program
from tests.ranks import RankError

WIDTH = 8


class ByNorm(torch.optim.Optimizer):
    """Momentum, divided by the norm of a whole matrix."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.mul_(0.9).add_(p.grad)
                    p.sub_(momentum / momentum.norm().clamp(min=1e-6), alpha=group["lr"])
        return None if closure is None else closure()


class Chained(torch.optim.Optimizer):
    """Matrices by one optimizer, the rest by another, as people put Muon beside AdamW."""

    def __init__(self, params: Any, lr: float) -> None:
        params = list(params)
        super().__init__(params, {"lr": lr})
        self.optimizers = [
            ByNorm([p for p in params if p.dim() > 1], lr),
            torch.optim.AdamW([p for p in params if p.dim() < 2], lr),
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"optimizers": [x.state_dict() for x in self.optimizers], **super().state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        inner = state_dict.pop("optimizers")
        super().load_state_dict(state_dict)
        for optimizer, state in zip(self.optimizers, inner, strict=True):
            optimizer.load_state_dict(state)

    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss


class Aggregated(torch.optim.Optimizer):
    """A momentum for each of several rates, in a dict (AggMo)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            if not self.state[p]:
                self.state[p]["momenta"] = {beta: torch.zeros_like(p) for beta in (0.0, 0.9)}
            for beta, momentum in self.state[p]["momenta"].items():
                momentum.mul_(beta).add_(p.grad)
                p.sub_(momentum, alpha=self.param_groups[0]["lr"] / 2)
        return loss


class Slow(torch.optim.SGD):
    """Keeps slow weights in lists of its own (Lookahead)."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.calls, self.slow = 0, [[p.detach().clone() for p in group["params"]] for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.calls += 1
        for group, slow in zip(self.param_groups, self.slow, strict=True):
            for p, before in zip(group["params"], slow, strict=True) if self.calls % 2 == 0 else ():
                p.copy_(before.lerp_(p, 0.5))
        return loss


class Sharp(torch.optim.SGD):
    def first_step(self) -> None:
        pass

    def second_step(self) -> None:
        pass


class Block(nn.Module):
    """Has a state of its own, which is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return torch.tanh(self.linear(x)) * (1 + 1 / (1 + self.calls))

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Model(LightningModule):
    def __init__(self, kind: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.blocks = kind, nn.Sequential(*(Block() for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.blocks(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return self.kind(self.parameters(), lr=0.05)


def _fit(layout: Layout, kind: Any, file: str, start: str | None, **options: Any) -> list[float]:
    losses, epochs = Losses(), 1 if start is None else 2
    options = {"plan": "auto", **({"microbatches": 1} if layout.pp > 1 else {}), **options}
    trainer = make_trainer(
        layout, "untied", options, max_epochs=epochs, callbacks=[losses], use_distributed_sampler=False
    )
    x = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(Model(kind), DataLoader(TensorDataset(x, x.flip(1)), batch_size=8), ckpt_path=start)
        trainer.save_checkpoint(file)
    return losses.seen


LAYOUTS = [Layout(tp=2), Layout(pp=2, microbatches=1), Layout(dp=2, zero=3), Layout(tp=2, pp=2, microbatches=1)]


@pytest.mark.parametrize(("kind", "layout"), crossed([Chained, Aggregated], LAYOUTS), ids=str)
def test_a_run_goes_on_as_on_one_device(kind: Any, layout: Layout, tmp_path: Path) -> None:
    plain, file, other = (str(tmp_path / name) for name in ("plain.ckpt", "file.ckpt", "other.ckpt"))
    (first,) = run_program(PLAIN, _fit, kind, plain, None)
    (second,) = run_program(PLAIN, _fit, kind, other, plain)
    for losses in run_program(layout, _fit, kind, file, None):
        assert losses == pytest.approx(first, abs=1e-9)
    for where, start in ((PLAIN, file), (layout, file), (layout, plain)):
        for losses in run_program(where, _fit, kind, other, start):
            assert losses == pytest.approx(second, abs=1e-9)
    calls = [torch.load(path)["state_dict"]["blocks.0._extra_state"] for path in (plain, file)]
    assert calls == [{"calls": 3}, {"calls": 3}]


@pytest.mark.parametrize("layout", [*LAYOUTS, Layout(dp=2, pp=2, microbatches=1, zero=1)], ids=str)
def test_what_an_optimizer_keeps_in_lists_is_of_what_it_steps(layout: Layout, tmp_path: Path) -> None:
    (losses,) = run_program(PLAIN, _fit, Slow, str(tmp_path / "plain.ckpt"), None)
    for found in run_program(layout, _fit, Slow, str(tmp_path / "file.ckpt"), None):
        assert found == pytest.approx(losses, abs=1e-9)


@pytest.mark.parametrize("kind", [Chained, Aggregated])
def test_folders_have_no_place_for_such_states(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(RankError, match='Use checkpoint="file"'):
        run_program(Layout(tp=2), _fit_to_folder, kind, str(tmp_path / "folder"))


def _fit_to_folder(layout: Layout, kind: Any, file: str) -> list[float]:
    return _fit(layout, kind, file, None, checkpoint="folder")


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(dp=2, zero=1)], ids=str)
def test_two_steps_that_share_a_norm_are_refused(layout: Layout, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="moves weights in `first_step` by a norm of the whole gradient"):
        run_program(layout, _fit, Sharp, str(tmp_path / "never"), None)
