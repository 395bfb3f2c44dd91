"""What a run of the strategy is made of, shared by the files in which its methods live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning_megatp.building.building import Building
from lightning_megatp.gradients.groups import Groups
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.pipeline import Pipeline
from lightning_megatp.plugin import ParallelismPlugin
from lightning_megatp.shim.lightning import Namespace
from lightning_megatp.strategy.verify import FirstBatch
from lightning_megatp.zero.options import ZeroOptions
from lightning_megatp.zero.sharding import ZeroSharding

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _Base
else:
    _Base = object  # the class is completed per Lightning namespace, by `strategy_class`


class StrategyState(_Base):
    """What a run is made of, in the order in which it comes to be; `MegaTPStrategyBase` makes it."""

    namespace: Namespace
    tp: int
    pp: int
    num_nodes: int
    parallelism: ParallelismPlugin
    zero: ZeroOptions
    verify: bool
    mesh: ParallelMesh | None
    _building: Building | None
    _first_batch: FirstBatch | None
    """Until it is compared with the unsplit model."""
    parallel: ParallelModule | None
    pipeline: Pipeline | None
    sharding: ZeroSharding | None
    _groups: Groups
    """The optimizers' groups, from when these are made."""
    _undivided: bool
    """Whether the model is on each rank as it is on one device."""
    _alone: bool
    """Whether there is one rank, and nothing to add."""

    def _module(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module

    def _trainer(self) -> Any:
        return self._module().trainer

    def _mesh(self) -> ParallelMesh:
        if self.mesh is None:
            raise RuntimeError(
                "MegaTPStrategy: the mesh exists once a Trainer has started the processes (fit, test, ...)."
            )
        return self.mesh

    def _parallel(self) -> ParallelModule:
        if self.parallel is None:
            raise RuntimeError("MegaTPStrategy: the model is split once a Trainer has set it up (fit, test, ...).")
        return self.parallel
