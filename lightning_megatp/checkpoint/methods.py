"""The checkpoint methods of MegaTPStrategy."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from lightning_megatp.building.building import Building
from lightning_megatp.checkpoint.full import (
    full_optimizer_state,
    full_state_dict,
    local_optimizer_state,
    local_state_dict,
)
from lightning_megatp.checkpoint.stages import (
    gather_optimizer_state,
    gather_state_dict,
    own_optimizer_state,
    own_state_dict,
)
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.module import ParallelModule
from lightning_megatp.plugin import ParallelismPlugin
from lightning_megatp.randomness import gather_random_states, set_random_state

if TYPE_CHECKING:
    from lightning.pytorch.strategies import ParallelStrategy as _Base
else:
    _Base = object  # the class is completed per Lightning namespace, by `strategy_class`


class CheckpointMethods(_Base):
    """What Lightning calls to save and to load."""

    parallelism: ParallelismPlugin
    pp: int
    _building: Building | None
    _random_states: list[dict[str, Any]] | None = None

    def _mesh(self) -> ParallelMesh:
        raise NotImplementedError

    def _parallel(self) -> ParallelModule:
        raise NotImplementedError

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The whole model under canonical names, on global rank 0; empty on the other ranks."""
        assert self.lightning_module is not None
        parallel, mesh = self._parallel(), self._mesh()
        if (mesh.rank("dp") > 0 and not parallel.divided) or self._cannot_gather():
            return {}
        parallel.check_replicas(mesh.group("tp"))
        state = full_state_dict(
            self.lightning_module.state_dict(), parallel, keep=mesh.rank("tp") == mesh.rank("dp") == 0
        )
        return gather_state_dict(state, parallel, mesh) if self.pp > 1 else state

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        parallel, mesh = self._parallel(), self._mesh()
        if (mesh.rank("dp") > 0 and not parallel.divided) or self._cannot_gather():
            return {}
        optimizer = getattr(optimizer, "optimizer", optimizer)
        state = full_optimizer_state(optimizer, parallel, keep=mesh.rank("tp") == mesh.rank("dp") == 0)
        return gather_optimizer_state(state, optimizer, parallel, mesh) if self.pp > 1 else state

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self._cannot_gather():
            warn_once_per_run(
                f"no checkpoint was written to {filepath}: after an exception the other tensor ranks, which hold the"
                " rest of the model, can't be asked for it. The last regular checkpoint is the newest."
            )
            return
        if not self._interrupted() and (states := gather_random_states(self._mesh())) is not None:
            checkpoint["random_states"] = states
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        fitting = self.lightning_module is not None and self.lightning_module.trainer.state.fn == "fit"
        self._random_states = checkpoint.get("random_states") if fitting else None
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Lightning restores the model before `setup` splits it; a model split by an earlier run gets its shards."""
        assert self.lightning_module is not None
        split: ParallelModule | None = self.parallelism.split_form(self.lightning_module)
        state = checkpoint["state_dict"]
        if split is not None:
            state = local_state_dict(state, split)
        if split is not None and split.order:
            state = own_state_dict(state, split)
        with contextlib.nullcontext() if self._building is None else self._building.record():
            self.lightning_module.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        parallel, mesh = self._parallel(), self._mesh()
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            if self.pp > 1:
                state = own_optimizer_state(state, optimizer, parallel, mesh)
            optimizer.load_state_dict(local_optimizer_state(state, optimizer, parallel))
        self._resume_random()  # the last thing restored before the first batch

    def _resume_random(self) -> None:
        """Go on with the random numbers of the checkpoint that was loaded."""
        states, mesh = self._random_states, self._mesh()
        if states is not None and len(states) == mesh.size("dp"):
            set_random_state(states[mesh.rank("dp")])

    def _cannot_gather(self) -> bool:
        return self._interrupted() and self._mesh().size("tp") * self.pp > 1

    def _interrupted(self) -> bool:
        trainer = getattr(self.lightning_module, "_trainer", None)
        return trainer is not None and bool(trainer.interrupted)
