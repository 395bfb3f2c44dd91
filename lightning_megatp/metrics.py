"""torchmetrics over ranks that see the same samples, which must count once, and over stages of which one sees them."""

from __future__ import annotations

import contextlib
import functools
import io
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_megatp.detour import Detour, end_all
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.shim.torch import tree_map
from lightning_megatp.snapshots.snapshot import modules_on


def gather_metrics_over(owners: Iterable[Any], group: dist.ProcessGroup) -> None:
    """Let every metric synchronise over a group, unless its user chose how.

    Set as `dist_sync_fn`: `process_group` would make metrics impossible to copy (`metric.clone()`).

    Args:
        owners: the LightningModule, and callbacks.
    """
    sync = _GatherOver(group)
    for metric in (x for owner in owners for x in modules_on(owner)):
        chosen = getattr(metric, "dist_sync_fn", None)
        is_ours = chosen is None or isinstance(chosen, _GatherOver)
        if isinstance(metric, Metric) and metric.process_group is None and is_ours:
            metric.dist_sync_fn = sync


class _GatherOver:
    """Gathers over a group. Copies of a metric have the same one; a pickled metric, as among the hyperparameters of a
    checkpoint, has none: there `dist_sync_fn` is None, as it was."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        return gather_all_tensors(tensor, self._group)

    def __deepcopy__(self, memo: dict[int, Any]) -> _GatherOver:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class LastStageMetrics:
    """Metrics are updated on the last pipeline stage; what they `compute` between steps is given on all stages.

    Lightning computes logged metrics at the end of an epoch on every rank, and so do users in their hooks; but a
    progress bar does it on rank 0 alone, and earlier. So the last stage leaves its value in the store, where the others
    find it whenever they ask: no two ranks have to call at the same moment, or equally often.

    Args:
        module: holds the metrics.
        mesh: who is where.
        store: where values are left.
        timeout: how long another stage waits for one.

    Communication: one object broadcast over pp at construction.
    """

    def __init__(self, module: nn.Module, mesh: ParallelMesh, store: dist.Store, timeout: timedelta) -> None:
        self._module, self._mesh, self._timeout = module, mesh, timeout
        name = [uuid.uuid4().hex]
        dist.broadcast_object_list(name, src=mesh.ranks("pp")[0], group=mesh.group("pp"))
        self._store = dist.PrefixStore(f"megatp/metrics/{name[0]}", store)
        self._detours: list[Detour] = []
        self._apart = False
        self._counts_resets = True
        self._batches = 0
        self.resets: list[float] = []
        """How often each metric was reset, or called by a hook, since the last batch: what it computes now is something
        else than before."""
        self._left: dict[str, int] = {}
        """Key -> number of batches that were over then."""

    def open(self) -> None:
        """Stand in for the `compute` of every metric, and follow what changes it, until `close`."""
        metrics = list(_metrics_of(self._module))
        self.resets = [0.0] * len(metrics)
        for index, (_, metric) in enumerate(metrics):
            self._detours.append(Detour(metric, "compute", functools.partial(self._compute, index)))
            change = functools.partial(self._change, index)
            # one that is called resets itself, computes, and then puts back what it had
            self._detours += [Detour(metric, method, change) for method in ("reset", "forward")]

    def close(self) -> None:
        """Give the metrics their own methods back."""
        end_all(self._detours)

    @property
    def are_apart(self) -> bool:
        """Whether the stages do different things now."""
        return self._apart

    @property
    def in_hook(self) -> bool:
        """Whether the last stage alone runs one of the user's hooks now."""
        return self._apart and self._counts_resets

    def next_batch(self) -> None:
        """Metrics are updated now: what was computed before is over. All stages call this alike."""
        self._batches, self.resets = self._batches + 1, [0.0] * len(self.resets)

    @contextlib.contextmanager
    def apart(self, counts_resets: bool = False) -> Iterator[None]:
        """Meanwhile the stages do different things: each computes for itself.

        Args:
            counts_resets: of the last stage, whose `resets` are then told to the others. In steps metrics reset
                themselves.
        """
        before = self._apart, self._counts_resets
        self._apart, self._counts_resets = True, counts_resets
        try:
            yield
        finally:
            self._apart, self._counts_resets = before

    def _change(self, index: int, method: Callable[[], Any]) -> Any:
        result = method()
        self.resets[index] += self._counts_resets
        return result

    def _compute(self, index: int, compute: Callable[[], Any]) -> Any:
        if self._apart:
            return compute()
        key = f"{self._batches}/{index}/{self.resets[index]}"
        if not self._mesh.is_last_stage:
            return self._take(key, index)
        with self.apart():  # a metric of metrics
            value = compute()
        self._leave(key, value)
        return value

    def _leave(self, key: str, value: Any) -> None:
        file = io.BytesIO()
        torch.save(tree_map(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, value), file)
        self._store.set(key, file.getvalue())  # type: ignore[arg-type]  # bytes are taken as they are
        # The others have begun every batch that is over here, so nobody asks for what was left before.
        for old in [old for old, batches in self._left.items() if batches < self._batches]:
            self._store.delete_key(old)
            del self._left[old]
        self._left[key] = self._batches

    def _take(self, key: str, index: int) -> Any:
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not self._store.check([key]):  # not `wait`, which would keep others from the store
            if time.monotonic() > deadline:
                name, _ = list(_metrics_of(self._module))[index]
                raise RuntimeError(
                    f"MegaTPStrategy: the last pipeline stage did not compute the metric `{name}`, and this one asks"
                    " for its value. Call `compute` on all ranks, or on global rank 0 alone."
                )
            time.sleep(0.001)
        return torch.load(io.BytesIO(self._store.get(key)), map_location=self._mesh.device, weights_only=False)


def _metrics_of(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """By name; of those that are in lists or dicts, by class."""
    names = {child: name for name, child in module.named_modules()}
    for child in modules_on(module):
        if isinstance(child, (Metric, MetricCollection)):
            yield names.get(child, type(child).__name__), child
