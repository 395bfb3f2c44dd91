"""Parallel layers against the layer they were made from, in float64 on real ranks.

The loss of a split output is what all ranks' losses add up to; shards of gradients are put together before they are
compared (elements that several ranks own add up).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatp.plan.ranges import Ranges, shard_ranges
from lightning_megatp.plan.shard import ShardedTensorSpec
from lightning_megatp.tensor import entry
from lightning_megatp.tensor.collectives import sequence_sizes, take_ranges
from lightning_megatp.tensor.context import TensorContext
from lightning_megatp.tensor.layers import (
    ColumnParallelLinear,
    HiddenParallelEmbedding,
    ParallelLayer,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from lightning_megatp.tensor.parameters import shard_
from lightning_megatp.tensor.sequence import SequenceShard
from tests.distributed.tensor.splitting import parallelize
from tests.distributed.tensor.test_collective_counts import CollectiveCounter
from tests.ranks import RankError, run_ranks

IN, TOKENS = 6, 5


@dataclasses.dataclass
class Split:
    """A layer, its parallel form on this rank, and how its parameters are split."""

    whole: nn.Module
    layer: ParallelLayer
    specs: dict[str, ShardedTensorSpec]
    context: TensorContext


def _split(kind: type[ParallelLayer], whole: nn.Module, by_rank: tuple[Ranges, ...], **options: Any) -> Split:
    context = TensorContext(dist.group.WORLD)
    whole = whole.double()
    layer, dim = copy.deepcopy(whole), int(kind in (RowParallelLinear, HiddenParallelEmbedding))
    specs = {
        name: ShardedTensorSpec(name, tuple(parameter.shape), dim, by_rank)
        for name, parameter in layer.named_parameters()
        if parameter.dim() > dim
    }
    for name, spec in specs.items():
        shard_(layer.get_parameter(name), spec, context.rank)
    return Split(whole, kind.adopt(layer, context, by_rank, "layer", **options), specs, context)


def _check_parameter_gradients(split: Split, partial: frozenset[str] = frozenset()) -> None:
    """Args:
    partial: whole parameters whose gradients the ranks have to add up.
    """
    for name, parameter in split.layer.named_parameters():
        spec, expected = split.specs.get(name), split.whole.get_parameter(name).grad
        assert parameter.grad is not None and expected is not None
        total = parameter.grad.clone()
        if spec is not None:
            total = torch.zeros_like(expected)
            spec.spec(split.context.rank).put(total, parameter.grad)
        if spec is not None or name in partial:
            dist.all_reduce(total)
        torch.testing.assert_close(total, expected)


def _input(*shape: int) -> tuple[Tensor, Tensor]:
    """The same leaf twice."""
    x = torch.randn(*(shape or (2, TOKENS, IN)), dtype=torch.float64)
    return x.clone().requires_grad_(), x.clone().requires_grad_()


# ---------------------------------------------------------------- column

COLUMNS: dict[str, tuple[int, int | list[int], int]] = {
    "even": (8, 1, 1),
    "uneven": (7, 1, 1),
    "fused": (24, 3, 2),
    "fused uneven": (30, [18, 6, 6], 1),
    "uneven heads": (15, 1, 3),
    "repeated heads": (16, [8, 4, 4], 2),
    "one repeated head": (14, [8, 3, 3], 1),
    "fewer features than ranks": (3, 1, 1),
}
"""name -> (features, parts, unit)."""


def _column(rank: int, world_size: int, name: str, gather: bool, bias: bool) -> None:
    features, parts, unit = COLUMNS[name]
    if name == "one repeated head":
        features, parts, unit = 4 * world_size + 8, [4 * world_size, 4, 4], 4
    if name == "uneven heads":
        features = 3 * (world_size + 1)
    by_rank = shard_ranges(features, world_size, parts, unit)
    split = _split(ColumnParallelLinear, nn.Linear(IN, features, bias), by_rank, gather_output=gather)
    x, x_whole = _input()
    weight = torch.randn(features, dtype=torch.float64)
    expected = split.whole(x_whole)
    y = split.layer(x)
    if gather:
        torch.testing.assert_close(y, expected)
        ((y * weight) ** 2).sum().backward()
        ((expected * weight) ** 2).sum().backward()
    else:
        torch.testing.assert_close(y, take_ranges(expected, -1, by_rank[rank]))
        ((y * take_ranges(weight, 0, by_rank[rank])) ** 2).sum().backward()
        times = torch.zeros(features, dtype=torch.float64)  # repeated features count on each rank that has them
        for ranges in by_rank:
            for start, stop in ranges:
                times[start:stop] += 1
        ((expected * weight) ** 2 * times).sum().backward()
    torch.testing.assert_close(x.grad, x_whole.grad)
    _check_parameter_gradients(split)
    assert split.layer.out_features == features
    assert split.layer.out_range == by_rank[rank]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("gather", [False, True], ids=["split", "gathered"])
@pytest.mark.parametrize("name", COLUMNS)
def test_column(name: str, gather: bool, world_size: int) -> None:
    run_ranks(world_size, _column, name, gather, True)


def test_column_without_bias() -> None:
    run_ranks(2, _column, "fused", False, False)
    run_ranks(2, _column, "fused", True, False)


def _column_on_tokens(rank: int, world_size: int, gather: bool, dim: int, tokens: int) -> None:
    by_rank = shard_ranges(7, world_size)
    split = _split(ColumnParallelLinear, nn.Linear(IN, 7), by_rank, gather_output=gather)
    x, x_whole = _input(*((tokens, 2, IN) if dim == 0 else (2, tokens, IN)))
    y, expected = split.layer(SequenceShard.shard(x, dim, split.context)), split.whole(x_whole)
    assert type(y) is Tensor
    if gather:
        torch.testing.assert_close(y, expected)
    else:
        torch.testing.assert_close(y, take_ranges(expected, -1, by_rank[rank]))
    y.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    _check_parameter_gradients(split)
    torch.testing.assert_close(x.grad, x_whole.grad)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("tokens", [1, 5, 8])
def test_column_gathers_a_sequence_shard(tokens: int, world_size: int) -> None:
    for gather in (False, True):
        run_ranks(world_size, _column_on_tokens, gather, tokens % 2, tokens)


# ---------------------------------------------------------------- row

ROWS: dict[str, tuple[int, int | list[int], int]] = {
    "even": (8, 1, 1),
    "uneven": (7, 1, 1),
    "heads": (18, 1, 3),
    "fused": (16, 2, 1),
    "fewer features than ranks": (3, 1, 1),
}


def _row(rank: int, world_size: int, name: str, split_input: bool, sequence_dim: int | None, bias: bool) -> None:
    features, parts, unit = ROWS[name]
    by_rank = shard_ranges(features, world_size, parts, unit)
    options = {"split_input": split_input, "sequence_dim": sequence_dim}
    split = _split(RowParallelLinear, nn.Linear(features, IN, bias), by_rank, **options)
    x, x_whole = _input(2, TOKENS, features)
    own = x.detach().clone().requires_grad_() if split_input else take_ranges(x.detach(), -1, by_rank[rank])
    y, expected = split.layer(own.requires_grad_()), split.whole(x_whole)
    weight = torch.randn_like(expected)
    ((expected * weight) ** 2).sum().backward()
    if sequence_dim is None:
        assert type(y) is Tensor
        torch.testing.assert_close(y, expected)
        ((y * weight) ** 2).sum().backward()
    else:
        assert type(y) is SequenceShard
        assert y.shape == expected.shape
        pieces = weight.split(sequence_sizes(weight.shape[sequence_dim], world_size), sequence_dim)
        assert y.plain.shape == pieces[rank].shape
        ((y.plain * pieces[rank]) ** 2).sum().backward()
        torch.testing.assert_close(y.whole(), expected)
    wanted = x_whole.grad if split_input else take_ranges(x_whole.grad, -1, by_rank[rank])
    torch.testing.assert_close(own.grad, wanted)
    _check_parameter_gradients(split, frozenset(() if sequence_dim is None else ("bias",)))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("sequence_dim", [None, 0, 1])
@pytest.mark.parametrize("name", ROWS)
def test_row(name: str, sequence_dim: int | None, world_size: int) -> None:
    for split_input in (False, True):
        run_ranks(world_size, _row, name, split_input, sequence_dim, True)


def test_row_without_bias() -> None:
    run_ranks(2, _row, "uneven", True, None, False)
    run_ranks(2, _row, "uneven", False, 1, False)


def _row_splits_a_sequence_shard(rank: int, world_size: int) -> None:
    by_rank = shard_ranges(IN, world_size)
    split = _split(RowParallelLinear, nn.Linear(IN, 3), by_rank, split_input=True)
    x, x_whole = _input()
    y, expected = split.layer(SequenceShard.shard(x, 1, split.context)), split.whole(x_whole)
    torch.testing.assert_close(y, expected)
    y.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    torch.testing.assert_close(x.grad, x_whole.grad)
    _check_parameter_gradients(split)


def test_row_splits_the_features_of_a_sequence_shard() -> None:
    run_ranks(2, _row_splits_a_sequence_shard)


def _row_without_sequence(rank: int, world_size: int) -> list[type]:
    """Pooled values have no sequence dim to scatter."""
    split = _split(RowParallelLinear, nn.Linear(4, 3), shard_ranges(4, world_size), split_input=True, sequence_dim=1)
    x = torch.randn(5, 4, dtype=torch.float64)
    y = split.layer(x)
    torch.testing.assert_close(y, split.whole(x))
    return type(y)


def test_row_of_a_value_without_a_sequence() -> None:
    assert run_ranks(2, _row_without_sequence) == [Tensor] * 2


def _row_fed_whole(rank: int, world_size: int) -> None:
    split = _split(RowParallelLinear, nn.Linear(8, 3), shard_ranges(8, world_size))
    split.layer(torch.randn(2, 8, dtype=torch.float64))


def test_row_fed_with_a_whole_input() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(2, _row_fed_whole)
    for failure in error.value.failures:
        assert failure.type_name == "ValueError"
        assert "`layer` has the plan's style `row` and expects 4 of 8 input features" in failure.message
        assert "but got 8" in failure.message and "use the style `row_split`" in failure.message
    assert len(error.value.failures) == 2


# ---------------------------------------------------------------- embeddings


def _embedding(rank: int, world_size: int, vocab: int, hidden: int, padding: int | None, shape: list[int]) -> None:
    ids = torch.randint(0, vocab, shape)
    if padding is not None and ids.numel():
        ids.view(-1)[0] = padding % vocab
    for kind, size in ((VocabParallelEmbedding, vocab), (HiddenParallelEmbedding, hidden)):
        split = _split(kind, nn.Embedding(vocab, hidden, padding_idx=padding), shard_ranges(size, world_size))
        for given in (ids, ids.int()):
            y, expected = split.layer(given), split.whole(given)
            torch.testing.assert_close(y, expected)
        weight = torch.randn_like(expected)
        (y * weight).sum().backward()
        (expected * weight).sum().backward()
        _check_parameter_gradients(split)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("padding", [None, 0, 5, -1])
@pytest.mark.parametrize(("vocab", "hidden"), [(8, 8), (7, 6), (9, 5)])
def test_embedding(vocab: int, hidden: int, padding: int | None, world_size: int) -> None:
    run_ranks(world_size, _embedding, vocab, hidden, padding, [3, 5])


@pytest.mark.parametrize("shape", [[], [1], [0], [2, 0], [2, 3, 4]], ids=str)
def test_embedding_of_any_shape_of_ids(shape: list[int]) -> None:
    run_ranks(2, _embedding, 7, 5, 3, shape)


def _out_of_range(rank: int, world_size: int, kind: type[ParallelLayer], wrong: int) -> tuple[str, str]:
    split = _split(kind, nn.Embedding(8, 8), shard_ranges(8, world_size))
    found = []
    for layer in (split.whole, split.layer):
        try:
            layer(torch.tensor([0, wrong, 7]))
        except Exception as error:
            found.append(type(error).__name__)
    return tuple(found)


@pytest.mark.parametrize("kind", [VocabParallelEmbedding, HiddenParallelEmbedding])
def test_an_id_out_of_range_raises_on_every_rank_what_it_raises_on_one_device(kind: type[ParallelLayer]) -> None:
    for wrong in (8, 100, -1, -9):
        assert run_ranks(2, _out_of_range, kind, wrong) == [("IndexError", "IndexError")] * 2


def _scaled_by_frequency(rank: int, world_size: int) -> None:
    whole = nn.Embedding(5, 6, scale_grad_by_freq=True)
    split = _split(HiddenParallelEmbedding, whole, shard_ranges(6, world_size))
    ids = torch.tensor([1, 1, 1, 2, 4, 4])
    split.layer(ids).pow(2).sum().backward()
    split.whole(ids).pow(2).sum().backward()
    _check_parameter_gradients(split)


def test_gradients_scaled_by_frequency() -> None:
    run_ranks(2, _scaled_by_frequency)


# ---------------------------------------------------------------- parameters that stay whole

WHOLE: dict[str, tuple[type[ParallelLayer], Callable[[], nn.Module], int, dict[str, Any]]] = {
    "column": (ColumnParallelLinear, lambda: nn.Linear(IN, 7), 7, {"gather_output": True}),
    "row": (RowParallelLinear, lambda: nn.Linear(IN, 7), IN, {"split_input": True}),
    "vocab": (VocabParallelEmbedding, lambda: nn.Embedding(7, IN, padding_idx=2), 7, {}),
    "hidden": (HiddenParallelEmbedding, lambda: nn.Embedding(7, IN, padding_idx=2), IN, {}),
}


def _kept_whole(rank: int, world_size: int, name: str) -> None:
    kind, make, size, options = WHOLE[name]
    split = _split(kind, make(), shard_ranges(size, world_size), **options)
    for parameter_name, parameter in split.layer.named_parameters():
        parameter.data = split.whole.get_parameter(parameter_name).data.clone()
    split.layer.whole_parameters = frozenset(split.specs)
    split.specs = {}
    ids = torch.randint(0, 7, (3, 5)) if "Embedding" in kind.__name__ else None
    x, x_whole = _input()
    y, expected = (split.layer(x), split.whole(x_whole)) if ids is None else (split.layer(ids), split.whole(ids))
    torch.testing.assert_close(y, expected)
    y.pow(2).sum().backward()
    expected.pow(2).sum().backward()
    if ids is None:
        torch.testing.assert_close(x.grad, x_whole.grad)
    _check_parameter_gradients(split)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", WHOLE)
def test_a_layer_whose_parameters_stay_whole(name: str, world_size: int) -> None:
    run_ranks(world_size, _kept_whole, name)


# ---------------------------------------------------------------- one entry per input


class Siblings(nn.Module):
    """q, k, v and gate, up of one input each; what a model calls them is its own business."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(IN, 8), nn.Linear(IN, 8), nn.Linear(IN, 8)
        self.out = nn.Linear(8, IN)

    def forward(self, x: Tensor, between: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
        q = self.q(x)
        x = between(x)
        return self.out(q * self.k(x) + self.v(x))


SIBLINGS = {"q": "column", "k": "column", "v": "column", "out": "row"}
BETWEEN: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "nothing": (lambda x: x, 1),
    "another tensor": (lambda x: x + 1, 2),
    "a view": (lambda x: x.view_as(x), 2),
    "no gradients": (lambda x: x.detach(), 1),
}


def _siblings(rank: int, world_size: int, between: str) -> int:
    torch.manual_seed(1)
    module = Siblings().double()
    whole = copy.deepcopy(module)
    parallel = parallelize(module, SIBLINGS)
    change, _ = BETWEEN[between]
    x, x_whole = _input()
    y, expected = module(2 * x, change), whole(2 * x_whole, change)
    torch.testing.assert_close(y, expected)
    with CollectiveCounter() as counter:
        y.pow(2).sum().backward()
    parallel.context.end_step()
    expected.pow(2).sum().backward()
    torch.testing.assert_close(x.grad, x_whole.grad)
    assert set(counter.calls) <= {"all-reduce"}
    return counter.calls["all-reduce"]


@pytest.mark.parametrize("between", BETWEEN)
def test_siblings_share_one_entry_as_long_as_their_input_is_the_same(between: str) -> None:
    assert run_ranks(2, _siblings, between) == [BETWEEN[between][1]] * 2


def _sibling_shards(rank: int, world_size: int, kept: int) -> list[dict[str, int]]:
    torch.manual_seed(1)
    module = Siblings().double()
    parallel = parallelize(module, SIBLINGS)
    x = torch.randn(2, 8, IN, dtype=torch.float64).requires_grad_()
    shard = SequenceShard.shard(x, 1, parallel.context)
    with CollectiveCounter() as forward, mock.patch.object(entry, "KEPT_BYTES", kept):
        y = module(shard)
    with CollectiveCounter() as of_input:
        torch.autograd.grad(y.pow(2).sum(), x, retain_graph=True)
    with CollectiveCounter() as backward:
        y.pow(2).sum().backward()
    return [dict(counter.calls) for counter in (forward, of_input, backward)]


def test_siblings_share_one_gather_of_a_sequence_shard() -> None:
    forward, of_input = {"all-gather": 1, "all-reduce": 1}, {"reduce-scatter": 1, "all-gather": 1}
    backward = {"reduce-scatter": 1, "all-gather": 2}
    found = run_ranks(2, _sibling_shards, 0)
    assert found == [[forward, of_input, backward]] * 2, "weights' gradients need the sequence again"
    found = run_ranks(2, _sibling_shards, entry.KEPT_BYTES)
    assert found == [[forward, of_input, of_input]] * 2, "a small one was kept"


def _changed_in_place(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    module = Siblings().double()
    whole = copy.deepcopy(module)
    parallel = parallelize(module, SIBLINGS)
    value = torch.randn(2, TOKENS, IN, dtype=torch.float64)
    with torch.no_grad():
        expected = whole(value.clone(), lambda x: x.add_(1.0))
        for x in (value.clone(), SequenceShard.shard(value, 1, parallel.context)):
            torch.testing.assert_close(module(x, lambda x: x.add_(1.0)), expected)


def test_siblings_with_a_change_in_place_between_them() -> None:
    run_ranks(2, _changed_in_place)


def _entry_without_gradients(rank: int, world_size: int) -> None:
    """What entered where nothing has a gradient is not what enters later, with one."""
    torch.manual_seed(1)
    module = Siblings().double()
    whole = copy.deepcopy(module)
    parallelize(module, SIBLINGS)
    x, x_whole = _input()
    with torch.no_grad():
        module(x)
    with torch.inference_mode():
        module(x)
    module(x).pow(2).sum().backward()
    whole(x_whole).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, x_whole.grad)
    x, x_whole = (torch.ones(1, 2, IN, dtype=torch.float64) for _ in range(2))
    for model, given in ((module, x), (whole, x_whole)):
        model(given)
        model(given.requires_grad_()).pow(2).sum().backward()
    torch.testing.assert_close(x.grad, x_whole.grad)


def test_an_entry_without_gradients_is_not_taken_for_one_with_them() -> None:
    run_ranks(2, _entry_without_gradients)


# ---------------------------------------------------------------- what stays as it was


class Tied(nn.Module):
    """An embedding and a head of one weight, and an MLP between them."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, IN, padding_idx=1)
        self.up, self.down = nn.Linear(IN, 9), nn.Linear(9, IN)
        self.head = nn.Linear(IN, vocab, bias=False)
        self.head.weight = self.tok.weight
        self.register_buffer("scale", torch.tensor(0.5, dtype=torch.float64))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok(ids)
        return self.head(x + self.scale * self.down(torch.tanh(self.up(x))))


TIED = {"tok": "vocab", "head": "column_gather", "up": "column", "down": "row"}


def _tied(rank: int, world_size: int, vocab: int) -> None:
    torch.manual_seed(rank)  # every rank gets rank 0's values
    module = Tied(vocab).double()
    torch.manual_seed(0)
    whole = Tied(vocab).double()
    ids = torch.randint(0, vocab, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    parallel = parallelize(module, TIED)
    assert module.head.weight is module.tok.weight
    logits, expected = module(ids), whole(ids)
    torch.testing.assert_close(logits, expected)
    loss, expected_loss = (nn.functional.cross_entropy(x.flatten(0, 1), ids.flatten()) for x in (logits, expected))
    parallel.partial.trace([loss])
    loss.backward()
    expected_loss.backward()
    parallel.partial.sum()
    for name, parameter in module.named_parameters():
        spec, wanted = parallel.spec(parameter), whole.get_parameter(name).grad
        torch.testing.assert_close(parameter.grad, wanted if spec is None else spec.spec(rank).take(wanted))
    assert parallel.spec(module.tok.weight) is not None
    assert module.tok.weight.shape[0] < vocab


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("vocab", [8, 7, 9])
def test_a_tied_embedding_and_head(vocab: int, world_size: int) -> None:
    run_ranks(world_size, _tied, vocab)


def _identity(rank: int, world_size: int) -> None:
    module = Tied(8).double()
    layers, parameters = dict(module.named_modules()), dict(module.named_parameters(remove_duplicate=False))
    calls: list[str] = []
    for name in ("tok", "up", "down", "head"):
        layers[name].register_forward_hook(lambda m, args, y, name=name: calls.append(name))
        layers[name].register_forward_pre_hook(lambda m, args, name=name: calls.append(f"before {name}"))
    layers["up"].note = "mine"
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    grads = []
    module.up.weight.register_post_accumulate_grad_hook(lambda p: grads.append(p.grad.shape))

    parallelize(module, TIED)
    assert all(layer is layers[name] for name, layer in module.named_modules())
    assert all(p is parameters[name] for name, p in module.named_parameters(remove_duplicate=False))
    assert list(module.state_dict()) == list(Tied(8).state_dict())
    assert isinstance(module.up, nn.Linear) and isinstance(module.up, ColumnParallelLinear)
    assert isinstance(module.down, nn.Linear) and isinstance(module.down, RowParallelLinear)
    assert isinstance(module.tok, nn.Embedding) and isinstance(module.head, nn.Linear)
    assert (module.up.in_features, module.up.out_features) == (IN, 9)
    assert (module.down.in_features, module.down.out_features) == (9, IN)
    assert module.tok.num_embeddings == 8 and module.tok.weight.shape[0] < 8
    assert module.up.note == "mine" and module.up.label == "up"

    module(torch.tensor([[1, 2]])).sum().backward()
    order = ["tok", "up", "down", "head"]
    assert calls == [call for name in order for call in (f"before {name}", name)]
    assert grads == [module.up.weight.shape]
    before = module.up.weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(module.up.weight.detach(), before - 0.1 * module.up.weight.grad)
    module.up(input=torch.zeros(2, IN, dtype=torch.float64))  # the argument's name stays
    assert not module.eval().up.training


def test_objects_parameters_hooks_and_names_stay() -> None:
    run_ranks(2, _identity)


def _values_of_rank_0(rank: int, world_size: int) -> tuple[float, float, str]:
    torch.manual_seed(rank)
    module = Tied(8).double()
    module.scale.fill_(float(rank))
    module.up.weight.data = module.up.weight.data.t().contiguous().t()
    parallel = parallelize(module, TIED)
    spec = parallel.spec_of("up.weight")
    assert spec is not None
    torch.manual_seed(0)
    torch.testing.assert_close(module.up.weight.detach(), spec.spec(rank).take(Tied(8).double().up.weight.detach()))
    assert module.up.weight.is_contiguous()
    assert module.down.bias.untyped_storage().nbytes() == 8 * IN
    return float(module.scale), float(module.down.bias.sum()), repr(module.up)


def test_every_rank_starts_from_the_values_of_rank_0() -> None:
    first, second = run_ranks(2, _values_of_rank_0)
    assert first[:2] == second[:2]
    assert first[0] == 0.0
    assert first[2].startswith("ColumnParallelLinear(in_features=6, out_features=9")


def _frozen(rank: int, world_size: int) -> None:
    module = Tied(8).double()
    module.up.requires_grad_(False)
    module.head.requires_grad_(False)
    parallel = parallelize(module, TIED)
    loss = module(torch.tensor([[1, 2]])).pow(2).sum()
    parallel.partial.trace([loss])
    loss.backward()
    parallel.partial.sum()
    assert module.up.weight.grad is None and not module.up.weight.requires_grad
    assert module.tok.weight.grad is None
    assert module.down.weight.grad is not None


def test_frozen_parameters_stay_frozen() -> None:
    run_ranks(2, _frozen)
