"""Metrics that average what they are given (`torchmetrics.MeanMetric`), updated with a step's loss: with one number per
microbatch on the last stage, and in the end with what one batch would have given them. What other metrics give for a
batch, where they are logged themselves, is that of the batch, too."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torchmetrics import MaxMetric, MeanMetric, Metric, MinMetric, SumMetric
from torchmetrics.wrappers import Running

from lightning_megatp.calls import Intercepted
from lightning_megatp.detour import Detour, end_all
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.pipeline.told.logs import Call, Logs
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import DisableTorchFunction
from lightning_megatp.shim.torchmetrics import copy_of_batch, put_states, states_of

_KINDS = (MeanMetric, SumMetric, MaxMetric, MinMetric)


class Aggregates:
    """Stands in for `update` and `forward` of such metrics, from `open` to `close`.

    Args:
        module: holds them.
        logs: what they are given is recorded there, and merged, as what is logged.
    """

    def __init__(self, module: nn.Module, logs: Logs) -> None:
        self._module: Any = module
        self._metrics: dict[str, Metric] = {n: x for n, x in module.named_modules() if type(x) in _KINDS}
        self._logs = logs
        self._detours: list[Detour] = []
        self._before: dict[str, Any] = {}
        """Name -> the states that it had before the batch."""
        self._others: set[str] = set()
        """Those that were given anything else, too."""
        self._is_updating = self._is_paused = False
        self._beside: dict[str, Metric] = {}
        """Name -> a copy of another metric, which counts this batch alone."""
        self._met: Counter[str] = Counter()
        """How often each of these was called in this batch."""
        self._running = [name for name, x in module.named_modules() if isinstance(x, Running)]
        """Windows of so many updates, as long as nobody was told."""
        for name, metric in module.named_modules():
            forward = metric.__dict__.get("forward")
            if type(metric).forward is Metric.forward and type(metric) not in _KINDS and type(forward) is Intercepted:
                forward.put_around(functools.partial(self._call, name, metric))

    def open(self) -> None:
        """Stand in from now on."""
        for name, metric in self._metrics.items():
            for method in ("update", "forward"):
                self._detours.append(Detour(metric, method, functools.partial(self._update, name)))

    def close(self) -> None:
        """Give them their own methods back."""
        end_all(self._detours)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Around a step that is none of the batch's."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @property
    def _sees(self) -> bool:
        return self._logs.is_recording and not self._is_paused

    def _update(self, name: str, call: functools.partial[Any]) -> Any:
        if self._is_updating or not self._sees:
            return call()
        with DisableTorchFunction():  # these are no operations of the step
            if len(call.args) == 1 and not call.keywords and _is_number(call.args[0]):
                if name not in self._before:
                    self._before[name] = states_of(self._metrics[name])
                self._logs.record(name, call.args[0])
            else:
                self._others.add(name)
        return self._updating(call)

    def _call(
        self, name: str, metric: Metric, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A call of another metric, on the last stage."""
        if self._sees and name not in self._beside:
            self._beside[name] = copy_of_batch(metric)  # before its states have a graph
        made = forward(*args, **kwargs)
        if self._sees:
            with DisableTorchFunction(), torch.no_grad():
                args, kwargs = apply_to_collection((args, kwargs), Tensor, Tensor.detach)
                self._beside[name].update(*args, **kwargs)
            self._met[name] += 1
            if isinstance(made, Tensor):
                self._logs.made_by[id(made)] = made, name
        return made

    def _of_batch(self, call: Call, microbatches: int) -> Call:
        """What is logged of a metric that each microbatch has called once, itself or the number that it gave, is what
        it gives for all of them."""
        name = call.made_by
        if name is None or not call.entry.has_value or self._met[name] != microbatches:
            return call
        with self._module.trainer.precision_plugin.forward_context():  # as in a step
            value = self._beside[name].compute()
        is_number = isinstance(value, Tensor) and value.numel() == 1
        return replace(call, value=value.detach().to(call.value).reshape(())) if is_number else call

    def _updating(self, call: functools.partial[Any]) -> Any:
        self._is_updating = True
        try:
            return call()
        finally:
            self._is_updating = False

    def settle(self, microbatches: Sequence[Sequence[Call]], merged: Iterable[Call]) -> list[Call]:
        """After a batch: let the metrics that every microbatch gave as many numbers have those of the batch.

        Args:
            microbatches: what each recorded.
            merged: the same of the batch.

        Returns:
            Of these, what is to be logged.
        """
        if self._running and len(microbatches) > 1:
            warn_once_per_run(
                f"`{self._running[0]}` has a window of updates, and with pp > 1 a step updates it for each microbatch"
                f" ({len(microbatches)} of a batch). Update it in `on_train_batch_end`, by its `outputs`, or make its"
                " window that many times as long."
            )
            self._running = []
        logged, given = list[Call](), dict[str, list[Call]]()
        for call in merged:
            if call.entry.updates is None:
                logged.append(self._of_batch(call, len(microbatches)))
            else:
                given.setdefault(call.entry.updates, []).append(call)
        for name, calls in given.items():
            each = [[call for call in recorded if call.entry.updates == name] for recorded in microbatches]
            if name not in self._others and len(set(map(len, each))) == 1 and self._averages(name, each):
                put_states(self._metrics[name], self._before[name])
                for call in calls:
                    value = call.value.to(call.entry.dtype)
                    self._updating(functools.partial(self._metrics[name].update, value))
        self._before.clear()
        self._others.clear()
        for name in self._met:
            self._beside[name].reset()
        self._met.clear()
        self._logs.made_by.clear()
        return logged

    def _averages(self, name: str, each: Sequence[Sequence[Call]]) -> bool:
        """Whether a metric was given averages. Of other numbers a mean is as good as any; a sum, or a largest one, may
        be of counts, whose microbatches' make the batch's."""
        if type(self._metrics[name]) is MeanMetric:
            return True
        calls = [call for recorded in each for call in recorded]
        known = [call.count if call.count is not None else call.is_loss for call in calls]
        return all(x is not None and bool(torch.isfinite(x) & (x > 0)) for x in known)


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) or (isinstance(x, Tensor) and x.dim() == 0 and not is_fake(x))
