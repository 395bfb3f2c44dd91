"""What tensor ranks send of a value, each its share, is the whole value again on all of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from lightning_megatp.pipeline.shares import Shares
from lightning_megatp.pipeline.slicing.plan import Key, Relay
from tests.ranks import run_ranks

SHAPES = [(4, 6), (3, 5, 7), (1,), (2, 1), (8,), ()]
DTYPES = [torch.float64, torch.bfloat16, torch.int64, torch.bool]


def _round_trip(rank: int, world_size: int) -> None:
    shares = Shares(dist.group.WORLD)
    for shape in SHAPES:
        for dtype in DTYPES:
            x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
            relay = Relay(Key(0, 0), tuple(x.shape), x.stride(), dtype, x.device, requires_grad=False)
            sent = shares.take(x, relay)
            buffer = shares.buffer(relay, x.device).copy_(sent)
            assert torch.equal(shares.gather(buffer, relay), x)
            whole = dtype in (torch.int64, torch.bool) or x.numel() < world_size
            assert sent.numel() == (x.numel() if whole else -(-x.numel() // world_size))


@pytest.mark.parametrize("world_size", [2, 4])
def test_shares_make_up_the_whole(world_size: int) -> None:
    run_ranks(world_size, _round_trip)


def test_one_tensor_rank_sends_whole_values() -> None:
    x = torch.randn(3, 4).t()
    relay = Relay(Key(0, 0), tuple(x.shape), x.stride(), x.dtype, x.device, requires_grad=True)
    sent = Shares().take(x, relay)
    assert sent.is_contiguous() and torch.equal(Shares().gather(sent, relay), x)
