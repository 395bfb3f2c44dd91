"""Parameters that a step uses on another stage than their own: `F.linear(h, self.tok.weight)` as the head.

Found by the dry run of the first batch, when optimizers exist already and foreign parameters are gone. So such a
parameter is lent: the stage that uses it gets a copy, its gradients are summed with those at home, the optimizer at
home makes the step, and the copy is renewed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.slicing.slicer import Slicer


class Loans:
    """The parameters lent between the stages of one pipeline.

    Args:
        slicer: puts a copy where the module looks for it.
        parallel: the module.
        mesh: who is where.
        homes: parameter name -> global ranks of this pipeline that hold it, the one that counts it last.
        rank_of_stage: stage -> global rank.
    """

    def __init__(
        self,
        slicer: Slicer,
        parallel: ParallelModule,
        mesh: ParallelMesh,
        homes: Mapping[str, Sequence[int]],
        rank_of_stage: Sequence[int],
    ) -> None:
        self._slicer, self._parallel, self._mesh = slicer, parallel, mesh
        self._homes = {name: list(ranks) for name, ranks in homes.items()}
        self.rank_of_stage = rank_of_stage
        self._lent: dict[str, set[int]] = {}
        """Name -> global ranks that have a copy."""

    def is_lent(self, name: str) -> bool:
        """Whether what this rank has under a name is a copy."""
        return self._mesh.global_rank in self._lent.get(name, ())

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Meanwhile the module's parameters are without the copies."""
        copies = {id(self._parallel.names[name]) for name in self._lent if self.is_lent(name)}
        taken = [
            (child._parameters, leaf, p)
            for child in self._parallel.module.modules()
            for leaf, p in child._parameters.items()
            if id(p) in copies
        ]
        for held, leaf, _ in taken:
            del held[leaf]
        try:
            yield
        finally:
            for held, leaf, copy in taken:
                held[leaf] = copy

    def lend(self, uses: Mapping[str, Sequence[int]]) -> list[str]:
        """Give copies to the stages that need some. Every rank of the pipeline has to call it, with the same uses.

        Args:
            uses: parameter name -> stages that use it.

        Returns:
            The names of what was lent.

        Communication: one broadcast over pp per lent parameter.
        """
        wanted = self.missing(uses)
        for name, ranks in wanted.items():
            self._lent.setdefault(name, set()).update(ranks)
            value = self._send(name)
            if self._mesh.global_rank in ranks:
                copy = self._slicer.ownership.hold(name, value)
                self._parallel.counted_elsewhere.add(id(copy))
                self._parallel.forget_freed()
        return list(wanted)

    def missing(self, uses: Mapping[str, Sequence[int]]) -> dict[str, set[int]]:
        """Parameter name -> global ranks that use it and don't have it yet."""
        found, last = {}, len(self.rank_of_stage) - 1  # which has the tail of the step, too: a stage more
        for name in sorted(uses):
            users = {self.rank_of_stage[min(stage, last)] for stage in uses[name]}
            found[name] = users - set(self._homes[name]) - self._lent.get(name, set())
        return {name: ranks for name, ranks in found.items() if ranks}

    def renew(self) -> None:
        """After an optimizer step: bring the copies up to date.

        Communication: one broadcast over pp per lent parameter.
        """
        for name in self._lent:
            self._send(name)

    def _send(self, name: str) -> Tensor:
        """Broadcast the values from home; copies take them in place."""
        held = self._parallel.names.get(name)
        like = self._slicer.ownership.stand_in(name)
        value = torch.empty(like.shape, dtype=like.dtype, device=self._mesh.device) if held is None else held.detach()
        sent = value.contiguous()  # gloo would send the memory as it lies
        dist.broadcast(sent, src=self._homes[name][-1], group=self._mesh.group("pp"))
        return value if sent is value else value.copy_(sent)
