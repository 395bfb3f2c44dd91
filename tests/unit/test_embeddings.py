"""Which subclasses of nn.Embedding do something around its forward only."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatp.plan.embeddings import looks_up
from tests.distributed.tensor.test_scaled_embeddings import Positions, Scaled


class Normed(nn.Embedding):
    """The whole row of a table that is not the one that is looked up in."""

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, F.normalize(self.weight))


class Both(nn.Embedding):
    """The lookup, and the table beside it."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) - self.weight.mean(0)


class Other(nn.Embedding):
    """Takes something else than ids."""

    def forward(self, ids: Tensor, *, kind: int) -> Tensor:
        return super().forward(ids) * kind


def test_what_reads_its_table_by_the_lookup_alone() -> None:
    assert looks_up(Scaled(4, 3)) and looks_up(Positions(4, 3))
    assert not any(looks_up(kind(4, 3)) for kind in (Normed, Both, Other, nn.Embedding))
    held = Scaled(4, 3)
    before = {name: id(x) for name, x in [*held.named_parameters(), *held.named_buffers()]}
    looks_up(held)
    assert type(held) is Scaled and before == {n: id(x) for n, x in [*held.named_parameters(), *held.named_buffers()]}
    with torch.device("meta"):
        assert looks_up(Scaled(4, 3)) and not looks_up(Both(4, 3))
