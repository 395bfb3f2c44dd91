"""The user's hooks on the gradients of parameters find them as on one device."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.crossing import fewer
from tests.distributed.training import PLAIN, TP2, Layout, Losses, make_trainer, run_program, train_loader
from tests.parity.models import GPT, GPTConfig
from tests.parity.variants import gpt_plan
from tests.ranks import RankError

GROUPED = GPTConfig(tied=False, attention="separate", kv_heads=2, gate="fused")  # shared by ranks at tp=4


def _centralised(g: Tensor) -> Tensor:
    return g - g.mean(tuple(range(1, g.dim())), keepdim=True) if g.dim() > 1 else g


def _first_rows(g: Tensor) -> None:
    g[:5] = 0


HOOKS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "clamp": lambda g: g.clamp(-1e-3, 1e-3),
    "unit norm": lambda g: g / (g.norm() + 1e-3),  # the biases of keys have gradients of rounding alone
    "centralised": _centralised,
    "rows in place": _first_rows,
    "looks": lambda g: None,
}


def _apply(function: Callable[[Tensor], Tensor | None], parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad = function(parameter.grad)


class Hooked(GPT):
    def __init__(self, config: GPTConfig, hook: str, kind: str) -> None:
        super().__init__(config)
        self.hook, self.kind = HOOKS[hook], kind
        if kind == "in __init__":
            self.register()

    def on_fit_start(self) -> None:
        if self.kind != "in __init__":
            self.register()

    def register(self) -> None:
        for parameter in self.parameters():
            if self.kind == "accumulated":
                parameter.register_post_accumulate_grad_hook(functools.partial(_apply, self.hook))
            else:
                parameter.register_hook(self.hook)
                parameter.register_hook(lambda g: 0.5 * g)


def _fit(layout: Layout, hook: str, kind: str, every: int) -> tuple[list[float], dict[str, Tensor], list[str]]:
    torch.manual_seed(0)
    module, losses = Hooked(GROUPED, hook, kind), Losses()
    plan = None if layout.plain else {"plan": gpt_plan(GROUPED)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(
            layout,
            strategy=plan,
            limit_train_batches=4,
            callbacks=[losses],
            accumulate_grad_batches=every,
            use_distributed_sampler=not layout.zero,  # hooks find a rank's own gradients: all train on the same
        )
        trainer.fit(module, train_loader(PLAIN if layout.zero else layout, 4))
    state = {name: value.clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}
    said = [str(item.message) for item in caught]
    return losses.seen, state, [text for text in said if "post_accumulate" in text or "each microbatch" in text]


WHOLE = Layout(tp=2, sequence=False)
CASES = [
    *(("on_fit_start", hook, TP2, 1) for hook in HOOKS),
    *(("in __init__", hook, WHOLE, 1) for hook in ("clamp", "unit norm")),
    ("on_fit_start", "clamp", TP2, 2),
    ("on_fit_start", "unit norm", Layout(tp=2, pp=2, microbatches=1), 1),
    ("on_fit_start", "unit norm", Layout(tp=4), 1),
    *(("on_fit_start", "clamp", Layout(dp=2, zero=level), 1) for level in (1, 3)),
    *(("in __init__", "unit norm", Layout(dp=2, zero=level), every) for level, every in ((3, 1), (2, 2))),
    ("on_fit_start", "unit norm", Layout(tp=2, dp=2, zero=3), 1),
    ("on_fit_start", "clamp", Layout(dp=2, pp=2, zero=2, microbatches=1), 1),
    ("accumulated", "clamp", TP2, 1),
    ("accumulated", "clamp", TP2, 2),
]


@pytest.mark.parametrize(("kind", "hook", "layout", "every"), fewer(CASES, extended=CASES[1::3]), ids=str)
def test_hooks_of_parameters_find_whole_gradients(kind: str, hook: str, layout: Layout, every: int) -> None:
    ((losses, whole, _),) = run_program(PLAIN, _fit, hook, kind, every)
    for rank, (found, state, said) in enumerate(run_program(layout, _fit, hook, kind, every)):
        assert found == pytest.approx(losses, rel=1e-9)
        assert not said
        assert (rank == 0) <= (state.keys() == whole.keys())  # the others may be given none
        for name, value in state.items():
            torch.testing.assert_close(value, whole[name], rtol=1e-9, atol=1e-9)


class Keeps(GPT):
    """Keeps a graph that was made before the model was split, as torchgeo's BYOL does, and that of each step."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.kept = self.double()(torch.zeros(1, 4, dtype=torch.long))  # in the precision of the run

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept = super().training_step(batch, batch_idx)
        return self.kept


def _keeps(layout: Layout) -> dict[str, Tensor]:
    torch.manual_seed(0)
    module = Keeps(GROUPED)
    plan = None if layout.plain else {"plan": gpt_plan(GROUPED)}
    trainer = make_trainer(layout, strategy=plan, limit_train_batches=2)
    trainer.fit(module, train_loader(layout, 2))
    return {name: value.clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}


def test_graphs_of_before_the_split_may_live_on() -> None:
    (whole,) = run_program(PLAIN, _keeps)
    for name, value in run_program(TP2, _keeps)[0].items():
        torch.testing.assert_close(value, whole[name], rtol=1e-9, atol=1e-9)


def test_what_is_made_of_a_part_is_not_put_into_it() -> None:
    with pytest.raises(RankError, match=r"accumulate_grad_hook` puts into `\S+`, .* by `norm` of"):
        run_program(TP2, _fit, "unit norm", "accumulated", 1)


@pytest.mark.parametrize("kind", ["on_fit_start", "accumulated"])
def test_hooks_on_gradients_of_microbatches_are_told(kind: str) -> None:
    for _, _, said in run_program(Layout(pp=2, microbatches=2), _fit, "unit norm", kind, 1):  # each of its own stage
        assert len(said) == 1 and "more) has a hook on its gradient. With pp > 1" in said[0]
