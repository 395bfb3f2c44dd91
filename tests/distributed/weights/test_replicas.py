"""Whether ranks hold the same."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from tests.ranks import run_ranks


def _differing(rank: int, world_size: int) -> list[str]:
    from lightning_megatp.replicas import differing

    same, turned = torch.full((3,), 1 + 2j), torch.full((3,), complex(1, rank))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return differing({"same": same, "turned": turned, "conjugate": same.conj()}, dist.group.WORLD, None, 0.0)


def test_complex_numbers_that_differ_in_their_imaginary_part() -> None:
    assert run_ranks(2, _differing) == [["turned"]] * 2
