"""What a user's hook finds out about gradients is about the whole model's, or said not to be."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities import grad_norm, rank_zero_only
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tests.distributed.training import PLAIN, TP2, Layout, make_trainer, run_program, train_loader
from tests.parity.models import GPT, GPTConfig
from tests.parity.variants import gpt_plan
from tests.ranks import RankError, run_ranks

PP2 = Layout(pp=2, microbatches=2)
CLIP = 0.05
CONFIGS = {
    "fused": GPTConfig(tied=True),
    "grouped": GPTConfig(tied=False, attention="separate", kv_heads=2, gate="fused"),  # shared by ranks at tp=4
}


class Logged(GPT):
    """As in Lightning's documentation."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class AfterBackward(GPT):
    """Norms by other functions, every second batch from the first on."""

    def on_after_backward(self) -> None:
        if self.trainer.global_step % 2 == 0:
            grads = {name: p.grad for name, p in self.named_parameters() if p.grad is not None}
            self.log("all", torch.nn.utils.get_total_norm(grads.values()))
            self.log("each", sum(torch.linalg.vector_norm(grad.detach().float()) for grad in grads.values()))


class Clipped(GPT):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():  # numbers of parts, which the factor does not depend on
            parameter.norm(torch.inf)
            parameter.norm(dim=-1)
            parameter.grad.norm(torch.inf)
        clip_grad_norm_(self.parameters(), CLIP)


class ClippedByNumber(GPT):
    """Of its own making."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        norm = torch.stack([grad.norm() for grad in grads]).norm()
        for grad in grads:
            grad.mul_((CLIP / norm).clamp(max=1.0))


class ClippedAsConfigured(GPT):
    """Lightning's own clipping beside a norm of the user's."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.log("before", sum(p.grad.norm() for p in self.parameters() if p.grad is not None))
        self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
        clip_grad_norm_(self.parameters(), CLIP / 2, foreach=False)


class Adaptive(GPT):
    """Clips by the norms of weights and of their gradients."""

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        for parameter in self.parameters():
            factor = CLIP * parameter.detach().norm() / parameter.grad.norm()  # type: ignore[union-attr]
            parameter.grad.mul_(factor.clamp(max=1.0))  # type: ignore[union-attr]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("weights", sum(p.norm() for p in self.parameters()))


class OneByOne(GPT):
    """Clips each parameter by itself. In buckets, gradients count their changes together."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            clip_grad_norm_(parameter, CLIP / 10)


class EachByItsOwn(GPT):
    """As in DINO."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            factor = CLIP / 10 / (parameter.grad.data.norm(2) + 1e-6)  # type: ignore[union-attr]
            if factor < 1:
                parameter.grad.data.mul_(factor)  # type: ignore[union-attr]


class UnitWise(GPT):
    """Likewise, by those of the rows: as in timm."""

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        weights = [p for p in self.parameters() if p.dim() > 1]
        for weight, grad in ((p.detach(), p.grad.detach()) for p in weights):  # type: ignore[union-attr]
            factor = CLIP * weight.norm(dim=1, keepdim=True) / grad.norm(dim=1, keepdim=True).clamp(min=1e-6)
            grad.copy_(grad * factor.clamp(max=1.0))


class Centred(GPT):
    """Takes from gradients what is common to rows, or to all of them.

    Args:
        how: it finds that.
    """

    def __init__(self, config: GPTConfig, how: str) -> None:
        super().__init__(config)
        self.how = how

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for block in self.blocks:
            weight, grad = block.mlp.down.weight, block.mlp.down.weight.grad
            if self.how == "mean of rows":
                grad.sub_(grad.mean(dim=1, keepdim=True))
            if self.how == "projection":
                grad.sub_((grad * weight).sum(1, keepdim=True) * weight)
            if self.how == "mean":
                grad.add_(grad.mean(), alpha=-1)
            if self.how == "assigned":
                weight.grad = grad - grad.mean(1, keepdim=True)
            if self.how == "kept":
                self.rows = grad.clone()
                self.rows.sub_(grad.mean(1, keepdim=True))
                torch.zeros(len(grad), dtype=grad.dtype).copy_(grad.mean(1))
            if self.how == "spread":
                grad.div_(grad.std())
            if self.how == "mean of columns":
                grad.sub_(grad.mean(dim=0, keepdim=True))


class ByClosure(Logged):
    """The optimizer calls the step's closure, and hooks after it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()

        def closure() -> Any:
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))

        optimizer.step(closure=closure)


class Recorder(Callback):
    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def _fit(layout: Layout, kind: Callable[..., GPT], config: GPTConfig, **options: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    module, recorder = kind(config), Recorder()
    plan = None if layout.plain else {"plan": gpt_plan(config)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(layout, strategy=plan, limit_train_batches=4, callbacks=[recorder], **options)
        trainer.fit(module, train_loader(layout, 4))
    state = {name: value.clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}
    return recorder.seen, state, [str(item.message) for item in caught if "takes" in str(item.message)]


@pytest.mark.parametrize(
    "layout",
    [
        TP2,
        Layout(dp=2, zero=1),
        *(pytest.param(Layout(tp=2, dp=2, zero=zero), marks=pytest.mark.extended) for zero in (0, 3)),
        pytest.param(Layout(tp=4), marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_norms_in_hooks_are_those_of_one_device(layout: Layout) -> None:
    for kind in (Logged, AfterBackward, Clipped, ClippedAsConfigured, Changed, Adaptive, OneByOne, ByClosure):
        for config in CONFIGS.values() if kind is Logged else [CONFIGS["fused"]]:
            [(expected, whole, _)] = run_program(PLAIN, _fit, kind, config)
            for seen, state, said in run_program(layout, _fit, kind, config):
                assert not said or kind is Clipped
                assert len(seen) == len(expected) == 4
                for ours, theirs in zip(seen, expected, strict=True):
                    if layout.dp > 1 and "loss" in theirs:
                        ours["loss"] = theirs["loss"]  # this rank's
                    assert ours == pytest.approx(theirs, rel=1e-6 if kind is AfterBackward else 1e-9), kind
                for name, value in state.items():
                    torch.testing.assert_close(value, whole[name], rtol=1e-9, atol=1e-9)


class OfParts(GPT):
    """What is known of a part only."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        weight = self.blocks[0].mlp.down.weight
        weight.grad.norm(torch.inf)
        weight.grad.pow(2).sum()
        torch.cat([p.grad.flatten() for p in reversed(list(self.parameters()))]).norm()
        weight.detach().std()
        self.norm.weight.grad.mean()  # a whole one


class OnRankZero(GPT):
    """Waits for nobody, in any of its steps."""

    @rank_zero_only
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen = [*getattr(self, "seen", []), self.blocks[0].mlp.down.weight.grad.norm()]


class Tiny(GPT):
    """A parameter with fewer rows than ranks."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.scale = torch.nn.Parameter(torch.tensor([1.0, 2.0]))

    def loss(self, batch: Any) -> Any:
        return super().loss(batch) * self.scale.square().sum()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))
        clip_grad_norm_(self.parameters(), CLIP)


class Changed(GPT):
    """Gradients and norms that change before they are looked at."""

    def on_after_backward(self) -> None:
        self.clip_gradients(self.optimizers(), CLIP, "norm")
        self.log("clipped", torch.nn.utils.get_total_norm([p.grad for p in self.parameters()]))
        first, *rest = (p.grad.norm() for p in self.parameters())
        for norm in rest:
            first += norm
        self.log("sum", first)
        self.log("again", sum(p.grad.norm() for p in self.parameters()))
        self.log("whole", sum(grad.norm() for grad in self.full().values()))

    def full(self) -> dict[str, torch.Tensor]:
        ours = getattr(self.trainer.strategy, "full_gradients", None)
        return ours() if ours else {name: p.grad for name, p in self.named_parameters()}


def _set(grad: torch.Tensor) -> None:
    grad[:1] = 0


def _replace(parameter: torch.nn.Parameter) -> None:
    parameter.grad = parameter.grad * 1.0


CHANGES: dict[str, Callable[[torch.nn.Parameter], Any]] = {
    "in place": lambda p: p.grad.nan_to_num_(0.0),
    "a part": lambda p: _set(p.grad),
    "through data": lambda p: p.grad.data.mul_(1.0),
    "out": lambda p: torch.mul(p.grad, 1.0, out=p.grad),
    "replaced": _replace,
}


class ClippedAfterChange(GPT):
    def __init__(self, config: GPTConfig, change: str) -> None:
        super().__init__(config)
        self.change = change

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            CHANGES[self.change](parameter)
        clip_grad_norm_(self.parameters(), CLIP)


class OfCallback(Callback):
    """On some ranks only."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        pl_module.blocks[0].mlp.down.weight.grad.norm()


def _seen(layout: Layout) -> list[float]:
    module = OnRankZero(CONFIGS["fused"])
    callbacks = [OfCallback()] if torch.distributed.get_rank() == 1 else []
    make_trainer(layout, limit_train_batches=4, callbacks=callbacks).fit(module, train_loader(layout, 4))
    return [float(norm) for norm in getattr(module, "seen", [])]


class Idle(GPT):
    """Has hooks that look at no gradient; counts who walks over its parameters."""

    walks = 0

    def on_after_backward(self) -> None:
        pass

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        pass

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.walks = 0

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        self.walks += 1
        return super().named_parameters(*args, **kwargs)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            assert self.walks == 0


def test_hooks_that_look_at_nothing_cost_no_walk_over_the_module() -> None:
    run_program(TP2, _fit, Idle, CONFIGS["fused"])


def test_what_is_known_of_a_part_only_is_said() -> None:
    said = run_program(TP2, _fit, OfParts, CONFIGS["fused"])[0][2]
    weight = "`blocks.0.mlp.down.weight`"
    for name, what in (("norm", "the gradient of `"), ("sum", f"the gradient of {weight}"), ("std", weight)):
        assert sum(f"takes `{name}` of {what}" in text for text in said) == 1, said
    assert len(said) == 3


@pytest.mark.parametrize("change", CHANGES)
def test_norms_of_changed_parts_are_not_taken_for_the_whole(change: str) -> None:
    kind = functools.partial(ClippedAfterChange, change=change)
    with pytest.raises(RankError, match="is known of this rank's part only"):
        run_program(TP2, _fit, kind, CONFIGS["fused"])


def test_norms_of_rows_that_are_divided() -> None:
    with pytest.raises(RankError, match=r"puts into the gradient of `blocks.0.\S+`, .* by `norm` of"):
        run_program(TP2, _fit, UnitWise, CONFIGS["fused"])


WAYS = {"mean of rows": "mean", "projection": "sum", "mean": "mean", "assigned": "mean", "spread": "std"}


@pytest.mark.parametrize("how", WAYS)
def test_what_is_made_of_parts_is_not_put_into_gradients(how: str) -> None:
    with pytest.raises(RankError, match=f"puts into .*`blocks.0.mlp.down.weight`.* by `{WAYS[how]}` of"):
        run_program(TP2, _fit, functools.partial(Centred, how=how), CONFIGS["fused"])


def test_what_is_made_of_parts_may_be_kept() -> None:
    run_program(TP2, _fit, functools.partial(Centred, how="kept"), CONFIGS["fused"])


def test_what_each_rank_has_is_put_into_gradients() -> None:
    kind = functools.partial(Centred, how="mean of columns")
    ((_, whole, _),) = run_program(PLAIN, _fit, kind, CONFIGS["fused"])
    held = {k: x for _, state, _ in run_program(TP2, _fit, kind, CONFIGS["fused"]) for k, x in state.items()}
    torch.testing.assert_close(held, whole, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("zero", [1, pytest.param(3, marks=pytest.mark.extended)])
def test_a_rank_without_rows_finds_the_same_norms(zero: int) -> None:
    ((expected, whole, _),) = run_program(PLAIN, _fit, Tiny, CONFIGS["fused"])
    for seen, state, said in run_program(Layout(dp=4, zero=zero), _fit, Tiny, CONFIGS["fused"]):
        assert not said and len(seen) == 4
        for ours, theirs in zip(seen, expected, strict=True):
            assert ours == pytest.approx({**theirs, "loss": ours["loss"]}, rel=1e-9)
        for name, value in state.items():
            torch.testing.assert_close(value, whole[name], rtol=1e-9, atol=1e-9)


def _by_owners(rank: int, world_size: int) -> list[float]:
    """Two of four ranks own all of the only parameter, the others nothing of any."""
    from lightning_megatp.hooks.norms import WholeNorms
    from lightning_megatp.mesh import MeshShape, ParallelMesh
    from lightning_megatp.module import ParallelModule
    from lightning_megatp.plan.parallel_plan import ParallelPlan
    from lightning_megatp.plan.shard import ShardedTensorSpec
    from lightning_megatp.tensor.context import TensorContext

    mesh = ParallelMesh(MeshShape(tp=world_size))
    spec = ShardedTensorSpec("weight", (4, 3), 0, (((0, 4),), ((0, 4),), (), ()))
    module, whole = nn.Linear(3, 4, bias=False), torch.arange(12.0).view(4, 3)
    module.weight.data = spec.spec(rank).take(whole)
    module.weight.grad = spec.spec(rank).take(2 * whole)
    parallel = ParallelModule(module, ParallelPlan(tp=world_size), TensorContext(mesh.group("tp")), {"weight": spec})
    with WholeNorms(parallel, mesh).looking("_after_closure"):
        return [float(x.norm()) / float(whole.norm()) for x in (module.weight, module.weight.grad)]


def test_a_rank_that_owns_nothing_finds_the_same_norms() -> None:
    assert run_ranks(4, _by_owners) == [[pytest.approx(1), pytest.approx(2)]] * 4


def test_hooks_of_one_rank_wait_for_nobody() -> None:
    torch.manual_seed(0)
    first, second = run_program(TP2, _seen)
    assert len(first) == 4 and not second


def test_norms_of_a_stage_are_said_to_be() -> None:
    said = run_program(PP2, _fit, Logged, CONFIGS["fused"])[0][2]
    assert len(said) == 1 and "With pp=2 a rank has the gradients of its own stages only" in said[0]
    with pytest.raises(RankError, match="that each pipeline stage computes"):
        run_program(PP2, _fit, ClippedByNumber, CONFIGS["fused"])


def test_clipping_in_hooks_takes_all_stages_together() -> None:
    for kind in (Clipped, ClippedAsConfigured):
        [(_, whole, _)] = run_program(PLAIN, _fit, kind, CONFIGS["fused"])
        for layout in (PP2, Layout(tp=2, pp=2, microbatches=2)):
            for _, state, _ in run_program(layout, _fit, kind, CONFIGS["fused"]):
                for name, value in state.items():
                    torch.testing.assert_close(value, whole[name], rtol=1e-9, atol=1e-9, msg=f"{kind} {layout} {name}")


def test_stages_clip_each_parameter_by_its_own_norm() -> None:
    both = Layout(tp=2, pp=2, microbatches=2)
    for kind, layout in ((EachByItsOwn, PP2), (OneByOne, PP2), (Adaptive, PP2), (EachByItsOwn, both)):
        [(_, whole, _)] = run_program(PLAIN, _fit, kind, CONFIGS["fused"])
        for _, state, _ in run_program(layout, _fit, kind, CONFIGS["fused"]):
            for name, value in state.items():
                torch.testing.assert_close(value, whole[name], rtol=1e-9, atol=1e-9, msg=f"{kind} {layout} {name}")


class ClippedAfterBackward(GPT):
    """Also in batches that only accumulate, whose gradients are summed later."""

    def on_after_backward(self) -> None:
        clip_grad_norm_(self.parameters(), CLIP)


class ClippedOnSchedule(ClippedAfterBackward):
    def configure_callbacks(self) -> Any:
        return GradientAccumulationScheduler({0: 1, 1: 2})


@pytest.mark.parametrize("layout", [TP2, PP2], ids=str)
def test_gradients_that_are_not_summed_yet_are_not_clipped(layout: Layout) -> None:
    constant = functools.partial(_fit, accumulate_grad_batches=2)
    scheduled = functools.partial(_fit, max_epochs=2)
    for fit, kind in ((constant, ClippedAfterBackward), (scheduled, ClippedOnSchedule)):
        with pytest.raises(RankError, match=r"`on_after_backward` scales .* would be trained differently"):
            run_program(layout, fit, kind, CONFIGS["fused"])
