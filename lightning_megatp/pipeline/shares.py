"""What crosses a boundary between stages whose layers are split over tensor ranks: each rank sends its share.

The value is the same on all tensor ranks, so each sends 1 / t of it to its peer of the next stage, and the peers put
the shares together. Between machines that is 1 / t of the bytes on each link; inside a machine, where tensor ranks are
neighbours, one all-gather.
Source: Narayanan et al. 2021, section 4.1 (scatter/gather optimization).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatp.pipeline.slicing.plan import Relay
from lightning_megatp.shim.collectives import all_gather_single


@dataclass(frozen=True)
class Shares:
    """How tensor ranks divide what they send between them.

    Args:
        group: the tensor ranks of one stage; None, or one rank, sends values whole.

    Communication: (t - 1) / t of each value per received message, beside 1 / t of it from stage to stage.
    """

    group: dist.ProcessGroup | None = None

    def divides(self, relay: Relay) -> bool:
        """Whether a value is sent in shares: floating ones with an element for each rank."""
        size = 1 if self.group is None else self.group.size()
        return size > 1 and relay.dtype.is_floating_point and torch.Size(relay.shape).numel() >= size

    def take(self, x: Tensor, relay: Relay) -> Tensor:
        """What this rank sends of a value: contiguous; of a divided one (ceil(n / t),), the last shares padded."""
        if not self.divides(relay):
            return x.contiguous()
        flat, size = x.reshape(-1), self._size(relay)
        start = dist.get_rank(self.group) * size
        share = flat[start : start + size]
        return share.contiguous() if len(share) == size else torch.cat([share, flat.new_zeros(size - len(share))])

    def buffer(self, relay: Relay, device: torch.device) -> Tensor:
        """Where this rank's share is received."""
        shape = (self._size(relay),) if self.divides(relay) else relay.shape
        return torch.empty(shape, dtype=relay.dtype, device=device)

    def gather(self, share: Tensor, relay: Relay) -> Tensor:
        """The whole value, once this rank's share is there. Every tensor rank has to call it at the same point."""
        if not self.divides(relay):
            return share
        assert self.group is not None
        flat = share.new_empty(len(share) * self.group.size())
        all_gather_single(flat, share, group=self.group)
        return flat[: torch.Size(relay.shape).numel()].view(relay.shape)

    def _size(self, relay: Relay) -> int:
        assert self.group is not None
        return -(-torch.Size(relay.shape).numel() // self.group.size())
