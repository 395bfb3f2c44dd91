"""Samples of a microbatch that a step puts beside each other: halves that are pairs, each with each, or with others.

One device finds a batch's samples in their order, a pipeline those of a microbatch: other pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatp.pipeline.loss.functions import JOINS
from lightning_megatp.pipeline.loss.samples import Samples
from lightning_megatp.tensor.einsum import labels_of, operands_of
from lightning_megatp.tensor.functions import argument

_CUTS = {"chunk": 2, "split": 2, "split_with_sizes": 2, "tensor_split": 2, "narrow": 1, "__getitem__": -1}
"""By name, which argument is the dim."""
_BESIDE = JOINS | {"add", "add_", "__add__", "__radd__", "__iadd__"}
"""What puts samples together, and compares none."""
_Rows = range | int
"""Which of a microbatch's samples, in order; or the identity of the tensor that names them."""


class Pairs:
    """What a step has made of some samples of a microbatch.

    Args:
        samples: says which tensors have a row per sample.
    """

    def __init__(self, samples: Samples) -> None:
        self._samples = samples
        self._of: dict[int, tuple[Tensor, _Rows]] = {}
        """By the identity of a tensor, which is kept alive for it."""
        self._indices: list[Tensor] = []
        """Tensors that name samples, kept alive so that their address means them."""

    def compares(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
        """Whether an operation made something of different samples, which needs a gradient. What is cut apart, and
        made of a part, is noted.

        Args:
            name: of the operation.
        """
        if name in _CUTS and args and self._is_table(args[0]):
            for part, rows in _cut(name, args, kwargs, result):
                self._of[id(part)] = part, rows
                self._indices += [x for x in _tensors(args[1:], kwargs) if id(x) == rows]
            return False
        if not isinstance(result, Tensor) or not result.requires_grad:
            return False
        if _each_with_each(args, result, self._samples.rows) and not any(map(self._samples.is_constant, args)):
            return True
        parts = [self._of[id(x)] for x in _tensors(args, kwargs) if id(x) in self._of]
        if not parts:
            return False
        found = {rows for _, rows in parts}
        found |= {
            range(self._samples.rows) for x in _tensors(args, kwargs) if self._is_table(x) and id(x) not in self._of
        }
        if len(found) == 1 and result.dim() and any(len(result) == len(x) for x, _ in parts):
            self._of[id(result)] = result, next(iter(found))
        return name not in _BESIDE and len(found) > 1

    def tabulates(self, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> bool:
        """Whether a product made a table of as many rows and columns as there are samples, or two views of each; or
        an einsum let the rows of two tables meet."""
        operands, rows = [*_tensors(args, kwargs)], self._samples.rows
        if not isinstance(result, Tensor) or any(map(self._samples.is_constant, operands)):
            return False
        if args and isinstance(args[0], str):
            labels = labels_of(args[0], [x.dim() for x in operands_of(args)])
            given, out = labels if labels is not None else ([], [])
            of_rows = {own[0] for x, own in zip(operands, given, strict=bool(given)) if self._is_table(x)}
            if len(of_rows.intersection(out)) > 1:
                return True
        learn = all(x.requires_grad for x in operands)
        return result.shape in [(rows, rows), (2 * rows, 2 * rows)] or (
            learn and result.shape in [(rows, 2 * rows), (2 * rows, rows)]
        )

    def _is_table(self, x: Any) -> bool:
        return self._samples.holds(x) and bool(x.requires_grad)


def _cut(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Iterator[tuple[Tensor, _Rows]]:
    """The parts of a table, and which samples they have."""
    whole, at = args[0], _CUTS[name]
    if name == "__getitem__":
        index = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
        if isinstance(index, slice) and len(result) < len(whole):
            yield result, range(len(whole))[index]
        elif isinstance(index, Tensor) and index.dim() == 1 and index.dtype != torch.bool:
            yield result, id(index)
    elif argument(args, kwargs, at, "dim", default=0) == 0:
        start = args[2] if name == "narrow" else 0
        for part in result if isinstance(result, (tuple, list)) else [result]:
            yield part, range(start, start + len(part))
            start += len(part)


def _each_with_each(args: Sequence[Any], result: Tensor, rows: int) -> bool:
    """Whether (rows, 1, ...) met (1, rows, ...) or (rows, ...), both with a gradient."""
    if rows < 2 or result.dim() < 2 or tuple(result.shape[:2]) != (rows, rows) or len(args) != 2:
        return False
    shapes = [tuple(x.shape) for x in args if isinstance(x, Tensor) and x.requires_grad]
    if len(shapes) != 2:
        return False
    padded = sorted((1,) * (result.dim() - len(shape)) + shape for shape in shapes)
    return padded[0][:2] == (1, rows) and padded[1][:2] == (rows, 1)


def _tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[Tensor]:
    for x in (*args, *kwargs.values()):
        if isinstance(x, (list, tuple)):
            yield from (y for y in x if isinstance(y, Tensor))
        elif isinstance(x, Tensor):
            yield x
