"""Data-parallel gradients: averaged in buckets of a fixed order, while backward still runs.

Source: Li et al. 2020 (PyTorch Distributed), section 3.2: buckets, reverse order, overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatp.shim.torch import flatten, unflatten
from lightning_megatp.tensor.collectives import from_host
from lightning_megatp.tensor.functions import OwnHook

_LARGE = 2**20
"""Bytes of such a bucket."""


@dataclass(eq=False)
class _Bucket:
    parameters: list[Tensor]
    part: int = 0
    ready: set[int] = field(default_factory=set)
    early: bool = False
    """Started before its batch was over."""
    has: list[bool] = field(default_factory=list)
    """Which parameters had a gradient here when it started."""
    flat: Tensor | None = None
    work: dist.Work | None = None
    memory: Tensor | None = None
    """On CPUs, of a large bucket: where `flat` always lies. What is freed there goes back to the system, which takes
    milliseconds to give it again, page by page; an allocator of GPUs keeps it."""

    def flatten(self, grads: list[Tensor]) -> Tensor:
        if self.memory is not None and self.memory.dtype == grads[0].dtype:
            return torch.cat([grad.reshape(-1) for grad in grads], out=self.memory)
        flat = flatten(grads)
        self.memory = flat if flat.device.type == "cpu" and flat.nbytes >= _LARGE else None
        return flat


class GradientBuckets:
    """Averages gradients over the data-parallel group.

    A bucket starts its all-reduce as soon as the gradients of all its parameters are there and the buckets before it
    have started, so that every rank issues the same collectives in the same order. In a pipeline, gradients are there
    when a stage is through with all microbatches, while other stages still work: `complete`. `finish` starts what is
    left: a parameter without a gradient on this rank takes part as zero, and keeps having none if no rank had one.

    Args:
        parameters: those that require a gradient, in the order of the model; the same on every rank of the group. Those
            of each pipeline stage on this rank are a part of their own, and what is in none is the last part.
        group: the data-parallel group.
        bucket_mb: size of a bucket in MiB; 0 starts everything after backward.
        hooks: start as gradients appear; otherwise by `complete`.

    Communication: one all-reduce per bucket and stepping batch, 2 (d - 1) / d of all elements.
    """

    def __init__(
        self, parameters: Sequence[Sequence[Tensor]], group: dist.ProcessGroup, bucket_mb: float, hooks: bool
    ) -> None:
        self.group = group
        self.parameters = [parameter for part in parameters for parameter in part]
        self.enabled = False
        """Whether gradients that appear now are final (the stepping batch) and may be sent."""
        self._overlap = bucket_mb > 0
        parts = list(enumerate(parameters))
        self._buckets = [_Bucket(filled, i) for i, part in parts for filled in _fill(part, bucket_mb * 2**20)]
        self._complete: set[int] = set()
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._next = 0
        # The last bucket is complete when backward is over, and then `finish` starts it: its gradients need no hooks.
        early = self._buckets[:-1] if self._overlap and hooks else []
        hooked = (p for bucket in early for p in bucket.parameters if p.requires_grad)
        self._hooks = [p.register_post_accumulate_grad_hook(OwnHook(self._on_gradient)) for p in hooked]

    @property
    def began(self) -> bool:
        """Whether some of the buckets are on their way."""
        return self._next > 0

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()

    def complete(self, part: int, factor: Tensor) -> None:
        """The gradients of a part of the parameters are there.

        Args:
            factor: () float64, by which this rank's have to be multiplied.
        """
        if self._overlap:
            self._complete.add(part)
            while self._next < len(self._buckets) and self._buckets[self._next].part in self._complete:
                self._buckets[self._next].early = True
                self._start(self._buckets[self._next], factor)

    @property
    def early(self) -> set[int]:
        """id of the parameters whose gradients are on their way, and come back by `finish`."""
        return {id(p) for bucket in self._buckets if bucket.early for p in bucket.parameters}

    def finish(self) -> None:
        """Start the remaining buckets, wait for all, and put the averages into `.grad`. Call when backward is over."""
        while self._next < len(self._buckets):
            self._start(self._buckets[self._next])
        for bucket in self._buckets:
            self._collect(bucket)
        self._next = 0
        self._complete.clear()

    def _on_gradient(self, parameter: Tensor) -> None:
        if not self.enabled:
            return
        bucket = self._bucket_of[id(parameter)]
        if bucket.flat is not None:
            raise RuntimeError(
                "MegaTPStrategy: a parameter got a second gradient in one backward, after its first was sent to the"
                " data-parallel ranks (reentrant activation checkpointing of a shared layer does this). Use"
                " checkpoint(..., use_reentrant=False), or MegaTPStrategy(bucket_mb=0)."
            )
        bucket.ready.add(id(parameter))
        while self._next < len(self._buckets) and self._is_ready(self._buckets[self._next]):
            self._start(self._buckets[self._next])

    def _is_ready(self, bucket: _Bucket) -> bool:
        return len(bucket.ready) == len(bucket.parameters)

    @torch.no_grad()  # a backward with create_graph leaves gradients that need one
    def _start(self, bucket: _Bucket, factor: Tensor | None = None) -> None:
        self._next += 1
        parameters = bucket.parameters
        found = [p.grad for p in parameters]
        sparse = [grad for grad in found if grad is not None and grad.is_sparse]
        if sparse:
            raise RuntimeError(
                f"MegaTPStrategy: a parameter of shape {tuple(sparse[0].shape)} has a sparse gradient, which is not"
                " averaged over data-parallel ranks. Build its embedding with sparse=False."
            )
        bucket.has = [grad is not None for grad in found]
        grads = [_zeros(p) if grad is None else grad for p, grad in zip(parameters, found, strict=True)]
        flags = grads[0].new_ones(len(grads))
        if not all(bucket.has):
            flags = from_host(bucket.has, flags.device).to(flags)
        bucket.flat = bucket.flatten([*grads, flags])
        if factor is not None:
            bucket.flat[: -len(flags)].mul_(factor)
        bucket.work = dist.all_reduce(bucket.flat, group=self.group, async_op=True)

    @torch.no_grad()
    def _collect(self, bucket: _Bucket) -> None:
        assert bucket.flat is not None and bucket.work is not None
        bucket.work.wait()
        *totals, flags = unflatten(bucket.flat, [*bucket.parameters, bucket.flat[-len(bucket.parameters) :]])
        # A flag is read (a synchronisation on GPUs) only where this rank had no gradient.
        wanted = bucket.has if all(bucket.has) else (flags > 0).tolist()
        divisor = self.group.size()
        if bucket.memory is None and any(wanted):
            bucket.flat.div_(divisor)
        for parameter, total, want in zip(bucket.parameters, totals, wanted, strict=True):
            if want:  # what the user kept of earlier batches is still there, if this batch's was on its way before
                kept, mine = (parameter.grad, None) if bucket.early else (None, parameter.grad)
                grad = total if bucket.memory is None else _quotient(total, divisor, into=mine)
                parameter.grad = grad if kept is None else kept + grad
        bucket.flat = bucket.work = None
        bucket.early = False
        bucket.ready.clear()


def _quotient(total: Tensor, divisor: float, into: Tensor | None) -> Tensor:
    """A gradient in memory of its own: that of this rank's, if that can be overwritten."""
    if into is None or into.requires_grad or not into.is_contiguous():
        return total / divisor
    return torch.div(total, divisor, out=into)


def _zeros(parameter: Tensor) -> Tensor:
    """In place of a gradient that is not there, of the dtype that other ranks' have."""
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype)


def _fill(parameters: Sequence[Tensor], size: float) -> Iterator[list[Tensor]]:
    """Buckets of about `size` bytes, last parameters first (their gradients come first), one dtype and device each."""
    bucket: list[Tensor] = []
    held = 0.0
    for parameter in reversed(parameters):
        changed = bool(bucket) and (bucket[0].dtype, bucket[0].device) != (parameter.dtype, parameter.device)
        if bucket and (changed or (size > 0 and held >= size)):
            yield bucket
            bucket, held = [], 0.0
        bucket.append(parameter)
        held += parameter.numel() * parameter.element_size()
    if bucket:
        yield bucket
