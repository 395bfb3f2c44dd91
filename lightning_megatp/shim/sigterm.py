"""SIGTERM without a collective in the signal handler, or one of its own per batch.

Private names touched, as of Lightning 2.6: `Trainer._signal_connector`, with `_sigterm_notifier_fn` and
`received_sigterm`, and the `_broadcast_sigterm_tensor` of the epoch loop. There the handler broadcasts from whatever
the rank is doing, and can meet another collective; and every training batch begins with a broadcast of rank 0's flag.
Lightning 2.5 has neither, and is left as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from lightning_megatp.stopping import Stopping

log = logging.getLogger(__name__)


def stop_together(
    trainer: Any, exception: type[BaseException], hosts: dist.ProcessGroup, carried: bool, tell: Callable[[], None]
) -> Stopping | None:
    """Let ranks that get SIGTERM stop as Lightning does, after a batch, but the same one on all of them.

    In a fit, `Trainer.received_sigterm` is true when all ranks know. Data-parallel ranks evaluate unequally often, so
    that they agree when they train again, and in an evaluation alone each stops by itself.

    Args:
        exception: `SIGTERMException`.
        hosts, carried, tell: see `Stopping`.
    """
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    if not hasattr(loop, "_broadcast_sigterm_tensor"):
        return None

    def agreed() -> None:
        connector.received_sigterm = True

    stopping = Stopping(hosts, carried, tell, agreed)
    alone = not carried and trainer.state.fn != "fit"

    def note(signum: Any, frame: Any) -> None:
        log.info(f"[rank {trainer.global_rank}] Received SIGTERM: {signum}")
        if not stopping.noted and trainer.strategy.launcher is not None:
            trainer.strategy.launcher.kill(signum)
        stopping.note()
        if alone:
            agreed()

    def before_batch() -> None:
        if not stopping.carried and stopping.meet():
            raise exception

    connector._sigterm_notifier_fn = note
    loop._broadcast_sigterm_tensor = before_batch
    return stopping
