"""Bad input is a clear error on every rank before any training: the value, the constraint, the fix."""

from __future__ import annotations

import traceback
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.distributed.training import PLAIN, PP2, TP2, Layout, make_trainer, run_program, tokens, train_loader
from tests.parity.models import GPT, GPTConfig
from tests.parity.variants import gpt_plan
from tests.ranks import RankError, run_ranks

GOOD = gpt_plan(GPTConfig(tied=False))


class NoStep(GPT):
    """Fails the test if training starts."""

    def training_step(self, *args: Any) -> Any:
        raise AssertionError("training has started")


def _fit(layout: Layout, plan: dict[str, Any], config: GPTConfig, strategy: dict[str, Any]) -> None:
    trainer = make_trainer(layout, strategy={"plan": plan, **strategy})
    trainer.fit(NoStep(config), train_loader(layout, 1))


def _wrong_world(rank: int, world_size: int, tp: int, dp: int | None) -> None:
    from lightning.pytorch import Trainer

    from lightning_megatp import MegaTPStrategy

    trainer = Trainer(accelerator="cpu", devices=world_size, strategy=MegaTPStrategy(tp=tp, dp=dp), logger=False)
    trainer.fit(NoStep(), train_loader(Layout(), 1))


def _errors(plan: dict[str, Any], layout: Layout = TP2, **config: Any) -> list[str]:
    """The message of each rank."""
    with pytest.raises(RankError) as error:
        run_program(layout, _fit, plan, GPTConfig(**{"tied": False, **config}), {})
    assert len(error.value.failures) == layout.tp * layout.dp, "every rank says so"
    return [failure.message for failure in error.value.failures]


def _check(messages: list[str], *texts: str) -> None:
    for message in messages:
        assert "MegaTPStrategy" in message
        for text in texts:
            assert text in message, f"{text!r} is not in: {message}"


def test_a_world_size_that_is_not_divisible() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(2, _wrong_world, 4, None)
    _check([f.message for f in error.value.failures], "world size 2 is not divisible by tp * pp = 4", "Use 4")


def test_a_dp_that_does_not_fill_the_world() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(2, _wrong_world, 1, 4)
    _check([f.message for f in error.value.failures], "dp=4", "world size is 2", "dp=2")


def test_a_pattern_that_matches_nothing() -> None:
    _check(
        _errors({**GOOD, "block.*.attn.qkvv": "column"}),
        "`block.*.attn.qkvv` matches no module",
        "Close names",
        "attn.qkv",
    )


def test_an_unknown_style() -> None:
    _check(_errors({**GOOD, "head": "columns"}), "unknown style 'columns'", "`column_gather`")


def test_an_unknown_option() -> None:
    _check(_errors({**GOOD, "head": {"style": "column_gather", "sise": 3}}), "no option sise")


@pytest.mark.parametrize(("name", "style"), [("norm", "column_gather"), ("tok", "row_split"), ("head", "vocab")])
def test_a_style_on_a_module_that_can_not_take_it(name: str, style: str) -> None:
    kind = {"norm": "LayerNorm", "tok": "Embedding", "head": "Linear"}[name]
    _check(_errors({**GOOD, name: style}), f"`{name}`", f"`{style}`", kind)


def test_a_column_output_that_nothing_consumes() -> None:
    plan = {"blocks.*.mlp.up": "column"}
    _check(_errors(plan), "`blocks.0.mlp.up`", "nothing consumes it", "`column_gather`")


def test_a_row_input_that_nothing_split() -> None:
    plan = {"blocks.*.mlp.down": "row"}
    _check(_errors(plan), "`blocks.0.mlp.down`", "never split", "`row_split`")


def test_heads_that_can_not_be_divided() -> None:
    unit_1 = {name: style for name, style in GOOD.items() if not name.startswith("blocks.*.attn")}
    unit_1 |= {"blocks.*.attn.qkv": {"style": "column", "parts": 3}, "blocks.*.attn.out": "row"}
    unit_1 |= {"blocks.*.attn.n_head": "divide", "blocks.*.attn.n_kv_head": "divide"}
    messages = _errors(unit_1, heads=3, hidden=12)
    _check(messages, "n_head` = 3 is not divisible by tp=2", "`unit`", "[1, 3]")


def test_fewer_query_heads_than_ranks() -> None:
    c = GPTConfig(tied=False, heads=2)
    _check(_errors(gpt_plan(c), Layout(tp=4), heads=2), "2", "tp=4", "leave this region out")


def test_parts_that_do_not_fill_the_features() -> None:
    plan = {**GOOD, "blocks.*.attn.qkv": {"style": "column", "parts": [16, 16, 15], "unit": 1}}
    _check(_errors(plan), "add up to 47", "48 features")


def test_a_tied_weight_that_is_split_at_one_place_only() -> None:
    plan = {name: style for name, style in gpt_plan(GPTConfig()).items() if name != "head"}
    _check(_errors(plan, tied=True), "head.weight", "tok.weight", "tied", "`column_gather`")


def _on_meta(layout: Layout) -> None:
    with torch.device("meta"):
        module = NoStep()
    make_trainer(layout, strategy={"plan": GOOD}).fit(module, train_loader(layout, 1))


def test_layers_without_values_are_told_so_to_the_end() -> None:
    """Teardown, too, can't move them."""
    with pytest.raises(RankError) as error:
        run_program(TP2, _on_meta)
    _check([f.message for f in error.value.failures], "is on the meta device. Create the layers with values")


class Lazy(NoStep):
    def __init__(self) -> None:
        super().__init__()
        self.extra = torch.nn.LazyLinear(4)


def _lazy(layout: Layout) -> None:
    make_trainer(layout, strategy={"plan": GOOD}).fit(Lazy(), train_loader(layout, 1))


def test_lazy_layers_are_told_to_run_once_before() -> None:
    with pytest.raises(RankError) as error:
        run_program(TP2, _lazy)
    _check([f.message for f in error.value.failures], "`extra.weight` is a lazy module's", "Run the model once")


def _warnings(layout: Layout, rows: int) -> list[str]:
    trainer = make_trainer(layout, strategy={"plan": None} if layout.tp == 1 else {"plan": GOOD})
    loader = DataLoader(tokens(3 * rows), batch_size=rows)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(GPT(GPTConfig(tied=False)), loader)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize(
    ("layout", "rows", "text", "count"),
    [
        (Layout(tp=2, zero=3), 2, "zero=3 divides nothing at dp=1", 1),
        (Layout(dp=2, zero=3), 2, "divides nothing", 0),
        (PP2, 1, "a batch has one microbatch", 1),
        (PP2, 2, "a batch has one microbatch", 0),
    ],
    ids=str,
)
def test_what_does_nothing_is_said_once(layout: Layout, rows: int, text: str, count: int) -> None:
    said = run_program(layout, _warnings, rows)
    assert [sum(text in each for each in of_rank) for of_rank in said] == [count, 0]


def test_two_patterns_for_one_layer() -> None:
    _check(_errors({**GOOD, "**.head": "row_split"}), "`head`", "`**.head`", "both")


class NothingToSplit(NoStep):
    def __init__(self) -> None:
        super().__init__()
        del self.blocks, self.head


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class OwnLayers(NothingToSplit):
    def __init__(self) -> None:
        super().__init__()
        self.gate = Doubled(4, 4)


def _strict(layout: Layout, kind: type[NoStep]) -> None:
    trainer = make_trainer(layout, strategy={"plan": {}, "strict": True})
    trainer.fit(kind(), train_loader(layout, 1))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (NoStep, "e.g. blocks.0.attn.qkv, blocks"),
        (NothingToSplit, "has no `nn.Linear`. If"),
        (OwnLayers, "a class of their own (`gate` is a Doubled)"),
    ],
)
def test_strict_raises_where_a_plan_splits_nothing(kind: type[NoStep], text: str) -> None:
    with pytest.raises(RankError) as error:
        run_program(TP2, _strict, kind)
    _check([f.message for f in error.value.failures], "tp=2", "splits nothing", text)


def _sequence_alone(layout: Layout) -> dict[str, Any]:
    trainer = make_trainer(layout, strategy=None if layout.plain else {"plan": {"blocks.*": "sequence"}})
    module = GPT(GPTConfig(tied=False))
    trainer.fit(module, train_loader(layout, 2))
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def test_tokens_stay_whole_where_a_plan_splits_nothing() -> None:
    [expected] = run_program(PLAIN, _sequence_alone)
    for found in run_program(TP2, _sequence_alone):
        torch.testing.assert_close(found, expected)


def _half(layout: Layout) -> None:
    """A row fed by a whole value: found by the first step, whatever the plan looks like."""
    trainer = make_trainer(layout, strategy={"plan": {"blocks.0.mlp.up": "column", "blocks.1.mlp.down": "row"}})
    trainer.fit(GPT(GPTConfig(tied=False)), train_loader(layout, 1))


def test_a_column_whose_row_is_elsewhere() -> None:
    with pytest.raises(RankError) as error:
        run_program(TP2, _half)
    _check([f.message for f in error.value.failures], "MegaTPStrategy")
    assert any("blocks.1.mlp.down" in f.message or "blocks.0.mlp.up" in f.message for f in error.value.failures)


def _used_after_fit(layout: Layout) -> list[str]:
    """What a script finds that goes on with the module after a fit."""
    module, said = GPT(GPTConfig(tied=False)), []
    make_trainer(layout, strategy={"plan": GOOD}).fit(module, train_loader(layout, 1))
    batch = next(iter(train_loader(layout, 1)))[0]
    for use in (lambda: module.to_torchscript(), lambda: module.to_onnx("model.onnx", batch), lambda: module(batch)):
        try:
            use()
        except RuntimeError as error:
            said.append(str(error))
            assert "FakeTensors" not in "".join(traceback.format_exception(error)), "torch's own error is no news"
    return said


@pytest.mark.parametrize("layout", [TP2, Layout(pp=2), Layout(dp=2, zero=3)], ids=str)
def test_exports_and_forwards_of_a_part(layout: Layout) -> None:
    for script, onnx, *forward in run_program(layout, _used_after_fit):
        for said, name in ((script, "to_torchscript"), (onnx, "to_onnx")):
            _check([said], f"`{name}` exports a whole model", f"tp={layout.tp}, pp={layout.pp}", "load_from_checkpoint")
        if layout.tp == 1:
            _check(forward, "called outside of a step", "checkpoint with")
