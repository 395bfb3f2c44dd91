"""Private names of torch.distributed's collectives. Seen in 2.11, 2.13, 2.14 and 2.15."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, ReduceScatterOptions

# torch 2.13 renames these two and warns at the names that 2.11 knows.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# Several at once, which torch.distributed offers by `_coalescing_manager` alone (2.11-2.14): the methods that it calls.
# NCCL sends them by one kernel. 2.13 renames them, too.
def all_gather_each(
    outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """`all_gather_single` of each input into its output. All are contiguous."""
    begin = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
    return _begun(begin, outputs, inputs, AllgatherOptions(), async_op)


def reduce_scatter_each(
    outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup, async_op: bool
) -> dist.Work | None:
    """`reduce_scatter_single` of each input, a sum, into its output. All are contiguous."""
    begin = getattr(group, "reduce_scatter_single_coalesced", None) or group.reduce_scatter_tensor_coalesced
    return _begun(begin, outputs, inputs, ReduceScatterOptions(), async_op)


def _begun(
    begin: Callable[..., dist.Work | None], outputs: list[Tensor], inputs: list[Tensor], options: Any, async_op: bool
) -> dist.Work | None:
    options.asyncOp = async_op
    work = begin(outputs, inputs, options)
    if async_op or work is None:
        return work
    work.wait()
    return None


def collectives_begun(group: Any) -> int:
    """How many collectives this rank has begun in a group. Ranks that differ would meet each other's in the next one.
    torch's own debugging of desynchronised ranks compares it; there is no public name (2.11-2.13)."""
    return int(group._get_sequence_number_for_group())


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Profilers record nothing of what begins here, on this thread. For collectives that may end after the batch, and
    so after the profiler that was there when they began: the thread they end on writes when, to memory that is freed
    by then (seen: `malloc(): unsorted double linked list corrupted`). Always allowed again at the end, since it can't
    be asked whether it was before. No public name (2.11-2.13)."""
    torch.autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch.autograd._enable_record_function(True)
