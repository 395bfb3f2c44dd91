"""Tables for people: layers that are alike share a row, and long names are folded where they have a dot."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lightning_megatp.plan.layer import LayerPlan
from lightning_megatp.plan.ranges import Ranges, length, show

Row = tuple[str, str, str, str]
"""Name, style, what this rank has, note."""
_IN_FULL = {"as it is": "the code between them runs as it is"}


@dataclass(frozen=True)
class Folded:
    """A name in a cell, folded behind dots where it is too long for its column, within a part of it only if need be."""

    text: str

    def __str__(self) -> str:
        return self.text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield Text("\n".join(self._lines(options.max_width)), overflow="fold")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(len, self._pieces()), default=0), len(self.text)).with_maximum(options.max_width)

    def _pieces(self) -> list[str]:
        return re.findall(r" *[^. ]*[. ]?", self.text)[:-1]

    def _lines(self, width: int) -> list[str]:
        lines = [""]
        for piece in self._pieces():
            if lines[-1] and len((lines[-1] + piece).rstrip()) > width:
                lines.append("")
            lines[-1] += piece
        return lines


class Titled(Table):
    """A table whose title and caption begin at its left edge, and may be wider than it is."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        title, caption = self.title, self.caption
        self.title = self.caption = None
        try:
            if title:
                yield Text(str(title), style="table.title")
            yield from super().__rich_console__(console, options)
        finally:
            self.title, self.caption = title, caption
        if caption:
            yield Text(str(caption), style="table.caption")


def pattern(name: str) -> str:
    """A name without its numbers."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)


def grouped(keys: Mapping[str, object]) -> dict[str, list[str]]:
    """Names that differ in their numbers only and have the same key, under one name for all of them.

    In it `*` is every number that there is, and `{0,4}` or `{0..3}` are some. One alone keeps its name.
    """
    kinds: dict[str, list[str]] = {}
    for name in keys:
        kinds.setdefault(pattern(name), []).append(name)
    groups: dict[str, list[str]] = {}
    for names in kinds.values():
        alike: dict[object, list[str]] = {}
        for name in names:
            alike.setdefault(keys[name], []).append(name)
        for some in alike.values():
            groups[_together(some, names)] = some
    return groups


def _together(names: Sequence[str], of: Sequence[str]) -> str:
    own, every = (list(zip(*(name.split(".") for name in each), strict=True)) for each in (names, of))
    return ".".join(_part(set(some), set(among)) for some, among in zip(own, every, strict=True))


def _part(own: set[str], every: set[str]) -> str:
    if len(own) == 1:
        return next(iter(own))
    return "*" if own == every else _some(sorted(map(int, own)))


def _some(numbers: Sequence[int]) -> str:
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{{{numbers[0]}..{numbers[-1]}}}"
    shown = [str(number) for number in (numbers if len(numbers) <= 4 else numbers[:3])]
    return f"{{{','.join([*shown, '...'] if len(numbers) > 4 else shown)}}}"


def times(name: str, names: Sequence[str]) -> str:
    """The name of a group, and how many are in it."""
    return f"{name} (x{len(names)})" if len(names) > 1 else name


def share(own: Ranges, of: int) -> str:
    """Which of how many features: `64 of 128: [0:32], [64:96]`."""
    return f"{length(own)} of {of}: {show(own).replace(',', ', ')}"


def numbers(ranks: Sequence[int]) -> str:
    """Ranks in ascending order: `0..3` if there are more than two in a row, else `0, 2`."""
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}..{ranks[-1]}"
    return ", ".join(map(str, ranks))


def layers_table(
    title: str,
    layers: Iterable[LayerPlan],
    tensor_rank: int,
    where: str,
    how: Mapping[str, str],
    more: Iterable[Row] = (),
) -> Table:
    """One row per kind of split layer. What holds for most rows stands once, below the table.

    Args:
        tensor_rank: whose features are shown.
        where: what that rank is called.
        how: layer -> how it was planned; none for those of the user's plan.
        more: other rows.
    """
    found = {layer.name: layer for layer in layers}
    planned = {name: how.get(name, "your plan" if how else "") for name in found}
    planned = {name: _IN_FULL.get(said, said) for name, said in planned.items()}
    keys = {
        name: (layer.style.style, layer.by_rank, layer.sequence_dim is not None, planned[name])
        for name, layer in found.items()
    }
    rows = grouped(keys)
    usual, captions = usual_remark([planned[names[0]] for names in rows.values()])
    tokens = {layer.style.style for layer in found.values() if layer.sequence_dim is not None}
    if tokens and all(layer.sequence_dim is not None for layer in found.values() if layer.style.style in tokens):
        captions.append(f"What {' and '.join(sorted(tokens))} layers return is split by tokens.")
        tokens = set()
    cells: list[Row] = []
    for name, names in rows.items():
        layer = found[names[0]]
        notes = ["" if planned[layer.name] == usual else planned[layer.name]]
        notes.append("returns some tokens" if tokens and layer.sequence_dim is not None else "")
        of = max(stop for ranges in layer.by_rank for _, stop in ranges)
        features = share(layer.by_rank[tensor_rank], of)
        cells.append((times(name, names), layer.style.style, features, "; ".join(filter(None, notes))))
    cells += more
    table = Titled(title=title, caption="\n".join(captions) or None)
    table.add_column("layers", overflow="fold")
    table.add_column("style", no_wrap=True)
    table.add_column(where, overflow="fold")
    noted = any(note for *_, note in cells)
    if noted:
        table.add_column("notes", overflow="fold")
    for name, *rest in _under_blocks(cells):
        table.add_row(Folded(name), *(rest if noted else rest[:-1]))
    return table


def _under_blocks(rows: Sequence[Row]) -> list[Row]:
    """Three rows or more in a row whose names begin alike, up to a number, stand below a row with that beginning."""
    found: list[Row] = []
    for head, group in itertools.groupby(rows, lambda row: _head(row[0])):
        below = list(group)
        if len(below) < 3 or not head:
            found += below
            continue
        common = {row[0].partition(" ")[2] for row in below}
        count = common.pop() if len(common) == 1 else ""
        found.append((f"{head[:-1]} {count}".rstrip(), "", "", ""))
        for name, *rest in below:
            found.append((f"  {name.removeprefix(head).removesuffix(count).rstrip()}", *rest))  # type: ignore[arg-type]
    return found


def _head(name: str) -> str:
    """`blocks.*.` of `blocks.*.mlp.up (x4)`."""
    beginning = re.match(r"[^ ]*?(\*|\{[^}]*\}|(?<=\.)\d+)\.", name)
    return beginning[0] if beginning else ""


def usual_remark(remarks: Sequence[str]) -> tuple[str, list[str]]:
    """The remark that is made in most rows, and the line below the table that stands for it; empty if there is none."""
    remark, count = Counter(remarks).most_common(1)[0] if remarks else ("", 0)
    if not remark or count < max(2, len(remarks) / 2):
        return "", []
    return remark, [f"{'All layers' if count == len(remarks) else 'Layers without a note'}: {remark}."]
