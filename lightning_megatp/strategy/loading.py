"""The checkpoint methods of MegaTPStrategy: loading."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from lightning_megatp.checkpoint.agree import together
from lightning_megatp.checkpoint.averages import AveragedCopies
from lightning_megatp.checkpoint.files import check_zip
from lightning_megatp.checkpoint.folder import Folder, is_folder
from lightning_megatp.checkpoint.full import local_optimizer_state
from lightning_megatp.checkpoint.sharded import (
    ELSEWHERE,
    NOT_TENSORS,
    load_sharded_model,
    load_sharded_optimizer,
    put_back,
)
from lightning_megatp.checkpoint.stages import load_own, own_optimizer_state
from lightning_megatp.module import ParallelModule
from lightning_megatp.optimizers.nested import inner_optimizers, method_replaced
from lightning_megatp.random_states import set_random_state
from lightning_megatp.shim.lightning import averages, restart_loaders
from lightning_megatp.strategy.state import StrategyState


class LoadingMethods(StrategyState):
    """What Lightning calls to load, from one file or from a folder."""

    wait_for_checkpoints: Callable[[], None]

    def _set_up_loading(self) -> None:
        self._averages: AveragedCopies | None = None
        self._random_states: list[dict[str, Any]] | None = None
        self._folder: Folder | None = None
        self._not_tensors: dict[str, Any] = {}
        self._whole_model = False
        self._resumes = False
        """Whether what is loaded begins a run. A search in the middle of one (LearningRateFinder, BatchSizeFinder) also
        puts back what it had saved, but goes on with the random numbers and loaders of now, as on one device."""
        self._is_split = False
        """Whether `setup` of this run is past the split: what is loaded from then on goes to the split module."""

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self.wait_for_checkpoints()
        saved = self.broadcast(str(checkpoint_path))
        if saved != str(checkpoint_path) and not Path(checkpoint_path).exists():
            checkpoint_path = saved  # BatchSizeFinder makes up another name on every rank
        path = Path(checkpoint_path)
        self._folder = None
        with together(f"the checkpoint {path} was not loaded"):
            if is_folder(path):
                self._folder = Folder(path)
                checkpoint = self._folder.meta(kwargs.get("weights_only", args[0] if args else None))
                self._not_tensors = checkpoint.pop(NOT_TENSORS)
                checkpoint["state_dict"] = dict(self._not_tensors)
                self._whole_model = self._needs_whole_model()
                if self._whole_model:
                    put_back(checkpoint, self._folder)
                checkpoint.pop(ELSEWHERE, None)
            else:
                if self.local_rank == 0 and path.is_file():
                    check_zip(path)
                checkpoint = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        fitting = self.lightning_module is not None and self.lightning_module.trainer.state.fn == "fit"
        self._resumes = fitting and not self._is_split
        self._random_states = checkpoint.get("random_states") if self._resumes else None
        return checkpoint

    def _needs_whole_model(self) -> bool:
        """Whether somebody has to see all of a folder's model: averages, and `on_load_checkpoint`, which may change it;
        and `verify`, which compares with the unsplit model."""
        module = self.lightning_module
        if module is None:
            return False
        unsplit = self.verify and self.parallelism.split_form(module) is None
        return unsplit or self._has_hook("on_load_checkpoint") or bool(averages(module.trainer))

    def _has_hook(self, name: str) -> bool:
        """Whether the module or a callback has something of its own instead of Lightning's empty hook."""
        return any(has_own(x, name) for x in (self._module(), *self._trainer().callbacks))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Lightning restores the model before `setup` splits it. From a file it gets all, or its shards if an earlier
        run has split it; from a folder, later, what is left of it after the split. In the middle of a run
        (LearningRateFinder) both load at once."""
        if self._folder is not None and not self._whole_model:
            if self._is_split:
                self._load_split_model()
            return
        split: ParallelModule | None = self.parallelism.split_form(self._module())
        load = functools.partial(self._module().load_state_dict, strict=strict)
        with contextlib.nullcontext() if self._building is None else self._building.record():
            if split is None:
                load(checkpoint["state_dict"])
            else:
                self._cut_averages(split)  # their callbacks load next
                with contextlib.nullcontext() if split.shadows is None else split.shadows.buffers_as_whole(loads=True):
                    load_own(checkpoint["state_dict"], split, load)

    def _cut_averages(self, parallel: ParallelModule) -> None:
        """Let averaged copies hold what the split module does; once in a run."""
        if self._averages is None:
            self._averages = AveragedCopies(averages(self._trainer()), parallel, self._mesh())

    def _leave_averages(self) -> None:
        if self._averages is not None:
            self._averages.close()
            self._averages = None

    def _load_split_model(self) -> None:
        """In `setup`, after the split: this rank's part of a folder."""
        self._is_split = True
        if self._folder is None or self._whole_model:
            return
        module = self._module()
        load_sharded_model(self._folder, module, self._parallel(), self._not_tensors, module.strict_loading)
        if module.trainer.state.fn != "fit":
            self._folder = None

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        parallel, mesh = self._parallel(), self._mesh()
        states = checkpoint["optimizer_states"]
        if states and len(states) != len(self.optimizers):  # without any, which a hook may empty, they begin anew
            raise RuntimeError(
                f"MegaTPStrategy: the checkpoint has {len(states)} optimizers, and the module configures"
                f" {len(self.optimizers)}. Configure them as they were when it was saved."
            )
        for index, (optimizer, state) in enumerate(zip(self.optimizers, states, strict=bool(states))):
            if not optimizer.param_groups:
                continue  # Lightning's stand-in, as in `optimizer_state`
            if self._folder is not None:
                load_sharded_optimizer(self._folder, index, state, optimizer, parallel, mesh)
                continue
            with method_replaced(inner_optimizers(optimizer), "load_state_dict", self._load_own_state):
                optimizer.load_state_dict(self._own_state(optimizer, state))
        self._folder = None
        if self._resumes:
            self._resume_random()  # the last thing restored before the first batch
            restart_loaders(self._trainer())

    def _own_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
        """What this rank has of an optimizer's whole state."""
        parallel = self._parallel()
        if self.pp > 1:
            state = own_optimizer_state(state, optimizer, self._groups.order(optimizer), parallel, self._mesh())
        return local_optimizer_state(state, optimizer, parallel)

    def _load_own_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        type(optimizer).load_state_dict(optimizer, self._own_state(optimizer, state))

    def _resume_random(self) -> None:
        """Go on with the random numbers of the checkpoint that was loaded."""
        states, mesh = self._random_states, self._mesh()
        if states is not None and len(states) == mesh.size("dp"):
            set_random_state(states[mesh.rank("dp")])


def has_own(owner: Any, name: str) -> bool:
    """Whether an object has a method of its own instead of Lightning's empty hook."""
    return name in vars(owner) or sum(name in vars(kind) for kind in type(owner).__mro__) > 1
