"""Which parameters are trained: every stage knows it of all, since it plans what needs a gradient on its way."""

from __future__ import annotations

from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.slicing.slicer import Slicer


class Trained:
    """What hooks freeze and unfreeze while a model is trained in stages.

    Args:
        parallel: the module, with what this rank holds.
        slicer: has what stands for the parameters of other stages.
        mesh: who is where.
    """

    def __init__(self, parallel: ParallelModule, slicer: Slicer, mesh: ParallelMesh) -> None:
        self._parallel, self._slicer, self._mesh = parallel, slicer, mesh
        self._known = self._own()

    def agree(self) -> bool:
        """Hear what was frozen or unfrozen on other stages since the last time.

        Returns:
            Whether anything was on any stage: plans made before are outdated.

        Communication: one object all-gather over pp.
        """
        own, before = self._own(), self._known
        changes = self._mesh.exchange({name: of for name, of in own.items() if before.get(name, of) != of}, "pp")
        for name, requires_grad in (change for of_stage in changes for change in of_stage.items()):
            self._slicer.ownership.stand_in(name).requires_grad_(requires_grad)
        self._known = self._own()
        return any(changes)

    def _own(self) -> dict[str, bool]:
        return {name: p.requires_grad for name, p in self._parallel.module.named_parameters(remove_duplicate=False)}
