"""Kernels that move memory as slowly as they are told. Needs Triton, which comes with torch for CUDA."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

BLOCKS, WORDS = 16, 8192
"""How many thread blocks move, each on a multiprocessor, and words that one moves at a time."""


@triton.jit
def _move(source, target, period, words, nanoseconds, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    start = globaltimer()
    at = tl.program_id(0) * WORDS
    while at < words:
        index = at + tl.arange(0, WORDS)
        inside = index < words
        tl.store(target + index, tl.load(source + index % period, mask=inside), mask=inside)
        at += tl.num_programs(0) * WORDS
    now = globaltimer()
    while now - start < nanoseconds:
        now = globaltimer()


def move(source: Tensor, target: Tensor, seconds: float) -> None:
    """Copy, over and over until the target is full, by few multiprocessors, and be done after so many seconds of the
    GPU's clock of real time, at whatever rate it computes just now; later where that is too fast.

    Args:
        source: contiguous.
        target: contiguous, of a multiple of its elements.
    """
    kind = torch.int64 if source.nbytes % 8 == target.nbytes % 8 == 0 else torch.uint8
    source, target = (x.view(-1).view(kind) for x in (source, target))
    _move[(BLOCKS,)](source, target, source.numel(), target.numel(), int(seconds * 1e9), WORDS=WORDS, num_warps=16)
