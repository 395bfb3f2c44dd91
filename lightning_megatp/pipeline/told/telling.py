"""What the last pipeline stage tells the others after a batch or a hook: only there are losses, logs, and what a step
leaves on the module."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatp.mesh import ParallelMesh, on_cpu
from lightning_megatp.pipeline.slicing.state.tables import Tables
from lightning_megatp.pipeline.told.held_tensors import Change, adopt
from lightning_megatp.pipeline.told.logs import Call, Logs
from lightning_megatp.snapshots.leftovers import Path, PlainValues, name_of

Options = list[list[dict[str, Any]]]
"""The options of optimizers, group by group, without tensors and what belongs to parameters."""


class Facts(NamedTuple):
    """What the last stage tells the others of a batch; they get numbers."""

    loss: Any = 0.0
    factor: Any = 1.0
    """That makes the weights of the microbatches add up to 1."""
    dtype: float = 0
    """The dtype of the loss, by its place in `_DTYPES`."""
    left_state: float = 0
    """Whether the step left something on the module there."""
    returns_more: float = 0
    """Whether it returned more than a loss."""
    set_values: float = 0
    """Bytes of the Python values that it set."""
    stop: float = 0
    """Whether `trainer.should_stop` was set."""
    goes_on: float = 0
    """Whether its step needed the others after all that its plan says."""
    again: float = 0
    """Whether it needed them when they had finished: the batch has to be run again."""
    has_loss: float = 0
    """Whether it returned a loss."""

    def loss_on(self, device: torch.device) -> Tensor:
        """The loss in its own dtype; shape ()."""
        return torch.full((), self.loss, dtype=_DTYPES[int(self.dtype)], device=device)


_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of losses."""


def dtype_index(loss: Tensor) -> int:
    """`Facts.dtype`."""
    return _DTYPES.index(loss.dtype) if loss.dtype in _DTYPES else 0


class Telling:
    """From the last stage to the others of one copy of the model.

    Args:
        mesh: who is where.
        logs: of the pipeline.
        opened: the modules around the units, by name, whose Python values are told.
        outside: the modules in no unit, by name, whose tensors are told.
        set_options: takes those of the optimizers' groups.
        tables: which steps keep, outside of units.
    """

    def __init__(
        self,
        mesh: ParallelMesh,
        logs: Logs,
        opened: Mapping[str, nn.Module],
        outside: Mapping[str, nn.Module],
        set_options: Callable[[Options], None],
        tables: Tables,
    ) -> None:
        self._mesh, self._logs, self._opened, self._outside = mesh, logs, opened, outside
        self._set_options, self._tables = set_options, tables

    def share(self, calls: Sequence[Call], facts: Sequence[float | Tensor]) -> list[float]:
        """Log everywhere what the last stage logged, and return its facts.

        Args:
            calls: of the last stage.
            facts: likewise; from the other stages their number counts.

        Communication: see `Logs.send`.
        """
        hosts, source = self._mesh.hosts("pp"), self._mesh.ranks("pp")[0]
        if not self._mesh.is_last_stage:
            return self._logs.receive(len(facts), hosts, source)
        return self._logs.send(calls, facts, hosts, source)

    def send_values(self, pickled: bytes) -> None:
        """What `pickled` has made, or other bytes; the others were told their length, and `adopt` or receive them.

        Communication: one broadcast over pp between the hosts, unless it is empty.
        """
        if pickled:
            row = torch.frombuffer(bytearray(pickled), dtype=torch.uint8)
            dist.broadcast(row, src=self._mesh.ranks("pp")[0], group=self._mesh.hosts("pp"))

    def receive_values(self, size: int) -> bytes:
        """The other end of `send_values`."""
        if not size:
            return b""
        row = torch.empty(size, dtype=torch.uint8)
        dist.broadcast(row, src=self._mesh.ranks("pp")[0], group=self._mesh.hosts("pp"))
        return row.numpy().tobytes()

    def adopt(self, size: int) -> list[Path]:
        """Set what `send_values` sent. Where numbers were others here."""
        if not size:
            return []
        values, tensors, options, tables = pickle.loads(self.receive_values(size))
        self._set_options(options)
        self._tables.adopt(tables, self._mesh.device)
        adopt(self._outside, tensors, self._mesh.device)
        return PlainValues(self._opened).adopt(values)

    def warn_late(self, paths: Sequence[Path]) -> None:
        """Warn of values that a step sets and others read. One of the ranks that notice does so: global rank 0, which
        says everything else, has the values in time."""
        if [self._mesh.rank(axis) for axis in ("pp", "dp", "tp")] == [1, 0, 0]:
            for path in paths:
                warnings.warn(
                    f"MegaTPStrategy: the step sets `{name_of(path)}`, which other pipeline stages than the last learn"
                    " after the batch: in the microbatches of one batch, they find the value from before it. If they"
                    " read it, set it in `on_train_batch_end`, or use microbatches=1.",
                    stacklevel=2,
                )


def pickled(
    values: Mapping[Any, bytes],
    tensors: Mapping[Any, Change] | None = None,
    options: Options | None = None,
    tables: Mapping[int, Any] | None = None,
) -> bytes:
    """Python values, tensors, options of optimizers and tables that a step or a hook has set; empty if there are
    none."""
    told = values, tensors or {}, options or [], on_cpu(tables or {})
    return pickle.dumps(told) if any(told) else b""


def options_of(optimizers: Iterable[Optimizer]) -> Options:
    """What hooks may change: rates, momenta, betas."""
    return [
        [{name: x for name, x in group.items() if _is_plain(x)} for group in optimizer.param_groups]
        for optimizer in optimizers
    ]


def set_options(optimizers: Iterable[Optimizer], options: Options) -> None:
    """Give the optimizers' groups such options."""
    for optimizer, groups in zip(optimizers, options, strict=False):
        for group, new in zip(optimizer.param_groups, groups, strict=False):
            group.update(new)


def _is_plain(x: Any) -> bool:
    parts = x if isinstance(x, tuple) else (x,)
    return all(isinstance(part, (bool, int, float, str)) for part in parts)
