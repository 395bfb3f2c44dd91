"""Plans: what patterns match, what a plan means for a model, and the words of every error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatp.plan.attributes import undivided_counts
from lightning_megatp.plan.parallel_plan import AttributePlan, ParallelPlan
from lightning_megatp.plan.ranges import show
from lightning_megatp.plan.resolve import resolve
from lightning_megatp.plan.styles import STYLES, Style, matches, read_plan

PLAN: dict[str, Any] = {
    "tok": "vocab",
    "blocks.*": "sequence",
    "blocks.*.attn.qkv": {"style": "column", "parts": 3, "unit": "head_size"},
    "blocks.*.attn.out": {"style": "row", "unit": "head_size"},
    "blocks.*.attn.heads": "divide",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
    "head": "column_gather",
}


class Attention(nn.Module):
    def __init__(self, heads: int, head_size: int) -> None:
        super().__init__()
        self.heads, self.head_size, self.name, self.causal = heads, head_size, "attention", True
        self.qkv = nn.Linear(8, 3 * heads * head_size)
        self.out = nn.Linear(heads * head_size, 8)

    @property
    def width(self) -> int:
        return self.heads * self.head_size


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)


class Block(nn.Module):
    def __init__(self, heads: int, head_size: int) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(8), Attention(heads, head_size), MLP()


class Model(nn.Module):
    """Two blocks between an embedding and a head; never run."""

    def __init__(self, heads: int = 4, head_size: int = 2, tied: bool = False) -> None:
        super().__init__()
        self.tok = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(Block(heads, head_size) for _ in range(2))
        self.head = nn.Linear(8, 10, bias=False)
        self.experts = 4
        if tied:
            self.head.weight = self.tok.weight


def _without(*patterns: str) -> dict[str, Any]:
    return {pattern: style for pattern, style in PLAN.items() if pattern not in patterns}


def _error(plan: Mapping[str, Any], model: nn.Module | None = None, tp: int = 2) -> str:
    with pytest.raises(ValueError, match=r"^MegaTPStrategy: ") as error:
        resolve(plan, model or Model(), tp)
    return str(error.value)


def _check(message: str, *texts: str) -> None:
    for text in texts:
        assert text in message, f"{text!r} is not in: {message}"


# ---------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("head", "head", True),
        ("head", "net.head", False),
        ("blocks.*.attn", "blocks.0.attn", True),
        ("blocks.*.attn", "blocks.0.1.attn", False),
        ("blocks.*.attn", "blocks.attn", False),
        ("blocks.*", "blocks.10", True),
        ("blocks.*", "blocks", False),
        ("blocks.1*", "blocks.10", True),
        ("blocks.1*", "blocks.2", False),
        ("*", "head", True),
        ("*", "net.head", False),
        ("**", "net.blocks.0.attn", True),
        ("**.attn", "attn", True),
        ("**.attn", "net.blocks.0.attn", True),
        ("**.attn", "net.blocks.0.attn.qkv", False),
        ("net.**.qkv", "net.qkv", True),
        ("net.**.qkv", "net.blocks.0.attn.qkv", True),
        ("net.**", "network.qkv", False),
        ("**.blocks.*.q*", "blocks.3.qkv", True),
        ("net.h.0", "net_h.0", False),
        ("blocks.[01]", "blocks.0", False),
    ],
)
def test_patterns(pattern: str, name: str, expected: bool) -> None:
    assert matches(pattern, name) is expected


# ---------------------------------------------------------------- reading


def test_a_style_is_a_name_or_a_mapping() -> None:
    assert read_plan({"a": "column", "b.*": {"style": "row"}}) == [Style("a", "column"), Style("b.*", "row")]


def test_options_are_read() -> None:
    plan = {
        "qkv": {"style": "column", "parts": [8, 4, 4], "unit": 2},
        "out": {"style": "row", "unit": "head_size"},
        "blocks.*": {"style": "sequence", "dim": 0, "input": "hidden_states"},
    }
    assert read_plan(plan) == [
        Style("qkv", "column", parts=(8, 4, 4), unit=2),
        Style("out", "row", unit="head_size"),
        Style("blocks.*", "sequence", dim=0, input="hidden_states"),
    ]


def test_an_unknown_style_lists_all_styles() -> None:
    _check(_error({"head": "columns"}), "`head` the unknown style 'columns'", *(f"`{name}`" for name in STYLES))


def test_a_mapping_without_a_style() -> None:
    _check(_error({"head": {"unit": 2}}), "entry for `head` has no `style`: write {style: column, unit: 2}.")


def test_a_pattern_that_is_no_text() -> None:
    _check(_error({1: "column"}), "the plan's pattern 1 (int) is no module's name. Write it as text: '1'.")  # type: ignore[dict-item]


def test_what_the_strategy_takes_for_a_plan() -> None:
    assert resolve("auto", Model(), 2).open == ["**"]
    assert not resolve(None, Model(), 2).layers
    with pytest.raises(ValueError, match="plan='all', but a plan is \"auto\" or a mapping"):
        resolve("all", Model(), 2)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (
            {"style": "column", "sise": 3},
            "style `column` for `head` has no option sise. It takes: global_sizes, parts, unit.",
        ),
        ({"style": "vocab", "unit": 3}, "style `vocab` for `head` has no option unit. It takes: no options."),
        ({"style": "sequence", "parts": 3, "unit": 1}, "has no option parts, unit. It takes: dim, input."),
        ({"style": "column", "parts": 1.5}, "option parts=1.5 of `head` in the plan is not"),
        ({"style": "column", "parts": "3"}, "option parts='3' of `head` in the plan is not"),
        ({"style": "column", "parts": [-2, 12]}, "option parts=(-2, 12) of `head` in the plan is not"),
        ({"style": "column", "parts": ["5", "5"]}, "option parts=('5', '5') of `head` in the plan is not"),
        ({"style": "column", "parts": []}, "option parts=() of `head` in the plan is not"),
        ({"style": "column", "parts": 0}, "option parts=0 of `head` in the plan is not"),
        ({"style": "column", "unit": 2.0}, "option unit=2.0 of `head` in the plan is not"),
        ({"style": "column", "unit": True}, "option unit=True of `head` in the plan is not"),
        ({"style": "divide", "unit": 0}, "option unit=0 of `head` in the plan is not"),
        ({"style": "sequence", "dim": "1"}, "option dim='1' of `head` in the plan is not"),
        ({"style": "sequence", "dim": -2}, "option dim=-2 of `head` in the plan is not"),
        ({"style": "sequence", "input": [0]}, "option input=[0] of `head` in the plan is not"),
        (None, "gives `head` the unknown style None"),
        (["column"], "gives `head` the unknown style ['column']"),
        ({"style": ["column"]}, "gives `head` the unknown style ['column']"),
    ],
)
def test_entries_that_a_plan_does_not_take(entry: Any, text: str) -> None:
    _check(_error({"head": entry}), text)


# ---------------------------------------------------------------- what a plan means


def test_layers_have_ranges_regions_and_sequence_dims() -> None:
    plan = resolve(PLAN, Model(), 2)
    assert plan.tp == 2
    layers = plan.layers
    attention, mlp = "blocks.1.attn", "blocks.1.mlp"
    assert layers[f"{attention}.qkv"].by_rank == (((0, 4), (8, 12), (16, 20)), ((4, 8), (12, 16), (20, 24)))
    assert layers[f"{attention}.out"].by_rank == (((0, 4),), ((4, 8),))
    assert {name: layer.region for name, layer in layers.items() if "blocks.1" in name} == {
        f"{attention}.qkv": attention, f"{attention}.out": attention, f"{mlp}.up": mlp, f"{mlp}.down": mlp,
    }  # fmt: skip
    assert layers["tok"].region is layers["head"].region is None
    assert {name: layer.sequence_dim for name, layer in layers.items() if layer.sequence_dim is not None} == {
        f"blocks.{i}.{row}": 1 for i in range(2) for row in ("attn.out", "mlp.down")
    }
    assert plan.attributes == [AttributePlan(f"blocks.{i}.attn", "heads", (2, 2)) for i in range(2)]
    assert set(plan.sequences) == {"blocks.0", "blocks.1"}


def test_parameters_have_shards_and_row_biases_are_whole() -> None:
    specs = resolve(PLAN, Model(), 2).parameters
    block = {"attn.qkv.weight", "attn.qkv.bias", "attn.out.weight", "mlp.up.weight", "mlp.up.bias", "mlp.down.weight"}
    assert set(specs) == {"tok.weight", "head.weight"} | {f"blocks.{i}.{name}" for i in range(2) for name in block}
    assert (specs["tok.weight"].dim, specs["blocks.0.mlp.down.weight"].dim) == (0, 1)
    assert specs["blocks.0.mlp.up.bias"].spec(1).local_shape == (8,)
    assert specs["blocks.0.mlp.down.weight"].spec(0).local_shape == (8, 8)


def test_without_sequence_parallelism_those_entries_are_checked_and_ignored() -> None:
    plan = resolve({**PLAN, "blocks.*.norm": "token_local"}, Model(), 2, sequence_parallel=False)
    assert plan.sequences == {}
    assert plan.token_local == []
    assert all(layer.sequence_dim is None for layer in plan.layers.values())
    with pytest.raises(ValueError, match="`block` matches no module"):
        resolve({**PLAN, "block": "sequence"}, Model(), 2, sequence_parallel=False)


def test_the_sequence_dim_of_the_innermost_block_counts() -> None:
    plan = {**PLAN, "blocks.0.mlp": {"style": "sequence", "dim": 0}, "blocks.*.norm": "token_local"}
    found = resolve(plan, Model(), 2)
    assert found.layers["blocks.0.mlp.down"].sequence_dim == 0
    assert found.layers["blocks.0.attn.out"].sequence_dim == 1
    assert found.token_local == ["blocks.0.norm", "blocks.1.norm"]


def test_an_empty_plan_splits_nothing() -> None:
    assert resolve({}, Model(), 2) == ParallelPlan(2)


def test_everything_fits_one_rank() -> None:
    specs = resolve(PLAN, Model(), 1).parameters.values()
    assert all(spec.spec(0).local_shape == spec.shape for spec in specs)


def test_tied_parameters_have_one_shard_under_both_names() -> None:
    specs = resolve(PLAN, Model(tied=True), 2).parameters
    assert specs["head.weight"] == specs["tok.weight"].renamed("head.weight")


def test_a_model_on_the_meta_device_is_enough() -> None:
    with torch.device("meta"):
        model = Model()
    assert resolve(PLAN, model, 2).parameters == resolve(PLAN, Model(), 2).parameters


def test_compiled_blocks_have_the_names_of_plain_ones() -> None:
    class Compiled(nn.Module):
        """The names of what torch.compile returns, without its seconds of imports."""

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self._orig_mod = module

    model = Model()
    model.blocks[0] = Compiled(model.blocks[0])
    plan = resolve(PLAN, model, 2)
    assert set(plan.layers) == set(resolve(PLAN, Model(), 2).layers)
    assert "blocks.0._orig_mod.mlp.up.weight" in plan.parameters, "parameters have the names of the state dict"


@pytest.mark.parametrize("pattern", ["tok", "encoder_tok", "*tok"])
def test_a_module_with_two_names_is_split_once(pattern: str) -> None:
    model = Model()
    model.encoder_tok = model.tok
    found = resolve({pattern: "vocab"}, model, 2)
    assert list(found.layers) == ["tok"]
    assert set(found.parameters) == {"tok.weight", "encoder_tok.weight"}


def test_few_key_value_heads_are_repeated() -> None:
    plan = {
        "blocks.*.attn.qkv": {"style": "column", "parts": [8, 4, 4], "unit": 2},
        "blocks.*.attn.out": {"style": "row", "unit": 2},
        "blocks.*.attn.heads": "divide",
        "blocks.*.attn.kv_heads": "divide",
    }
    model = Model()
    for block in model.blocks:
        block.attn.qkv, block.attn.kv_heads = nn.Linear(8, 16), 2
    found = resolve(plan, model, 4)
    assert found.attributes[-1] == AttributePlan("blocks.1.attn", "kv_heads", (1, 1, 1, 1))
    assert found.parameters["blocks.0.attn.qkv.weight"].shared
    assert not found.parameters["blocks.0.attn.out.weight"].shared


def test_uneven_heads_divide_with_a_unit() -> None:
    found = resolve(PLAN, Model(heads=3), 2)
    assert found.attributes[0].by_rank == (2, 1)
    assert [spec[0] for spec in found.layers["blocks.0.attn.out"].by_rank] == [(0, 4), (4, 6)]


def test_divide_keeps_units_together_and_reaches_the_root() -> None:
    model = Model()
    for block in model.blocks:
        block.attn.width_of_heads = 8
    plan = {"**.attn.width_of_heads": {"style": "divide", "unit": "head_size"}, "experts": "divide"}
    found = resolve(plan, model, 2)
    assert [a.by_rank for a in found.attributes] == [(4, 4), (4, 4), (2, 2)]
    assert found.attributes[-1] == AttributePlan("", "experts", (2, 2))


class ReadsHeads(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x).chunk(3, -1))
        return self.out(sum(parts).flatten(-2))  # type: ignore[union-attr]


@pytest.mark.parametrize("divided", [False, True])
@pytest.mark.parametrize("kind", [Attention, ReadsHeads])
def test_a_number_of_heads_that_a_forward_reads_and_the_plan_does_not_divide(
    kind: type[Attention], divided: bool
) -> None:
    model = Model()
    for block in model.blocks:
        block.attn = kind(4, 2)
    plan = PLAN if divided else {name: style for name, style in PLAN.items() if style != "divide"}
    found = undivided_counts(resolve(plan, model, 2), dict(model.named_modules()))
    expected = {f"blocks.{i}.attn.heads": f"blocks.{i}.attn.out" for i in range(2)}
    assert found == (expected if kind is ReadsHeads and not divided else {})


@pytest.mark.parametrize(("styles", "told"), [(("column", "row"), True), (("column_gather", "row_split"), False)])
def test_numbers_of_heads_are_known_by_their_names_where_a_plan_gives_no_units(
    styles: tuple[str, str], told: bool
) -> None:
    model = Model()
    for block in model.blocks:
        block.attn = ReadsHeads(4, 2)
    plan = {"blocks.*.attn.qkv": {"style": styles[0], "parts": 3}, "blocks.*.attn.out": styles[1]}
    found = undivided_counts(resolve(plan, model, 2), dict(model.named_modules()))
    assert found == ({f"blocks.{i}.attn.heads": f"blocks.{i}.attn.out" for i in range(2)} if told else {})


# ---------------------------------------------------------------- bad input


def test_a_pattern_that_matches_nothing() -> None:
    message = _error({**PLAN, "blocks.*.attn.qvk": "column"})
    _check(message, "pattern `blocks.*.attn.qvk` matches no module", "Close names: `blocks.*.attn.qkv`,")
    assert message.count("attn.qkv`") == 1
    _check(message, "full names as in `named_modules()`", "`*` is one component, `**` any number")


@pytest.mark.parametrize(
    ("pattern", "style", "kind", "wanted"),
    [
        ("blocks.0.norm", "column_gather", "LayerNorm", "nn.Linear"),
        ("tok", "row_split", "Embedding", "nn.Linear"),
        ("head", "vocab", "Linear", "nn.Embedding"),
        ("head", "hidden", "Linear", "nn.Embedding"),
        ("blocks", "column_gather", "ModuleList", "nn.Linear"),
    ],
)
def test_a_style_on_a_module_of_another_type(pattern: str, style: str, kind: str, wanted: str) -> None:
    message = _error({pattern: style})
    _check(message, f"gives `{pattern}` the style `{style}`", f"{kind}; that style is for {wanted}")
    _check(message, "Leave it out of the plan")


def test_a_scripted_module_is_refused() -> None:
    model = nn.ModuleList([nn.Linear(4, 4), torch.jit.script(nn.LayerNorm(4))])
    _check(_error({}, model), "`1` is a module that torch.jit made")


def test_a_subclass_with_a_call_of_its_own_is_not_swapped() -> None:
    class Scaled(nn.Linear):
        def __call__(self, x: Tensor) -> Tensor:
            y: Tensor = super().__call__(2 * x)
            return y

    model = Model()
    model.head = Scaled(8, 10)
    _check(_error({"head": "column_gather"}, model), "is a subclass of nn.Linear (Scaled)", "compute something else")


def test_a_convolution_is_split_by_its_output_channels_or_whole_groups() -> None:
    model = nn.ModuleDict({
        "dense": nn.Conv2d(3, 5, 3), "up": nn.ConvTranspose1d(4, 6, 2), "depthwise": nn.Conv1d(4, 8, 3, groups=4),
        "grouped_up": nn.ConvTranspose1d(6, 9, 2, groups=3, bias=False),
    })  # fmt: skip
    specs = resolve({"*": "column_gather"}, model, 2).parameters
    assert {name: (spec.dim, spec.spec(1).local_shape) for name, spec in specs.items()} == {
        "dense.weight": (0, (2, 3, 3, 3)), "dense.bias": (0, (2,)), "up.weight": (1, (4, 3, 2)), "up.bias": (0, (3,)),
        "depthwise.weight": (0, (4, 1, 3)), "depthwise.bias": (0, (4,)), "grouped_up.weight": (0, (2, 3, 2)),
    }  # fmt: skip
    _check(_error({"depthwise": "column_gather"}, model, tp=5), "4 groups of channels for tp=5 ranks", "tp <= 4")
    _check(_error({"dense": "row"}, model), "is a Conv2d, which takes the style `column_gather` only")
    _check(_error({"dense": {"style": "column_gather", "lazy": True}}, model), "are for linear layers")


def test_a_conv1d_is_a_linear_layer_whose_weight_lies_the_other_way() -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D
    model = nn.ModuleDict({"up": conv1d(16, 8), "down": conv1d(8, 16)})
    specs = resolve({"up": {"style": "column", "parts": 2}, "down": {"style": "row", "parts": 2}}, model, 2).parameters
    assert {name: (spec.dim, spec.spec(1).local_shape) for name, spec in specs.items()} == {
        "up.weight": (1, (8, 8)), "up.bias": (0, (8,)), "down.weight": (0, (8, 8)),
    }  # fmt: skip
    assert specs["up.weight"].by_rank[1] == specs["down.weight"].by_rank[1] == ((4, 8), (12, 16))
    _check(_error({"up": "vocab"}, model), "is a Conv1D; that style is for nn.Embedding")
    _check(_error({"up": "column", "down": {"style": "row", "unit": 3}}, model), "`down` (row, 16 features)")


def test_the_output_projection_of_multihead_attention() -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2)})
    _check(
        _error({"attn.out_proj": "row_split"}, model),
        "belongs to nn.MultiheadAttention",
        "`attn` itself the style `attention`",
    )


def test_an_attention_is_split_by_its_heads() -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(12, 3, add_bias_kv=True)})
    found = resolve({"attn": "attention"}, model, 2)
    assert found.layers["attn"].by_rank == (((0, 8),), ((8, 12),))
    assert {name: (spec.dim, spec.spec(1).local_shape) for name, spec in found.parameters.items()} == {
        "attn.in_proj_weight": (0, (12, 12)),
        "attn.in_proj_bias": (0, (12,)),
        "attn.bias_k": (2, (1, 1, 4)),
        "attn.bias_v": (2, (1, 1, 4)),
        "attn.out_proj.weight": (1, (12, 4)),
    }
    assert found.parameters["attn.in_proj_weight"].by_rank[1] == ((8, 12), (20, 24), (32, 36))
    other = nn.ModuleDict({"attn": nn.MultiheadAttention(12, 3, kdim=5, bias=False)})
    specs = resolve({"attn": "attention"}, other, 2).parameters
    assert specs["attn.k_proj_weight"].spec(0).local_shape == (8, 5)
    assert set(specs) == {f"attn.{name}" for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")} | {
        "attn.out_proj.weight"
    }


def test_an_attention_in_a_sequence_block() -> None:
    model = nn.ModuleDict({"layer": nn.TransformerEncoderLayer(8, 2, 8)})
    plan = {"layer": {"style": "sequence", "dim": 0}, "layer.self_attn": "attention"}
    assert resolve(plan, model, 2).layers["layer.self_attn"].sequence_dim == 0


def test_an_attention_with_fewer_heads_than_ranks() -> None:
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2)})
    message = _error({"attn": "attention"}, model, tp=4)
    _check(message, "`attn` has 2 heads for tp=4 ranks, and each needs one or more", "Use tp <= 2, or leave")


def test_what_is_no_attention_that_can_be_split() -> None:
    class Rotary(nn.MultiheadAttention):
        pass

    _check(
        _error({"blocks.*.attn": "attention"}), "is an Attention; that style is for nn.MultiheadAttention", "`column`"
    )
    message = _error({"attn": "attention"}, nn.ModuleDict({"attn": Rotary(8, 2)}))
    _check(
        message,
        "is a subclass of nn.MultiheadAttention (Rotary); only exactly",
        "a subclass may compute something else",
        "leave it out of the plan",
    )
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2)})
    nn.utils.prune.random_unstructured(model.attn, "in_proj_weight", amount=0.5)
    _check(_error({"attn": "attention"}, model), "some weight of it is no parameter of its own", "pruning")
    _check(_error({"attn": {"style": "attention", "unit": 2}}, model), "has no option unit. It takes: no options.")


class Experts(nn.Module):
    """Stacked parameters of given shapes; never run."""

    def __init__(self, attributes: Mapping[str, Any] | None = None, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        vars(self).update(attributes or {})


def _experts(attributes: Mapping[str, Any] | None = None, **shapes: tuple[int, ...]) -> nn.ModuleDict:
    return nn.ModuleDict({"moe": Experts(attributes, **shapes)})


def _split(model: nn.Module, style: Any = "experts", tp: int = 2) -> dict[str, tuple[int, str]]:
    """Parameter -> the dim and what the last rank holds."""
    specs = resolve({"moe": style}, model, tp).parameters
    return {name.removeprefix("moe."): (spec.dim, show(spec.by_rank[-1])) for name, spec in specs.items()}


def test_experts_are_known_by_names_and_shapes() -> None:
    gated = {"gate_up_proj": (4, 12, 8), "down_proj": (4, 8, 6)}
    assert _split(_experts(**gated)) == {"gate_up_proj": (1, "[3:6],[9:12]"), "down_proj": (2, "[3:6]")}
    assert _split(_experts(**gated), tp=4)["down_proj"] == (2, "[5:6]")
    assert _split(_experts(**gated), {"style": "experts", "unit": 2})["gate_up_proj"] == (1, "[4:6],[10:12]")
    transposed = {"gate_up_proj": (4, 8, 12), "down_proj": (4, 6, 8)}
    assert _split(_experts(**transposed)) == {"gate_up_proj": (2, "[3:6],[9:12]"), "down_proj": (1, "[3:6]")}
    biased = _experts({"is_concatenated": False}, **transposed, gate_up_proj_bias=(4, 12), down_proj_bias=(4, 8))
    assert _split(biased) == {
        "gate_up_proj": (2, "[6:12]"),
        "gate_up_proj_bias": (1, "[6:12]"),
        "down_proj": (1, "[3:6]"),
    }
    assert resolve({"moe": "experts"}, biased, 2).layers["moe"].stack.once == ["down_proj_bias"]
    plain = _experts({"is_transposed": False}, up_proj=(4, 6, 8), down_proj=(4, 8, 6))
    assert _split(plain) == {"up_proj": (1, "[3:6]"), "down_proj": (2, "[3:6]")}


def test_attributes_that_count_the_features_inside_an_expert_are_divided() -> None:
    counts = {"intermediate_dim": 6, "ffn_dim": 5, "hidden_dim": 6, "num_experts": 6}
    found = resolve({"moe": "experts"}, _experts(counts, gate_up_proj=(6, 12, 6), down_proj=(6, 6, 6)), 4)
    assert found.attributes == [AttributePlan("moe", "intermediate_dim", (2, 2, 1, 1))]


def test_experts_of_other_names_are_said_in_the_plan() -> None:
    model = _experts(w13=(4, 8, 12), w2=(4, 6, 8), b2=(4, 8), scale=(8,))
    parameters = {"w13": {"dim": 2, "parts": [6, 6]}, "w2": 1, "b2": "once", "scale": "whole"}
    style = {"style": "experts", "parameters": parameters}
    assert _split(model, style) == {"w13": (2, "[3:6],[9:12]"), "w2": (1, "[3:6]")}
    _check(_error({"moe": "experts"}, model), "`moe` has the style `experts` and the parameters ['b2', 'scale', 'w13'")
    _check(_error({"moe": "experts"}, model), "only gate_up_proj", "`parameters: {w13: {dim: 1, parts: 2}, w2: 2")
    for change, text in (
        ({"w3": 1}, "names `w3`, but the module has the parameters"),
        ({"w2": 3}, "`moe.w2` has 3 dims and can't be split on dim 3"),
        ({"w13": {"dim": 2, "parts": 5}}, "`moe.w13` (experts, 12 features) can't be split over tp=2"),
        ({"w13": 2}, "different numbers of features inside each expert: w13 [12], w2 [6]"),
        ({"w13": "whole", "w2": "whole"}, "`parameters` of `moe` splits nothing"),
    ):
        _check(_error({"moe": {**style, "parameters": {**parameters, **change}}}, model), text)
    del parameters["scale"]
    _check(_error({"moe": style}, model), "doesn't say what scale is", "`whole` for what all ranks use")


@pytest.mark.parametrize(
    "entry", ["twice", None, True, -1, 1.0, {"parts": 2}, {"dim": 1, "parts": 0}, {"dim": 1, "size": 2}, [1, 2]]
)
def test_what_a_parameter_of_experts_can_not_be(entry: Any) -> None:
    plan = {"moe": {"style": "experts", "parameters": {"w1": entry}}}
    _check(_error(plan), f"parameter `w1` of `moe` in the plan is {entry!r}, which is neither the dim that is split")


@pytest.mark.parametrize("entries", [[], {}, "w1", {1: 2}])
def test_parameters_of_experts_are_a_mapping(entries: Any) -> None:
    _check(_error({"moe": {"style": "experts", "parameters": entries}}), f"option parameters={entries!r} of `moe`")


def test_experts_that_can_not_be_split() -> None:
    usual = {"gate_up_proj": (4, 12, 8), "down_proj": (4, 8, 6)}
    plan = {"moe": "experts"}
    message = _error(plan, _experts(gate_up_proj=(4, 12, 8), down_proj=(4, 8, 5)))
    _check(message, "the shapes of `moe`, gate_up_proj (4, 12, 8), down_proj (4, 8, 5), fit no layout of experts")
    _check(_error(plan, _experts(up_proj=(4, 6, 8), down_proj=(4, 8, 6))), "fit both layouts of experts")
    _check(_error(plan, _experts({"is_transposed": True}, **usual)), "fit no layout of experts")
    _check(_error(plan, _experts({"_apply_gate": len}, **usual)), "has a `_apply_gate` of its own", "(`unit: 2`)")
    _check(_error(plan, _experts({"has_post_expert_norm": True}, **usual)), "normalises what each expert returns")
    message = _error(plan, _experts(**usual), tp=8)
    _check(message, "`moe` has 6 units of 1 features inside each expert for tp=8 ranks, and each needs one or more")
    message = _error(plan, _experts(gate_up_proj=(5, 12, 8), down_proj=(4, 8, 6)))
    _check(message, "stacks of [4, 5] experts: some experts do something else than others")
    _check(_error({"tok": "experts"}), "`tok` has the style `experts` and the parameters ['weight']")
    message = _error({"moe": {"style": "experts", "unit": 4}}, _experts(**usual))
    _check(message, "`moe.gate_up_proj` (experts, 12 features) can't be split over tp=2", "units of 4")


def test_parametrized_and_pruned_weights() -> None:
    model = Model()
    nn.utils.parametrizations.weight_norm(model.head)
    _check(
        _error({"head": "column_gather"}, model),
        "`head`",
        "is a subclass of nn.Linear (ParametrizedLinear)",
        "Leave it out of the plan",
    )
    model = Model()
    nn.utils.prune.random_unstructured(model.head, "weight", amount=0.5)
    _check(_error({"head": "column_gather"}, model), "no parameter `weight` of its own", "pruning replaces it")


def test_the_older_weight_norm() -> None:
    model = Model()
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(model.head)
    _check(_error({"head": "column_gather"}, model), "no parameter `weight` of its own", "weight_norm")


@pytest.mark.parametrize(
    ("style", "options", "text"),
    [
        ("vocab", {"sparse": True}, "has sparse=True, which needs the whole table on one rank"),
        ("vocab", {"max_norm": 1.5}, "has max_norm=1.5, which needs the whole table"),
        ("vocab", {"scale_grad_by_freq": True}, "has scale_grad_by_freq=True, which needs the whole table"),
        ("hidden", {"sparse": True}, "has sparse=True"),
        ("hidden", {"max_norm": 1.0}, "has max_norm=1.0"),
    ],
)
def test_embedding_options_that_need_the_whole_table(style: str, options: dict[str, Any], text: str) -> None:
    model = Model()
    model.tok = nn.Embedding(10, 8, **options)
    _check(_error({"tok": style}, model), f"gives `tok` the style `{style}`", text)


@pytest.mark.parametrize(
    ("style", "options", "text"),
    [
        ("vocab", {}, "is an EmbeddingBag; that style is for nn.Embedding"),
        ("hidden", {"sparse": True}, "has sparse=True"),
        ("hidden", {"max_norm": 1.0}, "has max_norm=1.0"),
        ("hidden", {"scale_grad_by_freq": True}, "has scale_grad_by_freq=True"),
    ],
)
def test_bags_that_cannot_be_split(style: str, options: dict[str, Any], text: str) -> None:
    model = Model()
    model.tok = nn.EmbeddingBag(10, 8, **options)
    _check(_error({"tok": style}, model), f"gives `tok` the style `{style}`", text)


def test_bags_are_split_by_their_columns() -> None:
    model = Model()
    model.tok = nn.EmbeddingBag(10, 7)
    parameters = resolve({"tok": "hidden"}, model, 2).parameters
    assert [parameters["tok.weight"].spec(rank).local_shape for rank in range(2)] == [(10, 4), (10, 3)]


def test_a_hidden_split_may_scale_by_frequency() -> None:
    model = Model()
    model.tok = nn.Embedding(10, 8, scale_grad_by_freq=True)
    assert resolve({"tok": "hidden"}, model, 2).parameters["tok.weight"].spec(1).local_shape == (10, 4)


def test_parts_that_do_not_fill() -> None:
    plan = {**PLAN, "blocks.*.attn.qkv": {"style": "column", "parts": [8, 8, 7]}}
    message = _error(plan)
    _check(message, "`blocks.0.attn.qkv` (column, 24 features) can't be split over tp=2", "[8, 8, 7] add up to 23")
    _check(message, "the dimension has 24 features", "Change `parts` or `unit`")
    _check(_error({**PLAN, "head": {"style": "column_gather", "parts": 3}}), "10 features do not divide into 3")


def test_a_unit_that_does_not_fill() -> None:
    message = _error({**PLAN, "head": {"style": "column_gather", "unit": 4}})
    _check(message, "`head` (column_gather, 10 features)", "10 features is not a whole number of units of 4")


def test_a_unit_that_names_no_int_attribute() -> None:
    message = _error({**PLAN, "blocks.*.attn.qkv": {"style": "column", "unit": "head_dim"}})
    _check(message, "`unit: head_dim` of `blocks.*.attn.qkv`", "`blocks.0.attn` has no int attribute", "None")
    _check(message, "Give the number instead")
    _check(_error({"head": {"style": "column_gather", "unit": "tok"}}), "the LightningModule` has no int", "Embedding")


def test_units_that_can_be_neither_divided_nor_repeated() -> None:
    message = _error(PLAN, Model(heads=3, head_size=4), tp=4)
    _check(message, "`blocks.0.attn.qkv` (column, 36 features)", "3 units", "divided among tp = 4", "or tp, or leave")


def test_a_row_can_not_repeat_units() -> None:
    message = _error({"blocks.*.attn.out": {"style": "row_split", "unit": 4}}, tp=4)
    _check(message, "`blocks.0.attn.out` has 2 units of 4 for tp=4 ranks", "`row_split` layer can't repeat units")
    _check(message, "Use tp <= 2, or leave this region out of the plan")


def test_an_embedding_with_fewer_features_than_ranks() -> None:
    model = Model()
    model.tok = nn.Embedding(3, 2)
    _check(_error({"tok": "vocab"}, model, tp=4), "`tok` has 3 rows for tp=4 ranks; each needs one or more")
    _check(_error({"tok": "hidden"}, model, tp=4), "`tok` has 2 features for tp=4 ranks")


def test_a_column_without_a_row() -> None:
    message = _error({"blocks.*.mlp.up": "column"})
    _check(message, "`blocks.0.mlp.up` has the style `column`", "its output is split, and nothing consumes it")
    _check(message, "the plan has no `row` layer", "use `column_gather` for `blocks.0.mlp.up`")
    _check(message, "Give `blocks.0.mlp.down`, which takes as many features, the style `row`, or")


def test_columns_alone_are_told_which_of_them_should_be_a_row() -> None:
    message = _error({"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "column"})
    _check(message, "Give `blocks.0.mlp.down`, which takes as many features, the style `row` instead of `column`, or")


def test_kinds_of_modules_that_a_style_is_not_for() -> None:
    class Own(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    class Made(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 10)

    model = Model()
    _check(_error({"tok": "column"}, model), "but it is an Embedding; that style is for nn.Linear.")
    model.head = Own(8, 10)
    _check(_error({"head": "column"}, model), "is a subclass of nn.Linear (Own) with a call or forward of its own")
    model.head = Made()
    assert resolve({"head": "column_gather"}, model, 2).layers["head"].by_rank == (((0, 5),), ((5, 10),))
    _check(_error({"blocks.0": "attention"}, model), "that style is for nn.MultiheadAttention.")


def test_a_row_without_a_column() -> None:
    message = _error({"blocks.*.mlp.down": "row"})
    _check(message, "`blocks.0.mlp.down` has the style `row`", "its input is never split")
    _check(message, "the plan has no `column` layer", "use `row_split` for `blocks.0.mlp.down`")


def test_two_patterns_for_one_layer() -> None:
    _check(_error({**PLAN, "**.head": "row_split"}), "both `head` and `**.head` of the plan match `head`")


def test_a_row_and_a_column_with_different_units() -> None:
    plan = {**_without("blocks.*.attn.heads"), "blocks.*.attn.out": "row"}
    message = _error(plan, Model(heads=3))
    _check(message, "`blocks.0.attn.out` takes the features [0:3], [3:6] on ranks 0..1")
    _check(message, "`blocks.0.attn.qkv` leaves [0:4], [4:6]", "Give both the same `unit`")


@pytest.mark.parametrize(("up", "taken"), [(24, 8), (16, 8), (8, 16)])
def test_a_row_and_a_column_of_other_sizes(up: int, taken: int) -> None:
    """What a fused projection looks like when `parts` was forgotten."""
    model = Model()
    for block in model.blocks:
        block.mlp.up, block.mlp.down = nn.Linear(8, up), nn.Linear(taken, 8)
    message = _error({"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"}, model)
    _check(message, f"`blocks.0.mlp.down` takes {taken} features in one piece")
    _check(message, f"`blocks.0.mlp.up` leaves [{up}]", "say so with `parts`, their number or their sizes")
    if up > taken:
        resolve({"blocks.*.mlp.up": {"style": "column", "parts": up // taken}, "blocks.*.mlp.down": "row"}, model, 2)


def test_projections_that_alternate_head_by_head() -> None:
    """q1 k1 v1 q2 k2 v2: with the three parts of a head as the unit."""
    plan = {
        "blocks.*.attn.qkv": {"style": "column", "unit": 6},
        "blocks.*.attn.out": {"style": "row", "unit": 2},
        "blocks.*.attn.heads": "divide",
    }
    found = resolve(plan, Model(heads=3), 2)
    assert found.layers["blocks.0.attn.qkv"].by_rank == (((0, 12),), ((12, 18),))
    assert found.layers["blocks.0.attn.out"].by_rank == (((0, 4),), ((4, 6),))


def test_queries_apart_from_their_key_value_heads() -> None:
    plan = {
        "blocks.*.attn.qkv": {"style": "column", "parts": [12, 4, 4], "unit": 2},
        "blocks.*.attn.out": {"style": "row", "unit": 2},
    }
    model = Model(heads=6)
    for block in model.blocks:
        block.attn.qkv = nn.Linear(8, 20)
    assert resolve(plan, model, 2).layers["blocks.0.attn.qkv"].by_rank[1] == ((6, 12), (14, 16), (18, 20))
    message = _error(plan, model, tp=4)
    _check(message, "over tp=4 the 2 heads of `blocks.0.attn.qkv` do not lie with the 6 query heads that use them")
    _check(message, "Use a tp that divides 6 and divides, or is divided by, 2")


def test_heads_that_are_cut() -> None:
    plan = {**PLAN, "blocks.*.attn.qkv": {"style": "column", "parts": 3}, "blocks.*.attn.out": "row"}
    message = _error(plan, Model(heads=3, head_size=4))
    _check(message, "`blocks.0.attn.heads` = 3 is not divisible by tp=2", "would be cut inside a head")
    _check(message, "as `unit` to the layers of `blocks.0.attn`", "use tp in [1, 3]")


def test_tied_parameters_with_different_styles() -> None:
    message = _error({"tok": "vocab", "head": "row_split"}, Model(tied=True))
    _check(message, "`tok.weight`", "`head.weight`", "one tied parameter, split differently")
    _check(message, "`vocab` and `column_gather`", "leave both out")


@pytest.mark.parametrize("planned", ["tok", "head"])
def test_tied_parameters_split_at_one_place_only(planned: str) -> None:
    message = _error({planned: PLAN[planned]}, Model(tied=True))
    _check(message, "`tok.weight`", "`head.weight`", "split by the plan only at one of them")


@pytest.mark.parametrize(
    ("attribute", "value"), [("name", "'attention'"), ("causal", "True"), ("scale", "0.5"), ("missing_value", "None")]
)
def test_divide_on_what_is_no_int(attribute: str, value: str) -> None:
    model = Model()
    for block in model.blocks:
        block.attn.scale, block.attn.missing_value = 0.5, None
    message = _error({f"blocks.*.attn.{attribute}": "divide"}, model)
    _check(message, f"`blocks.0.attn.{attribute}` is {value}; only an int attribute can be divided")


@pytest.mark.parametrize("attribute", ["headz", "width"])
def test_divide_on_an_attribute_that_modules_do_not_have(attribute: str) -> None:
    message = _error({f"blocks.*.attn.{attribute}": "divide"})
    _check(message, f"`blocks.*.attn.{attribute}` (divide) matches no attribute")
    _check(message, f"no module named `blocks.*.attn` has an own attribute `{attribute}`", "A property is divided by")


def test_divide_that_does_not_divide() -> None:
    message = _error({"blocks.*.attn.heads": "divide"}, Model(heads=3), tp=4)
    _check(message, "`blocks.0.attn.heads` = 3 can't be divided over tp=4", "Use a tp that divides 3")
    message = _error({"blocks.*.attn.heads": {"style": "divide", "unit": 3}})
    _check(message, "`blocks.0.attn.heads` = 4 is not a whole number of units of 3")
