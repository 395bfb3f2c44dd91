"""Plans that are found: which features belong together, and that a wrong plan is never proven."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.profilers.pytorch import RegisterRecordFunction
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from lightning_megatp.auto_plan.blocks import Block as Kind
from lightning_megatp.auto_plan.blocks import Call, find_blocks, is_linear, kinds_of_blocks
from lightning_megatp.auto_plan.capture import capture_calls
from lightning_megatp.auto_plan.compare import Reference
from lightning_megatp.auto_plan.discover import discover, look
from lightning_megatp.auto_plan.influence import probe
from lightning_megatp.auto_plan.results import BlockResult
from lightning_megatp.auto_plan.search import plan_block
from lightning_megatp.auto_plan.simulate import BlockPlan, Ranks, SimulatedExchange
from lightning_megatp.auto_plan.thin import ThinLinear, thin_copy
from lightning_megatp.plan.convolutions import least_size
from lightning_megatp.plan.parallel_plan import ParallelPlan
from lightning_megatp.plan.ranges import length, shard_ranges
from lightning_megatp.plan.resolve import resolve
from tests.parity.models import Adapter, OwnRMSNorm, adapted
from tests.unit.auto_models import (
    HEADS,
    HIDDEN,
    Block,
    Conditioned,
    Directions,
    FullNorm,
    Fused,
    Gated,
    Interleaved,
    Joint,
    Largest,
    Model,
    Modulated,
    NormedHeads,
    OneOutput,
    ResponseNorm,
    Routed,
    Separate,
    SideDoor,
    Three,
    TwoStreams,
    Unnormed,
    ValueResidual,
)

X = torch.randn(2, 5, HIDDEN, generator=torch.Generator().manual_seed(0))


def plan(body: nn.Module, tp: int, **options: Any) -> BlockResult:
    return plan_block(Kind(Block(body), ["block"], [Call((X,), options)]), tp)


def owned(result: BlockResult, name: str) -> list[list[int]]:
    """The features of each rank."""
    by_rank = result.plan.layers[f"body.{name}"].by_rank
    return [[i for start, stop in ranges for i in range(start, stop)] for ranges in by_rank]


def styles(result: BlockResult) -> dict[str, str]:
    return {name.removeprefix("body."): layer.style.style for name, layer in result.plan.layers.items()}


@pytest.mark.parametrize("tp", [2, 3, 6])
def test_heads_are_dealt_out(tp: int) -> None:
    result = plan(Separate(), tp)
    assert styles(result) == {"q": "column", "k": "column", "v": "column", "out": "row"}
    heads = [list(range(rank * 24 // tp, (rank + 1) * 24 // tp)) for rank in range(tp)]
    assert all(owned(result, name) == heads for name in ("q", "k", "v", "out"))
    assert max(result.errors.values()) < 1e-12


def test_heads_that_do_not_divide_are_not_cut() -> None:
    result = plan(Separate(), 4)
    assert [len(features) for features in owned(result, "q")] == [8, 8, 4, 4]
    assert owned(result, "v") == owned(result, "q") == owned(result, "out")


def test_fewer_key_heads_than_ranks_are_shared() -> None:
    result = plan(Separate(kv_heads=2), 6)
    assert owned(result, "k") == [[0, 1, 2, 3]] * 3 + [[4, 5, 6, 7]] * 3
    assert owned(result, "q") == [list(range(4 * rank, 4 * rank + 4)) for rank in range(6)]


def test_a_fused_layer_is_split_in_each_part_and_its_numbers_divided() -> None:
    result = plan(Fused(), 2)
    assert owned(result, "qkv")[1] == [*range(12, 24), *range(36, 48), *range(60, 72)]
    assert {(a.attribute, a.by_rank) for a in result.plan.attributes} >= {("n_embd", (12, 12))}


def test_an_interleaved_layer_is_split_by_heads() -> None:
    assert owned(plan(Interleaved(), 3), "qkv") == [list(range(24 * rank, 24 * rank + 24)) for rank in range(3)]


def test_gate_and_up_lie_together() -> None:
    result = plan(Gated(), 2)
    assert owned(result, "up") == [[*range(24), *range(48, 72)], [*range(24, 48), *range(72, 96)]]
    assert owned(result, "down") == [list(range(24)), list(range(24, 48))]


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm, OwnRMSNorm, ResponseNorm, Directions])
def test_a_norm_may_stand_between_a_pair(norm: Callable[[int], nn.Module]) -> None:
    """Ranks add up what it divides by."""
    result = plan(FullNorm(norm), 2)
    assert styles(result) == {"up": "column", "down": "row"}
    assert result.how["body.up"] == "with global sizes"
    assert result.sequence_dim is not None


def test_features_are_gathered_between_a_pair_for_what_cannot_be_added_up() -> None:
    result = plan(FullNorm(Largest), 2)
    assert styles(result) == {"up": "column", "down": "row"}
    assert result.how["body.up"] == "with global sizes, gathered for amax"


def test_a_pair_whose_features_are_gathered_twice_is_none() -> None:
    """Each of its layers is gathered once."""
    result = plan(FullNorm(lambda features: nn.Sequential(Largest(features), nn.GELU(), Largest(features))), 2)
    assert styles(result) == {"up": "column_gather", "down": "column_gather"}
    assert result.whole == {}
    assert "together they send more than one by one" in result.how["body.up"]


def test_what_earlier_blocks_have_made_is_used_by_parts() -> None:
    first = torch.randn(2, HEADS, 5, HIDDEN // HEADS, requires_grad=True)
    result = plan(ValueResidual(), 2, first=first)
    expected = dict.fromkeys(["q", "k", "v"], "column") | {"out": "row"}
    assert {name: styles(result).get(name) for name in expected} == expected, result.whole


class _ConditionedTokens(nn.Module):
    """Scales and shifts what attention reads, per token, by layers of a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift, self.body = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), Separate()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        normed = F.layer_norm(x, (HIDDEN,)) * self.scale(condition).sigmoid() + self.shift(condition)
        return x + self.body(normed)


def test_of_pairs_that_share_layers_those_that_send_less_are_regions() -> None:
    """Scale and shift could be columns of q, k and v as rows, with as many weights."""
    attention = dict.fromkeys(["body.q", "body.k", "body.v"], "column") | {"body.out": "row"}
    result = plan(_ConditionedTokens(), 2, condition=torch.randn(2, 5, HIDDEN))
    assert styles(result) == {**attention, "scale": "column_gather", "shift": "column_gather"}


def test_streams_that_attend_to_each_other_are_one_region() -> None:
    """Each output layer is made of the keys and values of both streams, and of its own queries."""
    call = Call((X,), {"other": torch.randn(2, 3, HIDDEN)})
    result = plan_block(Kind(Joint(), ["block"], [call]), 2)
    assert styles(result) == dict.fromkeys(["q", "k", "v", "q2", "k2", "v2"], "column") | {"out": "row", "out2": "row"}
    assert len(set(result.how.values())) == 1 and not result.gathers


def test_queries_of_tokens_that_a_block_does_not_return_prevent_nothing() -> None:
    result = plan(Joint(returns_both=False), 2, other=torch.randn(2, 3, HIDDEN))
    rest = dict.fromkeys(["q", "k", "v", "k2", "v2"], "column") | {"out": "row"}
    assert styles(result) == {**rest, "q2": "column_gather"} and not result.gathers


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("fused", [False, True])
def test_parts_of_what_one_row_takes_are_dealt_out_each(fused: bool, tp: int) -> None:
    result = plan(OneOutput(fused), tp)
    columns = ["all"] if fused else ["q", "k", "v", "up"]
    assert styles(result) == dict.fromkeys(columns, "column") | {"out": "row"} and not result.gathers
    row = result.plan.layers["body.out"]
    assert row.style.parts == (HIDDEN, 56)
    heads = shard_ranges(HIDDEN, tp, 1, HIDDEN // HEADS)
    assert [length(own) for own in row.by_rank] == [
        length(of_heads) + length(of_rest)
        for of_heads, of_rest in zip(heads, shard_ranges(56, tp, 1, row.unit), strict=True)
    ]


def test_a_norm_of_all_heads_lets_queries_and_keys_into_the_region_of_values() -> None:
    result = plan(NormedHeads(), 2)
    assert styles(result) == dict.fromkeys(["q.0", "k.0", "v"], "column") | {"out": "row"} and not result.gathers


def test_layers_that_are_called_twice_are_a_pair() -> None:
    assert styles(plan(TwoStreams(), 2)) == {"up": "column", "down": "row"}


def test_an_expert_without_tokens_does_not_keep_a_block_from_being_probed() -> None:
    result = plan(Routed(), 2)
    found = styles(result)
    assert result.problem is None
    assert found["experts.0.up"] == "column" and found["experts.0.down"] == "row"
    assert found["experts.1.up"] == found["experts.1.down"] == "column_gather"


def test_a_narrow_layer_of_samples_is_split_beside_tokens() -> None:
    """One of tokens would not be worth a collective (`_NARROW`)."""
    result = plan(Modulated(), 2, condition=torch.randn(2, 6))
    assert styles(result) == {"modulation": "column_gather", "up": "column", "down": "row"}
    assert result.sequence_dim == 1


def test_blocks_that_are_numbered_list_by_list_are_of_one_kind() -> None:
    lists = {"first": [Block(Separate(), 100 + i) for i in range(2)], "then": [Block(Separate(), i) for i in range(3)]}
    model = nn.ModuleDict({name: nn.ModuleList(blocks) for name, blocks in lists.items()})
    (kind,) = kinds_of_blocks(model, find_blocks(model))
    assert len(kind.names) == 5 and [next(iter(x.values())) for x in kind.counts] == [100, 101, 0, 1, 2]
    lists["then"][1].index = 7
    assert len(kinds_of_blocks(model, find_blocks(model))) > 1


class _Widened(nn.Module):
    """A norm of few features, and a layer that makes many of them, which mix."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.norm = nn.Linear(HIDDEN, HIDDEN), nn.LayerNorm(HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.norm(self.out(x))).softmax(-1))


def test_a_layer_that_widens_is_no_row_across_a_norm() -> None:
    """Sums of what it makes cost more than gathers of what it takes."""
    result = plan(_Widened(), 2)
    assert styles(result) == dict.fromkeys(["out", "up", "down"], "column_gather")


def test_a_gate_beside_the_columns_is_no_region_as_it_is() -> None:
    """Its gradient would be partial on every rank."""
    result = plan(SideDoor(), 2)
    assert all(how != "as it is" for how in result.how.values())


def test_masks_are_tried_and_left_out() -> None:
    mask = torch.zeros(2, 1, 5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
    assert set(styles(plan(Separate(), 2, mask=mask)).values()) == {"column", "row"}


class _Masked(nn.Module):
    """Attention by a number of heads, whose views infer a head's size, and by a float mask: 1 for tokens, or 0."""

    def __init__(self, large: float) -> None:
        super().__init__()
        self.heads, self.large = 2, large
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (f(x).view(*x.shape[:-1], self.heads, -1).transpose(-2, -3) for f in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / 2.0 + self.large * (mask[:, None, None, :] - 1)
        return self.out((scores.softmax(-1) @ v).transpose(-2, -3).flatten(-2))


@pytest.mark.parametrize("tokens", [5, 4])
def test_float_masks_decide_nothing_but_what_they_hide(tokens: int) -> None:
    result = plan(_Masked(1e9), 2, mask=(torch.arange(5) < tokens).double().expand(2, 5))
    assert {attribute.name for attribute in result.plan.attributes} == {"body.heads"}
    assert set(styles(result).values()) == {"column", "row"}


def test_what_makes_no_difference_proves_nothing() -> None:
    """Weights of tokens that, so large, decide the softmax alone: heads cut at the wrong places compute the same."""
    result = plan(_Masked(1e9), 2, mask=torch.linspace(0.1, 0.9, 5).expand(2, 5))
    assert not result.plan.attributes and set(styles(result).values()) == {"column_gather"}


class _Shifted(nn.Module):
    """Splits as `Separate` does, but the code knows which heads it has: nothing can be moved."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 8), nn.Linear(8, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(y * torch.arange(1, 1 + y.shape[-1], dtype=y.dtype))


def test_a_constant_made_from_the_local_size_is_not_proven_as_it_is() -> None:
    """Shapes agree on every rank, and the numbers would be wrong."""
    result = plan(_Shifted(), 2)
    assert all(how != "as it is" for how in result.how.values())


class _Dropped(nn.Module):
    """Two MLPs side by side, the second called between the layers of the first, with dropout of the second's input and
    of the features that the first has then."""

    def __init__(self, whole: float, own: float) -> None:
        super().__init__()
        self.up, self.down, self.whole, self.own = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN), whole, own
        self.first, self.second = nn.Linear(HIDDEN, 12), nn.Linear(12, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        side = self.second(F.gelu(self.first(F.dropout(x, self.whole, self.training))))
        return self.down(F.dropout(F.gelu(y), self.own, self.training)) + side


@pytest.mark.parametrize(("whole", "own"), [(0.1, 0.0), (0.0, 0.1), (0.0, 0.0)])
def test_features_draw_numbers_of_their_own_and_whole_values_do_not(whole: float, own: float) -> None:
    """A rank's stream is open from a column layer to the next row layer: here for the wrong values."""
    result = plan(_Dropped(whole, own), 2)
    assert set(styles(result).values()) == {"column", "row"}
    assert result.how["body.up"] == result.how["body.down"] == ("with global sizes" if whole or own else "as it is")


# What the proof has to catch.


def proven(name: str, body: nn.Module, tp: int = 2) -> tuple[Reference, BlockPlan]:
    result = plan(body, tp)
    assert result.problem is None
    return Reference(thin_copy(Block(body), seed=1), Call((X,), {})), result.plan


def test_a_proven_plan_holds_for_other_weights() -> None:
    reference, found = proven("separate", Separate())
    assert reference.compare(found, 2).holds


@pytest.mark.parametrize("layer", ["body.q", "body.k", "body.v", "body.out"])
def test_shards_swapped_between_ranks_are_caught(layer: str) -> None:
    reference, found = proven("separate", Separate())
    swapped = dataclasses.replace(found.layers[layer], by_rank=found.layers[layer].by_rank[::-1])
    assert not reference.compare(BlockPlan({**found.layers, layer: swapped}), 2).holds


def test_a_shifted_range_is_caught() -> None:
    reference, found = proven("gated", Gated())
    first, second = found.layers["body.up"].by_rank
    shifted = tuple(tuple((start + 1, stop + 1) for start, stop in ranges) for ranges in (first, second))
    wrong = (shifted[0], ((shifted[1][0]), (second[1][0], second[1][1])))
    layer = dataclasses.replace(found.layers["body.up"], by_rank=wrong)
    assert not reference.compare(BlockPlan({**found.layers, "body.up": layer}), 2).holds


def test_a_missing_reduction_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, found = proven("separate", Separate())
    monkeypatch.setattr(SimulatedExchange, "reduce", lambda self, x: x)
    assert not reference.compare(found, 2).holds


def test_a_bias_added_by_every_rank_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, found = proven("separate", Separate())
    compute = ThinLinear.compute
    monkeypatch.setattr(ThinLinear, "compute", lambda self, x, bias=True: compute(self, x))
    assert not reference.compare(found, 2).holds


def test_a_missing_entry_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process the numbers are right without it; the marks of the regions are not."""
    reference, found = proven("separate", Separate())
    monkeypatch.setattr(SimulatedExchange, "copy", lambda self, x: x)
    assert not reference.compare(found, 2).holds


# Blocks, and whole models.


def test_blocks_are_what_lists_hold() -> None:
    assert find_blocks(Model()) == ["blocks.0", "blocks.1", "blocks.2"]
    assert find_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []
    assert find_blocks(nn.ModuleDict({"mlp": Gated()})) == ["mlp"]


def _held(**parts: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


def test_stages_of_a_u_net_are_no_blocks() -> None:
    """Each has a list of residual layers, with a linear layer of the time, and one of transformers. A layer of experts
    is one block, though most of its layers are in a list."""
    plain, narrow = partial(nn.Linear, 8, 8), partial(nn.Linear, 8, 4)

    def transformer() -> nn.Module:
        blocks = (_held(attention=nn.Sequential(plain(), narrow()), mlp=nn.Sequential(plain(), plain())) for _ in "ab")
        return _held(enter=plain(), blocks=nn.ModuleList(blocks), leave=plain())

    stages = [
        _held(
            residual=nn.ModuleList(_held(time=plain()) for _ in "ab"),
            attentions=nn.ModuleList([transformer() for _ in "ab"]),
        )
        for _ in "ab"
    ]
    model = _held(time=plain(), stages=nn.ModuleList(stages))
    assert find_blocks(model) == [
        f"stages.{stage}.attentions.{i}.blocks.{block}" for stage in range(2) for i in range(2) for block in range(2)
    ]
    experts = nn.ModuleList(nn.Sequential(plain(), plain(), plain()) for _ in range(16))
    layer = _held(query=plain(), router=narrow(), experts=experts, shared=nn.Sequential(plain(), plain()))
    assert find_blocks(_held(layers=nn.ModuleList([layer]))) == ["layers.0"]


def test_an_index_makes_no_kinds_and_a_setting_does() -> None:
    model = Model()
    for name, child in model.blocks.named_modules(prefix="model.blocks"):  # as adapters do
        child.kwargs = {"target_name": name}  # type: ignore[assignment]
    assert [kind.names for kind in kinds_of_blocks(model)] == [["blocks.0", "blocks.1", "blocks.2"]]
    model.blocks[2].body.window = 3  # type: ignore[union-attr, assignment]
    assert [len(kind.names) for kind in kinds_of_blocks(model)] == [2, 1]


class Activated(nn.Module):
    def __init__(self, activation: Any) -> None:
        super().__init__()
        self.up, self.down, self.activation = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN), activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


def found_for(*bodies: nn.Module) -> ParallelPlan:
    model = nn.Module()
    model.blocks = nn.ModuleList(Block(body) for body in bodies)
    found = resolve({"**": "auto"}, model, 2)
    kinds, problems = look(model, found, [lambda: [block(X) for block in model.blocks]])  # type: ignore[operator]
    assert not problems
    discover(model, 2, kinds, found)
    return found


@pytest.mark.parametrize(
    "activations",
    [(F.gelu, F.gelu, softmax), (partial(F.softmax, dim=-1), partial(F.glu, dim=-2)), (F.relu, lambda x: x.cumsum(-1))],
)
def test_blocks_that_compute_something_else_are_of_another_kind(activations: tuple[Any, ...]) -> None:
    found = found_for(*map(Activated, activations[:-1]), Activated(activations[-1]))
    last = f"blocks.{len(activations) - 1}.body"
    if activations[-1] is softmax:
        assert found.layers["blocks.1.body.down"].style.style == "row"
    assert found.layers.get(f"{last}.up") is None or found.how[f"{last}.up"] != "as it is"


def test_blocks_of_the_same_shapes_and_other_heads_are_of_another_kind() -> None:
    class Heads(Fused):
        def __init__(self, heads: int) -> None:
            super().__init__()
            self.n_head = heads

    found = found_for(Heads(4), Heads(6), Heads(2))
    shares = {a.module: a.by_rank for a in found.attributes if a.attribute == "n_head"}
    assert all(share == (heads // 2,) * 2 for share, heads in zip(shares.values(), (4, 6, 2), strict=False))
    assert found_for(Heads(4), Heads(5)).attributes != [] and found_for(Heads(2), Heads(3)).layers


def test_a_copy_that_evaluates_is_of_the_same_kind() -> None:
    """Nobody calls it, and what follows the trained blocks has to be split as they are."""
    blocks = nn.ModuleDict({"average": nn.ModuleList([Block(Gated()).eval()]), "net": nn.ModuleList([Block(Gated())])})
    (kind,) = kinds_of_blocks(blocks)
    assert kind.names == ["average.0", "net.0"]


def test_a_module_that_blocks_share_is_planned_once() -> None:
    shared = Gated()
    found = found_for(shared, shared)
    assert set(found.layers) == {"blocks.0.body.up", "blocks.0.body.down"}


@pytest.mark.parametrize("in_place", [True, False], ids=["compile()", "torch.compile"])
def test_compiled_blocks_are_planned_under_their_plain_names(in_place: bool) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(Block(Gated()) for _ in range(2))
    for i, block in enumerate(model.blocks):
        if in_place:
            block.compile(backend="eager")
        else:
            model.blocks[i] = torch.compile(block, backend="eager")  # type: ignore[assignment]
    found = resolve({"**": "auto"}, model, 2)
    kinds, _ = look(model, found, [lambda: [block(X) for block in model.blocks]])  # type: ignore[operator]
    discover(model, 2, kinds, found)
    assert found.layers["blocks.1.body.down"].style.style == "row" and not found.sequences
    assert set(found.parameters) >= {f"blocks.0.{'' if in_place else '_orig_mod.'}body.up.weight"}


@pytest.mark.parametrize("when", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_hooks_of_the_users_own_are_called_by_real_steps_only(when: str) -> None:
    block, calls = Block(Gated()), []
    getattr(block.body, f"register_{when}_hook")(lambda *x: calls.append(x))
    result = plan_block(Kind(block, ["block"], [Call((X,), {})]), 2)
    assert not calls and "has a hook of" in (result.problem or "")
    assert set(styles(result).values()) == {"column_gather"}


def test_hooks_of_a_profiler_are_no_hooks_of_the_users() -> None:
    block = Block(Gated())
    with RegisterRecordFunction(block):
        block(X)  # which leaves records that can't be copied
        result = plan_block(Kind(block, ["block"], [Call((X,), {})]), 2)
    assert styles(result) == styles(plan(Gated(), 2))


@pytest.mark.parametrize("left", [lambda y: y, lambda y: [y], lambda y: {"penalty": y}])
def test_what_a_block_leaves_on_itself_is_compared_too(left: Any) -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            self.penalty = left(h.square().mean())
            return self.down(h.relu())

    assert all(how != "as it is" for how in plan(Auxiliary(), 2).how.values())


def test_only_one_block_of_a_kind_runs() -> None:
    model, runs = Model(layers=5), []
    for block in model.blocks:
        block.body.register_forward_hook(lambda module, *_: runs.append(module))  # type: ignore[union-attr]
    kinds = kinds_of_blocks(model)
    assert capture_calls(model, kinds, lambda: model.step(torch.arange(10).view(2, 5))) is None
    assert len(runs) == 1 and len(kinds[0].calls) == 1
    assert "forward" not in vars(model.blocks[0])


def test_a_layer_of_torch_with_dropout_in_its_attention() -> None:
    layer = nn.TransformerEncoderLayer(HIDDEN, 4, 48, batch_first=True)
    result = plan_block(Kind(layer, ["block"], [Call((X,), {})]), 2)
    assert styles(result) == {"linear1": "column", "linear2": "row"}


def test_what_a_step_copies_after_its_blocks() -> None:
    """Where nothing has data any more: numbers of a new metric, or real tensors."""
    model, copies = Model(tied=False), []

    def step() -> None:
        model.step(torch.zeros(2, 5, dtype=torch.long))
        held = torch.ones(2).requires_grad_()
        copies.extend(copy.deepcopy([torch.tensor(0.0), held.detach(), model.head.weight] * 20))
        copies.append(torchmetrics.MeanMetric())

    assert capture_calls(model, kinds_of_blocks(model, find_blocks(model)), step) is None
    assert len(copies) == 61


def test_operations_that_fail_behind_the_blocks_are_not_printed_by_torch(caplog: pytest.LogCaptureFixture) -> None:
    """What torch.compile does with values behind them."""
    model = Model(layers=2)
    kinds = kinds_of_blocks(model)

    def step() -> None:
        model.step(torch.arange(10).view(2, 5))
        torch.empty(2).set_(torch.UntypedStorage(8), 0, (2,))

    assert capture_calls(model, kinds, step) is None
    assert "set_" not in caplog.text


def test_a_block_of_several_names_is_captured_once_and_gets_its_forward_back() -> None:
    model, shared = nn.Module(), Block(Gated())
    model.first, model.second = nn.ModuleList([shared]), nn.ModuleList([shared])
    kinds = kinds_of_blocks(model)
    assert [kind.names for kind in kinds] == [["first.0"]]
    assert capture_calls(model, kinds, lambda: shared(X)) is None
    assert len(kinds[0].calls) == 1 and "forward" not in vars(shared)


def test_a_step_may_change_results_of_blocks_in_place() -> None:
    model = nn.Module()
    other = nn.Sequential(nn.Linear(HIDDEN, 8), nn.ReLU(), nn.Linear(8, HIDDEN))
    model.blocks = nn.ModuleList([Block(Gated()), Block(other)])  # of two kinds
    kinds = kinds_of_blocks(model)

    def step() -> None:
        x = X
        for block in model.blocks:
            x = block(x)
            x *= 2.0

    assert capture_calls(model, kinds, step) is None
    assert [len(kind.calls) for kind in kinds] == [1, 1]


def test_a_linear_subclass_counts_if_it_computes_the_same() -> None:
    class Same(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input @ self.weight.T if self.bias is None else input @ self.weight.T + self.bias

    class Cast(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            bias = None if self.bias is None else self.bias.to(input.dtype)
            return F.linear(input, self.weight.to(input.dtype), bias)

    class Scaled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 1.01

    class Quantized(nn.Linear):
        def to(self, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
            return self.weight.round().to(dtype)

        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input, self.weight, self.bias) if self.training else self.to(input.dtype)

    class Rounded(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            step = self.weight.detach().abs().amax() / 7
            rounded = (self.weight / step).round() * step
            return F.linear(input, self.weight + (rounded - self.weight).detach(), self.bias)

    class Limited(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input, self.weight.clamp(-2, 2), self.bias)

    class Reversed(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return F.linear(input.detach() * 2 - input, self.weight, self.bias)  # turns gradients around

    assert not any(is_linear(kind(7, 3)) for kind in (Rounded, Limited, Reversed))
    assert is_linear(nn.Linear(3, 2)) and is_linear(Same(7, 3)) and is_linear(Same(7, 3, bias=False))
    assert is_linear(Cast(7, 3)) and is_linear(Cast(7, 3, bias=False))
    assert not is_linear(Scaled(7, 3)) and not is_linear(Quantized(7, 3))
    assert not is_linear(torch.nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)))


@pytest.mark.parametrize("tied", [True, False])
def test_a_whole_model(tied: bool) -> None:
    model = Model(tied=tied)
    found = resolve({"**": "auto"}, model, 2)
    kinds, problems = look(model, found, [lambda: model.step(torch.arange(10).view(2, 5))])
    assert not problems and not discover(model, 2, kinds, found).problems
    assert {name: layer.style.style for name, layer in found.layers.items() if "blocks" not in name} == {
        "tok": "vocab", "head": "column_gather",
    }  # fmt: skip
    assert len(found.layers) == 3 * 4 + 2
    split = sum(length(spec.by_rank[0]) * 2 == spec.shape[spec.dim] for spec in found.parameters.values())
    assert split == len(found.parameters) == 3 * 7 + 2


def test_the_rest_of_a_plan_is_left_alone() -> None:
    model = Model(Gated, layers=2)
    source = {"blocks.0.body.up": {"style": "column", "parts": 2}, "blocks.0.body.down": "row", "blocks.1": "auto"}
    found = resolve(source, model, 2)
    kinds, _ = look(model, found, [lambda: model.step(torch.arange(10).view(2, 5))])
    discover(model, 2, kinds, found)
    assert set(found.layers) == {f"blocks.{i}.body.{name}" for i in range(2) for name in ("up", "down")}
    assert "blocks.0.body.up" not in found.how and found.how["blocks.1.body.up"] == "as it is"


def test_a_model_without_weights_is_planned() -> None:
    with torch.device("meta"):
        model = Model(layers=2)
        ids = torch.zeros(2, 5, dtype=torch.long)
    found = resolve({"**": "auto"}, model, 3)
    kinds, problems = look(model, found, [lambda: model.step(ids)])
    assert not problems and not discover(model, 3, kinds, found).problems
    assert len(found.layers) == 2 * 4 + 2


def test_after_a_step_that_raises_layers_are_gathered_and_it_is_said() -> None:
    model = Model()

    def step() -> None:
        raise KeyError("labels")

    found = resolve({"**": "auto"}, model, 2)
    kinds, problems = look(model, found, [step])
    assert "KeyError: 'labels'" in problems[0]
    assert "gathered: the step that was tried out does not call it" in discover(model, 2, kinds, found).problems[0]


def test_candidates_name_what_feeds_a_row() -> None:
    twin = thin_copy(Block(Separate()), seed=0)
    (candidate,) = probe(twin, Call((X,), {}), 2).candidates(2)
    assert candidate.rows == ["body.out"] and set(candidate.columns) == {"body.q", "body.k", "body.v"}


@pytest.mark.parametrize("body", [Conditioned(), Conditioned(128), Three()])
def test_of_three_layers_the_pair_with_most_weights_is_a_region(body: nn.Module) -> None:
    assert styles(plan(body, 2)) == {"condition": "column_gather", "up": "column", "down": "row"}


def test_a_block_may_use_a_buffer_of_a_module_that_it_is_given() -> None:
    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("grid", torch.randn(5, HIDDEN))

    class OnGrid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)

        def forward(self, x: Tensor, grid: nn.Module) -> Tensor:
            return x + self.down(torch.relu(self.up(x @ (grid.grid.T @ grid.grid))))

    found = plan_block(Kind(OnGrid(), ["block"], [Call((X, Grid()), {})]), 2)
    assert styles(found) == {"up": "column", "down": "row"}


def test_a_layer_is_a_column_after_it_was_no_row() -> None:
    attention = {**dict.fromkeys(("attention.q", "attention.k", "attention.v"), "column"), "attention.out": "row"}
    assert styles(plan(Unnormed(), 2)) == {**attention, "up": "column", "down": "row"}


@pytest.mark.parametrize(("tp", "dropout"), [(2, 0.0), (6, 0.0), (2, 0.1)])
def test_an_adapter_lies_in_the_region_of_its_layer(tp: int, dropout: float) -> None:
    """Only its few features are sent: in front of columns `down` is whole, behind rows `up` is."""
    result = plan(adapted(Separate(), dropout), tp)
    columns = {f"{name}.{part}": "column" for name in "qkv" for part in ("base", "up")}
    assert styles(result) == {**columns, "out.base": "row", "out.down": "row"}
    assert {layer.region for layer in result.plan.layers.values()} == {"body"}
    assert set(result.how.values()) == {"with global sizes" if dropout else "as it is"} and not result.gathers
    assert result.sequence_dim == 1 and result.token_local == ["body.out.up"]


def test_an_adapter_around_a_layer_that_stays_whole_stays_whole_too() -> None:
    """Its region would send the whole width for a few weights."""

    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randint(-8, 8, (48, 48), dtype=torch.int8), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight.to(x.dtype))

    x = torch.randn(2, 5, 48)
    result = plan_block(Kind(Adapter(Packed(), 48, 48), ["block"], [Call((x,), {})]), 2)
    assert not result.plan.layers and result.problem is None
    assert set(result.whole) == {"down", "up"} and "narrow" in result.whole["up"]


class Counting(nn.Module):
    """Counts its calls, up to a number of features that might stay together."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(HIDDEN, 14), nn.Linear(14, HIDDEN), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.down(torch.relu(self.up(x)))


def test_numbers_that_count_on_while_a_block_is_probed() -> None:
    result = plan(Counting(), 2)
    assert result.problem is None and owned(result, "down") == [[*range(7)], [*range(7, 14)]]


def test_numbers_that_the_code_does_not_read_are_not_tried() -> None:
    body = Fused()
    others = dict.fromkeys("abcdefghijkl", HIDDEN)
    body.__dict__ = others | body.__dict__  # before those that are read
    found = plan(body, 2)
    assert {a.attribute for a in found.plan.attributes} == {"n_head", "n_embd"}


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="torch 2.10")
def test_products_by_groups_are_known_in_float64() -> None:
    """The experts of transformers, by default, which torch has in other dtypes only."""

    class Experts(Separate):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.Parameter(torch.randn(2, HIDDEN, HIDDEN))

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = super().forward(x, mask)
            offsets = torch.tensor([4, x.shape[0] * x.shape[1]], dtype=torch.int32)
            return F.grouped_mm(x.flatten(0, 1), self.experts, offs=offsets).view_as(x)

    assert styles(plan(Experts(), 2)) == styles(plan(Separate(), 2))


class _OfWeights(nn.Module):
    """Attention by the weights of an nn.MultiheadAttention, which is not called (WavLM)."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 4, batch_first=True)
        self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.attention.in_proj_weight, self.attention.in_proj_bias).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in (q, k, v))
        x = x + self.attention.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).relu())


class _Called(_OfWeights):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x, x, x, need_weights=False)[0]
        return x + self.down(self.up(x).relu())


@pytest.mark.parametrize("kind", [_OfWeights, _Called])
def test_an_attention_that_its_block_does_not_call_stays_whole(kind: type[nn.Module]) -> None:
    model = nn.Module()
    model.blocks = nn.ModuleList(kind() for _ in range(2))
    found = resolve({"**": "auto"}, model, 2)
    kinds, _ = look(model, found, [lambda: [block(X) for block in model.blocks]])  # type: ignore[operator]
    problems = discover(model, 2, kinds, found).problems
    named = {name.removeprefix("blocks.1."): layer.style.style for name, layer in found.layers.items() if "1." in name}
    called = {"attention": "attention"} if kind is _Called else {}
    assert named == {"up": "column", "down": "row", **called}
    said = "`blocks.0.attention` (and 1 more) stays whole: its block uses its weights without calling it"
    assert problems == ([] if called else [said])


class _PooledKeys(nn.Module):
    """A convolution over the channels of each head (MViT), which ranks have of their own heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.width = 4, HIDDEN
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.pool = nn.Conv1d(HIDDEN // 4, HIDDEN // 4, 33, padding=16, groups=HIDDEN // 4)
        self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, -1).transpose(1, 3).unbind(2)
        k = self.pool(k.reshape(b * self.heads, n, -1).transpose(1, 2)).transpose(1, 2).reshape(q.shape)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, self.width))
        return x + self.down(self.up(x).relu())


def test_a_convolution_inside_of_a_region_does_not_prevent_it() -> None:
    kind = Kind(_PooledKeys(), ["block"], [Call((X,), {})])
    found = plan_block(kind, 2, least_convolution=1)
    assert styles(found) == {"qkv": "column", "out": "row", "up": "column", "down": "row"}
    assert "would not compute the same" in found.whole["pool"] and "pool" not in found.how


def test_indices_that_are_drawn_lie_in_their_bounds() -> None:
    """`torch_choice` of torchvision."""

    class Draws(Gated):
        def forward(self, x: Tensor) -> Tensor:
            own = [1.0, 1.0, 1.0]
            at = int(torch.empty(1).uniform_(0, len(own)).item()), int(torch.empty(1).uniform_(to=3.0).item())
            return super().forward(x) * own[at[0]] * own[at[1]]

    assert styles(plan(Draws(), 2)) == styles(plan(Gated(), 2))


def test_a_block_whose_train_returns_nothing() -> None:
    class Silent(Gated):
        def train(self, mode: bool = True) -> None:  # type: ignore[override]
            super().train(mode)

    found = plan_block(Kind(Silent(), ["block"], [Call((X,), {})]), 2)
    assert styles(found) == {"up": "column", "down": "row"} and found.problem is None


class Convolved(nn.Module):
    """Convolutions over tokens: before a region, where values are whole, and depthwise inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.inside = nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1), nn.Conv1d(48, 48, 3, padding=1, groups=48)
        self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return self.down(F.gelu(self.inside(self.up(x).transpose(1, 2)).transpose(1, 2)))


@pytest.mark.parametrize("tp", [2, 5])
def test_convolutions_are_split_where_they_are_worth_it(tp: int) -> None:
    kind = Kind(Block(Convolved()), ["block"], [Call((X,), {})])
    small = plan_block(kind, tp)
    assert not {"mix", "inside"} & styles(small).keys()
    found = plan_block(kind, tp, least_convolution=100)
    assert styles(found) == {**styles(small), "mix": "column_gather", "inside": "column_gather"}
    assert found.problem is None and found.how["body.mix"] == "gathered: a convolution"
    assert [len(features) for features in owned(found, "mix")] == ([12, 12] if tp == 2 else [5, 5, 5, 5, 4])


@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_weight_normed_convolutions_inside_of_blocks(older: bool, dim: int | None) -> None:
    class Normed(Convolved):
        def __init__(self) -> None:
            super().__init__()
            if older:
                with pytest.warns(FutureWarning, match="weight_norm"):
                    nn.utils.weight_norm(self.mix, dim=dim)
            else:
                weight_norm(self.mix, dim=dim)

    found = plan_block(Kind(Block(Normed()), ["block"], [Call((X,), {})]), 2, least_convolution=100)
    assert found.problem is None and styles(found)["mix"] == "column_gather"
    assert found.how["body.mix"] == "gathered: a convolution"


def test_a_convolution_of_what_every_rank_of_a_region_has() -> None:
    """gMLP: the half of an MLP's features that goes through a norm is needed whole by all ranks."""

    class SpatialGate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(HIDDEN, 48), nn.LayerNorm(24), nn.Linear(24, HIDDEN)
            self.tokens = nn.Conv1d(X.shape[1], X.shape[1], 1)

        def forward(self, x: Tensor) -> Tensor:
            u, v = F.gelu(self.up(x)).chunk(2, dim=-1)
            return self.down(u * self.tokens(self.norm(v)))

    found = plan_block(Kind(Block(SpatialGate()), ["block"], [Call((X,), {})]), 2, least_convolution=0)
    assert found.problem is None
    assert styles(found) == {"up": "column", "down": "row", "tokens": "column_gather"}


def test_the_largest_convolutions_are_those_worth_it() -> None:
    widths = (64, 32, 16, 2)
    model = nn.ModuleList(nn.Conv2d(width, width, 3) for width in widths)
    assert least_size(model) == 32 * 32 * 9
    assert least_size(nn.ModuleList([model, nn.Linear(2000, 2000)])) == float("inf")


def test_convolutions_outside_of_blocks_and_subclasses_of_another_constructor() -> None:
    class Padded(nn.Conv2d):
        def __init__(self, width: int) -> None:
            super().__init__(width, width, 3, padding=1)

    class Scaled(nn.Conv2d):
        def _conv_forward(self, *args: Any) -> Tensor:
            return super()._conv_forward(*args) * 2

    model = nn.ModuleDict({"padded": Padded(8), "scaled": Scaled(8, 8, 3), "few": nn.Conv2d(8, 8, 3, groups=2)})
    model["computed"] = weight_norm(nn.Conv2d(8, 8, 3), name="bias")
    found = resolve({"**": "auto"}, model, 3)
    discover(model, 3, [], found)
    assert set(found.layers) == {"padded"} and set(found.parameters) == {"padded.weight", "padded.bias"}


class Towers(nn.Module):
    """A recommender: nothing of it is in a list, and most of it is tables."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(31, 6, padding_idx=2), nn.Embedding(50, 6)
        self.counted, self.few = nn.Embedding(40, 6, scale_grad_by_freq=True), nn.Embedding(1, 6)
        self.read, self.up, self.down = nn.Embedding(31, 6), nn.Linear(6, 24), nn.Linear(24, 6)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        x = self.users(users) + self.counted(users) + self.few(torch.zeros_like(users))
        x = x + self.read.weight[users] + self.read(users)
        return (self.down(torch.relu(self.up(x))) * self.items(items)).sum(-1)


@pytest.mark.parametrize("hooked", [False, True])
def test_tables_inside_of_a_block_that_is_in_no_list(hooked: bool) -> None:
    model = nn.Module()
    model.net, model.other = Towers().double(), nn.Linear(6, 6)
    if hooked:  # it can't be run by itself
        model.net.up.register_forward_hook(lambda *args: None)
    ids = torch.tensor([[0, 2, 30, 15, 2], [1, 16, 29, 0, 7]])
    found = resolve({"**": "auto"}, model, 3)
    kinds, _ = look(model, found, [lambda: model.net(ids, ids)])  # type: ignore[operator]
    discover(model, 3, kinds, found)
    tables = {name: layer.by_rank for name, layer in found.layers.items() if layer.style.style == "vocab"}
    assert tables.keys() - {"net.read"} == {"net.users", "net.items"}
    assert hooked or "net.read" not in tables, "its code looks at the weight"
    assert tables["net.users"] == (((0, 11),), ((11, 21),), ((21, 31),))


def test_tables_of_blocks_in_lists_stay_whole() -> None:
    model = nn.ModuleList(Towers().double() for _ in range(2))
    ids = torch.tensor([[0, 2, 30, 15, 2]])
    found = resolve({"**": "auto"}, model, 2)
    kinds, _ = look(model, found, [lambda: [tower(ids, ids) for tower in model]])
    discover(model, 2, kinds, found)
    assert not any(layer.style.style == "vocab" for layer in found.layers.values())


def test_tied_convolutions_that_would_be_split_differently_stay_whole() -> None:
    model = nn.ModuleDict({"down": nn.Conv1d(8, 8, 3), "up": nn.ConvTranspose1d(8, 8, 3)})
    model.up.weight = model.down.weight
    found = resolve({"**": "auto"}, model, 2)
    discover(model, 2, [], found)
    assert not found.layers


def test_what_a_row_returns_may_be_changed_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            y = self.down(self.up(x).relu())
            y += x
            return y

    found = plan(InPlace(), 2)
    assert styles(found) == {"up": "column", "down": "row"} and found.sequence_dim == 1


@pytest.mark.parametrize("dim", [0, 1])
def test_a_block_that_changes_one_token_in_place_keeps_all_of_them(dim: int) -> None:
    """Of a part of the sequence, each rank would change its own first one."""

    class InPart(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            x.select(dim, 0).add_(1)
            return x + self.down(self.up(x).relu())

    found = plan(InPart(), 2)
    assert styles(found) == {"up": "column", "down": "row"} and found.sequence_dim is None


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_block_with_a_checkpoint_inside(reentrant: bool) -> None:
    """What backward runs again would wait there for the other simulated ranks."""

    class Checkpointed(Separate):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return checkpoint(self.inside, x, mask, use_reentrant=reentrant)

        def inside(self, x: Tensor, mask: Tensor | None) -> Tensor:
            return super().forward(x, mask).tanh()

    found = plan(Checkpointed(), 2)
    assert styles(found) == styles(plan(Separate(), 2)) and found.sequence_dim == 1


def test_a_block_that_holds_a_computed_weight() -> None:
    """deepcopy refuses tensors with a graph."""

    class Normed(Gated):
        def __init__(self) -> None:
            super().__init__()
            with pytest.warns(FutureWarning, match="weight_norm"):
                self.normed = nn.utils.weight_norm(nn.Linear(HIDDEN, HIDDEN))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.normed(x))

    found = plan(Normed(), 2)
    assert found.problem is None and styles(found) == styles(plan(Gated(), 2))


def test_a_backward_that_runs_layers_again_is_not_waited_for() -> None:
    ranks = Ranks(2)
    assert ranks.run(lambda rank: ranks.share(rank, X)) is None
    with pytest.raises(RuntimeError, match="runs a layer again"):
        ranks.share(0, X)


def test_units_that_no_token_passes_are_reached() -> None:
    """Far from zero, a unit behind a ReLU is closed for every token, or open for every one."""

    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x.tanh() + 20).relu())

    assert styles(plan(Shifted(), 2)) == {"up": "column", "down": "row"}


def test_units_of_a_bottleneck_behind_other_layers_are_reached() -> None:
    """A pooled row is one of few, and the signs of both layers cancel."""

    class Squeezed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)
            self.reduce, self.excite = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            h = self.down(torch.nn.functional.gelu(self.up(x)))
            return h * torch.sigmoid(self.excite(torch.relu(self.reduce(h.mean(1, keepdim=True)))))

    assert styles(plan(Squeezed(), 2)) == {"up": "column", "down": "row", "reduce": "column", "excite": "row"}


def test_modules_that_use_a_parameter_twice_are_known() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.weight = nn.LayerNorm(HIDDEN), nn.Parameter(torch.rand(HIDDEN))
            self.up, self.down = nn.Linear(HIDDEN, 48), nn.Linear(48, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(self.norm(x * self.weight + 1 - self.weight)).relu())

    assert plan(Mixed(), 2).used_twice == {"body"}


def test_compiled_code_gets_no_shards_that_report_whole_sizes() -> None:
    def found(body: nn.Module, global_sizes: bool) -> BlockResult:
        return plan_block(Kind(Block(body), ["block"], [Call((X,), {})]), 2, global_sizes=global_sizes)

    bodies: list[Any] = [Separate(), Fused(), Gated(), _Shifted()]
    tracked = [body for body in bodies if any(x.global_sizes for x in found(body, True).plan.layers.values())]
    assert tracked
    for body in tracked:
        result = found(body, False)
        assert set(styles(result).values()) == {"column_gather"} and "compiled" in str(result.how)


class Output(dict[str, Any]):
    """What some libraries return instead of a tuple: unknown to torch."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


@dataclasses.dataclass
class State:
    hidden: Tensor


class CountsAll(nn.Module):
    """Its heads are cut by a number of its own, which fits a rank's features too, and is wrong there."""

    def __init__(self, returns: Any) -> None:
        super().__init__()
        self.heads, self.returns = 4, returns
        self.q, self.k, self.v, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Any) -> Any:
        x = x.hidden if isinstance(x, State) else x
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, scale=0.5)
        return self.returns(self.out(y.transpose(1, 2).flatten(2)))


@pytest.mark.parametrize("returns", [State, lambda y: Output(last_hidden_state=y), lambda y: (0, Output(parts=[y]))])
def test_what_a_block_returns_inside_of_an_object_is_compared(returns: Any) -> None:
    result = plan_block(Kind(CountsAll(returns), ["block"], [Call((X,), {})]), 2)
    assert result.problem is None
    assert "output 0" in result.errors
    assert set(result.how.values()) == {"with heads divided"}


def test_what_a_block_is_given_inside_of_an_object_needs_its_gradient() -> None:
    result = plan_block(Kind(CountsAll(State), ["block"], [Call((State(X.clone().requires_grad_()),), {})]), 2)
    assert result.problem is None and result.errors["gradient of input 0"] < 1e-12


@pytest.mark.parametrize("returns", [lambda y: None, lambda y: y.argmax(-1)])
def test_a_block_that_returns_nothing_to_compare_is_gathered(returns: Any) -> None:
    result = plan_block(Kind(CountsAll(returns), ["block"], [Call((X,), {})]), 2)
    assert result.problem is not None and "compare" in result.problem
    assert {layer.style.style for layer in result.plan.layers.values()} == {"column_gather"}


def test_an_object_that_a_block_was_given_is_not_what_it_returns() -> None:
    """A cache holds each rank's keys and values; nothing but the ranks' own layers reads them."""

    class Cached(Separate):
        def forward(self, x: Tensor, cache: Any) -> Any:  # type: ignore[override]
            cache.kept = self.k(x)
            return super().forward(x), cache

    class Cache:
        pass

    result = plan_block(Kind(Cached(), ["block"], [Call((X, Cache()), {})]), 2)
    assert result.problem is None and set(result.how.values()) == {"as it is"}
