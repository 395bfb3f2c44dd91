"""What a step returned for each microbatch, as it would have for the batch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_megatp.messages import warn_once_per_run

_PLACES = frozenset(["idx", "index", "epoch", "step", "id", "seed", "rank"])
"""Words in the names of whole numbers that tell where something is, and count nothing."""


class Merge:
    """Puts results of microbatches together.

    Tensors with a dim are concatenated along dim 0, unless another dim alone has the microbatches' rows (what recurrent
    layers return, time first); those that can't be of rows are averaged by weight. Floating numbers are averaged by
    what they are averages of, if that is known, and added up if they are sums; else by weight. Whole numbers are
    counts, and added up; but those that are alike in all microbatches and no multiple of their rows, or by
    name an index, an epoch or a step, stay. Lists are joined, but those of a few tensors with all rows in each, or of
    averages, are put together entry by entry, as tuples are; and what holds them (dicts, tuples, dataclasses) keeps its
    type. Of other values the last one stays.

    Args:
        weights: of the microbatches.
        rows: of the microbatches.
        counts: by the identity of a number, how many values it is the average of; infinity for their sum.
    """

    def __init__(
        self, weights: Sequence[float], rows: Sequence[int], counts: Mapping[int, Tensor | float] | None = None
    ) -> None:
        self._weights, self._rows, self._counts = weights, rows, counts or {}
        self._added: dict[str, None] = {}
        self._averaged: dict[str, None] = {}

    def of(self, parts: Sequence[Any], name: str = "") -> Any:
        """The whole of something.

        Args:
            parts: one per microbatch, of the same structure.
            name: what it is called.

        Warns:
            UserWarning: the rows of a tensor may be along dim 0 or another, or along none.
        """
        first = parts[-1]
        if len(parts) == 1:
            return first
        if isinstance(first, Tensor):
            return self._of_tensors(parts, name)
        if isinstance(first, bool):
            return first
        if isinstance(first, int):
            return self._of_whole_numbers(parts, name)
        if isinstance(first, float):
            return sum(part * share for part, share in zip(parts, self._shares(parts, name), strict=True))
        if isinstance(first, Mapping):
            items = {key: self.of([part[key] for part in parts], str(key)) for key in first}
            return type(first)(items.items())  # type: ignore[call-arg]
        if isinstance(first, tuple):
            names = getattr(first, "_fields", [f"{name}[{i}]" for i in range(len(first))])
            merged = [self.of(entries, key) for key, entries in zip(names, zip(*parts, strict=True), strict=True)]
            return type(first)(*merged) if hasattr(first, "_fields") else tuple(merged)
        if isinstance(first, list):
            if self._is_of_entries(parts, name):
                return [self.of(entries, f"{name}[{i}]") for i, entries in enumerate(zip(*parts, strict=True))]
            return [item for part in parts for item in part]
        if is_dataclass(first) and not isinstance(first, type):
            values = {x.name: [getattr(part, x.name) for part in parts] for x in fields(first) if x.init}
            return replace(first, **{key: self.of(items, key) for key, items in values.items()})
        return first

    def warn(self, step: str) -> None:
        """Say what was made of numbers, beside the loss.

        Args:
            step: whose.
        """
        averaged = [name for name in self._averaged if name not in ("", "loss")]
        if not self._added and not averaged:
            return
        added = f"whole numbers are added up, as counts are ({_listed(self._added)})" if self._added else ""
        others = f"{'others' if added else 'numbers'} are averaged ({_listed(averaged)})" if averaged else ""
        warn_once_per_run(
            f"of what `{step}` returns for microbatches {' and '.join(filter(None, (added, others)))}. Where that is"
            " wrong (a sum, a size that is no count), return one number per row, or `self.log` it with `reduce_fx`."
        )

    def _is_of_entries(self, parts: Sequence[list[Any]], name: str) -> bool:
        """Whether lists have the same few entries for each microbatch, each of all its rows, and not one per row."""

        def has_rows(x: Any, n: int) -> bool:
            return isinstance(x, Tensor) and x.shape[:1] == (n,)

        with_rows = list(zip(parts, self._rows, strict=True))
        if not parts[0] or len({len(part) for part in parts}) > 1:
            return False
        if not all(has_rows(x, n) or id(x) in self._counts for part, n in with_rows for x in part):
            return False
        if any(len(part) % n for part, n in with_rows):
            return True
        if any(has_rows(x, n) for part, n in with_rows for x in part):
            warn_once_per_run(
                f"the step returned a list (`{name or 'the result'}`) of {len(parts[0])} tensors for {self._rows[0]}"
                f" rows, each of as many entries. Those of {len(parts)} microbatches are joined. If each holds all"
                " rows, return a tuple or a dict."
            )
        return False

    def _of_whole_numbers(self, parts: Sequence[Any], name: str) -> Any:
        if len({int(part) for part in parts}) == 1:
            multiples = all(int(part) % n == 0 for part, n in zip(parts, self._rows, strict=True))
            if not multiples or not _PLACES.isdisjoint(re.split(r"[^a-z]+", name.lower())):
                return parts[-1]
        self._added[name or "the result"] = None
        return sum(parts[1:], start=parts[0])

    def _of_tensors(self, parts: Sequence[Tensor], name: str) -> Tensor | list[Tensor]:
        if parts[0].dim() > 0 and not _is_no_row(parts, self._rows):
            dim = _rows_dim([part.shape for part in parts], self._rows)
            same = len({(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}) == 1
            return torch.cat(list(parts), dim) if same else list(parts)
        if parts[0].dtype == torch.bool:
            return parts[-1]
        if not parts[0].is_floating_point():
            number: Tensor = self._of_whole_numbers(parts, name)
            return number
        pairs = zip(parts, self._shares(parts, name), strict=True)
        return sum((part * share for part, share in pairs), start=parts[0] * 0.0)

    def _shares(self, parts: Sequence[Any], name: str) -> list[float]:
        """What each of some numbers is multiplied by."""
        known = [float(self._counts[id(part)]) for part in parts if id(part) in self._counts]
        if len(known) == len(parts) and all(map(math.isinf, known)):
            return [1.0] * len(parts)
        if len(known) < len(parts) or not 0 < sum(known) < math.inf:
            self._averaged[name] = None
            known = list(self._weights)
        return [count / sum(known) for count in known]


def _listed(names: Sequence[str] | Mapping[str, None]) -> str:
    return ", ".join(f"`{name}`" for name in list(names)[:4])


def _is_no_row(parts: Sequence[Tensor], rows: Sequence[int]) -> bool:
    """Whether these are as large for each microbatch, and of no dim that could be its rows, or several for each (a loss
    for each of three heads): averages, as numbers are."""
    shape = parts[0].shape
    if not parts[0].is_floating_point() or any(part.shape != shape for part in parts):
        return False
    if any(size % n == 0 for size in shape for n in rows):
        return False
    warn_once_per_run(
        f"the step returned a tensor of shape {tuple(shape)} for {rows[0]} rows, which are in none of its dims: those"
        f" of {len(rows)} microbatches are averaged."
    )
    return True


def _rows_dim(shapes: Sequence[torch.Size], rows: Sequence[int]) -> int:
    """Along which dim tensors of these shapes hold the rows of their microbatches."""

    def has_rows(dim: int) -> bool:
        return all(len(shape) > dim and shape[dim] == n for shape, n in zip(shapes, rows, strict=True))

    others = [dim for dim in range(1, len(shapes[0])) if has_rows(dim)]
    if has_rows(0) or len(others) != 1:
        return 0
    per_row = {shape[0] / n for shape, n in zip(shapes, rows, strict=True)}
    if len(per_row) > 1 or not per_row.pop().is_integer():
        return others[0]
    warn_once_per_run(
        f"the step returned a tensor of shape {tuple(shapes[0])} for {rows[0]} rows. Those of {len(rows)} microbatches"
        f" are put together along dim 0. If dim {others[0]} are the rows, let it come first, or use microbatches=1."
    )
    return 0
