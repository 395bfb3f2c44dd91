"""Linear layers that a block does not call: it gives their weights to `F.linear`, or has weights of no layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatp.auto_plan.blocks import Block as Kind
from lightning_megatp.auto_plan.blocks import Call, find_blocks
from lightning_megatp.auto_plan.discover import discover, look
from lightning_megatp.auto_plan.results import BlockResult
from lightning_megatp.auto_plan.search import OTHERWISE, plan_block
from lightning_megatp.auto_plan.simulate import BlockPlan
from lightning_megatp.plan.layer import TRANSPOSED, BareLinear, LayerPlan
from lightning_megatp.plan.layer_styles import split_parameters
from lightning_megatp.plan.ranges import shard_ranges
from lightning_megatp.plan.resolve import resolve
from lightning_megatp.plan.styles import Style

WIDTH = 16
X = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))


class Pair(nn.Module):
    """Two linear layers, and what a test does with their weights."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], **parameters: tuple[int, ...]) -> None:
        super().__init__()
        self.norm, self.run = nn.LayerNorm(WIDTH), run
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        if parameters:
            del self.up
        for name, shape in parameters.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.run(self, self.norm(x))


def found(block: nn.Module, **options: Any) -> BlockResult:
    return plan_block(Kind(block, ["block"], [Call((X,), {})]), 2, **options)


def styles(result: BlockResult) -> dict[str, str]:
    return {name: layer.style.style for name, layer in result.plan.layers.items()}


def by_function(self: Any, x: Tensor) -> Tensor:
    return self.down(F.gelu(F.linear(x, self.up.weight, self.up.bias)))


def by_product(self: Any, x: Tensor) -> Tensor:
    return F.gelu(x @ self.up.weight.to(x.dtype).T + self.up.bias) @ self.down.weight.transpose(0, 1)


def normed(self: Any, x: Tensor) -> Tensor:
    return self.down(F.gelu(F.linear(x, F.normalize(self.up.weight), self.up.bias)))


def in_training_only(self: Any, x: Tensor) -> Tensor:
    weight = self.up.weight if self.training else self.up.weight.abs()
    return self.down(F.gelu(F.linear(x, weight, self.up.bias)))


def of_weights(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, F.linear(self.down.weight, self.up.weight.T))


@pytest.mark.parametrize("run", [by_function, by_product])
def test_code_between_them_sees_whole_sizes(run: Any) -> None:
    """Should a step keep such a weight whole after all, what it makes is whole, and fits."""
    result = found(Pair(run))
    assert styles(result) == {"up": "column", "down": "row"} and not result.whole
    assert all(layer.global_sizes for layer in result.plan.layers.values())
    assert result.plan.layers["up"].by_function


def test_compiled_code_gets_no_parts_of_them() -> None:
    result = found(Pair(by_function), global_sizes=False)
    assert "otherwise than by calling it" in result.whole["up"] and "up" not in result.plan.layers


@pytest.mark.parametrize("run", [normed, in_training_only, of_weights])
def test_a_weight_that_is_used_otherwise_stays_whole(run: Any) -> None:
    result = found(Pair(run))
    assert result.problem is None and "up" not in result.plan.layers


def test_a_bias_that_is_used_otherwise_stays_whole() -> None:
    result = found(Pair(lambda self, x: self.down(F.gelu(F.linear(x, self.up.weight, self.up.bias * 2)))))
    assert styles(result) == {"up": "column", "down": "row"}
    assert result.plan.layers["up"].whole == ("bias",) and not result.plan.layers["down"].whole


@pytest.mark.parametrize(
    ("bias", "run"),
    [
        ("b", lambda self, x: self.down(F.gelu(F.linear(x, self.w, self.b)))),
        ("b", lambda self, x: self.down(F.gelu(F.linear(input=x, bias=self.b, weight=self.w)))),
        (None, lambda self, x: self.down(F.gelu(F.linear(x, self.w, self.b * 2)))),
        (None, lambda self, x: self.down(F.gelu(F.linear(x, self.w) + self.b))),
        (None, lambda self, x: self.down(F.gelu(x @ self.w.t()))),
        (None, lambda self, x: self.down(F.gelu(torch.einsum("b t d, f d -> b t f", x, self.w)))),
        (None, lambda self, x: self.down(F.gelu(torch.einsum("fd,...d->...f", [self.w, x])))),
    ],
    ids=["bias", "named", "computed", "added", "product", "einsum", "dots"],
)
def test_a_bare_weight_is_a_layer(bias: str | None, run: Any) -> None:
    result = found(Pair(run, w=(4 * WIDTH, WIDTH), b=(4 * WIDTH,)))
    assert styles(result) == {"w": "column", "down": "row"}
    assert result.plan.layers["w"].bare == BareLinear("w", bias)


@pytest.mark.parametrize(
    "run",
    [
        lambda self, x: self.down(F.gelu(F.linear(x, self.w * 2))),
        lambda self, x: self.down(F.gelu(F.linear(x, self.w))) + self.w.sum(),
        lambda self, x: self.down(F.gelu(F.linear(x, self.w if self.training else -self.w))),
        lambda self, x: self.down(F.gelu(F.linear(x, self._parameters["w"]))),
        lambda self, x: self.down(F.gelu(torch.einsum("btd,fd,td->btf", x, self.w, self.w[:5]))),
        lambda self, x: self.down(F.gelu(torch.einsum("btd,fd->btf", x[..., :1], self.w))),
        lambda self, x: self.down(F.gelu(self.w.transpose(0, 1).chunk(2)[0].sum(0) + x.sum(-1, True))),
        lambda self, x: self.down(F.gelu(x @ self.w[: 2 * WIDTH].T.repeat(1, 2))),
    ],
    ids=["scaled", "summed", "in training", "looked up", "twice", "repeated", "added", "a part"],
)
def test_a_bare_matrix_that_is_something_else_is_none(run: Any) -> None:
    result = found(Pair(run, w=(4 * WIDTH, WIDTH)))
    assert result.problem is None and "w" not in result.plan.layers and "down" in result.plan.layers
    assert "otherwise" in result.whole["w"] or "in its place" in result.whole["w"]


def problems(run: Any) -> list[str]:
    """What is said of two blocks that hold a matrix."""
    model = nn.ModuleDict({"blocks": nn.ModuleList(Pair(run, w=(4 * WIDTH, WIDTH)) for _ in range(2))})
    plan = resolve("auto", model, 2)
    kinds, _ = look(model, plan, [lambda: [block(X) for block in model["blocks"]]])
    return discover(model, 2, kinds, plan).problems


def test_what_is_multiplied_with_and_stays_whole_is_said() -> None:
    why = "its code uses it otherwise than as the weight of one linear layer"
    assert problems(lambda self, x: self.down(F.gelu(F.linear(x, self.w)))) == []
    assert problems(lambda self, x: self.down(F.gelu(x @ self.w[: 2 * WIDTH].T.repeat(1, 2)))) == []
    said = f"`blocks.0.w` (and 1 more) stays whole: {why}"
    assert problems(lambda self, x: self.down(torch.cat([F.linear(x, w) for w in self.w.chunk(2)], -1))) == [
        f"{said} (`chunk`)"
    ]
    twice = problems(lambda self, x: self.down(torch.einsum("btd,fd,td->btf", x, self.w, self.w[:5])))
    assert twice == [f"{said} (`getitem`)"]


def test_one_module_that_looks_elsewhere_costs_the_others_nothing() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = Pair(lambda self, x: self.down(F.gelu(F.linear(x, self.w))), w=(4 * WIDTH, WIDTH))
            self.two = Pair(lambda self, x: self.down(F.gelu(F.linear(x, self._parameters["w"]))), w=(4 * WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    result = found(Both())
    assert result.problem is None and result.plan.layers["one.w"].style.style == "column"
    assert "two.w" not in result.plan.layers


def test_a_bare_weight_may_be_in_by_out() -> None:
    shapes = {"w": (WIDTH, 64), "b": (64,), "v": (64, WIDTH)}
    block = Pair(lambda self, x: F.gelu(x @ self.w + self.b) @ self.v, **shapes)
    del block.down
    result = found(block)
    assert styles(result) == {"w": "column", "v": "row"}
    assert [result.plan.layers[name].bare for name in "wv"] == [BareLinear(name, None, TRANSPOSED) for name in "wv"]
    added = Pair(lambda self, x: torch.addmm(self.b, x.flatten(0, 1), self.w).relu().view(2, 5, 64) @ self.v, **shapes)
    del added.down
    result = found(added)
    assert styles(result) == {"w": "column", "v": "row"}
    assert result.plan.layers["w"].bare == BareLinear("w", "b", TRANSPOSED)
    both = Pair(lambda self, x: self.down(F.linear(x @ self.w, self.w)), w=(WIDTH, WIDTH))
    both.down = nn.Linear(WIDTH, WIDTH)
    assert "w" not in found(both).plan.layers


def test_a_bare_weight_of_two_modules_is_none() -> None:
    block = Pair(lambda self, x: self.down(F.gelu(F.linear(x, self.w))), w=(4 * WIDTH, WIDTH))
    block.other = nn.Module()
    block.other.w = block.w
    assert "w" not in found(block).plan.layers


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, 1).T @ x.flatten(0, 1)


@torch.jit.script
def scripted(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


@pytest.mark.parametrize(
    "function", [lambda x, weight: _Product.apply(x, weight), scripted], ids=["autograd", "scripted"]
)
@pytest.mark.parametrize("is_bare", [False, True])
def test_a_function_of_the_users_own_gets_whole_weights(function: Any, is_bare: bool) -> None:
    """It alone, not the whole block, costs its weight a split."""

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair, self.p = Pair(by_function), nn.Linear(WIDTH, WIDTH, bias=False)
            self.w = nn.Parameter(torch.zeros(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.pair(x) + function(torch.tanh(x), self.w if is_bare else self.p.weight)

    body = Body()
    if is_bare:
        del body.p
    result = found(body)
    assert styles(result) == {"pair.up": "column", "pair.down": "row"} and result.problem is None
    assert not is_bare or result.whole["w"] in (
        OTHERWISE,
        "its code is not seen to use it as the weight of a linear layer",
    )
    assert not is_bare or (function is scripted) != ("w" in result.multiplied)


def test_a_bare_weight_that_is_used_twice_between_regions() -> None:
    def run(self: Any, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        return x + F.linear(x, self.w) + F.linear(torch.tanh(x), self.w)

    block = Pair(run, w=(WIDTH, WIDTH))
    block.up = nn.Linear(WIDTH, 4 * WIDTH)
    result = found(block)
    assert styles(result)["up"] == "column" and result.sequence_dim == 1
    assert not any("(" in name for name in (*result.used_twice, *result.how, *result.whole, *result.token_local))


class _Sequence(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(super().forward(x), self.weight)


def test_code_that_calls_all_modules_in_it_calls_no_weight() -> None:
    result = found(_Sequence())
    assert result.problem is None and styles(result) == {"0": "column", "2": "row"}


def test_a_trusted_plan_with_layers_by_function_has_global_sizes() -> None:
    by_rank = shard_ranges(4 * WIDTH, 2)
    layers = {name: LayerPlan(name, Style(name, style), by_rank) for name, style in (("up", "column"), ("down", "row"))}
    result = found(Pair(by_function), trusted=BlockPlan(layers))
    assert result.how["up"] == "as the model's own plan says"
    assert all(layer.global_sizes for layer in result.plan.layers.values())


class _Table(nn.Embedding):
    pass


def test_tables_and_bare_weights_in_blocks() -> None:
    tables = nn.Module()
    tables.tokens, tables.places = _Table(8, WIDTH), _Table(8, WIDTH)
    model = nn.Module()
    model.tables = tables
    model.layers = nn.ModuleList(Pair(lambda self, x: x, w=(4 * WIDTH, WIDTH), v=(WIDTH, 4 * WIDTH)) for _ in range(2))
    for layer in model.layers:
        del layer.down
    assert find_blocks(model) == ["layers.0", "layers.1"]


class _Einsums(nn.Module):
    """Attention whose weights have a dim for the heads."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        shapes = {"q": (4, WIDTH, 3), "k": (WIDTH, 4, 3), "v": (4, 3, WIDTH), "o": (4, 3, WIDTH)} | shapes
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def forward(self, x: Tensor) -> Tensor:
        q, k = torch.einsum("bsd,hde->bhse", x, self.q), torch.einsum("...sd,dhe->...hse", x, self.k)
        v = torch.einsum("bsd,hed->bshe", x, self.v)
        scores = torch.einsum("bhse,bhte->bhst", q, k).softmax(-1)
        return x + torch.einsum("bhst,bthe,hed->bsd", scores, v, self.o)


def test_weights_with_a_dim_for_heads() -> None:
    result = found(_Einsums())
    assert styles(result) == {"q": "column", "k": "column", "v": "column", "o": "row"} and result.problem is None
    dims = {name: (layer.bare.dims.outputs, layer.bare.dims.inputs) for name, layer in result.plan.layers.items()}
    assert dims == {"q": ((0, 2), (1,)), "k": ((1, 2), (0,)), "v": ((0, 1), (2,)), "o": ((2,), (0, 1))}
    assert split_parameters(result.plan.layers["k"], result.block.module)[0].dim == 1


def test_heads_that_do_not_divide_are_not_cut() -> None:
    result = found(_Einsums(q=(3, WIDTH, 4), k=(WIDTH, 3, 4), v=(3, 4, WIDTH), o=(3, 4, WIDTH)))
    splits = {name: split_parameters(layer, result.block.module)[0] for name, layer in result.plan.layers.items()}
    assert {name: split.dim for name, split in splits.items()} == {"q": 0, "k": 1, "v": 0, "o": 0}
    assert all(split.by_rank == (((0, 2),), ((2, 3),)) for split in splits.values())


@pytest.mark.parametrize(
    ("shape", "run", "outputs"),
    [
        ((3, WIDTH, WIDTH), lambda w, x: F.linear(x, w.flatten(0, 1)), (0, 1)),
        ((3, WIDTH, WIDTH), lambda w, x: x @ w.view(3 * WIDTH, -1).T, (0, 1)),
        ((WIDTH, 3, 4, 4), lambda w, x: x @ w.reshape(WIDTH, -1), (1, 2, 3)),
        ((3, WIDTH, WIDTH), lambda w, x: torch.einsum("bsd,cfd->bscf", x, w).flatten(2), (0, 1)),
    ],
    ids=["flattened", "viewed", "in by out", "einsum"],
)
def test_fused_weights_of_several_dims(shape: tuple[int, ...], run: Any, outputs: tuple[int, ...]) -> None:
    def attend(self: Any, x: Tensor) -> Tensor:
        q, k, v = run(self.qkv, x).view(*x.shape[:2], 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        return self.down(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    block = Pair(attend, qkv=shape)
    block.down = nn.Linear(WIDTH, WIDTH)
    result = found(block)
    assert styles(result) == {"qkv": "column", "down": "row"}
    assert result.plan.layers["qkv"].bare.dims.outputs == outputs
    (split,) = split_parameters(result.plan.layers["qkv"], block)
    assert split.dim == outputs[1] and split.by_rank[0][0][0] == 0


class _Held(nn.Module):
    """Whose weights are in a dict and a list."""

    def __init__(self) -> None:
        super().__init__()
        weights = {"up": nn.Parameter(torch.zeros(4 * WIDTH, WIDTH)), "bias": nn.Parameter(torch.zeros(4 * WIDTH))}
        self.p = nn.ParameterDict(weights)
        self.w = nn.ParameterList([nn.Parameter(torch.zeros(4 * WIDTH, WIDTH))])

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(F.linear(torch.tanh(x), self.p["up"], self.p["bias"])) @ next(iter(self.w))


def test_weights_in_dicts_and_lists_are_those_of_layers() -> None:
    result = found(_Held())
    assert styles(result) == {"p.up": "column", "w.0": "row"} and result.problem is None
    assert [result.plan.layers[name].bare for name in ("p.up", "w.0")] == [
        BareLinear("up", "bias"),
        BareLinear("0", None, TRANSPOSED),
    ]


def test_a_dict_of_weights_is_no_block() -> None:
    model = nn.Module()
    model.net = nn.Module()
    model.net.weights = nn.ParameterDict({name: nn.Parameter(torch.zeros(8, 8)) for name in "ab"})
    model.weights = nn.ParameterList(nn.Parameter(torch.zeros(8, 8)) for _ in range(2))
    model.layers = nn.ModuleList(_Held() for _ in range(2))
    assert find_blocks(model) == ["net", "layers.0", "layers.1"]


def test_a_block_may_make_a_layer_while_it_runs() -> None:
    """As BigBird does for short texts; `torch.nn.init.uniform_` is asked by names alone."""

    def run(self: Any, x: Tensor) -> Tensor:
        nn.Linear(2, 2)
        return by_function(self, x)

    result = found(Pair(run))
    assert result.problem is None and styles(result) == {"up": "column", "down": "row"}
