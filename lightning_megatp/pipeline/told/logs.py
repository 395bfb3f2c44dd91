"""`self.log` under a pipeline: called once per microbatch on the last stage, logged once per batch on every rank.

Callbacks (ModelCheckpoint, EarlyStopping, a plateau scheduler) run on all ranks and must decide alike, so what the last
stage logged for a batch is averaged over its microbatches, sent to the other stages, and logged everywhere.
"""

from __future__ import annotations

import contextlib
import numbers
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_megatp.messages import with_article
from lightning_megatp.pipeline.loss.averages import Averages, scalar
from lightning_megatp.shim.collectives import unrecorded
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torchmetrics import batch_value, set_batch_value


@dataclass(frozen=True)
class Entry:
    """What is logged under one name, without its numbers: the same for many batches."""

    name: str
    options: dict[str, Any]
    dtype: torch.dtype
    metric: str | None = None
    """The module's name of a torchmetrics object that was logged itself."""
    has_value: bool = True
    """False for a metric that was only updated, and gave nothing for this batch."""
    sized: bool = False
    """A batch size was logged with it."""
    updates: str | None = None
    """The name of a metric that was given the number; nothing was logged then."""


@dataclass(frozen=True)
class Call:
    """One call of `self.log`."""

    entry: Entry
    value: Tensor
    """() float64; nan without one."""
    is_loss: Tensor | None = None
    """() bool: whether it is what the step's loss is; None for no."""
    count: Tensor | None = None
    """() float64: how many values it is an average of; infinity for a sum, None if nobody knows."""
    over: Tensor | None = None
    """() float64: the same, but 0 for a count of nothing that was taken for something."""
    given: Tensor | float | None = None
    """What was logged, until it is compared."""
    size: Tensor | float | None = None
    """The batch size that was logged with it."""
    made_by: str | None = None
    """The module's name of a torchmetrics object that gave this number for its batch."""
    sums: str = ""
    """How it is a sum over a microbatch's samples that may not add up, see `Made.sums`."""

    def beside(self, loss: Tensor | None, averages: Averages | None, rows: int, batch: int) -> Call:
        """This call, compared with what its microbatch made.

        Args:
            loss: its own.
            averages: of the step; None if they don't matter.
            rows: its samples. What an earlier stage has made is taken for an average over them, whatever the loss is
                one of, unless a batch size was logged with it.
            batch: the samples of the batch.
        """
        device, call = self.value.device, replace(self, given=None)
        if loss is not None and loss.numel() == 1:
            call = replace(call, is_loss=(self.value == scalar(loss, device)))
        made = None if averages is None else averages.made(self.given)
        number = None if averages is None else averages.count_of(self.given)
        if averages is not None and number is None and self.size is None and averages.is_early(self.given):
            count = scalar(rows, device)
            return replace(call, count=count, over=count)
        if made is not None:
            call = replace(call, sums=made.sums(rows, batch))
        if made is not None and number is not None:
            count = scalar(number, device)
            call = replace(call, count=count, over=torch.where(scalar(made.empty, device) > 0, 0.0, count))
        return call


@dataclass
class Logs:
    """Stands in for the `log` of a LightningModule, from `open` to `close`.

    Args:
        module: the LightningModule.
        device: where values are logged.
    """

    module: nn.Module
    device: torch.device
    _calls: list[Call] | None = None
    """The calls of the microbatch or hook that is being recorded; None while calls go through."""
    _known: dict[bytes, int] = field(default_factory=dict)
    """Lists of entries that the other stages know, by their number."""
    _lists: list[list[Entry]] = field(default_factory=list)
    made_by: dict[int, tuple[Tensor, str]] = field(default_factory=dict)
    """By the identity of a number that a metric gave for a microbatch: that, and the metric's name."""
    _leaving: list[dist.Work] = field(default_factory=list)
    """What was sent last: the other stages may still compute, and this one need not wait for them."""

    def open(self) -> None:
        """Stand in from now on."""
        self._leaving = []  # of a run that failed
        self._log: Callable[..., None] = self.module.log  # type: ignore[assignment]
        self.module.__dict__["log"] = self

    def close(self) -> None:
        """Give the module its own `log` back."""
        self.module.__dict__.pop("log", None)

    def __call__(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        options |= dict(zip(_POSITIONAL, args, strict=False))
        if isinstance(value, Tensor) and is_fake(value):
            raise RuntimeError(
                f"MegaTPStrategy: self.log({name!r}, ...) was given a value without data: it is made of parameters or"
                " buffers of another pipeline stage, which this rank does not have. Outside of steps a rank reads those"
                " of its own stages; log it in the step (`training_step`, `validation_step`), which is given the"
                " others', too."
            )
        if self._calls is None or not _loggable(value):
            self._log(name, value, **options)  # what can't be logged is refused in Lightning's own words
            return
        self._calls.append(self._call(name, value, options))

    @property
    def is_recording(self) -> bool:
        """Whether a microbatch or hook is being recorded."""
        return self._calls is not None

    def record(self, metric: str, value: Tensor | float) -> None:
        """Note what a metric of this name is updated with."""
        assert self._calls is not None
        dtype = value.dtype if isinstance(value, Tensor) and value.is_floating_point() else torch.get_default_dtype()
        entry = Entry(f"update of {metric}", {}, dtype, updates=metric)
        self._calls.append(Call(entry, scalar(value, self.device), given=value))

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Call]]:
        """Keep calls instead of passing them on."""
        before, self._calls = self._calls, []
        try:
            yield self._calls
        finally:
            self._calls = before

    def send(
        self, calls: Sequence[Call], facts: Sequence[float | Tensor], hosts: dist.ProcessGroup, source: int
    ) -> list[float]:
        """Log everywhere. Called on the last stage, and `receive` on the others.

        Args:
            calls: as `merge` gives them.
            facts: n numbers, sent along.
            hosts: of the stages, for CPU tensors.

        Returns:
            The facts as the others get them.

        Communication: one broadcast of n + 3 + len(calls) float64, and of one per batch size, which is not waited for;
            the names only when they are new. What lies on a device is read once, all of it together.
        """
        for work in self._leaving:
            work.wait()
        entries = [call.entry for call in calls]
        described = pickle.dumps(entries)
        new = described not in self._known
        number = self._known.setdefault(described, len(self._known))
        values, sizes = [call.value for call in calls], [call.size for call in calls if call.size is not None]
        row = _on_host([float(number), float(new), *facts, *values, *sizes])
        self._leaving = _send_sized(torch.tensor(row, dtype=torch.float64), hosts, source)
        if new:
            dist.broadcast_object_list([described], src=source, group=hosts)
        self._replay(entries, values, row[len(row) - len(sizes) :])
        return row[2 : 2 + len(facts)]

    def receive(self, n_facts: int, hosts: dist.ProcessGroup, source: int) -> list[float]:
        """The other end of `send`: logs the same, and returns the facts."""
        row = _receive_sized(hosts, source)
        number, new, *facts = row[: 2 + n_facts].tolist()
        if new:
            box: list[Any] = [None]
            dist.broadcast_object_list(box, src=source, group=hosts)
            self._lists.append(pickle.loads(box[0]))
        entries, numbers = self._lists[int(number)], row[2 + n_facts :]
        values, sizes = numbers[: len(entries)], numbers[len(entries) :]
        self._replay(entries, values.to(self.device, non_blocking=True).unbind(), sizes.tolist())
        return facts

    def _call(self, name: str, value: Tensor | float | Metric, options: dict[str, Any]) -> Call:
        metric = self._metric_name(value, options) if isinstance(value, Metric) else None
        given = batch_value(value) if isinstance(value, Metric) else value
        dtype = given.dtype if isinstance(given, Tensor) and given.is_floating_point() else torch.get_default_dtype()
        size = options.pop("batch_size", None)
        entry = Entry(name, _portable(options), dtype, metric, given is not None, size is not None)
        made_by = metric or self.made_by.get(id(given), (None, None))[1]
        number = scalar(torch.nan if given is None else given, self.device)
        return Call(entry, number, size=size, given=given, made_by=made_by)

    def _metric_name(self, metric: Metric, options: dict[str, Any]) -> str:
        found = options.get("metric_attribute") or next(
            (name for name, child in self.module.named_modules() if child is metric), None
        )
        if found is None:
            raise RuntimeError(
                f"MegaTPStrategy: self.log was given {with_article(type(metric).__name__)} that is no attribute of"
                " the LightningModule, so the other pipeline stages can't know it. Make it one in `__init__`."
            )
        return str(found)

    def _replay(self, entries: Sequence[Entry], values: Iterable[Tensor], sizes: Sequence[float]) -> None:
        """Log on this stage what the last one has logged.

        Args:
            sizes: of those entries that have one.
        """
        remaining = iter(sizes)
        for entry, value in zip(entries, values, strict=True):
            value, options = value.to(entry.dtype), dict(entry.options)
            if entry.sized:
                size = next(remaining)
                options["batch_size"] = int(size) if size.is_integer() else size
            if entry.metric is None:
                self._log(entry.name, value, **options)
                continue
            metric: Any = self.module.get_submodule(entry.metric)
            set_batch_value(metric, value if entry.has_value else None)
            self._log(entry.name, metric, metric_attribute=entry.metric, **options)


def merge(
    microbatches: Sequence[Sequence[Call]], weights: Tensor, adds_up: bool = False, total: Tensor | None = None
) -> list[Call]:
    """What the microbatches logged, as one batch would have.

    The loss is averaged by the microbatches' weights. Any other number that a step averaged is averaged by what it
    averaged over, and a sum is added up; the rest is averaged by the batch sizes that were logged with it, or by the
    weights. Or values are summed, or the largest or smallest is taken, as `reduce_fx` says. What is logged several
    times under one name, in a loop maybe, stays several calls.

    Args:
        weights: (m,) float64.
        adds_up: whether the loss is the sum of the microbatches', not their mean.
        total: () float64, what their weighted sum is divided by; None for the weights' sum.
    """
    total = weights.sum() if total is None else total
    weights = torch.where(weights.sum() > 0, weights, torch.ones_like(weights))
    found: dict[tuple[str, int], list[tuple[Call, Tensor]]] = {}
    for calls, weight in zip(microbatches, weights.unbind(), strict=True):
        times: Counter[str] = Counter()
        for call in calls:
            found.setdefault((call.entry.name, times[call.entry.name]), []).append((call, weight))
            times[call.entry.name] += 1
    return [
        _merged([call for call, _ in pairs], torch.stack([w for _, w in pairs]), adds_up, total)
        for pairs in found.values()
    ]


def _merged(calls: list[Call], weights: Tensor, adds_up: bool, total_weight: Tensor) -> Call:
    entry, values = calls[-1].entry, torch.stack([call.value for call in calls])
    sizes = [call.size for call in calls if call.size is not None]
    sized = len(sizes) == len(calls)
    total = sum(sizes) if sized else None
    how = entry.options.get("reduce_fx", "mean")
    (made_by, *others) = {call.made_by for call in calls}
    made_by = None if others else made_by
    if how in ("sum", "max", "min"):
        return Call(replace(entry, sized=sized), getattr(values, how)(), size=total)
    given = torch.stack([scalar(size, values.device) for size in sizes]) if sized else weights
    value = _mean(values, given)
    if any(call.count is not None for call in calls):
        # `y.sum() * 0`, where there is nothing to average, is an average of nothing
        unknown = torch.where(values == 0, 0.0, torch.nan).unbind()
        counts = [u if call.count is None else call.count for call, u in zip(calls, unknown, strict=True)]
        overs = [u if call.over is None else call.over for call, u in zip(calls, unknown, strict=True)]
        of, over = torch.stack(counts), torch.stack(overs).sum()
        mean = (values * of).sum() / torch.where(over > 0, over, of.max())
        value = torch.where(torch.isfinite(of).all(), mean, value)
        value = torch.where(torch.isinf(of).all(), values.sum(), value)
    losses = [call.is_loss for call in calls if call.is_loss is not None]
    if len(losses) == len(calls):
        mean = (values * weights).sum() / torch.where(total_weight > 0, total_weight, weights.sum())
        loss = values.sum() if adds_up else mean
        value = torch.where(torch.stack(losses).all(), loss, value)
    return Call(replace(entry, sized=sized), value, size=total, made_by=made_by)


def _mean(values: Tensor, weights: Tensor) -> Tensor:
    return (values * weights).sum() / weights.sum()


def _loggable(value: Any) -> bool:
    return isinstance(value, (numbers.Number, Metric)) or (isinstance(value, Tensor) and value.numel() == 1)


def _portable(options: dict[str, Any]) -> dict[str, Any]:
    """Options that another rank understands: no process group, and functions by the names Lightning has for them."""
    kept = {name: value for name, value in options.items() if name not in ("metric_attribute", "sync_dist_group")}
    if callable(how := kept.get("reduce_fx")):
        kept["reduce_fx"] = how.__name__
    return kept


def _on_host(numbers: Sequence[float | Tensor]) -> list[float]:
    """Numbers, some of which lie on a device, which is waited for once."""
    away = [x for x in numbers if isinstance(x, Tensor) and x.device.type != "cpu"]
    read = iter(torch.stack(away).tolist() if away else ())
    return [next(read) if isinstance(x, Tensor) and x.device.type != "cpu" else float(x) for x in numbers]


def _send_sized(row: Tensor, group: dist.ProcessGroup, source: int) -> list[dist.Work]:
    """Broadcast a row whose length the receivers don't know: at first 64 numbers, and the rest if it is longer."""
    first = row.new_zeros(_ROW)
    first[0] = len(row)
    first[1 : 1 + len(row)] = row[: _ROW - 1]
    pieces = [first] if len(row) < _ROW else [first, row[_ROW - 1 :].clone()]
    with unrecorded():
        works = [dist.broadcast(piece, src=source, group=group, async_op=True) for piece in pieces]
    return [work for work in works if work is not None]


def _receive_sized(group: dist.ProcessGroup, source: int) -> Tensor:
    first = torch.empty(_ROW, dtype=torch.float64)
    dist.broadcast(first, src=source, group=group)
    length = int(first[0])
    if length < _ROW:
        return first[1 : 1 + length]
    rest = first.new_empty(length - _ROW + 1)
    dist.broadcast(rest, src=source, group=group)
    return torch.cat([first[1:], rest])


_ROW = 64
_POSITIONAL = (
    "prog_bar", "logger", "on_step", "on_epoch", "reduce_fx", "enable_graph", "sync_dist", "sync_dist_group",
    "add_dataloader_idx", "batch_size", "metric_attribute", "rank_zero_only",
)  # fmt: skip
