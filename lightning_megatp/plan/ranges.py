"""Index ranges: which features of a dimension each tensor rank owns."""

from __future__ import annotations

from collections.abc import Sequence

Range = tuple[int, int]
"""Start and stop, half open."""
Ranges = tuple[Range, ...]
"""The pieces of one dimension one rank owns, in the order in which they lie in its shard."""


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


def show(ranges: Ranges, most: int = 3) -> str:
    """Ranges as people write them: [0:16],[32:48]."""
    text = ",".join(f"[{start}:{stop}]" for start, stop in ranges[:most])
    return text + (f",... {len(ranges) - most} more" if len(ranges) > most else "")
