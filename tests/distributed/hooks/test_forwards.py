"""Hooks that run forwards (samples after an epoch) where zero > 0 has divided parameters, or blocks are on stages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.crossing import crossed
from tests.distributed.training import (
    DP2,
    PLAIN,
    PP2,
    TP2_PP2,
    Layout,
    eval_loader,
    make_trainer,
    run_program,
    train_loader,
)
from tests.parity.models import GPT
from tests.ranks import RankError

IDS = torch.arange(4).unsqueeze(0)
CASES = [
    *crossed(
        [Layout(pp=2, microbatches=2), Layout(dp=2, zero=1), Layout(tp=2, dp=2, zero=3), Layout(dp=2, zero=3)], [1, 2]
    ),
    *(
        pytest.param(layout, accumulated, marks=pytest.mark.extended)
        for accumulated in (1, 2)
        for layout in (
            Layout(dp=2, zero=2),
            Layout(pp=2, microbatches=4, schedule="zb_v"),
            Layout(tp=2, pp=2, microbatches=2),
            Layout(pp=2, dp=2, microbatches=2, zero=2),
        )
    ),
]


class Sampling(GPT):
    """Runs forwards in hooks and keeps what came out.

    Args:
        kind: of mistake, if any; "leaves" for a step that leaves something to its hooks.
        has_weights: whether a rank has whole ones, or rows.
    """

    def __init__(self, kind: str, has_weights: bool) -> None:
        super().__init__()
        self.kind, self.has_weights = kind, has_weights
        self.seen, self.losses = dict[str, list[float]](), list[Tensor]()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        self.log("val", loss, sync_dist=True)
        if self.kind == "leaves":
            self.losses.append(loss)

    def keep(self, name: str, x: Tensor) -> None:
        self.seen.setdefault(name, []).append(x.double().square().sum().item())

    def on_train_start(self) -> None:
        self.keep("before any step", self.tok(IDS))

    def on_validation_epoch_end(self) -> None:
        ids = IDS
        for _ in range(3):
            h = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
            for block in self.blocks:
                h = block(h)
            logits = self.head(self.norm(h))
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        self.keep("generated", logits)
        if self.trainer.is_global_zero:
            self.losses.clear()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.keep("whole", self(IDS))

    def on_train_epoch_end(self) -> None:
        if self.kind == "alone":
            if self.trainer.is_global_zero:
                self(IDS)
            return
        x = self(IDS)  # with gradients enabled
        if self.kind == "backward":
            x.square().mean().backward()
        self.keep("after an epoch", x.detach())
        if self.has_weights:
            weight = self.head.weight.detach()
            self.keep("weights", weight.full_tensor() if hasattr(weight, "full_tensor") else weight)


class Blocks(Callback):
    def on_train_batch_end(self, trainer: Any, module: Sampling, *args: Any) -> None:
        width = module.norm.weight.shape[0]
        x = torch.linspace(-1, 1, 3 * width, dtype=module.dtype).view(1, 3, width)
        module.keep("a block", module.blocks[-1](x))


def _fit(layout: Layout, accumulated: int = 1, kind: str = "") -> dict[str, list[float]]:
    torch.manual_seed(0)
    module = Sampling(kind, layout.tp == layout.pp == 1)
    trainer = make_trainer(
        layout,
        max_epochs=2,
        callbacks=[Blocks()],
        num_sanity_val_steps=0,
        accumulate_grad_batches=accumulated,
        val_check_interval=3,
    )
    trainer.fit(module, train_loader(layout, 4), eval_loader(layout, 1))
    return {**module.seen, "val": [float(trainer.callback_metrics["val"])]}


@pytest.mark.parametrize(("layout", "accumulated"), CASES, ids=str)
def test_forwards_are_those_of_undivided_parameters(layout: Layout, accumulated: int) -> None:
    expected = run_program(DP2 if layout.dp > 1 else PLAIN, _fit, accumulated)[0]
    assert {name: len(values) for name, values in expected.items()} == {
        **{"before any step": 1, "whole": 8, "generated": 2, "a block": 8, "after an epoch": 2, "weights": 2, "val": 1}
    }
    for found in run_program(layout, _fit, accumulated):
        for name, values in found.items():
            assert values == pytest.approx(expected[name], rel=1e-9), name
        assert {*found} == {*expected} - ({"weights"} if layout.tp * layout.pp > 1 else set())


def test_in_a_hook_of_the_last_stage_alone() -> None:
    """A step leaves something, so the hook runs where that is."""
    [expected] = run_program(PLAIN, _fit, 1, "leaves")
    found = run_program(PP2, _fit, 1, "leaves")
    assert found[0]["generated"] == pytest.approx(expected["generated"], rel=1e-9)
    for rank in found:
        assert rank["after an epoch"] == pytest.approx(expected["after an epoch"], rel=1e-9)


class Generates(LightningModule):
    """Of transformers, whose blocks fill a cache that the model hands them."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        config = LlamaConfig(**sizes, pad_token_id=0, bos_token_id=1, eos_token_id=31)  # type: ignore[arg-type]
        self.model = LlamaForCausalLM(config)
        self.seen = list[Any]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss  # type: ignore[no-any-return]

    def on_train_epoch_end(self) -> None:
        torch.manual_seed(5)
        for sampled in (False, True):
            self.seen.append(self.model.generate(IDS + 1, max_new_tokens=4, do_sample=sampled).tolist())  # type: ignore
        states = self.model(input_ids=IDS, output_hidden_states=True).hidden_states
        self.seen.append(pytest.approx([x.double().square().sum().item() for x in states], rel=1e-9))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _generates(layout: Layout) -> list[Any]:
    torch.manual_seed(0)
    module = Generates()
    make_trainer(layout, strategy={"plan": "auto"}).fit(module, train_loader(layout, 2))
    return module.seen


@pytest.mark.parametrize("layout", [PP2, pytest.param(TP2_PP2, marks=pytest.mark.extended)], ids=str)
def test_generate(layout: Layout) -> None:
    [expected] = run_program(PLAIN, _generates)
    assert len(expected[-1].expected) == 3
    for seen in run_program(layout, _generates):
        assert seen[:-1] == expected[:-1] and seen[-1].expected == expected[-1]


class Draws(GPT):
    """Samples what it computes with in a hook; or takes something that only one stage has."""

    def __init__(self, alike: bool) -> None:
        super().__init__()
        self.alike = alike

    def on_train_epoch_end(self) -> None:
        x = torch.randint(0, 32, (1, 4))
        if not self.alike and self.trainer.global_rank == 0:
            x = (x + 1) % 32
        self.sample = self(x).square().sum().item()


def _draws(layout: Layout, alike: bool) -> float:
    torch.manual_seed(0)
    module = Draws(alike)
    make_trainer(layout).fit(module, train_loader(layout, 1))
    return module.sample


def test_stages_draw_alike() -> None:
    [expected] = run_program(PLAIN, _draws, True)
    assert run_program(PP2, _draws, True) == [pytest.approx(expected, rel=1e-9)] * 2


def test_what_stages_have_for_themselves_is_an_error() -> None:
    with pytest.raises(RankError, match=r"`on_train_epoch_end` calls `tok` .* differ"):
        run_program(PP2, _draws, False)


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=3), PP2], ids=str)
def test_a_backward_of_such_a_forward_is_an_error(layout: Layout) -> None:
    run_program(DP2, _fit, 1, "backward")
    with pytest.raises(RankError, match=r"`on_train_epoch_end` computes gradients .* run without gradients"):
        run_program(layout, _fit, 1, "backward")


@pytest.mark.parametrize("layout", [Layout(dp=2, zero=3), PP2], ids=str)
def test_on_rank_zero_alone_is_an_error(layout: Layout) -> None:
    run_program(DP2, _fit, 1, "alone")
    with pytest.raises(RankError, match=r"`on_train_epoch_end` calls .* on rank 0 .* left that hook without a call"):
        run_program(layout, _fit, 1, "alone")
