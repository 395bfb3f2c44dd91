"""Index ranges: which features of a dimension each tensor rank owns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache

Range = tuple[int, int]
"""Start and stop, half open."""
Ranges = tuple[Range, ...]
"""The pieces of one dimension one rank owns, in the order in which they lie in its shard."""
ByRank = tuple[Ranges, ...]
"""The ranges of every rank of a group."""

_MOST_PIECES = 1 << 16
"""Pieces of one rank, at most; what is cut finer than that is not followed any further."""


def split_evenly(count: int, ways: int) -> list[Range]:
    """Contiguous pieces whose lengths differ by at most one, longer ones first: 6 in 4 -> 2, 2, 1, 1."""
    small, extra = divmod(count, ways)
    stops = [small * (i + 1) + min(i + 1, extra) for i in range(ways)]
    return list(zip([0, *stops[:-1]], stops, strict=True))


def deal_units(count: int, ways: int) -> list[Range]:
    """Like split_evenly, but fewer units than ranks are repeated: 2 key-value heads on 4 ranks -> 0, 0, 1, 1.

    Raises:
        ValueError: fewer units than ranks, and the ranks can't be dealt out evenly.
    """
    if count >= ways:
        return split_evenly(count, ways)
    if count < 1 or ways % count:
        raise ValueError(f"{count} units can be neither divided among tp = {ways} ranks nor repeated evenly on them")
    return [(rank * count // ways, rank * count // ways + 1) for rank in range(ways)]


def shard_ranges(size: int, ways: int, parts: int | Sequence[int] = 1, unit: int = 1) -> tuple[Ranges, ...]:
    """The ranges of every rank in a dimension of `size` features.

    Args:
        size: length of the dimension.
        ways: number of tensor ranks.
        parts: how many equal pieces lie one after another in the dimension (3 for a fused q, k, v), or their sizes.
            Each part is dealt out by itself.
        unit: features that must stay together (the size of a head). A part of fewer units than ranks is repeated on
            neighbouring ranks (key-value heads), if `unit` was given (is above 1).

    Returns:
        For each rank its ranges: fused q, k, v of 48 rows on 3 ranks -> rank 1: ((16, 32), ...) per part.

    Raises:
        ValueError: parts or units that do not fill the dimension, or units that can't be dealt out.
    """
    if isinstance(parts, int):
        if parts < 1 or size % parts:
            raise ValueError(f"{size} features do not divide into {parts} equal parts")
        parts = [size // parts] * parts
    if sum(parts) != size:
        raise ValueError(f"the parts {list(parts)} add up to {sum(parts)}, but the dimension has {size} features")
    by_rank: list[list[Range]] = [[] for _ in range(ways)]
    offset = 0
    for part in parts:
        if unit < 1 or part % unit:
            raise ValueError(f"a part of {part} features is not a whole number of units of {unit}")
        units = part // unit
        pieces = deal_units(units, ways) if unit > 1 else split_evenly(units, ways)
        for rank, (start, stop) in enumerate(pieces):
            if stop > start:
                by_rank[rank].append((offset + start * unit, offset + stop * unit))
        offset += part
    return tuple(merge(ranges) for ranges in by_rank)


def merge(ranges: Sequence[Range]) -> Ranges:
    """Join neighbours: (0, 4), (4, 8) -> (0, 8)."""
    merged: list[Range] = []
    for start, stop in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def length(ranges: Ranges) -> int:
    """Number of indices in the ranges."""
    return sum(stop - start for start, stop in ranges)


def owners(by_rank: Sequence[Ranges], index: int) -> list[int]:
    """The ranks that own one index."""
    return [rank for rank, ranges in enumerate(by_rank) if any(start <= index < stop for start, stop in ranges)]


def first_owned(by_rank: Sequence[Ranges], rank: int) -> Ranges:
    """What of a rank's ranges no lower rank owns: 0, 0, 1, 1 -> of rank 2 all, of rank 3 nothing."""
    own = by_rank[rank]
    for start, stop in itertools.chain.from_iterable(by_rank[:rank]):
        own = tuple(
            piece
            for low, high in own
            for piece in ((low, min(high, start)), (max(low, stop), high))
            if piece[0] < piece[1]
        )
    return own


def show(ranges: Ranges, most: int = 3) -> str:
    """Ranges as people write them: [0:16],[32:48]."""
    text = ",".join(f"[{start}:{stop}]" for start, stop in ranges[:most])
    return text + (f",... {len(ranges) - most} more" if len(ranges) > most else "")


def everything(by_rank: ByRank, size: int) -> bool:
    """Whether every rank owns all of a dim, in its order."""
    return all(ranges == ((0, size),) for ranges in by_rank)


@lru_cache(1024)
def owned_once(by_rank: ByRank, size: int) -> bool:
    """Whether every index of a dim is owned by exactly one rank."""
    pieces = sorted(piece for ranges in by_rank for piece in ranges if piece[0] < piece[1])
    return merge(pieces) == ((0, size),) if size else not pieces


@lru_cache(1024)
def owner_counts(by_rank: ByRank, rank: int) -> tuple[tuple[int, int, int], ...]:
    """A rank's shard as (start, stop, owners): local indices, and how many ranks own these."""
    cuts = sorted({edge for ranges in by_rank for piece in ranges for edge in piece})
    found, at = [], 0
    for start, stop in by_rank[rank]:
        edges = [start, *(cut for cut in cuts if start < cut < stop), stop]
        for low, high in itertools.pairwise(edges):
            found.append((at, at + high - low, len(owners(by_rank, low))))
            at += high - low
    return tuple(found)


@lru_cache(1024)
def gathered_runs(by_rank: ByRank) -> Ranges:
    """Where the indices 0, 1, 2, ... lie in the ranks' shards, one after another; repeated ones at their
    first owner."""
    pieces, at = [], 0
    for ranges in by_rank:
        for start, stop in ranges:
            pieces.append((start, stop, at))
            at += stop - start
    runs: list[Range] = []
    done = 0
    for start, stop, at in sorted(pieces, key=lambda piece: (piece[0], piece[2])):
        if stop > done:
            runs.append((at + max(done - start, 0), at + stop - start))
            done = stop
    return merge(runs)


@lru_cache(4096)
def merge_dims(by_rank: ByRank, size: int, outer: int, inner: int) -> ByRank | None:
    """Ownership of the middle one of three dims (outer, size, inner), seen in the dim they become together: 2 rows of
    heads (0, 1), 4 features each, of 2 heads -> (0, 4), (8, 12). None if it falls into too many pieces."""
    if outer * max(map(len, by_rank), default=0) > _MOST_PIECES:
        return None
    return tuple(
        merge([((i * size + a) * inner, (i * size + b) * inner) for i in range(outer) for a, b in ranges])
        for ranges in by_rank
    )


@lru_cache(4096)
def split_dim(by_rank: ByRank, sizes: tuple[int, ...]) -> tuple[int, ByRank] | None:
    """Ownership of a dim, seen in the dims it is split into: features (0, 8) of 4 heads, 4 features each -> of dim 0,
    (0, 2). None if no single dim tells who owns what."""
    for i, size in enumerate(sizes):
        outer, inner = math.prod(sizes[:i]), math.prod(sizes[i + 1 :])
        if outer > _MOST_PIECES:
            continue
        found = [_middle(ranges, outer, size * inner, inner) for ranges in by_rank]
        known = [ranges for ranges in found if ranges is not None]
        if len(known) == len(found):
            return i, tuple(known)
    return None


def _middle(ranges: Ranges, outer: int, period: int, unit: int) -> Ranges | None:
    """The ranges in each of `outer` periods, in units; None if periods differ, lie in another order, or cut a unit."""
    rows: list[list[Range]] = [[] for _ in range(outer)]
    last = 0
    for start, stop in ranges:
        while start < stop:
            row = start // period
            end = min(stop, (row + 1) * period)
            if row < last or (start % unit or end % unit):
                return None
            rows[row].append(((start - row * period) // unit, (end - row * period) // unit))
            start, last = end, row
    first = merge(rows[0])
    return first if all(merge(row) == first for row in rows) else None


@lru_cache(4096)
def slice_span(by_rank: ByRank, start: int, stop: int) -> ByRank:
    """Ownership of the indices from `start` to `stop`, counted from `start`."""
    return tuple(
        merge([(max(a, start) - start, min(b, stop) - start) for a, b in ranges if max(a, start) < min(b, stop)])
        for ranges in by_rank
    )


def ascending(ranges: Ranges) -> bool:
    """Whether a shard holds its indices in their order, each once."""
    return all(a[1] <= b[0] for a, b in itertools.pairwise(ranges))


def local_span(ranges: Ranges, start: int, stop: int) -> Range:
    """Where the owned ones of the indices from `start` to `stop` lie in a shard, whose ranges ascend: start, length."""
    before = sum(min(b, start) - a for a, b in ranges if a < start)
    return before, sum(min(b, stop) - max(a, start) for a, b in ranges if max(a, start) < min(b, stop))


def local_piece(ranges: Ranges, start: int, stop: int) -> Ranges:
    """What lies from `start` to `stop` in a shard: (4, 8), (12, 16) from 2 to 6 -> (6, 8), (12, 14)."""
    found, at = [], 0
    for a, b in ranges:
        low, high = max(start - at, 0), min(stop - at, b - a)
        if low < high:
            found.append((a + low, a + high))
        at += b - a
    return tuple(found)


def intersection(ranges: Ranges, others: Ranges) -> Ranges:
    """The indices of the first that are among the second, in the order of the first."""
    return tuple((max(a, c), min(b, d)) for a, b in ranges for c, d in others if max(a, c) < min(b, d))


@lru_cache(1024)
def repeat_dim(by_rank: ByRank, size: int, times: int) -> ByRank:
    """Ownership of a dim that is repeated as a whole: 0, 1, 2 -> 0, 1, 2, 0, 1, 2."""
    return concatenate(((by_rank, size),) * times)


@lru_cache(1024)
def repeat_each(by_rank: ByRank, times: int) -> ByRank:
    """Ownership of a dim whose indices are repeated one by one: 0, 1, 2 -> 0, 0, 1, 1, 2, 2."""
    return tuple(tuple((a * times, b * times) for a, b in ranges) for ranges in by_rank)


@lru_cache(1024)
def concatenate(parts: tuple[tuple[ByRank, int], ...]) -> ByRank:
    """Ownership of dims laid one after another, each with its size."""
    whole: list[list[Range]] = [[] for _ in parts[0][0]]
    offset = 0
    for by_rank, size in parts:
        for rank, ranges in enumerate(by_rank):
            whole[rank] += [(offset + a, offset + b) for a, b in ranges]
        offset += size
    return tuple(map(merge, whole))


@lru_cache(4096)
def positions(held: Ranges, wanted: Ranges) -> Ranges | None:
    """Where wanted indices lie in a shard that holds `held`; None if it lacks some."""
    starts, at = [], 0
    for a, b in held:
        starts.append((a, b, at))
        at += b - a
    found = []
    for start, stop in wanted:
        while start < stop:
            piece = next(((a, b, at) for a, b, at in starts if a <= start < b), None)
            if piece is None:
                return None
            end = min(stop, piece[1])
            found.append((piece[2] + start - piece[0], piece[2] + end - piece[0]))
            start = end
    return merge(found)


def contains(held: ByRank, wanted: ByRank) -> bool:
    """Whether each rank holds what it wants."""
    return all(positions(mine, ranges) is not None for mine, ranges in zip(held, wanted, strict=True))


@lru_cache(1024)
def grouped_units(by_rank: ByRank, group: int) -> ByRank | None:
    """The groups (key-value heads) that serve the units (query heads) of each rank, `group` units to each; None if on
    some rank they don't serve equally many."""
    found = []
    for ranges in by_rank:
        served = [i // group for a, b in ranges for i in range(a, b)]
        groups = list(dict.fromkeys(served))
        each = len(served) // len(groups) if groups else 0
        if served != [g for g in groups for _ in range(each)]:
            return None
        found.append(merge([(g, g + 1) for g in groups]))
    return tuple(found)
