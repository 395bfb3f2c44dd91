"""ShardSpec: taking shards out of a full tensor and putting them back."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatp import ShardSpec
from lightning_megatp.plan.ranges import length, owners, shard_ranges
from lightning_megatp.plan.shard import ShardedTensorSpec

unhurried = settings(deadline=None, max_examples=60)  # no time limit: the machine may be busy
QKV = ShardedTensorSpec("attn.qkv.weight", (12, 3), 0, shard_ranges(12, 2, 3))
GROUPED = ShardedTensorSpec("attn.kv.weight", (3, 8), 1, shard_ranges(8, 4, 2, unit=2))


@st.composite
def sharded(draw: st.DrawFn) -> ShardedTensorSpec:
    """One parameter of one to three dims, split along one of them."""
    ways, unit = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 3))
    counts = [n for n in range(1, 10) if n >= ways or ways % n == 0 or unit == 1]
    parts = [n * unit for n in draw(st.lists(st.sampled_from(counts), min_size=1, max_size=3))]
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] = sum(parts)
    return ShardedTensorSpec("w", tuple(shape), dim, shard_ranges(shape[dim], ways, parts, unit))


def _full(spec: ShardedTensorSpec) -> torch.Tensor:
    return torch.arange(torch.Size(spec.shape).numel()).view(spec.shape).float()


@unhurried
@given(sharded())
def test_shards_put_back_give_the_full_tensor(sharded: ShardedTensorSpec) -> None:
    full = _full(sharded)
    built = torch.full_like(full, -1)
    for rank in range(len(sharded.by_rank)):
        spec = sharded.spec(rank)
        local = spec.take(full)
        assert local.shape == spec.local_shape
        assert local.is_contiguous()
        spec.put(built, local)
    assert torch.equal(built, full)


@unhurried
@given(sharded())
def test_a_shard_put_into_a_tensor_is_taken_out_again(sharded: ShardedTensorSpec) -> None:
    for rank in range(len(sharded.by_rank)):
        spec = sharded.spec(rank)
        local = -1 - torch.arange(torch.Size(spec.local_shape).numel()).view(spec.local_shape).float()
        full = _full(sharded)
        spec.put(full, local)
        assert torch.equal(spec.take(full), local)
        assert int((full >= 0).sum()) == spec.numel - local.numel(), "nothing else is written"


@unhurried
@given(sharded())
def test_pieces_tile_the_shard_and_count_its_owners(sharded: ShardedTensorSpec) -> None:
    for rank, ranges in enumerate(sharded.by_rank):
        features = [i for start, stop in ranges for i in range(start, stop)]
        pieces = sharded.pieces(rank)
        assert [i for start, stop, _ in pieces for i in range(start, stop)] == list(range(length(ranges)))
        for start, stop, count in pieces:
            assert {len(owners(sharded.by_rank, features[at])) for at in range(start, stop)} == {count}


@unhurried
@given(sharded())
def test_shared_means_that_some_element_has_several_owners(sharded: ShardedTensorSpec) -> None:
    counts = [count for rank in range(len(sharded.by_rank)) for *_, count in sharded.pieces(rank)]
    assert sharded.shared == (max(counts) > 1)
    weight = sum(
        (stop - start) / count for r in range(len(sharded.by_rank)) for start, stop, count in sharded.pieces(r)
    )
    assert weight == pytest.approx(sharded.shape[sharded.dim]), "each element counts once over the ranks"


def test_fused_parts() -> None:
    spec = QKV.spec(1)
    assert spec == ShardSpec("attn.qkv.weight", (12, 3), (((2, 4), (6, 8), (10, 12)), ((0, 3),)))
    assert spec.local_shape == (6, 3)
    assert spec.numel == 36
    assert spec.take(_full(QKV))[:, 0].tolist() == [6, 9, 18, 21, 30, 33]
    assert QKV.pieces(1) == [(0, 2, 1), (2, 4, 1), (4, 6, 1)]
    assert not QKV.shared


def test_repeated_units() -> None:
    assert GROUPED.shared
    assert GROUPED.by_rank == (((0, 2), (4, 6)), ((0, 2), (4, 6)), ((2, 4), (6, 8)), ((2, 4), (6, 8)))
    assert GROUPED.pieces(0) == [(0, 2, 2), (2, 4, 2)]


def test_partly_shared_elements_are_pieces_of_their_own() -> None:
    sharded = ShardedTensorSpec("w", (6,), 0, (((0, 4),), ((2, 6),)))
    assert sharded.pieces(0) == [(0, 2, 1), (2, 4, 2)]
    assert sharded.pieces(1) == [(0, 2, 2), (2, 4, 1)]


def test_a_rank_that_owns_nothing() -> None:
    sharded = ShardedTensorSpec("w", (3, 2), 1, shard_ranges(2, 4))
    spec, full = sharded.spec(3), _full(sharded)
    assert spec.local_shape == (3, 0)
    assert spec.take(full).shape == (3, 0)
    assert sharded.pieces(3) == []
    before = full.clone()
    spec.put(full, torch.empty(3, 0))
    assert torch.equal(full, before)


def test_ranges_on_two_dims() -> None:
    spec = ShardSpec("w", (4, 6), (((1, 2), (3, 4)), ((0, 1), (4, 6))))
    full = torch.arange(24).view(4, 6)
    local = spec.take(full)
    assert local.tolist() == [[6, 10, 11], [18, 22, 23]]
    built = torch.zeros_like(full)
    spec.put(built, local)
    own = list(itertools.product([1, 3], [0, 4, 5]))
    assert all(int(built[i, j]) == (int(full[i, j]) if (i, j) in own else 0) for i in range(4) for j in range(6))


def test_a_shard_shares_no_memory_with_the_full_tensor() -> None:
    whole = ShardSpec("w", (4, 2), (((0, 4),), ((0, 2),)))
    full = torch.zeros(4, 2)
    for spec in (whole, ShardSpec("w", (4, 2), (((0, 2),), ((0, 2),)))):
        spec.take(full).fill_(1.0)
    assert not full.any()


def test_a_transposed_tensor_gives_a_contiguous_shard() -> None:
    full = torch.arange(12.0).view(3, 4).t()
    local = ShardSpec("w", (4, 3), (((1, 3),), ((0, 3),))).take(full)
    assert local.is_contiguous()
    assert torch.equal(local, full[1:3])


def test_renamed_changes_the_name_only() -> None:
    other = QKV.renamed("other")
    assert other.name == "other"
    assert other.renamed(QKV.name) == QKV
