"""`torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` in steps that optimize by hand, and in hooks of pipelines."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_  # by name, as most do
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.distributed.training import DP2, DP2_PP2, PLAIN, PP2, TP2, TP2_PP2, Layout, make_trainer, run_program
from tests.ranks import RankError

WIDTH = 8
LIMIT = 0.05
LAYOUTS = [TP2, DP2, PP2, TP2_PP2, DP2_PP2, Layout(dp=2, zero=3), Layout(dp=2, pp=2, microbatches=2, zero=1)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(LightningModule):
    """Args:
    kind: of its step, by the function's name.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.automatic_optimization = kind.startswith("hook")
        self.table, self.head = nn.Embedding(9, WIDTH), nn.Linear(WIDTH, 9, bias=False)
        self.head.weight = self.table.weight  # of two stages
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.seen: list[dict[str, float]] = []
        if kind.endswith("frozen"):
            self.table.requires_grad_(False)
            self.blocks[:2].requires_grad_(False)

    def loss(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.roll(1, 1).flatten())

    def training_step(self, batch: list[Tensor], index: int) -> Tensor | None:
        loss = self.loss(batch[0])
        self.log("loss", loss)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        globals()[self.kind](self)
        optimizer.step()
        return None

    def on_after_backward(self) -> None:
        if self.kind == "hook_after_backward":
            self.log("norm", clip_grad_norm_(self.parameters(), LIMIT))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.kind in ("hook_inf", "hook_frozen"):
            self.log("norm", clip_grad_norm_(self.parameters(), LIMIT, norm_type=math.inf))
        if self.kind == "hook_head":
            clip_grad_norm_(self.norm.parameters(), LIMIT)

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.kind == "hook_configured":
            held = [p for group in optimizer.param_groups for p in group["params"]]
            self.log("norm", clip_grad_norm_(held, LIMIT))

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        """A closure that is called by the hook, or by the optimizer."""
        kept = self.norm.parameters() if self.kind == "hook_step_some" else self.parameters()
        if self.kind == "hook_step_called":
            optimizer_closure()
            clip_grad_norm_(kept, LIMIT)
            optimizer.step()
        elif self.kind.startswith("hook_step"):

            def clipped() -> Any:
                loss = optimizer_closure()
                clip_grad_norm_(kept, LIMIT)
                return loss

            optimizer.step(closure=clipped)
        else:
            super().optimizer_step(epoch, index, optimizer, optimizer_closure)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append({name: float(x) for name, x in self.trainer.logged_metrics.items()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)


def all_by_norm(lit: Model) -> None:
    norm = clip_grad_norm_(lit.parameters(), LIMIT)
    lit.log("norm", norm)
    lit.log("norm_number", norm.item() + 1)


def some_by_norms(lit: Model) -> None:
    trained = [p for p in lit.blocks.parameters() if p.requires_grad]
    lit.log("blocks", nn.utils.clip_grad_norm_(trained, LIMIT, norm_type=3.0))
    lit.log("up", clip_grad_norm_(lit.blocks[1].up.weight, LIMIT / 3))
    lit.log("largest", clip_grad_norm_(lit.norm.parameters(), max_norm=LIMIT / 5, norm_type="inf"))  # type: ignore[arg-type]


def by_value(lit: Model) -> None:
    clip_grad_value_(lit.parameters(), LIMIT / 50)


def unless_it_is_large(lit: Model) -> None:
    """The number decides what is done next."""
    if clip_grad_norm_(lit.parameters(), LIMIT) > 0.4:
        lit.zero_grad()


def cleared(lit: Model) -> None:
    """Gradients of the batch before, of some parts of the module, and what came of two backwards."""
    lit.blocks[0].zero_grad()
    lit.norm.zero_grad(set_to_none=False)
    for parameter in lit.blocks[1].parameters():
        parameter.grad = None
    lit.manual_backward(lit.loss(torch.arange(4).expand(2, 4)))


def cleared_in_no_block(lit: Model) -> None:
    lit.table.weight.grad = None
    lit.log("norm", clip_grad_norm_(lit.parameters(), LIMIT))


def with_others(lit: Model) -> None:
    clip_grad_norm_([*lit.parameters(), torch.zeros(3, requires_grad=True)], LIMIT)


def of_order_zero(lit: Model) -> None:
    clip_grad_norm_(lit.parameters(), LIMIT, norm_type=0.0)


def of_others(lit: Model) -> None:
    x = torch.ones(4, requires_grad=True)
    x.grad = torch.full((4,), 3.0)
    lit.log("theirs", clip_grad_norm_([x], 1.0))
    lit.log("clipped", x.grad.sum())


def train(layout: Layout, kind: str) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    torch.manual_seed(1)
    lit = Model(kind)
    data = TensorDataset(torch.randint(0, 9, (24, 4), generator=torch.Generator().manual_seed(2)))
    sampler = None if layout.dp > 1 else DistributedSampler(data, 1, 0, shuffle=True, seed=0)
    plan = {"plan": "auto" if layout.tp > 1 else None}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        trainer = make_trainer(layout, strategy=plan)
        trainer.fit(lit, DataLoader(data, batch_size=8 // layout.dp, sampler=sampler))
    whole = trainer.strategy.lightning_module_state_dict()
    return lit.seen, {name: x.clone() for name, x in whole.items()}


def check(layout: Layout, kind: str) -> None:
    (seen, weights), *_ = run_program(PLAIN, train, kind)
    for rank, (found, held) in enumerate(run_program(layout, train, kind)):
        assert len(found) == len(seen) == 3
        for i, (own, expected) in enumerate(zip(found, seen, strict=True)):
            if layout.dp > 1:  # each rank logs the loss of its samples
                own, expected = ({k: x for k, x in logs.items() if k != "loss"} for logs in (own, expected))
            assert own == pytest.approx(expected, rel=1e-9, abs=1e-12), f"step {i} on rank {rank}"
        for name, x in held.items() if rank == 0 else ():
            torch.testing.assert_close(x, weights[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", ["all_by_norm", "some_by_norms", "by_value", "unless_it_is_large", "cleared"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_steps_clip_as_on_one_device(layout: Layout, kind: str) -> None:
    check(layout, kind)


@pytest.mark.parametrize("layout", [TP2, PP2], ids=str)
def test_what_is_in_no_block_is_cleared(layout: Layout) -> None:
    check(layout, "cleared_in_no_block")


def test_what_is_gathered_is_not_cleared_by_hand() -> None:
    with pytest.raises(RankError, match=r"sets the gradient of `table.weight`.*Clear them by `zero_grad\(\)`"):
        run_program(Layout(dp=2, zero=3), train, "cleared_in_no_block")


def test_gradients_of_other_tensors_are_clipped_as_ever() -> None:
    check(TP2, "of_others")


@pytest.mark.parametrize("kind", ["hook_after_backward", "hook_inf", "hook_configured"])
@pytest.mark.parametrize("layout", [TP2, PP2, TP2_PP2, DP2_PP2, Layout(dp=2, pp=2, microbatches=2, zero=3)], ids=str)
def test_hooks_clip_as_on_one_device(layout: Layout, kind: str) -> None:
    check(layout, kind)


@pytest.mark.parametrize("kind", ["hook_step_called", "hook_step_within"])
@pytest.mark.parametrize("layout", [TP2, PP2, DP2, Layout(dp=2, zero=3), Layout(dp=2, tp=2, zero=1)], ids=str)
def test_steps_of_optimizers_clip_as_on_one_device(layout: Layout, kind: str) -> None:
    check(layout, kind)


@pytest.mark.parametrize("kind", ["hook_frozen", "hook_step_frozen"])
def test_a_stage_that_trains_nothing_clips_with_the_others(kind: str) -> None:
    check(PP2, kind)


def test_steps_of_optimizers_clip_some_parameters() -> None:
    check(TP2, "hook_step_some")
    with pytest.raises(RankError, match="clips the gradients of some parameters by their norm, of which each pipeline"):
        run_program(PP2, train, "hook_step_some")


def test_hooks_clip_a_part_of_the_stages_with_an_error() -> None:
    with pytest.raises(RankError, match=r"scales the gradient of .* by a number in a tensor"):
        run_program(PP2, train, "hook_head")


@pytest.mark.parametrize("layout", [TP2, PP2], ids=str)
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("with_others", "together with those of other tensors. Clip them in two calls"),
        ("of_order_zero", r"norm_type=0\), of gradients of which each rank has parts"),
    ],
)
def test_what_cannot_be_clipped_together(layout: Layout, kind: str, message: str) -> None:
    with pytest.raises(RankError, match=message):
        run_program(layout, train, kind)
