"""Where one rank fails, all raise: nobody waits for a rank that gave up, and nobody goes on alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist


class OtherRankFailed(RuntimeError):
    """Raised on the ranks that did not fail themselves."""


@contextlib.contextmanager
def together(what: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Run a block on all ranks of a group; where it raises on one, it raises on all.

    Args:
        what: didn't work, for the message.
        group: the world by default. Without one, the block just runs.

    Communication: one object all-gather of what went wrong.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as raised:
        error = raised
    if not dist.is_initialized():
        found: list[str | None] = [None]
    else:
        found = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, None if error is None else f"{type(error).__name__}: {error}", group=group)
    if error is not None:
        raise error
    for rank, message in enumerate(found):
        if message is not None:
            raise OtherRankFailed(f"MegaTPStrategy: {what}; on rank {rank}: {message}")
