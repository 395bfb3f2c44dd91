"""Private names of torchmetrics. Seen in 1.5-1.8."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from torchmetrics import Metric


def batch_value(metric: Metric) -> Tensor | None:
    """What the last `metric(...)` gave for its batch, which Lightning logs on steps; None if it was only updated."""
    value: Any = metric._forward_cache
    return value.detach() if isinstance(value, Tensor) and value.numel() == 1 else None


def set_batch_value(metric: Metric, value: Tensor | None) -> None:
    """Let Lightning log this on steps."""
    metric._forward_cache = value  # type: ignore[assignment]


def copy_of_batch(metric: Metric) -> Metric:
    """A copy without updates. What it computes is what `metric(...)` gives for a batch: that of all ranks only where
    the user says so by `dist_sync_on_step`."""
    made = copy.deepcopy(metric)
    made._to_sync = metric.dist_sync_on_step  # from `sync_on_compute`, when it was made
    made.reset()
    return made


def states_of(metric: Metric) -> dict[str, Any]:
    """What an update changes; copies."""
    names = [*metric._defaults, "_update_count", "_computed"]
    return {name: copy.deepcopy(_detached(getattr(metric, name))) for name in names}


def put_states(metric: Metric, states: dict[str, Any]) -> None:
    """Undo updates since `states_of`."""
    for name, value in states.items():
        setattr(metric, name, value)


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x
