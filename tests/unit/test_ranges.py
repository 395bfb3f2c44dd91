"""Index ranges: every index has an owner, and only units that have to be repeated have several."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_megatp.plan.ranges import (
    ByRank,
    Ranges,
    ascending,
    concatenate,
    contains,
    deal_units,
    everything,
    gathered_runs,
    grouped_units,
    length,
    local_span,
    merge,
    merge_dims,
    owned_once,
    owner_counts,
    owners,
    positions,
    repeat_dim,
    repeat_each,
    shard_ranges,
    show,
    slice_span,
    split_dim,
    split_evenly,
)

unhurried = settings(deadline=None, max_examples=60)  # no time limit: the machine may be busy
WAYS = st.integers(1, 8)


@st.composite
def splits(draw: st.DrawFn) -> tuple[int, int, list[int], int]:
    """(size, ways, parts, unit) that can be dealt out."""
    ways, unit = draw(WAYS), draw(st.integers(1, 5))
    divisors = [n for n in range(1, ways) if ways % n == 0]  # fewer units than ranks have to be repeated evenly
    counts = st.integers(ways, 3 * ways) | st.sampled_from(divisors or [ways])
    if unit == 1:
        counts = st.integers(1, 3 * ways)  # nothing is repeated: some ranks may get nothing
    parts = [count * unit for count in draw(st.lists(counts, min_size=1, max_size=4))]
    return sum(parts), ways, parts, unit


def indices(ranges: Ranges) -> list[int]:
    return [i for start, stop in ranges for i in range(start, stop)]


@unhurried
@given(st.integers(0, 100), WAYS)
def test_an_even_split_is_contiguous_and_its_lengths_differ_by_one_at_most(count: int, ways: int) -> None:
    pieces = split_evenly(count, ways)
    assert len(pieces) == ways
    assert [i for piece in pieces for i in range(*piece)] == list(range(count))
    lengths = [stop - start for start, stop in pieces]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


def test_an_even_split_in_numbers() -> None:
    assert split_evenly(6, 4) == [(0, 2), (2, 4), (4, 5), (5, 6)]
    assert split_evenly(1, 3) == [(0, 1), (1, 1), (1, 1)]


def test_fewer_units_than_ranks_are_repeated_on_neighbours() -> None:
    assert deal_units(2, 4) == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert deal_units(1, 2) == [(0, 1), (0, 1)]
    assert deal_units(3, 2) == [(0, 2), (2, 3)]


@pytest.mark.parametrize(("count", "ways"), [(3, 4), (2, 3), (0, 2)])
def test_units_that_can_be_neither_divided_nor_repeated(count: int, ways: int) -> None:
    text = f"{count} units can be neither divided among tp = {ways} ranks nor repeated evenly on them"
    with pytest.raises(ValueError, match=re.escape(text)):
        deal_units(count, ways)


@unhurried
@given(splits())
def test_the_ranges_of_all_ranks_cover_every_index(split: tuple[int, int, list[int], int]) -> None:
    size, ways, parts, unit = split
    by_rank = shard_ranges(size, ways, parts, unit)
    assert len(by_rank) == ways
    assert {i for ranges in by_rank for i in indices(ranges)} == set(range(size))
    for ranges in by_rank:
        mine = indices(ranges)
        assert mine == sorted(set(mine)), "in the order of the full dimension, none twice"
        assert length(ranges) == len(mine)
        assert merge(ranges) == ranges, "neighbours are joined"
    offset = 0
    for part in parts:
        for at in range(offset, offset + part):
            expected = max(1, ways * unit // part) if unit > 1 else 1
            assert len(owners(by_rank, at)) == expected
        offset += part


@unhurried
@given(splits())
def test_units_stay_together(split: tuple[int, int, list[int], int]) -> None:
    size, ways, parts, unit = split
    by_rank = shard_ranges(size, ways, parts, unit)
    for at in range(0, size, unit):
        assert all(owners(by_rank, at) == owners(by_rank, at + i) for i in range(unit))


@unhurried
@given(splits())
def test_each_part_is_dealt_out_by_itself(split: tuple[int, int, list[int], int]) -> None:
    size, ways, parts, unit = split
    by_rank = shard_ranges(size, ways, parts, unit)
    for rank in range(ways):
        offset, expected = 0, []
        for part in parts:
            expected += [offset + i for i in indices(shard_ranges(part, ways, 1, unit)[rank])]
            offset += part
        assert indices(by_rank[rank]) == expected


def test_fused_parts_in_numbers() -> None:
    assert shard_ranges(96, 2, 3) == (((0, 16), (32, 48), (64, 80)), ((16, 32), (48, 64), (80, 96)))
    assert shard_ranges(8, 2) == (((0, 4),), ((4, 8),))
    assert shard_ranges(8, 1, 2) == (((0, 8),),), "one rank owns one range"
    assert shard_ranges(7, 2, 1) == (((0, 4),), ((4, 7),))
    assert shard_ranges(2, 4) == (((0, 1),), ((1, 2),), (), ()), "without units nothing is repeated"


def test_grouped_query_heads_in_numbers() -> None:
    """4 query heads and 2 key-value heads of 2 features on 4 ranks."""
    assert shard_ranges(16, 4, [8, 4, 4], unit=2) == (
        ((0, 2), (8, 10), (12, 14)),
        ((2, 4), (8, 10), (12, 14)),
        ((4, 6), (10, 12), (14, 16)),
        ((6, 8), (10, 12), (14, 16)),
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((10, 2, 3), "10 features do not divide into 3 equal parts"),
        ((10, 2, 0), "10 features do not divide into 0 equal parts"),
        ((10, 2, [4, 4]), "the parts [4, 4] add up to 8, but the dimension has 10 features"),
        ((10, 2, 1, 4), "a part of 10 features is not a whole number of units of 4"),
        ((10, 2, 1, 0), "a part of 10 features is not a whole number of units of 0"),
        ((12, 4, 1, 4), "3 units can be neither divided among tp = 4 ranks nor repeated evenly on them"),
    ],
)
def test_parts_and_units_that_do_not_fill_the_dimension(arguments: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        shard_ranges(*arguments)


def test_merge() -> None:
    assert merge([]) == ()
    assert merge([(0, 4), (4, 8), (9, 10)]) == ((0, 8), (9, 10))


def test_ranges_as_people_write_them() -> None:
    assert show(((0, 16), (32, 48))) == "[0:16],[32:48]"
    assert show(((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))) == "[0:1],[2:3],[4:5],... 2 more"
    assert show(()) == ""


# ---------------------------------------------------------------- ownership, followed through views


@st.composite
def ownerships(draw: st.DrawFn, most: int = 8) -> tuple[ByRank, int]:
    """Ranges of 1 to 3 ranks in a dim, overlapping or not; each index has an owner."""
    size, ways = draw(st.integers(1, most)), draw(st.integers(1, 3))
    owned = draw(st.lists(st.sets(st.integers(0, ways - 1), min_size=1), min_size=size, max_size=size))
    return tuple(merge([(i, i + 1) for i in range(size) if rank in owned[i]]) for rank in range(ways)), size


def place(ranges: Ranges, size: int, outer: int, inner: int) -> list[int]:
    """The elements of a shard of (outer, size, inner), in its order, numbered as in the whole."""
    return [(o * size + i) * inner + k for o in range(outer) for i in indices(ranges) for k in range(inner)]


@unhurried
@given(ownerships(), st.integers(1, 3), st.integers(1, 3))
def test_merged_dims_hold_what_the_shards_hold(owned: tuple[ByRank, int], outer: int, inner: int) -> None:
    by_rank, size = owned
    merged = merge_dims(by_rank, size, outer, inner)
    assert merged is not None
    for ranges, found in zip(by_rank, merged, strict=True):
        assert indices(found) == place(ranges, size, outer, inner)


@unhurried
@given(ownerships(), st.integers(1, 3), st.integers(1, 3))
def test_a_split_dim_undoes_the_merge(owned: tuple[ByRank, int], outer: int, inner: int) -> None:
    by_rank, size = owned
    merged = merge_dims(by_rank, size, outer, inner)
    assert merged is not None
    found = split_dim(merged, (outer, size, inner))
    assert found is not None
    dim, again = found
    shape = (outer, size, inner)
    before, after = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    for ranges, back in zip(merged, again, strict=True):
        assert place(back, shape[dim], before, after) == indices(ranges)


def test_a_split_dim_in_numbers() -> None:
    assert split_dim((((0, 8),), ((8, 16),)), (4, 4)) == (0, (((0, 2),), ((2, 4),)))
    fused = shard_ranges(24, 2, 3, 4)
    assert split_dim(fused, (3, 2, 4)) == (1, (((0, 1),), ((1, 2),)))
    assert split_dim((((0, 6),), ((6, 16),)), (4, 4)) is None, "a head is cut"
    assert split_dim((((8, 12), (0, 8), (12, 16)),), (2, 8)) is None, "another order"
    assert split_dim((((0, 4),), ()), (1, 4)) == (0, (((0, 1),), ()))


@unhurried
@given(ownerships(), st.data())
def test_a_slice_is_what_lies_in_the_span(owned: tuple[ByRank, int], data: st.DataObject) -> None:
    by_rank, size = owned
    start = data.draw(st.integers(0, size))
    stop = data.draw(st.integers(start, size))
    for ranges, found in zip(by_rank, slice_span(by_rank, start, stop), strict=True):
        assert indices(found) == [i - start for i in indices(ranges) if start <= i < stop]
        assert ascending(ranges)
        first, count = local_span(ranges, start, stop)
        assert [i - start for i in indices(ranges)[first : first + count]] == indices(found)


@unhurried
@given(ownerships(), ownerships(), st.integers(1, 3))
def test_repeated_and_concatenated_dims(one: tuple[ByRank, int], two: tuple[ByRank, int], times: int) -> None:
    by_rank, size = one
    for ranges, tiled, each in zip(by_rank, repeat_dim(by_rank, size, times), repeat_each(by_rank, times), strict=True):
        assert indices(tiled) == [n * size + i for n in range(times) for i in indices(ranges)]
        assert indices(each) == [i * times + n for i in indices(ranges) for n in range(times)]
    if len(two[0]) == len(by_rank):
        for ranges, more, both in zip(by_rank, two[0], concatenate((one, two)), strict=True):
            assert indices(both) == indices(ranges) + [size + i for i in indices(more)]


@unhurried
@given(ownerships(), ownerships())
def test_positions_of_wanted_indices(one: tuple[ByRank, int], two: tuple[ByRank, int]) -> None:
    held, wanted = one[0][0], two[0][0]
    found = positions(held, wanted)
    if found is None:
        assert not set(indices(wanted)) <= set(indices(held))
    else:
        assert [indices(held)[i] for i in indices(found)] == indices(wanted)
    assert contains(one[0], one[0])


@unhurried
@given(ownerships())
def test_shards_are_put_together_in_order(owned: tuple[ByRank, int]) -> None:
    by_rank, size = owned
    together = [i for ranges in by_rank for i in indices(ranges)]
    assert [together[i] for i in indices(gathered_runs(by_rank))] == list(range(size))
    assert owned_once(by_rank, size) == (len(together) == size)
    assert everything(by_rank, size) == (len(together) == size * len(by_rank))
    for rank, ranges in enumerate(by_rank):
        counts = [count for start, stop, count in owner_counts(by_rank, rank) for _ in range(start, stop)]
        assert counts == [len(owners(by_rank, i)) for i in indices(ranges)]


def test_key_value_heads_of_query_heads() -> None:
    assert grouped_units((((0, 4),), ((4, 8),)), 4) == (((0, 1),), ((1, 2),))
    assert grouped_units((((0, 2),), ((2, 4),), ((4, 6),)), 3) == (((0, 1),), ((0, 2),), ((1, 2),))
    assert grouped_units((((0, 3),), ((3, 6),), ((6, 8),)), 4) is None, "3 of one, then 1 and 2"
    assert grouped_units((((0, 2),), ()), 2) == (((0, 1),), ())
