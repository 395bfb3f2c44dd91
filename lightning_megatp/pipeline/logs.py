"""`self.log` under a pipeline: called once per microbatch on the last stage, logged once per batch on every rank.

Callbacks (ModelCheckpoint, EarlyStopping, a plateau scheduler) run on all ranks and must decide alike, so what the last
stage logged for a batch is averaged over its microbatches, sent to the other stages, and logged everywhere.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric


@dataclass
class Entry:
    """One call of `self.log`, without its value."""

    name: str
    options: dict[str, Any]
    metric: str | None = None
    """The module's name of a torchmetrics object that was logged itself."""


@dataclass
class Logs:
    """Stands in for the `log` of a LightningModule.

    Args:
        module: the LightningModule.
    """

    module: nn.Module
    _calls: list[tuple[Entry, Any]] | None = None
    """Of the microbatch or hook that is being recorded; None while calls go through."""
    _known: dict[bytes, int] = field(default_factory=dict)
    """Lists of entries that the other stages know, by their number."""
    _lists: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._log: Callable[..., None] = self.module.log  # type: ignore[assignment]
        self._metrics = {id(child): name for name, child in self.module.named_modules() if isinstance(child, Metric)}
        self.module.__dict__["log"] = self

    def close(self) -> None:
        """Give the module its own `log` back."""
        self.module.__dict__.pop("log", None)

    def __call__(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        if self._calls is None:
            self._log(name, value, *args, **options)
            return
        options |= dict(zip(_POSITIONAL, args, strict=False))
        metric = self._metrics.get(id(value)) if isinstance(value, Metric) else None
        value = value.detach() if isinstance(value, Tensor) else value
        self._calls.append((Entry(name, options, metric), value))

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[tuple[Entry, Any]]]:
        """Keep calls instead of passing them on."""
        before, self._calls = self._calls, []
        try:
            yield self._calls
        finally:
            self._calls = before

    def send(self, entries: Sequence[Entry], values: Sequence[Tensor], numbers: Tensor, group: dist.ProcessGroup,
             source: int) -> Tensor:  # fmt: skip
        """Tell the other stages, and log everywhere. Called on the last stage.

        Args:
            entries: what was logged.
            values: scalars, beside them; for metrics what they gave for this batch.
            numbers: (n,) float64, sent along.

        Communication: one broadcast of n + 3 + len(values) float64; the names only when they are new.
        """
        described = pickle.dumps([(e.name, _portable(e.options), e.metric) for e in entries])
        new = described not in self._known
        number = self._known.setdefault(described, len(self._known))
        head = torch.tensor([float(number), float(new), float(len(values))], dtype=torch.float64, device=numbers.device)
        row = torch.stack([v.to(numbers.device, torch.float64) for v in values]) if values else numbers.new_empty(0)
        _broadcast_sized(torch.cat([head, numbers, row]), group, source)
        if new:
            dist.broadcast_object_list([described], src=source, group=group)
        return numbers

    def receive(self, numbers: Tensor, group: dist.ProcessGroup, source: int) -> Tensor:
        """The other end of `send`: logs the same, and returns the numbers. `numbers` says how many there are."""
        row = _broadcast_sized(None, group, source, numbers)
        number, new, _ = row[:3].tolist()
        if new:
            box: list[Any] = [None]
            dist.broadcast_object_list(box, src=source, group=group)
            self._lists.append(box[0])
        n = len(numbers)
        self.replay([Entry(*e) for e in pickle.loads(self._lists[int(number)])], list(row[3 + n :].unbind()))
        return row[3 : 3 + n]

    def replay(self, entries: Sequence[Entry], values: Sequence[Any]) -> None:
        """Log for the whole batch."""
        metrics = dict(self.module.named_modules())
        for entry, value in zip(entries, values, strict=True):
            if entry.metric is None:
                self._log(entry.name, value, **entry.options)
            else:
                metric: Any = metrics[entry.metric]
                if metric._forward_cache is None:
                    metric._forward_cache = value
                self._log(entry.name, metric, **entry.options)


def merge(microbatches: Sequence[Sequence[tuple[Entry, Any]]], weights: Tensor) -> tuple[list[Entry], list[Any]]:
    """What the microbatches logged, as one batch would have.

    A value is averaged by the microbatches' weights, or summed, or the largest or smallest one is taken, as its
    `reduce_fx` says. Of metrics the last microbatch's object stays: it has seen them all.
    """
    order: dict[str, Entry] = {}
    found: dict[str, list[tuple[Any, Tensor]]] = {}
    for calls, weight in zip(microbatches, weights.unbind(), strict=True):
        for entry, value in calls:
            order.setdefault(entry.name, entry)
            found.setdefault(entry.name, []).append((value, weight))
    return list(order.values()), [_reduce(order[name], found[name]) for name in order]


def _reduce(entry: Entry, found: list[tuple[Any, Tensor]]) -> Any:
    if isinstance(found[0][0], Metric):
        return found[-1][0]
    weights = torch.stack([weight for _, weight in found]).double()
    values = torch.stack([torch.as_tensor(v, dtype=torch.float64, device=weights.device).reshape(()) for v, _ in found])
    how = entry.options.get("reduce_fx", "mean")
    name = how if isinstance(how, str) else getattr(how, "__name__", "mean")
    if name in ("sum", "max", "min"):
        return getattr(values, name)()
    return (values * weights).sum() / weights.sum()


def metric_value(value: Any) -> Tensor:
    """A logged value as a scalar to send; for a metric what it gave for this batch, nan if it gave nothing."""
    if isinstance(value, Metric):
        value = value._forward_cache
    usable = isinstance(value, Tensor) and value.numel() == 1
    return value.detach().double().reshape(()) if usable else torch.tensor(torch.nan, dtype=torch.float64)


def _broadcast_sized(row: Tensor | None, group: dist.ProcessGroup, source: int, like: Tensor | None = None) -> Tensor:
    """Broadcast a row whose length the receivers don't know: at first 64 numbers, and the rest if it is longer."""
    given = row if row is not None else like
    assert given is not None
    first = torch.zeros(_ROW, dtype=torch.float64, device=given.device)
    if row is not None:
        first[0] = len(row)
        first[1 : 1 + len(row)] = row[: _ROW - 1]
    dist.broadcast(first, src=source, group=group)
    length = len(row) if row is not None else int(first[0])
    if length < _ROW:
        return first[1 : 1 + length]
    rest = row[_ROW - 1 :].clone() if row is not None else first.new_empty(length - _ROW + 1)
    dist.broadcast(rest, src=source, group=group)
    return torch.cat([first[1:], rest])


def _portable(options: dict[str, Any]) -> dict[str, Any]:
    """Without the metric itself, which Lightning finds by its attribute, and without process groups."""
    return {name: value for name, value in options.items() if name not in ("metric_attribute", "sync_dist_group")}


_ROW = 64
_POSITIONAL = (
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group",
    "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only",
)  # fmt: skip
