"""How the rows of a step's tensors hold the samples of a batch: one after the other, or in several rounds.

`torch.cat([x, y])` of two views of the samples has all of the first view, then all of the second: two rounds. So have
rows of (tokens, samples) that were flattened: a round for each token. Microbatches that are put together have to be put
together round by round.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_megatp.containers import tensors_in
from lightning_megatp.pipeline.loss.functions import JOINS
from lightning_megatp.pipeline.loss.samples import STATISTICS
from lightning_megatp.pipeline.slicing.dry_run.by_tensor import ByTensor
from lightning_megatp.pipeline.slicing.dry_run.call import Call
from lightning_megatp.pipeline.slicing.rows import SCRAMBLED, CallRows, Placed, Rows
from lightning_megatp.shim.torch import DisableTorchFunction
from lightning_megatp.tensor.functions import argument, is_in_place, operation_names


class Interleaving:
    """Follows where samples lie in the tensors of a step.

    Args:
        count: how many samples there are.
        tables: tensors of the microbatch that have a row for each.
    """

    def __init__(self, count: int, tables: Sequence[Tensor]) -> None:
        self._samples = count
        self._of = ByTensor((x, Rows(0, 1)) for x in tables)
        self.coupled = ""
        """The first operation between blocks that makes something of all samples: a number, a row, a table."""
        self.of_units: dict[str, CallRows] = {}
        """Of each unit's first call."""

    def rounds_of(self, x: Tensor) -> int:
        """In how many rounds it holds the samples, as far as is known; SCRAMBLED if it doesn't hold all."""
        return self._of[x].rounds if x in self._of else 1

    def note(self, call: Call, out: Any) -> None:
        """After an operation.

        Args:
            out: what it returned.
        """
        given = [(x, self._of[x]) for x in tensors_in(call.args, call.kwargs) if x in self._of]
        made = tensors_in(out)
        if not given or not made:
            return
        with DisableTorchFunction():
            views = None if call.is_unit or call.opaque else self._viewed(call)
        for i, x in enumerate(made):
            if x in self._of:
                continue  # changed in place
            if views is not None and len(views) == len(made):
                rows = views[i]
            elif call.name in JOINS and not call.is_unit:
                rows = self._joined(call, x, given)
            elif call.name in ("repeat", "tile") and len(given) == 1:
                rows = _repeated(*given[0], x)
            else:
                rows = _followed(given, x)
            if rows is not None:
                self._of[x] = rows
            if _couples(call, given, x, rows, self._samples):
                self.coupled = self.coupled or call.by
        if call.is_unit and call.name not in self.of_units:
            self.of_units[call.name] = CallRows(self._placed(tensors_in(call.args, call.kwargs)), self._placed(made))

    def _placed(self, tensors: Sequence[Tensor]) -> tuple[Placed, ...]:
        return tuple(Placed(tuple(x.shape), self._of.get(x), x.requires_grad) for x in tensors)

    def _viewed(self, call: Call) -> list[Rows | None] | None:
        """Where the samples are in views of the first argument; None if the operation makes other tensors."""
        x = call.args[0] if call.args else None
        if not isinstance(x, Tensor) or x not in self._of or is_in_place(call.name):
            return None
        rows = self._of[x]
        stands_in = torch.empty(x.shape, dtype=x.dtype, device="meta")
        tried = self._tried(call, stands_in)
        if call.name in _RESHAPES:
            return [self._reshaped(x, rows, y) for y in tried or []] or None
        if tried is None or not all(y._base is stands_in for y in tried):  # or of what the operation made itself
            return None
        return [_strided(x.shape, rows, y) for y in tried]

    def _tried(self, call: Call, stands_in: Tensor) -> list[Tensor] | None:
        """The result for a tensor without data that lies in rows; None if there is none."""
        try:
            return tensors_in(call.function(stands_in, *call.args[1:], **call.kwargs))
        except Exception:
            return None

    def _reshaped(self, x: Tensor, rows: Rows, y: Tensor) -> Rows | None:
        """Numbers keep their order: (rounds, samples, all else)."""
        if rows.rounds == SCRAMBLED:
            return _along(rows, x, y)
        rest = x.numel() // max(math.prod(x.shape[: rows.dim]) * rows.rounds * self._samples, 1)
        behind = y.numel()
        for dim, size in enumerate(y.shape):
            behind //= max(size, 1)
            if behind <= rest and behind * size >= rest * self._samples:
                return Rows(dim, behind * size // (rest * self._samples))
        return Rows(0, SCRAMBLED)

    def _joined(self, call: Call, x: Tensor, given: Sequence[tuple[Tensor, Rows]]) -> Rows | None:
        first, rows = given[0]
        if any(other.dim != rows.dim for _, other in given):
            return None
        if x.dim() > first.dim():  # stacked
            dim = rows.dim if x.shape[rows.dim] == first.shape[rows.dim] else rows.dim + 1
            return Rows(dim, max(other.rounds for _, other in given))
        if x.dim() != first.dim() or x.shape[rows.dim] == first.shape[rows.dim]:
            return _followed(given, x)
        if x.shape[rows.dim] != sum(y.shape[rows.dim] for y, _ in given):
            return Rows(rows.dim, SCRAMBLED)  # with rows that are no samples
        each = {y.shape[rows.dim] // max(other.rounds, 1) for y, other in given}
        whole = len(each) == 1 and all(other.rounds for _, other in given)
        return Rows(rows.dim, sum(other.rounds for _, other in given) if whole else SCRAMBLED)


def _strided(shape: Sequence[int], rows: Rows, y: Tensor) -> Rows | None:
    """The dim of a view that has the stride of the samples' dim in a tensor that lies in rows."""
    size, stride = shape[rows.dim], math.prod(shape[rows.dim + 1 :])
    for dim, (found, step) in enumerate(zip(y.shape, y.stride(), strict=True)):
        if found == size and step == stride:
            return Rows(dim, rows.rounds)
    for dim, (found, step) in enumerate(zip(y.shape, y.stride(), strict=True)):
        if found > 1 and step == stride:  # a part of the rows
            each = size // max(rows.rounds, 1)
            return Rows(dim, found // each if rows.rounds and found % each == 0 else SCRAMBLED)
    return None


def _repeated(x: Tensor, rows: Rows, y: Tensor) -> Rows:
    dim = rows.dim + y.dim() - x.dim()
    return Rows(dim, rows.rounds * (y.shape[dim] // max(x.shape[rows.dim], 1)))


def _followed(given: Sequence[tuple[Tensor, Rows]], y: Tensor) -> Rows | None:
    """What is computed row by row."""
    found = [rows for x, r in given if (rows := _along(r, x, y)) is not None]
    if not found:
        return None
    alike = all(rows == found[0] for rows in found)
    return found[0] if alike else max(found, key=lambda rows: rows.rounds)


def _couples(call: Call, given: Sequence[tuple[Tensor, Rows]], y: Tensor, rows: Rows | None, samples: int) -> bool:
    """Whether an operation between units makes one thing of all samples, or compares each with each."""
    if call.is_unit or not y.is_floating_point() or all(value.stage is None for value in call.inputs):
        return False
    if call.name in _REDUCES and (rows is None or _is_over_samples(call, *given[0])):
        return True
    if call.name == "batch_norm":
        return bool(argument(call.args, call.kwargs, 5, "training", default=False))
    most = max(list(x.shape).count(samples) for x, _ in given)
    return call.name in _COMPARES and list(y.shape).count(samples) > max(most, 1)


def _is_over_samples(call: Call, x: Tensor, rows: Rows) -> bool:
    """Whether a reduction names the dim of the samples. Its result may seem to have them: as many of something else."""
    dims = argument(call.args, call.kwargs, STATISTICS.get(call.name, (1, None))[0], "dim", "axis")
    dims = [dims] if type(dims) is int else dims
    return isinstance(dims, (tuple, list)) and rows.dim in [dim % x.dim() for dim in dims]


def _along(rows: Rows, x: Tensor, y: Tensor) -> Rows | None:
    """Where a result has as many rows as what it is made of."""
    size = x.shape[rows.dim]
    for dim in (rows.dim, y.dim() - x.dim() + rows.dim):
        if 0 <= dim < y.dim() and y.shape[dim] == size:
            return Rows(dim, rows.rounds)
    dims = [dim for dim, found in enumerate(y.shape) if found == size]
    return Rows(dims[0], rows.rounds) if len(dims) == 1 else None


_RESHAPES = operation_names("view reshape flatten unflatten view_as reshape_as ravel")
_REDUCES = operation_names("mean sum std var std_mean var_mean amax amin max min norm vector_norm median quantile prod")
_COMPARES = operation_names("matmul __matmul__ mm bmm einsum cdist")
