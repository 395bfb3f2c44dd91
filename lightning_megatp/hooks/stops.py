"""`trainer.should_stop`, set by a hook on some rank: all ranks stop after that batch, as the one device would."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from lightning_megatp.detour import Detour
from lightning_megatp.user_hooks import mentions


def stopping_together(trainer: Any, hosts: dist.ProcessGroup) -> Iterator[Detour]:
    """Let ranks agree whether to stop, where the user's code has something to do with it. It may ask the clock, or
    weights of which ranks hold different parts, and Lightning leaves ranks that go on waiting for the others.

    Args:
        trainer: about to fit.
        hosts: the world, for CPU tensors.

    Communication: one all-reduce of an element here. Where it is needed, one after each batch, and one after each
    validation and epoch.
    """

    def agree() -> bool:
        stop = torch.tensor(int(trainer.should_stop))
        dist.all_reduce(stop, op=dist.ReduceOp.MAX, group=hosts)
        return bool(stop)

    def before(call: Callable[[], Any]) -> Any:
        trainer.should_stop = agree()
        return call()

    def after(call: Callable[[], Any]) -> Any:
        result = call()
        trainer.should_stop = agree()
        return result

    owners = (trainer.lightning_module, *trainer.callbacks)
    needed = torch.tensor(int(any(mentions(x, {"should_stop"}) for x in owners)))
    dist.all_reduce(needed, op=dist.ReduceOp.MAX, group=hosts)
    if needed:
        loop = trainer.fit_loop
        yield Detour(loop.epoch_loop, "on_advance_end", before)
        yield Detour(loop.epoch_loop.val_loop, "run", after)
        yield from (Detour(loop, name, after) for name in ("on_advance_start", "on_advance_end"))
