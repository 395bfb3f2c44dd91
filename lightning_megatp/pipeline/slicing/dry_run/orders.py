"""In which order the tensors of a step hold the samples of a microbatch.

Mixup, CutMix and negatives from the batch put each sample beside another one (`x[torch.randperm(n)]`, `x.flip(0)`).
One device finds that other one anywhere in the batch, a pipeline in the microbatch. A step that only sorts its samples,
and later sorts them back, does the same on both. Some of the samples (`x[:4]`, `x.chunk(2)`, `x.split(8)`) are others
in a microbatch, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_megatp.containers import tensors_in
from lightning_megatp.pipeline.loss.functions import JOINS
from lightning_megatp.pipeline.slicing.dry_run.by_tensor import ByTensor
from lightning_megatp.pipeline.slicing.dry_run.call import Call
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.tensor.functions import argument

_Order = tuple[int, ...]
"""Which sample each row holds; empty: not known."""
_UNKNOWN: _Order = ()


class Orders:
    """Follows in which order the rows of a step's tensors hold samples.

    Args:
        count: how many samples there are.
        tables: tensors of the microbatch that have a row for each.
    """

    def __init__(self, count: int, tables: Sequence[Tensor]) -> None:
        self._rows = count
        self._own: _Order = tuple(range(count))
        self._of = ByTensor((x, self._own) for x in tables)
        """Tensors that depend on the batch."""
        self.mixed = ""
        """The first operation that took samples in different orders."""
        self.divided = ""
        """The first one by which a module is given some of the samples, of a step that learns."""
        self._cut: ByTensor[str] = ByTensor()
        """What was made of some of the samples, and by which operation they were taken."""

    def note(self, call: Call, out: Any) -> None:
        """After an operation.

        Args:
            out: what it returned.
        """
        given = [x for x in tensors_in(call.args, call.kwargs) if x in self._of]
        made = tensors_in(out)
        if not given:
            return
        if by := self._cut_by(call, given):
            if call.is_unit and torch.is_grad_enabled():
                self.divided = self.divided or by
            for x in made:
                self._cut[x] = by
        if (moved := self._moved(call)) is not None:
            before = self._of[call.args[0]]
            known = before and len(moved) == self._rows
            after = tuple(before[i] for i in moved) if known else _UNKNOWN
            for x in made:
                self._of[x] = after
            return
        orders = {self._of[x] for x in given}
        met = {self._of[x] for x in given if self._is_table(x)}
        together = call.name not in JOINS or any(map(self._is_table, made))
        if together and len(met) > 1 and _UNKNOWN not in orders:
            self.mixed = self.mixed or call.by
        order = orders.pop() if len(orders) == 1 else _UNKNOWN
        for x in made or given[:1]:  # `x[...] = y` returns nothing
            self._of[x] = order if self._is_table(x) or order == self._own else _UNKNOWN

    def _cut_by(self, call: Call, given: Sequence[Tensor]) -> str:
        """The operation by which some of the samples were taken, by number; "" if all are there, or each by itself."""
        if before := next((by for x in given if (by := self._cut.get(x))), ""):
            return before
        x = call.args[0] if call.args else None
        if call.is_unit or not isinstance(x, Tensor) or x not in self._of or not self._is_table(x):
            return ""
        if call.name == "__getitem__":
            index = call.args[1][0] if isinstance(call.args[1], tuple) and call.args[1] else call.args[1]
            return call.by if isinstance(index, slice) and _takes_some(index, self._rows) else ""
        sizes = argument(call.args, call.kwargs, 1, *_SIZES)
        cuts = call.name in _CUTS and argument(call.args, call.kwargs, 2, "dim", default=0) in (0, -x.dim())
        return call.by if cuts and sizes != 1 else ""

    def _moved(self, call: Call) -> _Order | None:
        """The rows that an operation takes of its first argument, or brings into another order; None if it does not."""
        x = call.args[0] if call.args else None
        if not isinstance(x, Tensor) or x not in self._of or not self._is_table(x):
            return None
        given = dict(zip(_ARGUMENTS.get(call.name, ()), call.args[1:], strict=False)) | call.kwargs
        if call.name == "__getitem__":
            index = call.args[1]
            return self._rows_of(index[0] if isinstance(index, tuple) and index else index)
        if call.name == "index_select" and given.get("dim") == 0:
            return self._rows_of(given.get("index"))
        dims = _numbers(given.get("dims"), call.args[1:] if call.name == "flip" else ())
        if call.name == "flipud" or (call.name == "flip" and 0 in dims):
            return self._own[::-1]
        if call.name == "roll" and (0 in dims or (x.dim() == 1 and not dims)):
            by = sum(n for n, dim in zip(_numbers(given.get("shifts")), dims or [0], strict=False) if dim == 0)
            return tuple((i - by) % self._rows for i in self._own)
        return None

    def _rows_of(self, index: Any) -> _Order | None:
        """The rows that an index along dim 0 takes, if it names rows one by one."""
        if isinstance(index, Tensor) and is_fake(index):
            return _UNKNOWN
        if not isinstance(index, (Tensor, np.ndarray, list)):
            return None
        rows = torch.as_tensor(index)
        if rows.dim() != 1 or rows.is_floating_point() or rows.dtype == torch.bool:
            return None
        return tuple(i % self._rows for i in rows.tolist())

    def _is_table(self, x: Tensor) -> bool:
        return self._rows > 1 and x.dim() > 0 and len(x) == self._rows


_CUTS = ("chunk", "split", "split_with_sizes", "tensor_split")
_SIZES = ("split_size_or_sections", "split_size", "split_sizes", "chunks", "indices_or_sections")
"""What the second argument of these is called; of one that is 1, each sample is a part."""
_ARGUMENTS = {"index_select": ("dim", "index"), "flip": ("dims",), "roll": ("shifts", "dims")}
"""After the tensor."""


def _takes_some(index: slice, rows: int) -> bool:
    """Whether a slice takes some of the samples, of a microbatch or of a batch, and not one alone or each n-th."""
    start, stop, step = index.start or 0, index.stop, index.step or 1
    if not all(isinstance(x, int) for x in (start, step, stop or 0)):
        return False
    if step != 1:
        return rows % step > 0 or stop is not None
    return (start, stop) not in ((0, None), (0, rows)) and (index.start is None or stop != start + 1)


def _numbers(value: Any, given: Sequence[Any] = ()) -> list[int]:
    """`0`, `(0, 1)`, or numbers that are given one by one."""
    several = value if isinstance(value, (tuple, list)) else [value, *given[1:]]
    return [x for x in several if isinstance(x, int)]
