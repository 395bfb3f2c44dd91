"""Parity must fail when something is broken on purpose: each test breaks one thing and expects the difference.

What is broken keeps its shapes and its marks, so that nothing but wrong numbers can show it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.parity.cases import Case
from tests.parity.compare import ParityError, compare
from tests.parity.parallel import fit_case, setting_of
from tests.parity.running import Run
from tests.parity.test_parity import Reference
from tests.ranks import run_ranks


def drop_forward_reduction() -> Any:
    """Row layers and the vocabulary embedding return their partial sums."""
    from lightning_megatp.tensor import collectives, layers

    right = layers.reduce_from_region

    def broken(x: Any, group: Any, spend: bool) -> Any:
        with patch.object(collectives, "begin_all_reduce", _unsummed):
            return right(x, group, spend)

    return patch.object(layers, "reduce_from_region", broken)


def drop_backward_reduction() -> Any:
    """The gradient of a region's input is not summed."""
    from lightning_megatp.tensor import entry

    return patch.object(entry, "begin_all_reduce", _unsummed)


def _unsummed(x: Any, *args: Any, **kwargs: Any) -> Any:
    from lightning_megatp.tensor.collectives import Pending

    return Pending(x.clone(), None)


def drop_sequence_reduction() -> Any:
    """Gradients of norms and biases in sequence regions are not summed."""
    from lightning_megatp.plugin import ParallelismPlugin

    return patch.object(ParallelismPlugin, "finalize_gradients", lambda self, parallel: None)


def drop_data_parallel_reduction() -> Any:
    from lightning_megatp.gradients import buckets

    done = SimpleNamespace(wait=lambda: None)
    return patch.object(buckets, "dist", SimpleNamespace(all_reduce=lambda *args, **kwargs: done))


def drop_norm_reduction() -> Any:
    """Each rank clips by the norm of its own shards."""
    from lightning_megatp.gradients import norm

    nothing = SimpleNamespace(all_reduce=lambda *args, **kwargs: None, ReduceOp=norm.dist.ReduceOp)
    return patch.object(norm, "dist", nothing)


def shift_a_range() -> Any:
    """The rows of q, and of each other fused part, begin one later than the heads do."""
    from lightning_megatp.plan import layer_styles, regions

    right = layer_styles.shard_ranges

    def shifted(size: int, ways: int, parts: Any = 1, unit: int = 1) -> Any:
        by_rank = right(size, ways, parts, unit)
        if parts != 3:
            return by_rank
        part = size // 3
        own = part // ways
        return tuple(
            tuple(
                piece
                for offset in range(0, size, part)
                for piece in (
                    [(offset + rank * own + 1, offset + (rank + 1) * own + 1)]
                    if rank < ways - 1
                    else [(offset + rank * own + 1, offset + part), (offset, offset + 1)]
                )
            )
            for rank in range(ways)
        )

    both = contextlib.ExitStack()
    for module in (layer_styles, regions):
        both.enter_context(patch.object(module, "shard_ranges", shifted))
    return both


def add_a_bias_twice() -> Any:
    from lightning_megatp.tensor.layers import RowParallelLinear

    right = RowParallelLinear._compute
    return patch.object(RowParallelLinear, "_compute", lambda self, x: right(self, x) + self.bias)


def drop_sequence_gather_gradient() -> Any:
    """The gradient of a sequence scatter is zero for the other ranks' tokens."""
    from lightning_megatp.tensor.collectives import _Scatter

    right = _Scatter.backward

    def backward(ctx: Any, grad: Any) -> Any:
        from lightning_megatp.tensor import collectives

        def no_gather(x: Any, group: Any, dim: int, sizes: Any) -> Any:
            pieces = [x.new_zeros([size if d == dim % x.dim() else n for d, n in enumerate(x.shape)]) for size in sizes]
            pieces[group.rank()] = x
            return torch.cat(pieces, dim)

        with patch.object(collectives, "all_gather", no_gather):
            return right(ctx, grad)

    return patch.object(_Scatter, "backward", staticmethod(backward))


def _fit_broken(rank: int, world_size: int, case: Case, breakage: Callable[[], Any]) -> Run:
    from lightning_megatp.module import ParallelModule

    # The strategy's own comparison of the ranks would stop some of these first; here the losses have to show them.
    with breakage(), patch.object(ParallelModule, "check_replicas", lambda self, group: None):
        return fit_case(rank, world_size, case)


REPLICATED = Case("tied", sequence=False)
SEQUENCE = Case("tied", sequence=True)
BREAKAGES: list[tuple[Callable[[], Any], Case]] = [
    (drop_forward_reduction, REPLICATED),
    (drop_backward_reduction, REPLICATED),
    (drop_backward_reduction, Case("swiglu_rms", sequence=False)),
    (drop_sequence_reduction, SEQUENCE),
    (drop_sequence_reduction, Case("qk_norm", sequence=False)),
    (drop_data_parallel_reduction, Case("tied", tp=1, dp=2)),
    (drop_norm_reduction, Case("tied", sequence=False, clip="norm")),
    (shift_a_range, REPLICATED),
    (shift_a_range, SEQUENCE),
    (add_a_bias_twice, REPLICATED),
    (add_a_bias_twice, SEQUENCE),
    (drop_sequence_gather_gradient, SEQUENCE),
]


@pytest.mark.parametrize(("breakage", "case"), BREAKAGES, ids=lambda value: getattr(value, "__name__", str(value)))
def test_parity_sees_what_is_broken(breakage: Callable[[], Any], case: Case, reference: Reference) -> None:
    runs = run_ranks(case.tp * case.dp, _fit_broken, case, breakage)
    with pytest.raises(ParityError):
        compare(reference(setting_of(case)), runs, case.tp, case.precision)


@pytest.mark.parametrize("case", sorted({case for _, case in BREAKAGES}, key=str), ids=str)
def test_parity_holds_when_nothing_is_broken(case: Case, reference: Reference) -> None:
    """So that a failure above is the breakage's."""
    runs = run_ranks(case.tp * case.dp, _fit_broken, case, contextlib.nullcontext)
    compare(reference(setting_of(case)), runs, case.tp, case.precision)
