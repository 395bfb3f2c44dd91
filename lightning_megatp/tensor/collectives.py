"""Megatron's collectives as autograd functions. None of them modifies its input, unless it is told that it may.

Every backward node carries `region_above` and `region_below`: in which region its output and its input live, seen from
the loss. "whole": the same on every tensor rank; "tensor": between a column layer's entry and a row layer's exit, where
each rank has its own features; "sequence": each rank has its own tokens. `lineage.py` walks these marks.

Shapes: b batch, s sequence, h hidden, t tensor-parallel size. Volumes are elements received per rank by a ring.
Source: Shoeybi et al. 2019, section 3 (f and g); Korthikanti et al. 2022, section 4.2.2 (g and g-bar).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_megatp.plan.ranges import Ranges, length
from lightning_megatp.shim.collectives import (
    all_gather_each,
    all_gather_single,
    reduce_scatter_each,
    reduce_scatter_single,
)
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import is_view
from lightning_megatp.tensor.functions import OwnFunction

LONG_ROW = 2**20
"""Bytes of one sequence of a batch, all tokens, from which on each is sent from and to where it lies. Shorter ones are
brought into one piece first, which takes a copy of them, and fewer messages."""


def sequence_sizes(length: int, ways: int) -> list[int]:
    """Tokens per rank; lengths not divisible by `ways` give the first ranks one more."""
    each, more = divmod(length, ways)
    return [each + (rank < more) for rank in range(ways)]


def copy_to_region(x: Tensor, group: dist.ProcessGroup, above: str = "tensor") -> Tensor:
    """Identity; all-reduce the gradient (f). Enters a tensor region with a whole value.

    Args:
        x: any shape, the same on every rank.
        above: the region entered, "tensor" or "sequence".

    Communication: none forward; 2 (t - 1) / t * numel(x) backward.
    """
    return x if group.size() == 1 else _Copy.apply(x, group, above)


def use_on_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Identity of a whole parameter, used on this rank's tokens. Its gradient is all-reduced, unless whoever walks the
    graph sets the node's `completes` to False: then the caller sums what all uses have accumulated.

    Args:
        x: a leaf, the same on every rank.

    Communication: none forward; 2 (t - 1) / t * numel(x) backward.
    """
    return _Use.apply(x, group)


def reduce_from_region(x: Tensor, group: dist.ProcessGroup, spend: bool = False) -> Tensor:
    """All-reduce; identity for the gradient (g). Leaves a tensor region with a partial sum.

    Args:
        x: any shape, a partial sum.
        spend: whether x is the caller's alone, who reads it no more: then the sum may take its place.

    Communication: 2 (t - 1) / t * numel(x) forward; none backward.
    """
    return x if group.size() == 1 else _Reduce.apply(x, group, "tensor", spend)


def leave_alike(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Identity; the gradient divided by the ranks. Leaves a tensor region with a value that every rank has computed
    alike, of what entered: each adds its share to the sums of gradients there.

    Args:
        x: any shape, the same on every rank.

    Communication: none.
    """
    return x if group.size() == 1 or not x.requires_grad else _Alike.apply(x, group)


def added_once(x: Tensor, added: Tensor, group: dist.ProcessGroup) -> Tensor:
    """What ranks have added to their parts of a sum, taken off again on all but the first.

    Args:
        x: any shape, each rank's part with `added` in it.
        added: the same shape, the same on every rank.

    Communication: none.
    """
    return x if group.size() == 1 else _Once.apply(x, added, group)


def gather_from_region(x: Tensor, group: dist.ProcessGroup, sizes: Sequence[int]) -> Tensor:
    """All-gather the last dim; slice the gradient. Leaves a tensor region with features.

    Args:
        x: (..., sizes[rank]).

    Returns:
        (..., sum(sizes)), the same on every rank.

    Communication: (t - 1) / t * numel(result) forward (padded to equal sizes); none backward.
    """
    return x if group.size() == 1 else _Gather.apply(x, group, -1, sizes, "whole", "tensor")


def scatter_to_region(x: Tensor, group: dist.ProcessGroup, by_rank: Sequence[Ranges]) -> Tensor:
    """Take this rank's ranges of the last dim; all-gather the gradient. Enters a tensor region with a whole value.

    Args:
        x: (..., h), the same on every rank.
        by_rank: the ranges of every rank, each index in one of them.

    Returns:
        (..., features of this rank).

    Communication: none forward; (t - 1) / t * numel(x) backward.
    """
    if group.size() == 1:
        return x
    in_order = [i for ranges in by_rank for start, stop in ranges for i in range(start, stop)]
    if in_order != list(range(x.shape[-1])):  # the ranges of a rank are not one piece: bring them together first
        x = x.index_select(-1, from_host(in_order, x.device))
    sizes = [length(ranges) for ranges in by_rank]
    return _Scatter.apply(x, group, -1, sizes, "tensor")


def scatter_sequence(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Take this rank's tokens; all-gather the gradient. Enters a sequence region.

    Args:
        x: (b, s, h) with dim=1 or (s, b, h) with dim=0, the same on every rank.

    Communication: none forward; (t - 1) / t * numel(x) backward.
    """
    return _Scatter.apply(x, group, dim, sequence_sizes(x.shape[dim], group.size()), "sequence")


def gather_sequence(x: Tensor, group: dist.ProcessGroup, dim: int, length: int, above: str) -> Tensor:
    """All-gather the tokens. The gradient is reduce-scattered when a tensor region follows (each rank then holds a
    partial sum of it), and sliced when whole values follow.

    Args:
        x: (b, tokens of this rank, h) with dim=1.
        length: tokens of all ranks together.
        above: what follows, "tensor" or "whole".

    Communication: (t - 1) / t * numel(result) forward; the same backward into a tensor region, else none.
    """
    sizes = sequence_sizes(length, group.size())
    return _Gather.apply(x, group, dim, sizes, above, "sequence")


def reduce_scatter_sequence(x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
    """Sum the partial values of a tensor region, keep this rank's tokens (g-bar); all-gather the gradient.

    Args:
        x: (b, s, h) with dim=1, a partial sum.

    Communication: (t - 1) / t * numel(x) forward, the same backward.
    """
    return _ReduceScatter.apply(x, group, dim)


# The backward of each function is its conjugate; through autograd if its own gradient may be asked for, so that
# gradients of gradients are right too.


class _Copy(OwnFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, above: str) -> Tensor:
        ctx.group, ctx.region_above, ctx.region_below = group, above, "whole"
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _Reduce.apply(grad, ctx.group, ctx.region_above, False), None, None
        return all_reduce(grad, ctx.group), None, None


class _Use(OwnFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.region_above, ctx.region_below = group, "sequence", "whole"
        ctx.completes = True
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Reduce.apply(grad, ctx.group, "sequence", False) if ctx.completes else grad, None


class _Reduce(OwnFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, below: str, spend: bool) -> Tensor:
        ctx.group, ctx.region_above, ctx.region_below = group, "whole", below
        total = begin_all_reduce(x, group, spend=spend and not is_view(x), async_op=False).wait()
        if total is x:
            ctx.mark_dirty(x)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        whole = _Copy.apply(grad, ctx.group, ctx.region_below) if torch.is_grad_enabled() else grad
        return whole, None, None, None


class _Alike(OwnFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.region_above, ctx.region_below = group, "whole", "tensor"
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        whole = _Copy.apply(grad, ctx.group, ctx.region_below) if torch.is_grad_enabled() else grad
        return whole / ctx.group.size(), None


class _Once(OwnFunction):
    """A function of its own, so that all ranks have the same graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, added: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.first, ctx.region_above, ctx.region_below = group.rank() == 0, "tensor", "tensor"
        return x.view_as(x) if ctx.first else x - added

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None if ctx.first else -grad, None


class _Gather(OwnFunction):
    """Shards of a dim -> all of it. Its gradient is reduce-scattered where it is partial, else sliced."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int], above: str, below: str
    ) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        ctx.region_above, ctx.region_below = above, below
        return all_gather(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        partial = ctx.region_above == "tensor"
        if not torch.is_grad_enabled():
            own = (reduce_scatter if partial else take_own)(grad, ctx.group, ctx.dim, ctx.sizes)
        elif partial:
            own = _ReduceScatter.apply(grad, ctx.group, ctx.dim)
        else:
            own = _Scatter.apply(grad, ctx.group, ctx.dim, ctx.sizes, ctx.region_below)
        return own, None, None, None, None, None


class _Scatter(OwnFunction):
    """A whole dim -> this rank's piece of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int], above: str) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sizes
        ctx.region_above, ctx.region_below = above, "whole"
        return take_own(x, group, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            whole = _Gather.apply(grad, ctx.group, ctx.dim, ctx.sizes, "whole", ctx.region_above)
        else:
            whole = all_gather(grad, ctx.group, ctx.dim, ctx.sizes)
        return whole, None, None, None, None


class _ReduceScatter(OwnFunction):
    """Partial values of a sequence -> this rank's tokens of their sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.sizes = group, dim, sequence_sizes(x.shape[dim], group.size())
        ctx.region_above, ctx.region_below = "sequence", "tensor"
        return reduce_scatter(x, group, dim, ctx.sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _Gather.apply(grad, ctx.group, ctx.dim, ctx.sizes, "tensor", "sequence"), None, None
        return all_gather(grad, ctx.group, ctx.dim, ctx.sizes), None, None


def take_own(x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int]) -> Tensor:
    """This rank's piece of `dim`, contiguous."""
    rank = group.rank()
    return x.narrow(dim, sum(sizes[:rank]), sizes[rank]).clone(memory_format=torch.contiguous_format)


class Pending:
    """A collective under way.

    Args:
        result: of the right shape; its values may be read after `wait`.
        work: what to wait for; None if there is nothing.
        finish: makes the result of what has arrived.
    """

    def __init__(self, result: Tensor, work: dist.Work | None, finish: Callable[[], Tensor] | None = None) -> None:
        self.result = result
        self._work, self._finish = work, finish

    def wait(self) -> Tensor:
        """The result, complete. On a GPU, what is called next on this stream waits, not this thread."""
        if self._work is not None:
            self._work.wait()
        if self._finish is not None:
            self.result = self._finish()
        self._work = self._finish = None
        return self.result


def all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over the group as a new tensor."""
    return begin_all_reduce(x, group, async_op=False).wait()


def begin_all_reduce(x: Tensor, group: dist.ProcessGroup, spend: bool = False, async_op: bool = True) -> Pending:
    """Start an `all_reduce`; with `spend` in the place of x, if it is contiguous."""
    total = x if spend and x.is_contiguous() else x.clone(memory_format=torch.contiguous_format)
    # a dry run sends nothing
    return Pending(total, None if is_fake(x) else dist.all_reduce(total, group=group, async_op=async_op))


def all_gather(x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int]) -> Tensor:
    """Concatenate the ranks' tensors along `dim`; uneven sizes are padded on the wire and stripped."""
    return begin_all_gather(x, group, dim, sizes, async_op=False).wait()


def begin_all_gather(
    x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int], async_op: bool = True
) -> Pending:
    """Start an `all_gather`."""
    ways, most, dim = len(sizes), max(sizes), dim % x.dim()
    size = torch.Size((*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :]))
    if is_fake(x):
        return Pending(x.new_empty(size), None)
    sent = x.contiguous() if x.shape[dim] == most else _pad(x, dim, most)
    if min(sizes) == most and _sent_by_rows(size, dim, x.element_size()):  # parts arrive where they belong
        whole = sent.new_empty(size)
        return Pending(whole, all_gather_each(_rows(whole, dim), _rows(sent, dim), group, async_op))
    wire = (ways * sent.shape[0], *sent.shape[1:])
    if min(sizes) == most and size[:dim].numel() == 1:  # here, too
        whole = sent.new_empty(size)
        return Pending(whole, all_gather_single(whole.view(wire), sent, group=group, async_op=async_op))
    received = sent.new_empty(wire)

    def finish() -> Tensor:
        parts = received.view(ways, *sent.shape)
        if min(sizes) == most:
            whole = parts.movedim(0, dim).reshape(*x.shape[:dim], ways * most, *x.shape[dim + 1 :])
            return whole.contiguous()  # a view, where each rank has one: `view` of it would fail
        return torch.cat([part.narrow(dim, 0, n) for part, n in zip(parts.unbind(0), sizes, strict=True)], dim)

    return Pending(received, all_gather_single(received, sent, group=group, async_op=async_op), finish)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int]) -> Tensor:
    """Sum over the group, keep this rank's piece along `dim`; uneven pieces are padded on the wire and stripped."""
    return begin_reduce_scatter(x, group, dim, sizes, async_op=False).wait()


def begin_reduce_scatter(
    x: Tensor, group: dist.ProcessGroup, dim: int, sizes: Sequence[int], async_op: bool = True
) -> Pending:
    """Start a `reduce_scatter`."""
    rank, most, dim = group.rank(), max(sizes), dim % x.dim()
    if is_fake(x):
        return Pending(x.narrow(dim, 0, sizes[rank]).clone(memory_format=torch.contiguous_format), None)
    if min(sizes) == most and _sent_by_rows(x.shape, dim, x.element_size()):
        kept = x.new_empty((*x.shape[:dim], most, *x.shape[dim + 1 :]))
        return Pending(kept, reduce_scatter_each(_rows(kept, dim), _rows(x.contiguous(), dim), group, async_op))
    if min(sizes) == most:
        split = x.reshape(*x.shape[:dim], len(sizes), most, *x.shape[dim + 1 :]).movedim(dim, 0)
    else:
        split = torch.stack([_pad(piece, dim, most) for piece in x.split(list(sizes), dim)])
    split = split.contiguous()
    kept = split.new_empty(split.shape[1:])
    work = reduce_scatter_single(kept, split.view(-1, *split.shape[2:]), group=group, async_op=async_op)
    if sizes[rank] == most:
        return Pending(kept, work)
    own = kept.narrow(dim, 0, sizes[rank])
    return Pending(own, work, own.clone)  # never a view


def take_ranges(x: Tensor, dim: int, ranges: Ranges) -> Tensor:
    """The given ranges of `dim`, one after another, contiguous."""
    if not ranges:
        return x.narrow(dim, 0, 0).contiguous()
    if len(ranges) == 1:
        return x.narrow(dim, ranges[0][0], ranges[0][1] - ranges[0][0]).contiguous()
    return torch.cat([x.narrow(dim, start, stop - start) for start, stop in ranges], dim)


def gather_ranges(x: Tensor, group: dist.ProcessGroup, dim: int, by_rank: Sequence[Ranges]) -> Tensor:
    """All-gather shards and put them in the order of the full dimension."""
    sizes = [length(ranges) for ranges in by_rank]
    gathered = all_gather(x, group, dim, sizes)
    order = canonical_order(by_rank)
    return gathered if order is None else gathered.index_select(dim, from_host(order, x.device))


def from_host(numbers: Sequence[float], device: torch.device) -> Tensor:
    """A list as a tensor on a device. The host does not wait until the device has done what was launched before."""
    return torch.tensor(numbers).to(device, non_blocking=True)


def canonical_order(by_rank: Sequence[Ranges]) -> list[int] | None:
    """Positions in the concatenated shards of features 0, 1, 2, ...; None when they already lie so."""
    features = [i for ranges in by_rank for start, stop in ranges for i in range(start, stop)]
    if features == list(range(len(features))):
        return None
    first: dict[int, int] = {}
    for position, feature in enumerate(features):
        first.setdefault(feature, position)
    return [first[feature] for feature in range(len(first))]


def _sent_by_rows(size: torch.Size, dim: int, element: int) -> bool:
    """Whether there are several rows before a dim, and long ones; `element` bytes each. All ranks say the same."""
    return size[:dim].numel() > 1 and size[dim:].numel() * element >= LONG_ROW


def _rows(x: Tensor, dim: int) -> list[Tensor]:
    """What lies before a dim, one after another, of a contiguous tensor."""
    return list(x.flatten(0, dim - 1).unbind(0))


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    missing = size - x.shape[dim]
    dim = dim % x.dim()
    return F.pad(x, [0, 0] * (x.dim() - dim - 1) + [0, missing]).contiguous()
