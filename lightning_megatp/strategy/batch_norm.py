"""SyncBatchNorm over the ranks that see different samples."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn


class BatchNormGroups:
    """Lets every SyncBatchNorm of a module work over a group, unless its user chose one, until `leave`.

    Its default is the world, where pipeline stages, which call other norms or none, would wait for each other.

    Args:
        module: as it is split.
        group: the data-parallel ranks.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        norms = (child for child in module.modules() if isinstance(child, nn.SyncBatchNorm))
        self._norms = [norm for norm in norms if norm.process_group is None]
        for norm in self._norms:
            norm.process_group = group

    def leave(self) -> None:
        """A module that holds a process group could not be copied."""
        for norm in self._norms:
            norm.process_group = None
