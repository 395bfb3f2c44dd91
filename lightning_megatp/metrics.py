"""torchmetrics over the data-parallel ranks only: tensor ranks see the same samples, which must count once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors


def gather_metrics_over(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Let every metric of a module synchronise over a group, unless its user chose how.

    Set as `dist_sync_fn`, a plain function: `process_group` would make metrics impossible to copy (`metric.clone()`).
    """
    sync = _gather_over(group)
    for metric in module.modules():
        ours = getattr(metric, "dist_sync_fn", None)
        if isinstance(metric, Metric) and metric.process_group is None and (ours is None or hasattr(ours, "megatp")):
            metric.dist_sync_fn = sync


def _gather_over(group: dist.ProcessGroup) -> Callable[..., list[Tensor]]:
    def gather(tensor: Tensor, group: Any = None, own: dist.ProcessGroup = group) -> list[Tensor]:
        return gather_all_tensors(tensor, own)

    gather.megatp = True  # type: ignore[attr-defined]
    return gather
