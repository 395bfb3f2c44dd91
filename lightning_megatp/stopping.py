"""All ranks stop after the same batch once one of them was told to."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatp.shim.collectives import unrecorded


class Stopping:
    """A rank that is told to stop (SIGTERM) notes it; the ranks agree where all of them come by.

    A signal comes at any moment, and a collective of its own there could meet another one of the peers.

    Args:
        hosts: the world, for CPU tensors.
        carried: whether the message of every batch reaches all ranks, from rank 0. Then it carries the note too, and
            nothing else is sent. The other ranks' notes get to rank 0 by `tell`.
        tell: hands this rank's note to rank 0, at once and without a collective.
        agreed: called on every rank when all of them know.

    Communication: by `carry` none of its own; by `meet` one all-reduce of an element over the world, which has the time
    until the next call to finish.
    """

    def __init__(
        self, hosts: dist.ProcessGroup, carried: bool, tell: Callable[[], None], agreed: Callable[[], None]
    ) -> None:
        self.carried = carried
        self.noted = False
        self._hosts = hosts
        self._tell, self._agreed = tell, agreed
        self._under_way: tuple[Tensor, dist.Work] | None = None

    def note(self) -> None:
        """This rank shall stop. Safe in a signal handler: nothing here waits for another rank."""
        if not self.noted:
            self.noted = True
            self._tell()

    def hear(self, note: bool) -> None:
        """What the message of a batch carried, on every rank."""
        if note and self.carried:
            self._agreed()

    def meet(self, last: bool = False) -> bool:
        """Whether a rank had noted it when all of them called this before; the last time, whether one has by now."""
        notes = [self._under_way, self._send()]
        self._under_way = None if last else notes.pop()
        found = [_wait(*note) for note in notes if note is not None]
        if any(found):
            self._agreed()
        return any(found)

    def _send(self) -> tuple[Tensor, dist.Work]:
        note = torch.tensor(int(self.noted))
        with unrecorded():
            return note, dist.all_reduce(note, op=dist.ReduceOp.MAX, group=self._hosts, async_op=True)


def _wait(note: Tensor, work: dist.Work) -> bool:
    work.wait()
    return bool(note)
