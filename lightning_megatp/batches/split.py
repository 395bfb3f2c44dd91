"""Batches to microbatches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_megatp.batches.signature import is_sparse, tensors_of
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.plan.ranges import split_evenly


def split_batch(batch: Any, microbatches: int) -> list[Any]:
    """Split a batch along its batch dim, into parts of the same structure.

    The rule: the batch size is the size of dim 0 of the first tensor that has one. Tensors with as many rows are split
    along dim 0, and so are NumPy arrays, and lists in the batch of as many entries, one per row (strings, numbers,
    dicts, lists of them, tensors of other lengths), unless they hold tensors of as many rows, as default collation
    makes of tuples. It makes tuples of strings: these are split like lists, and so are those of dicts, which
    `zip(*samples)` makes, inside of a batch.
    Everything else (scalars, tables of another size, None) is given to every microbatch as it is. If that is not what a
    batch means, define `split_batch(self, batch, microbatches)` on the LightningModule, and return a list.

    Args:
        batch: tuples, lists, dicts and other mappings (Hugging Face's BatchEncoding), dataclasses, at any depth.
        microbatches: how many parts are wanted; batches with fewer rows give fewer parts, of one row each. Where rows
            do not divide, the first parts have one more.

    Raises:
        ValueError: no tensor with a batch dim, the first in a list of tensors of different lengths, or an object that
            can't be made of some rows; and more than one microbatch.
    """
    if microbatches == 1:
        return [batch]
    if is_ragged(batch):
        raise ValueError(
            f"MegaTPStrategy: a batch ({type(batch).__name__}) begins with a list of tensors of different lengths. If"
            " each is a sample, define `split_batch(self, batch, microbatches)` on the LightningModule, and, where"
            " microbatches may hold different numbers of samples, `loss_weight(self, batch)`; or use microbatches=1."
        )
    rows = batch_size(batch)
    if not rows:
        raise ValueError(
            f"MegaTPStrategy: a batch ({type(batch).__name__}) holds no tensor with rows in dim 0, so it can't be split"
            f" into microbatches={microbatches}. Define `split_batch(self, batch, microbatches)` on the"
            " LightningModule, or use microbatches=1."
        )
    parts = split_evenly(rows, min(microbatches, rows))
    try:
        if type(batch) in (list, tuple):  # of columns, however many there are
            return [type(batch)(_take(x, rows, start, stop) for x in batch) for start, stop in parts]
        return [_take(batch, rows, start, stop) for start, stop in parts]
    except Exception as error:
        raise ValueError(
            f"MegaTPStrategy: a batch ({type(batch).__name__}) can't be made anew of some of its rows:"
            f" {str(error).rstrip('.')}. To split it, {_REMEDY}"
        ) from error


def check_rows(batches: Mapping[int, Any]) -> None:
    """Refuse batches whose samples lie elsewhere than the rule has them.

    Args:
        batches: number of samples -> the batch that is made of them; two or more, or none to look at.

    Raises:
        ValueError: with as many samples as rows, something else of the batch grows than its first tensor.
    """
    firsts = {samples: _first(batch) for samples, batch in batches.items()}
    if not firsts or any(not isinstance(first, Tensor) or not len(first) for first in firsts.values()):
        return
    samples, batch = max(batches.items())
    if all(len(first) == samples for samples, first in firsts.items() if first is not None):
        *_, hidden = shapes = [[tuple(x.shape) for x in _hidden(b)] for b in batches.values()]
        if any(other != hidden for other in shapes):
            raise ValueError(
                f"MegaTPStrategy: a batch ({type(batch).__name__}) holds tensors that grow with its samples inside of"
                f" an object, here of shape {hidden[0] if hidden else ()}, which would be given to every microbatch as"
                f" it is. To split it, {_REMEDY}"
            )
        return _check_others(batches)
    shape = tuple(firsts[samples].shape)  # type: ignore[union-attr]
    others = zip(*([len(x) for x in tensors_of(b) if x.dim() > 0] for b in batches.values()), strict=False)
    if all(isinstance(b, list) and len(b) == n for n, b in batches.items()):
        where = f"the batch is a list with as many entries as samples, each of shape {shape}"
    elif any(list(lengths) == [*batches] for lengths in zip(*map(_lists_around_first, batches.values()), strict=False)):
        where = f"that one is in a list with as many entries as samples, each of shape {shape}"
    elif all(isinstance(x, Tensor) and x.dim() > 1 and x.shape[1] == n for n, x in firsts.items()):
        where = f"its shape is {shape}: dim 1 has as many entries as samples (`batch_first=True` would change that)"
    elif any(list(lengths) == [n + more for n in batches] for lengths in others for more in (0, 1)):
        where = f"that one has {shape[0]} rows, and another tensor as many as samples (or one more: where each begins)"
    else:
        return
    raise ValueError(
        f"MegaTPStrategy: microbatches are made of the rows (dim 0) of a batch's first tensor, and in a batch"
        f" ({type(batch).__name__}) of {samples} samples {where}. Put samples in the rows of the first tensor, or"
        f" {_REMEDY}"
    )


def _check_others(batches: Mapping[int, Any]) -> None:
    """Check that no tensor has several rows for each sample where the first one has one: the rule gives it to each
    microbatch.

    Raises:
        ValueError: a tensor has.

    Warns:
        UserWarning: a number is that of samples.
    """
    samples, batch = max(batches.items())
    for tensors in zip(*(filter(Tensor.dim, tensors_of(b)) for b in batches.values()), strict=False):
        per_sample = {len(x) / n for x, n in zip(tensors, batches, strict=True)}
        if len(per_sample) == 1 and (several := per_sample.pop()) > 1 and several.is_integer():
            shape = next(tuple(x.shape) for x, n in zip(tensors, batches, strict=True) if n == samples)
            raise ValueError(
                f"MegaTPStrategy: a batch ({type(batch).__name__}) of {samples} samples holds a tensor of shape"
                f" {shape}, {several:.0f} rows a sample, which would be given to every microbatch as it is. To split"
                f" it, {_REMEDY}"
            )
    counts = zip(*map(_counts, batches.values()), strict=False)
    if len(batches) > 1 and any(list(numbers) == [*batches] for numbers in counts):
        warn_once_per_run(
            f"a batch ({type(batch).__name__}) holds a number that is that of its samples. Every microbatch is given"
            " the whole batch's: a mean by it (`loss.sum() / batch['n']`) would be that much too small. Take the number"
            " of rows from a tensor, or define `split_batch(self, batch, microbatches)` on the LightningModule."
        )


def _counts(batch: Any) -> list[int]:
    """The integers in a batch."""
    found: list[int] = []
    apply_to_collection(batch, int, found.append, wrong_dtype=bool)
    return found


def check_dense(batch: Any) -> None:
    """Refuse sparse tensors: how many elements a microbatch has of one, and so what a step does, depends on values.

    Raises:
        ValueError: the batch holds one.
    """
    for sparse in filter(is_sparse, tensors_of(batch)):
        raise ValueError(
            f"MegaTPStrategy: a batch ({type(batch).__name__}) holds a tensor of shape {tuple(sparse.shape)} and layout"
            f" {sparse.layout}. With pp > 1 tensors of a batch have to be dense: let `on_after_batch_transfer`, or the"
            " loader, call `to_dense()`, or hand on its indices and values as tensors of their own."
        )


def check_columns(batches: Mapping[int, Any], batch: Any) -> None:
    """Refuse a batch some of whose columns have as many entries as it has rows, and would be cut like them, though
    they don't grow with its samples: names of variables, weights of classes.

    Args:
        batches: as for `check_rows`.
        batch: of the size that is trained with. One sample is not cut.

    Raises:
        ValueError: it has one.
    """
    rows = batch_size(batch)
    of_samples = [list(_columns(b)) for b in batches.values()]
    if rows in (None, 1) or len(of_samples) < 2 or len(set(map(len, of_samples))) > 1:
        return
    if any(set(lengths) == {rows} for lengths in zip(*of_samples, strict=True)):
        raise ValueError(
            f"MegaTPStrategy: a batch ({type(batch).__name__}) has {rows} rows, and a column of {rows} entries however"
            " many samples it is made of (names of variables, weights of classes), which would be split like the rows."
            f" Use another batch size, keep that column on the LightningModule, or {_REMEDY}"
        )


def _columns(batch: Any) -> Iterator[int]:
    """The lengths of what a batch may be split along: tensors, arrays, lists of anything else, and tuples of texts."""
    found: list[int] = []
    for entry in batch if type(batch) in (list, tuple) else [batch]:
        _find_lengths(entry, found)
    yield from found


def _find_lengths(entry: Any, found: list[int]) -> None:
    def note(x: Any) -> Any:
        if isinstance(x, (Tensor, np.ndarray)):
            found.extend([len(x)] if x.ndim > 0 else [])
        elif any(True for _ in _in_lists(x)):
            for item in x:
                _find_lengths(item, found)
        elif isinstance(x, list) or _one_per_row(x, len(x)):
            found.append(len(x))
        return x

    apply_to_collection(entry, (Tensor, np.ndarray, list, tuple), note)


_REMEDY = (
    "define `split_batch(self, batch, microbatches)` on the LightningModule, which returns a list, or use"
    " microbatches=1."
)


def _hidden(batch: Any) -> list[Tensor]:
    """The tensors of objects in a batch that the rule does not look into, and gives to each microbatch."""
    first, *_, last = split_batch(batch, batch_size(batch) or 1)
    given = {id(x) for x in tensors_of(first)} & {id(x) for x in tensors_of(last)}
    seen: set[int] = set()

    def note(x: Tensor) -> Tensor:
        seen.add(id(x))
        return x

    apply_to_collection(batch, Tensor, note)
    return [x for x in tensors_of(batch) if id(x) in given - seen]


def batch_size(batch: Any) -> int | None:
    """Rows of the first tensor that has a dim 0, or the number of samples in a list of different lengths; None without
    one."""
    first = _first(batch)
    return None if first is None else len(first)


def is_ragged(batch: Any) -> bool:
    """Whether its first tensor with rows is one of many samples, it seems, rather than a column."""
    return _different_lengths(_first(batch))


def _take(batch: Any, rows: int, start: int, stop: int) -> Any:
    def part(x: Any) -> Any:
        if isinstance(x, (Tensor, np.ndarray)):
            return x[start:stop] if x.ndim > 0 and len(x) == rows else x
        if isinstance(x, tuple):
            if len(x) == rows and not hasattr(x, "_fields") and _one_per_row(x, rows):
                return x[start:stop]
            items = [_take(y, rows, start, stop) for y in x]
            return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
        if len(x) == rows and not _have_rows(_in_lists(x), rows):
            return x[start:stop]
        return [_take(item, rows, start, stop) for item in x]

    return apply_to_collection(batch, (Tensor, np.ndarray, list, tuple), part)


def _one_per_row(x: tuple[Any, ...], rows: int) -> bool:
    """Whether a tuple of as many entries as rows holds samples: strings, or dicts that are no columns."""
    if all(isinstance(y, (str, bytes)) for y in x):
        return True
    return all(isinstance(y, Mapping) for y in x) and not _have_rows(tensors_of(x), rows)


def _have_rows(tensors: Iterable[Tensor], rows: int) -> bool:
    """Whether there are tensors, and all are columns of the batch."""
    tensors = list(tensors)
    return bool(tensors) and all(x.dim() > 0 and len(x) == rows for x in tensors)


def _in_lists(x: Any) -> Iterator[Tensor]:
    """The tensors of a list and of lists and tuples in it. If each has the batch's rows, these are its columns."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for item in x:
            yield from _in_lists(item)


def _first(batch: Any) -> Tensor | list[Any] | None:
    """The first tensor that has a dim 0, or the list of different lengths that holds it."""
    found: list[Tensor | list[Any]] = []
    _find_with_rows(batch, found)
    return found[0] if found else None


def _find_with_rows(batch: Any, found: list[Tensor | list[Any]]) -> None:
    """Add the tensors that have a dim 0, and the lists of different lengths, in their order. (A closure that called
    itself would hold them until garbage is collected.)"""

    def note(x: Any) -> Any:
        if _different_lengths(x) or (isinstance(x, Tensor) and x.dim() > 0):
            found.append(x)
        elif isinstance(x, list):
            for item in x:
                _find_with_rows(item, found)
        return x  # a dataclass is made anew, and may check what it is given

    apply_to_collection(batch, (Tensor, list), note)


def _lists_around_first(batch: Any) -> list[int]:
    """The lengths of the lists and tuples that hold the first tensor which has a dim 0, from the outermost on."""
    if isinstance(batch, (list, tuple)):
        entries: Iterable[Any] = batch
    elif isinstance(batch, Mapping):
        entries = batch.values()
    elif is_dataclass(batch) and not isinstance(batch, type):
        entries = (getattr(batch, field.name) for field in fields(batch))
    else:
        return []
    holder = next((entry for entry in entries if _first(entry) is not None), None)
    own = [len(batch)] if isinstance(batch, (list, tuple)) else []
    return own + _lists_around_first(holder)


def _different_lengths(x: Any) -> bool:
    """Whether it is a list of tensors, or of what begins with one, that are of one kind but of different lengths."""
    firsts = [_first(item) for item in x] if isinstance(x, list) else []
    tensors = [first for first in firsts if isinstance(first, Tensor)]
    same_kind = len(tensors) == len(firsts) and len({(y.dtype, y.dim()) for y in tensors}) == 1
    return same_kind and len(set(map(len, tensors))) > 1
