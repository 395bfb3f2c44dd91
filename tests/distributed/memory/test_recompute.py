"""Recomputation on real ranks: the run without it, bit by bit, in every layout, with dropout everywhere."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_megatp.recompute.full import FullRecompute, InputShares
from lightning_megatp.tensor.collectives import copy_to_region
from lightning_megatp.tensor.context import Region, TensorContext
from tests.benchmarks.activations import Shape, measure, rows
from tests.distributed.training import Layout, make_trainer, run_program, train_loader
from tests.parity.cases import Case as ParityCase
from tests.parity.models import GPT, Attention, GPTConfig
from tests.parity.parallel import make_strategy, setting_of, whole_gradients
from tests.parity.running import Recorder, Run
from tests.parity.running import fit as fit_model
from tests.parity.variants import gpt_plan
from tests.ranks import RankError, run_ranks

CONFIG = GPTConfig(layers=4, dropout=0.1, attention_dropout=0.2, tied=False)


class EagerAttention(Attention):
    """Attention as many model files write it."""

    def forward(self, x_BLD: Tensor) -> Tensor:
        parts = self.qkv(x_BLD).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in parts)
        scores_BHLL = q @ k.transpose(-2, -1) * self.head_size**-0.5
        later_LL = torch.ones(x_BLD.size(1), x_BLD.size(1), dtype=torch.bool, device=x_BLD.device).triu(1)
        weights_BHLL = F.softmax(scores_BHLL.masked_fill(later_LL, float("-inf")), dim=-1)
        y_BHLK = F.dropout(weights_BHLL, self.dropout, self.training) @ v
        return self.out(y_BHLK.transpose(1, 2).flatten(2))


class Eager(GPT):
    def __init__(self, config: GPTConfig = CONFIG) -> None:
        super().__init__(config)
        for block in self.blocks:
            block.attn.__class__ = EagerAttention


@dataclasses.dataclass(frozen=True)
class Case:
    """What is compared with the same run without recomputation."""

    layout: Layout
    recompute: Any
    precision: str = "64-true"
    global_sizes: bool = False
    offload: bool = False
    eager: bool = True

    def __str__(self) -> str:
        kind = self.recompute if isinstance(self.recompute, str) else f"blocks{self.recompute['blocks']}"
        extra = [name for name in ("global_sizes", "offload") if getattr(self, name)]
        extra += [] if self.eager else ["sdpa"]
        return "-".join([kind, *extra, self.precision, str(self.layout)])


def _plan(case: Case) -> dict[str, Any]:
    plan = gpt_plan(CONFIG)
    if case.global_sizes:
        plan = {name: style for name, style in plan.items() if not name.endswith(("n_head", "n_kv_head"))}
        plan["blocks.*.attn.qkv"] |= {"global_sizes": True}
    return plan


def fit(layout: Layout, case: Case, recompute: Any) -> Run:
    torch.manual_seed(5)
    module = Eager() if case.eager else GPT(CONFIG)
    recorder = Recorder(whole_gradients)
    strategy = {
        "plan": _plan(case),
        "recompute": recompute,
        "offload_activations": case.offload and recompute != "none",
    }
    trainer = make_trainer(layout, strategy=strategy, precision=case.precision, callbacks=[recorder])
    trainer.fit(module, train_loader(layout, 3))
    return recorder.run


def check(case: Case) -> None:
    same(*(run_program(case.layout, fit, case, kind) for kind in ("none", case.recompute)))


def same(without: list[Run], recomputed: list[Run]) -> None:
    """Bit by bit."""
    for expected, found in zip(without, recomputed, strict=True):
        assert found.losses == expected.losses and len(set(found.losses)) > 1
        assert found.gradients.keys() == expected.gradients.keys()
        for name, gradient in expected.gradients.items():
            assert torch.equal(found.gradients[name], gradient), name
        for name, parameter in expected.local.items():
            assert torch.equal(found.local[name], parameter), name


TP2, PP2 = Layout(tp=2), Layout(pp=2)
TP2_WHOLE = Layout(tp=2, sequence=False)
ZB = Layout(tp=2, pp=2, schedule="zb_h1", microbatches=2)
FEW = [
    Case(TP2, "selective"),
    Case(TP2_WHOLE, "full"),
    Case(ZB, {"blocks": 1}),
]
LAYOUTS = [
    TP2,
    TP2_WHOLE,
    Layout(tp=2, dp=2),
    PP2,
    ZB,
    *(Layout(pp=2, schedule=name, microbatches=2) for name in ("gpipe", "interleaved", "zb_h1", "zb_v")),
    Layout(tp=2, pp=2, sequence=False),
]
MANY = [
    *itertools.starmap(Case, itertools.product(LAYOUTS, ["full", "selective", {"blocks": 1}])),
    *(Case(TP2_WHOLE, kind, global_sizes=True) for kind in ("full", "selective")),
    *(Case(layout, kind, precision="bf16-mixed") for layout in (TP2, PP2) for kind in ("full", "selective")),
    *(Case(layout, kind, offload=True) for layout in (TP2, ZB) for kind in ("full", "selective")),
    *(Case(layout, "selective", eager=False) for layout in (TP2, PP2)),
]


@pytest.mark.parametrize("case", FEW, ids=str)
def test_the_run_is_that_without_recomputation(case: Case) -> None:
    check(case)


@pytest.mark.extended
@pytest.mark.parametrize("case", MANY, ids=str)
def test_the_run_is_that_without_recomputation_everywhere(case: Case) -> None:
    check(case)


# ---- what is kept ----


@pytest.mark.parametrize("fused", [False, True], ids=["eager", "fused"])
def test_a_layer_keeps_no_more_than_the_formulas_say(fused: bool) -> None:
    shape = Shape(batch=2, length=64, hidden=64, heads=4, fused=fused)
    for row in rows(2):
        for kept, _ in run_ranks(2, measure, row, shape, True):
            assert kept <= row.formula(shape), row.name


def _shares(rank: int, world_size: int) -> None:
    context = TensorContext(dist.group.WORLD)
    shares = InputShares(context)
    x = torch.arange(15.0).view(3, 5).requires_grad_() * 1
    share = shares.take(x)
    assert share is not None and share.numel() == (8, 7)[rank]
    assert shares.take(x) is share, "blocks that get the same value keep one share"
    assert torch.equal(shares.put_together(share, x.shape), x)
    inside = copy_to_region(x, context.group) * (rank + 1)
    whole, region = (FullRecompute(torch.nn.Identity(), shares).input(0, value) for value in (x, inside))
    assert whole.whole is not None and region.whole is None, "values of a region are others on each rank"
    assert all(shares.take(other) is None for other in (x.detach(), x.t(), x[0, :1]))
    context.open_region = Region("between column and row")
    assert shares.take(x * 2) is None


def test_whole_inputs_are_kept_in_shares() -> None:
    run_ranks(2, _shares)


# ---- beside what users do ----


def _fit_model(rank: int, world_size: int, case: ParityCase, options: dict[str, Any]) -> Run:
    return fit_model(setting_of(case), make_strategy(case, **options), world_size, case.dp, whole_gradients)


FULL, SELECTIVE, OFFLOAD = {"recompute": "full"}, {"recompute": "selective"}, {"offload_activations": True}
BESIDE: list[tuple[str, dict[str, Any]]] = [
    ("recomputed_parts", FULL),
    *itertools.product(["recomputed", "recomputed_parts"], [SELECTIVE, OFFLOAD]),
    *itertools.product(["recomputed", "late_regulariser", "twice"], [SELECTIVE, FULL]),
]


@pytest.mark.parametrize(
    ("model", "options"), [pytest.param(*x, marks=pytest.mark.extended if i else ()) for i, x in enumerate(BESIDE)]
)
def test_checkpoints_of_the_users_own_and_odd_steps(model: str, options: dict[str, Any]) -> None:
    case = ParityCase(model, sequence=True)
    same(run_ranks(2, _fit_model, case, {}), run_ranks(2, _fit_model, case, options))


# ---- one Trainer after another ----


def _two_fits(layout: Layout, kinds: tuple[Any, Any]) -> list[list[float]]:
    torch.manual_seed(5)
    module, losses = Eager(), []
    for kind in kinds:
        recorder = Recorder(whole_gradients)
        strategy = {"plan": _plan(Case(layout, kind)), "recompute": kind}
        trainer = make_trainer(layout, strategy=strategy, callbacks=[recorder])
        torch.manual_seed(6)
        trainer.fit(module, train_loader(layout, 2))
        losses.append(recorder.run.losses)
    return losses


@pytest.mark.extended
@pytest.mark.parametrize("layout", [TP2, PP2], ids=str)
def test_another_trainer_recomputes_something_else(layout: Layout) -> None:
    expected = run_program(layout, _two_fits, ("none", "none"))
    for kinds in (("full", "none"), ("selective", "full"), ({"blocks": 1}, "selective")):
        assert run_program(layout, _two_fits, kinds) == expected


def test_stages_cut_without_recomputation_stay_so() -> None:
    with pytest.raises(
        RankError, match='already cut into pipeline stages by an earlier Trainer, with recompute="none"'
    ):
        run_program(PP2, _two_fits, ("none", "full"))


@pytest.mark.extended
def test_a_model_without_blocks_is_refused_on_every_rank() -> None:
    case = ParityCase("regression")
    with pytest.raises(RankError, match="runs the blocks of a model again, and this one has none") as caught:
        run_ranks(2, _fit_model, case, FULL)
    assert len(caught.value.failures) == 2
