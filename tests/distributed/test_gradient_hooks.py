"""What a user's hook finds out about gradients is about the whole model's, or said not to be."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import grad_norm, rank_zero_only
from torch.nn.utils import clip_grad_norm_

from tests.distributed.training import PLAIN, TP2, Layout, make_trainer, run_program, train_loader
from tests.parity.models import GPT, GPTConfig
from tests.parity.variants import gpt_plan
from tests.ranks import RankError

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
        clip_grad_norm_(self.parameters(), CLIP)


class ClippedAsConfigured(GPT):
    """Lightning's own clipping beside a norm of the user's."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.log("before", sum(p.grad.norm() for p in self.parameters() if p.grad is not None))
        self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")
        clip_grad_norm_(self.parameters(), CLIP / 2, foreach=False)


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
        Layout(tp=2, dp=2, zero=3),
        *(
            pytest.param(x, marks=pytest.mark.extended)
            for x in (Layout(tp=4), Layout(dp=2, zero=1), Layout(tp=2, dp=2))
        ),
    ],
    ids=str,
)
def test_norms_in_hooks_are_those_of_one_device(layout: Layout) -> None:
    for kind in (Logged, AfterBackward, Clipped, ClippedAsConfigured):
        for config in CONFIGS.values() if kind is Logged else [CONFIGS["fused"]]:
            [(expected, whole, _)] = run_program(PLAIN, _fit, kind, config)
            for seen, state, said in run_program(layout, _fit, kind, config):
                assert not said
                assert len(seen) == len(expected) == 4
                for ours, theirs in zip(seen, expected, strict=True):
                    if layout.dp > 1:
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
        torch.cat([p.grad.flatten() for p in self.parameters()]).norm()
        weight.detach().std()
        self.norm.weight.grad.mean()  # a whole one


class OnRankZero(GPT):
    """Waits for nobody, in any of its steps."""

    @rank_zero_only
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen = [*getattr(self, "seen", []), self.blocks[0].mlp.down.weight.grad.norm()]


class Late(GPT):
    """Does not ask at first."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.global_step == 2:
            self.blocks[0].mlp.down.weight.grad.norm()


class OfCallback(Callback):
    """On some ranks only."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        pl_module.blocks[0].mlp.down.weight.grad.norm()


def _seen(layout: Layout) -> list[float]:
    module = OnRankZero(CONFIGS["fused"])
    callbacks = [OfCallback()] if torch.distributed.get_rank() == 1 else []
    make_trainer(layout, limit_train_batches=4, callbacks=callbacks).fit(module, train_loader(layout, 4))
    return [float(norm) for norm in getattr(module, "seen", [])]


def test_what_is_known_of_a_part_only_is_said() -> None:
    said = run_program(TP2, _fit, OfParts, CONFIGS["fused"])[0][2]
    weight = "`blocks.0.mlp.down.weight`"
    for name, what in (("norm", "the gradient of `"), ("sum", f"the gradient of {weight}"), ("std", weight)):
        assert sum(f"takes `{name}` of {what}" in text for text in said) == 1, said
    assert len(said) == 3
    said = run_program(TP2, _fit, Late, CONFIGS["fused"])[0][2]
    assert len(said) == 1 and "takes `norm` of the gradient" in said[0]


def test_hooks_of_one_rank_wait_for_nobody() -> None:
    torch.manual_seed(0)
    first, second = run_program(TP2, _seen)
    assert len(first) == 4 and not second


def test_norms_of_a_stage_are_said_to_be() -> None:
    said = run_program(PP2, _fit, Logged, CONFIGS["fused"])[0][2]
    assert len(said) == 1 and "With pp=2 a rank has the gradients of its own stages only" in said[0]
    for kind in (Clipped, ClippedAsConfigured):
        with pytest.raises(RankError, match="by a number that each pipeline stage computes"):
            run_program(PP2, _fit, kind, CONFIGS["fused"])
