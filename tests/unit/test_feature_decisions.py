"""What a feature shard remembers of an operation is used for that operation alone.

One process plays one rank: whatever needs other ranks' features raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_megatp.tensor.collectives import take_ranges
from lightning_megatp.tensor.features.layout import FeatureLayout
from lightning_megatp.tensor.features.shard import FeatureShard

OWNED = (((0, 4),), ((4, 8),))
INTERLEAVED = (((0, 2), (4, 6)), ((2, 4), (6, 8)))
BOTH = (((0, 8),), ((0, 8),))


class _Alone:
    """In place of a `GroupExchange`."""

    def gather(self, x: Tensor, dim: int, by_rank: Any) -> Tensor:
        raise LookupError("gathers")

    def copy(self, x: Tensor) -> Tensor:
        return x


# Neighbours differ in one thing that a rule looks at.
OPERATIONS: list[Callable[[Any, Any], Any]] = [
    lambda x, o: x.transpose(0, 1),
    lambda x, o: x.transpose(0, 2),
    lambda x, o: x.transpose(2, 1),
    lambda x, o: x.transpose(dim0=2, dim1=1),
    lambda x, o: x.transpose(dim0=0, dim1=1),
    lambda x, o: x[:, 1:3],
    lambda x, o: x[:, 1:4],
    lambda x, o: x[:, 1:4:2],
    lambda x, o: x[:, 1],
    lambda x, o: x[:, 2],
    lambda x, o: x[:, None],
    lambda x, o: x[:, o.index],
    lambda x, o: x[..., :4],
    lambda x, o: x[..., :2],
    lambda x, o: x[..., [2, 3]],
    lambda x, o: x.unflatten(-1, (-1, 2)),
    lambda x, o: x.unflatten(-1, (2, -1)),
    lambda x, o: x[:1].unflatten(-1, (2, -1)),
    lambda x, o: x.narrow(dim=2, start=2, length=4),
    lambda x, o: x.narrow(dim=2, length=2, start=4),
    lambda x, o: x.view(2, 6, 4, 2),
    lambda x, o: x.view([2, 6, 2, 4]),
    lambda x, o: x.view((2, 6, 8)),
    lambda x, o: x[:1].view(1, 6, 2, 4),
    lambda x, o: x[:1].view(1, 3, 2, 8),
    lambda x, o: x.split(4, -1),
    lambda x, o: x.split(2, -1),
    lambda x, o: x.split([2, 6], -1),
    lambda x, o: x.sum(1),
    lambda x, o: x.sum(0),
    lambda x, o: x.sum(1, True),
    lambda x, o: x.sum((0, 1)),
    lambda x, o: x.sum([0]),
    lambda x, o: x.mean(dim=1),
    lambda x, o: x.mean(dim=0),
    lambda x, o: x.mean(dim=0, keepdim=True),
    lambda x, o: x.double().mean(0),
    lambda x, o: x * 2,
    lambda x, o: 2.5 - x,
    lambda x, o: x.clamp(0),
    lambda x, o: x.clamp(max=0),
    lambda x, o: F.gelu(x, approximate="tanh"),
    lambda x, o: x + o.features,
    lambda x, o: x + o.one,
    lambda x, o: x + o.rows,
    lambda x, o: o.rows * x,
    lambda x, o: x + x,
    lambda x, o: x + o.alike,
    lambda x, o: x + o.everywhere,
    lambda x, o: x + o.interleaved,
    lambda x, o: x + x.transpose(0, 1).transpose(0, 1),
    lambda x, o: o.interleaved + x,
    lambda x, o: o.interleaved + o.interleaved,
    lambda x, o: torch.cat([x, x], 1),
    lambda x, o: torch.cat([x, o.interleaved], 1),
    lambda x, o: torch.cat([x, o.everywhere], 1),
    lambda x, o: torch.cat([x, x], 2),
    lambda x, o: torch.cat([x, o.interleaved], 2),
    lambda x, o: torch.where(x > 0, x, o.features),
    lambda x, o: torch.where(x > 0, x, 0.0),
]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_decision_is_that_of_the_same_operands(rank: int) -> None:
    context: Any = SimpleNamespace(rank=rank, exchange=_Alone(), gathers=Counter(), kept_whole=set())
    whole = SimpleNamespace(
        x=torch.randn(2, 6, 8), interleaved=torch.randn(2, 6, 8), alike=torch.randn(2, 6, 8),
        everywhere=torch.randn(2, 6, 8), features=torch.randn(8), one=torch.randn(1), rows=torch.randn(6, 8),
        index=torch.tensor([0, 3]),
    )  # fmt: skip
    kept = SimpleNamespace(**vars(whole))
    owned = {"x": OWNED, "alike": OWNED, "interleaved": INTERLEAVED, "everywhere": BOTH}
    for name, by_rank in owned.items():
        local = take_ranges(getattr(whole, name), -1, by_rank[rank])
        setattr(kept, name, FeatureShard.wrap(local, FeatureLayout(-1, by_rank, 8, context)))
    for _ in range(2):
        remembered = [_ran(run, kept) for run in OPERATIONS]  # each on what the ones before left behind
    for run, results in zip(OPERATIONS, remembered, strict=True):
        for name in owned:
            getattr(kept, name).features.decisions.clear()
        fresh = _ran(run, kept)
        assert len(results) == len(fresh)
        for own, again, expected in zip(results, fresh, _listed(run(whole.x, whole)) if fresh else (), strict=True):
            layout = own.features
            assert layout == again.features
            torch.testing.assert_close(own.plain, again.plain)
            taken = expected if layout.replicated else take_ranges(expected, layout.dim, layout.own)
            torch.testing.assert_close(own.plain, taken)


def _ran(run: Callable[[Any, Any], Any], operands: Any) -> list[Any]:
    """What an operation returns; nothing where it gathers."""
    try:
        return _listed(run(operands.x, operands))
    except LookupError:
        return []


def _listed(x: Any) -> list[Any]:
    return [x] if isinstance(x, Tensor) else list(x)
