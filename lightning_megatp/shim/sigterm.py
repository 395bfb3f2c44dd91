"""SIGTERM without a collective in the signal handler, or one of its own per batch.

Private names touched, as of Lightning 2.5 and 2.6: `Trainer._signal_connector`, with `_sigterm_notifier_fn` and
`received_sigterm`; the `_broadcast_sigterm_tensor` of 2.6's epoch loop, or the `advance` of 2.5's. In 2.6 the handler
broadcasts from whatever the rank is doing, and can meet another collective; and every training batch begins with a
broadcast of rank 0's flag. In 2.5 each rank stops after the batch in which its own signal came.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch.distributed as dist

log = logging.getLogger(__name__)


class Stops(Protocol):
    """`stopping.Stopping`."""

    carried: bool
    noted: bool

    def note(self) -> None:
        """This rank shall stop."""

    def meet(self) -> bool:
        """Whether all ranks know that one shall."""


def tell_to_stop(trainer: Any) -> None:
    """What Lightning asks after each batch."""
    trainer._signal_connector.received_sigterm = True


def stop_together(trainer: Any, exception: type[BaseException], stopping: Stops) -> None:
    """Let ranks that get SIGTERM stop as Lightning does, after a batch, but the same one on all of them.

    In a fit, `Trainer.received_sigterm` is true when all ranks know. Data-parallel ranks evaluate unequally often, so
    that they agree when they train again, and in an evaluation alone each stops by itself.

    Args:
        exception: `SIGTERMException`.
        stopping: of this rank, by which all agree.
    """
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    alone = not stopping.carried and trainer.state.fn != "fit"

    def note(signum: Any, frame: Any) -> None:
        log.info(f"[rank {dist.get_rank()}] Received SIGTERM: {signum}")
        if not stopping.noted and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)
        stopping.note()
        if alone:
            tell_to_stop(trainer)

    def before_batch() -> None:
        if not stopping.carried and stopping.meet():
            raise exception

    def advance(*args: Any) -> None:
        before_batch()
        type(loop).advance(loop, *args)

    connector._sigterm_notifier_fn = note
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = before_batch
    else:
        loop.advance = advance
