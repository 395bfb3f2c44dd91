"""Each collective: forward, gradient and gradient of the gradient are those of the unsharded computation.

A case says what every rank's output is as a function of every rank's input. A whole value counts once, a sharded one on
each rank; the loss is a cubic, so that gradients depend on the values.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_megatp import MeshShape, ParallelMesh
from lightning_megatp.plan.ranges import length, shard_ranges, split_evenly
from lightning_megatp.plan.shard import ShardedTensorSpec
from lightning_megatp.tensor import collectives as c
from lightning_megatp.tensor import parameters
from lightning_megatp.tensor.loading import load_whole_values
from tests.ranks import run_ranks

Group = dist.ProcessGroup


@dataclasses.dataclass
class Case:
    """One function on every rank, and what it should be."""

    run: Callable[[Tensor, Group], Tensor]
    inputs: list[Tensor]
    """By rank; one tensor if it is whole."""
    reference: Callable[[list[Tensor]], list[Tensor]]
    """The inputs of every rank -> the outputs of every rank, or the one whole output."""
    twice: bool = True
    """Whether its gradient is differentiable again."""


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _sizes(ways: int, even: bool) -> list[int]:
    return [2] * ways if even else [length((piece,)) for piece in split_evenly(2 * ways - 1, ways)]


def _shape(dim: int, size: int, ndim: int = 3) -> list[int]:
    shape = [3, 2, 4][:ndim]
    shape[dim] = size
    return shape


def _copy(ways: int, even: bool, dim: int) -> Case:
    above = "tensor" if even else "sequence"
    return Case(lambda x, g: c.copy_to_region(x, g, above), [_normal(3, 2)], lambda xs: xs * ways)


def _use(ways: int, even: bool, dim: int) -> Case:
    return Case(c.use_on_tokens, [_normal(3, 2)], lambda xs: xs * ways)


def _reduce(ways: int, even: bool, dim: int) -> Case:
    inputs = [_normal(*_shape(dim, 3)) for _ in range(ways)]
    return Case(c.reduce_from_region, inputs, lambda xs: [torch.stack(xs).sum(0)])


def _reduce_spending(ways: int, even: bool, dim: int) -> Case:
    """The sum takes the place of a tensor of the caller's, never that of a view."""

    def run(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        own = x.mul(1)
        y = c.reduce_from_region(own if even else own.view_as(own), group, spend=True)
        assert (y.data_ptr() == own.data_ptr()) == even and (even or torch.equal(own, x))
        return y

    inputs = [_normal(*_shape(dim, 3)) for _ in range(ways)]
    return Case(run, inputs, lambda xs: [torch.stack(xs).sum(0)])


def _alike(ways: int, even: bool, dim: int) -> Case:
    """What every rank computes of what has entered is one value, with one gradient."""

    def run(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return c.leave_alike(c.copy_to_region(x, group) ** 2, group)

    return Case(run, [_normal(3, 2)], lambda xs: [xs[0] ** 2])


def _added_once(ways: int, even: bool, dim: int) -> Case:
    """A sum of parts to each of which its rank has added what entered."""

    def run(x: Tensor, group: dist.ProcessGroup) -> Tensor:
        entered = c.copy_to_region(x, group)
        part = entered**2 / ways + entered
        return c.reduce_from_region(c.added_once(part, entered, group), group)

    return Case(run, [_normal(3, 2)], lambda xs: [xs[0] ** 2 + xs[0]])


def _gather_features(ways: int, even: bool, dim: int) -> Case:
    sizes = _sizes(ways, even)
    inputs = [_normal(*_shape(-1, size)) for size in sizes]
    return Case(lambda x, g: c.gather_from_region(x, g, sizes), inputs, lambda xs: [torch.cat(xs, -1)])


def _scatter_features(ways: int, even: bool, dim: int) -> Case:
    size = 4 * ways if even else 4 * ways - 2
    by_rank = shard_ranges(size, ways, 1 if dim == 0 else 2)  # of one piece, or of two with others' between them
    index = [[i for start, stop in ranges for i in range(start, stop)] for ranges in by_rank]
    return Case(
        lambda x, g: c.scatter_to_region(x, g, by_rank),
        [_normal(*_shape(-1, size))],
        lambda xs: [xs[0][..., i] for i in index],
    )


def _scatter_tokens(ways: int, even: bool, dim: int) -> Case:
    sizes = _sizes(ways, even)
    return Case(
        lambda x, g: c.scatter_sequence(x, g, dim),
        [_normal(*_shape(dim, sum(sizes)))],
        lambda xs: list(xs[0].split(sizes, dim)),
    )


def _gather_tokens_whole(ways: int, even: bool, dim: int) -> Case:
    sizes = _sizes(ways, even)
    inputs = [_normal(*_shape(dim, size)) for size in sizes]
    run = lambda x, g: c.gather_sequence(x, g, dim, sum(sizes), "whole")  # noqa: E731
    return Case(run, inputs, lambda xs: [torch.cat(xs, dim)])


def _gather_tokens_into_a_region(ways: int, even: bool, dim: int) -> Case:
    sizes = _sizes(ways, even)
    inputs = [_normal(*_shape(dim, size)) for size in sizes]
    run = lambda x, g: c.gather_sequence(x, g, dim, sum(sizes), "tensor")  # noqa: E731
    return Case(run, inputs, lambda xs: [torch.cat(xs, dim)] * ways)


def _reduce_scatter_tokens(ways: int, even: bool, dim: int) -> Case:
    sizes = _sizes(ways, even)
    inputs = [_normal(*_shape(dim, sum(sizes))) for _ in range(ways)]
    run = lambda x, g: c.reduce_scatter_sequence(x, g, dim)  # noqa: E731
    return Case(run, inputs, lambda xs: list(torch.stack(xs).sum(0).split(sizes, dim)))


def _gather_one_token(ways: int, even: bool, dim: int) -> Case:
    """Fewer tokens than ranks: some ranks have none."""
    inputs = [_normal(*_shape(dim, int(rank == 0))) for rank in range(ways)]
    above = "tensor" if even else "whole"
    run = lambda x, g: c.gather_sequence(x, g, dim, 1, above)  # noqa: E731
    return Case(run, inputs, lambda xs: [torch.cat(xs, dim)] * (ways if even else 1))


def _scatter_one_token(ways: int, even: bool, dim: int) -> Case:
    sizes = [1] + [0] * (ways - 1)
    x = _normal(*_shape(dim, 1))
    if even:
        return Case(lambda x, g: c.scatter_sequence(x, g, dim), [x], lambda xs: list(xs[0].split(sizes, dim)))
    inputs = [_normal(*_shape(dim, 1)) for _ in range(ways)]
    run = lambda x, g: c.reduce_scatter_sequence(x, g, dim)  # noqa: E731
    return Case(run, inputs, lambda xs: list(torch.stack(xs).sum(0).split(sizes, dim)))


def _spec(ways: int, even: bool, dim: int, unit: int = 1) -> ShardedTensorSpec:
    size = 4 * ways if even else 4 * ways - 2
    shape = _shape(dim, size, 2 if dim < 2 else 3)
    return ShardedTensorSpec("w", tuple(shape), dim % len(shape), shard_ranges(size, ways, 2, unit))


def _gather_parameter(ways: int, even: bool, dim: int) -> Case:
    spec = _spec(ways, even, dim)
    inputs = [spec.spec(rank).take(_normal(*spec.shape)) for rank in range(ways)]
    order = c.canonical_order(spec.by_rank)

    def reference(xs: list[Tensor]) -> list[Tensor]:
        joined = torch.cat(xs, spec.dim)
        return [joined if order is None else joined.index_select(spec.dim, torch.tensor(order))]

    return Case(lambda x, g: parameters.gather_parameter(x, spec, g), inputs, reference, twice=False)


def _slice_whole(ways: int, even: bool, dim: int) -> Case:
    spec = _spec(ways, even, dim)
    return Case(
        lambda x, g: parameters.slice_whole(x, g, spec.dim, spec.by_rank),
        [_normal(*spec.shape)],
        lambda xs: [_take(xs[0], spec, rank) for rank in range(ways)],
        twice=False,
    )


def _slice_whole_repeated(ways: int, even: bool, dim: int) -> Case:
    """Elements that several ranks own: their gradients add up."""
    size = 2 if even else 2 + 2 * ways
    parts = [2] if even else [2, 2 * ways]
    by_rank = shard_ranges(size, ways, parts, unit=2)
    shape = _shape(dim, size)
    spec = ShardedTensorSpec("w", tuple(shape), dim % 3, by_rank)
    return Case(
        lambda x, g: parameters.slice_whole(x, g, spec.dim, spec.by_rank),
        [_normal(*shape)],
        lambda xs: [_take(xs[0], spec, rank) for rank in range(ways)],
        twice=False,
    )


def _take(full: Tensor, spec: ShardedTensorSpec, rank: int) -> Tensor:
    index = [i for start, stop in spec.by_rank[rank] for i in range(start, stop)]
    return full.index_select(spec.dim, torch.tensor(index, dtype=torch.long))


CASES: dict[str, Callable[[int, bool, int], Case]] = {
    "copy_to_region": _copy,
    "use_on_tokens": _use,
    "leave_alike": _alike,
    "added_once": _added_once,
    "reduce_from_region": _reduce,
    "reduce_from_region spending": _reduce_spending,
    "gather_from_region": _gather_features,
    "scatter_to_region": _scatter_features,
    "scatter_sequence": _scatter_tokens,
    "gather_sequence to whole": _gather_tokens_whole,
    "gather_sequence to tensor": _gather_tokens_into_a_region,
    "reduce_scatter_sequence": _reduce_scatter_tokens,
    "gather one token": _gather_one_token,
    "scatter one token": _scatter_one_token,
    "gather_parameter": _gather_parameter,
    "slice_whole": _slice_whole,
    "slice_whole repeated": _slice_whole_repeated,
}


def _loss(outputs: list[Tensor], weights: list[Tensor]) -> Tensor:
    return torch.stack([(weight * y**3).sum() for y, weight in zip(outputs, weights, strict=True)]).sum()


def _check_case(rank: int, world_size: int, name: str, long_row: int) -> int:
    with mock.patch.object(c, "LONG_ROW", long_row):
        return _check_named(rank, world_size, name)


def _check_named(rank: int, world_size: int, name: str) -> int:
    count = 0
    for even, dim in itertools.product([True, False], [0, 1, -1]):
        torch.manual_seed(3 + dim)
        case = CASES[name](world_size, even, dim)
        leaves = [x.requires_grad_() for x in case.inputs]
        expected = case.reference(leaves)
        weights = [torch.randn_like(y) for y in expected]
        wanted = torch.autograd.grad(_loss(expected, weights), leaves, create_graph=True)

        mine = leaves[rank] if len(leaves) > 1 else leaves[0]
        x = mine.detach().clone().requires_grad_()
        before, version = x.detach().clone(), x._version
        y, weight = case.run(x, dist.group.WORLD), weights[rank if len(expected) > 1 else 0]
        torch.testing.assert_close(y, expected[rank if len(expected) > 1 else 0])
        (grad,) = torch.autograd.grad((weight * y**3).sum(), x, create_graph=True)
        own = rank if len(leaves) > 1 else 0
        torch.testing.assert_close(grad, wanted[own])

        if case.twice:
            vectors = [torch.randn_like(g) for g in wanted]
            squares = torch.stack([(v * g**2).sum() for v, g in zip(vectors, wanted, strict=True)]).sum()
            wanted_twice = torch.autograd.grad(squares, leaves)
            (twice,) = torch.autograd.grad((vectors[own] * grad**2).sum(), x)
            torch.testing.assert_close(twice, wanted_twice[own])

        upstream = torch.randn_like(y)
        given, given_version = upstream.clone(), upstream._version
        torch.autograd.grad(case.run(x, dist.group.WORLD), x, upstream)
        assert torch.equal(upstream, given) and upstream._version == given_version, "the incoming gradient is changed"
        assert torch.equal(x, before) and x._version == version, "the input is changed"
        count += 1
    return count


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_unsharded_computation(name: str, world_size: int) -> None:
    assert run_ranks(world_size, _check_case, name, c.LONG_ROW) == [6] * world_size


@pytest.mark.parametrize("name", ["gather_sequence to whole", "gather_sequence to tensor", "reduce_scatter_sequence"])
def test_rows_that_are_sent_one_by_one(name: str) -> None:
    assert run_ranks(2, _check_case, name, 0) == [6] * 2


def _gather_repeated(rank: int, world_size: int) -> None:
    """Where several ranks own an element, the sum of their gradients is its gradient."""
    for dim, one_piece in itertools.product([0, 1], [True, False]):
        size, parts = (2, [2]) if one_piece else (2 + 2 * world_size, [2, 2 * world_size])
        spec = ShardedTensorSpec("w", tuple(_shape(dim, size, 2)), dim, shard_ranges(size, world_size, parts, unit=2))
        torch.manual_seed(dim)
        full, upstream = _normal(*spec.shape), _normal(*spec.shape)
        shard = spec.spec(rank).take(full).requires_grad_()
        gathered = parameters.gather_parameter(shard, spec, dist.group.WORLD)
        assert torch.equal(gathered, full)
        given = upstream.clone()
        (grad,) = torch.autograd.grad(gathered, shard, given)
        assert torch.equal(given, upstream), "the incoming gradient is changed"
        total = torch.zeros_like(full)
        spec.spec(rank).put(total, grad)
        dist.all_reduce(total)
        torch.testing.assert_close(total, upstream)


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_repeated_parameter_gathered_outside_its_layer(world_size: int) -> None:
    run_ranks(world_size, _gather_repeated)


def _one_rank_group(rank: int, world_size: int) -> None:
    """A tensor axis of one rank: values pass, and nothing is sent."""
    group = ParallelMesh(MeshShape(dp=world_size)).group("tp")
    x = _normal(2, 3)
    for name in ("copy_to_region", "reduce_from_region"):
        assert getattr(c, name)(x, group) is x
    assert c.gather_from_region(x, group, [3]) is x
    assert c.scatter_to_region(x, group, [((0, 3),)]) is x
    for dim in (0, 1):
        assert torch.equal(c.scatter_sequence(x, group, dim), x)
        assert torch.equal(c.gather_sequence(x, group, dim, x.shape[dim], "whole"), x)
        assert torch.equal(c.reduce_scatter_sequence(x, group, dim), x)


def test_a_group_of_one_rank() -> None:
    run_ranks(2, _one_rank_group)


def _plain(rank: int, world_size: int) -> None:
    """The collectives below autograd: dtypes, strides, pieces of every size, and rows sent one by one."""
    for layout, long_row in (([3, 1, 0, 2][:world_size], c.LONG_ROW), ([2] * world_size, 0)):
        with mock.patch.object(c, "LONG_ROW", long_row):
            _plain_pieces(rank, world_size, layout)


def _plain_pieces(rank: int, world_size: int, layout: list[int]) -> None:
    group = dist.group.WORLD
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
        torch.manual_seed(0)
        for dim in (0, 1, -1):
            full = torch.randint(0, 50, _shape(dim, sum(layout))).to(dtype)
            for x in (full, full.transpose(0, -1).contiguous().transpose(0, -1)):
                piece = x.split(layout, dim)[rank]
                before = piece.clone()
                gathered = c.all_gather(piece, group, dim, layout)
                assert torch.equal(gathered, full) and gathered.dtype == dtype
                assert torch.equal(piece, before)
                kept = c.reduce_scatter(x, group, dim, layout)
                assert torch.equal(kept, world_size * full.split(layout, dim)[rank]) and kept.dtype == dtype
                assert torch.equal(x, full)
                total = c.all_reduce(x, group)
                assert torch.equal(total, world_size * full) and total.is_contiguous()
                assert torch.equal(x, full)


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_plain_collectives_take_any_dtype_stride_and_size(world_size: int) -> None:
    run_ranks(world_size, _plain)


def _single_features(rank: int, world_size: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    for shape in ((8, 1), (3, 4, 1), (3, 1, 4)):
        dim = shape.index(1)
        whole = c.all_gather(torch.full(shape, float(rank)), group, dim, [1] * world_size)
        assert whole.is_contiguous(), "or `view` fails, and `randn_like` draws other numbers"
        assert torch.equal(whole.select(dim, 1), torch.ones_like(whole.select(dim, 1)))


def test_what_is_gathered_lies_as_on_one_device() -> None:
    run_ranks(2, _single_features)


def _shards(rank: int, world_size: int) -> None:
    for dim, even, unit in itertools.product([0, 1], [True, False], [1, 2]):
        spec = _spec(world_size, True, dim, unit) if unit == 2 else _spec(world_size, even, dim)
        torch.manual_seed(0)
        full = _normal(*spec.shape)
        parameter = nn.Parameter(full.clone())
        alias = [parameter]
        parameters.shard_(parameter, spec, rank)
        assert alias[0] is parameter and parameter.shape == spec.spec(rank).local_shape
        assert torch.equal(parameter, spec.spec(rank).take(full))
        storage = parameter.untyped_storage().nbytes()
        assert storage == parameter.numel() * parameter.element_size(), "the rest of the whole tensor is freed"
        gathered = parameters.gather_shards(parameter, spec, dist.group.WORLD)
        assert torch.equal(gathered, full) and not gathered.requires_grad
        assert torch.equal(c.gather_ranges(parameter.detach(), dist.group.WORLD, dim, spec.by_rank), full)

        module = nn.ParameterDict({"w": parameter})
        load_whole_values(module, {parameter: spec.spec(rank)}.get)
        module.load_state_dict({"w": 2 * full})
        assert torch.equal(parameter, spec.spec(rank).take(2 * full)), "of whole values, this rank's"
        module.load_state_dict({"w": 3 * spec.spec(rank).take(full)})
        assert torch.equal(parameter, 3 * spec.spec(rank).take(full)), "a shard is taken as it is"
        words = f"size mismatch for w: (5, 9) was given, the whole model has {tuple(full.shape)}."
        with pytest.raises(RuntimeError, match=re.escape(words)) as error:
            module.load_state_dict({"w": torch.zeros(5, 9)})
        assert str(error.value).count("w:") == 1 and "Missing" not in str(error.value)
        assert torch.equal(parameter, 3 * spec.spec(rank).take(full)), "and nothing is loaded"


@pytest.mark.parametrize("world_size", [2, 4])
def test_parameters_are_cut_to_shards_and_gathered(world_size: int) -> None:
    run_ranks(world_size, _shards)


def _in_place_after_copy(rank: int, world_size: int) -> str:
    x = torch.ones(3, requires_grad=True)
    y = c.copy_to_region(2 * x, dist.group.WORLD)
    try:
        y.add_(1.0)
    except RuntimeError as error:
        return str(error)
    y.sum().backward()
    return f"gradient {x.grad.tolist()}"


def test_an_in_place_change_of_a_copied_value_is_right_or_raises() -> None:
    for answer in run_ranks(2, _in_place_after_copy):
        assert "in" in answer and ("place" in answer or answer == "gradient [4.0, 4.0, 4.0]")


def _from_peers(rank: int, world_size: int) -> None:
    """The values of every rank arrive: inputs that differ from rank to rank."""
    x = torch.full((2, 3), float(rank))
    expected = torch.arange(float(world_size)).repeat_interleave(3).expand(2, -1)
    assert torch.equal(c.gather_from_region(x, dist.group.WORLD, [3] * world_size), expected)
    assert torch.equal(c.all_reduce(x, dist.group.WORLD), torch.full((2, 3), sum(map(float, range(world_size)))))


def test_values_of_every_rank_arrive() -> None:
    run_ranks(4, _from_peers)


# ---------------------------------------------------------------- without ranks


def test_sequence_sizes() -> None:
    assert c.sequence_sizes(8, 4) == [2, 2, 2, 2]
    assert c.sequence_sizes(5, 4) == [2, 1, 1, 1]
    assert c.sequence_sizes(1, 2) == [1, 0]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_take_ranges(dim: int) -> None:
    x = torch.arange(2 * 6 * 6).view(6, 2, 6).movedim(1, 2) if dim == 1 else torch.arange(2 * 36).view(6, 2, 6)
    for ranges, index in [((), []), (((1, 3),), [1, 2]), (((4, 6), (0, 1)), [4, 5, 0]), (((0, 6),), list(range(6)))]:
        taken = c.take_ranges(x, dim, ranges)
        assert torch.equal(taken, x.index_select(dim, torch.tensor(index, dtype=torch.long)))
        assert taken.is_contiguous()


def test_canonical_order() -> None:
    assert c.canonical_order([((0, 2),), ((2, 4),)]) is None
    assert c.canonical_order(shard_ranges(4, 2, 2)) == [0, 2, 1, 3]
    repeated = shard_ranges(4, 4, 1, unit=2)
    order = c.canonical_order(repeated)
    features = [i for ranges in repeated for start, stop in ranges for i in range(start, stop)]
    assert order is not None and [features[position] for position in order] == [0, 1, 2, 3]


def test_no_function_is_left_out() -> None:
    """A new collective needs a case here."""
    public = {
        name
        for module in (c, parameters)
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")
    }
    tested = {name.split()[0] for name in CASES} | {
        "all_reduce", "all_gather", "reduce_scatter", "take_ranges", "gather_ranges", "canonical_order",
        "sequence_sizes", "shard_", "replace_data", "gather_shards", "whole_values", "take_own", "from_host",
        "Pending", "begin_all_reduce", "begin_all_gather", "begin_reduce_scatter",  # by way of those above
    }  # fmt: skip
    assert public <= tested
