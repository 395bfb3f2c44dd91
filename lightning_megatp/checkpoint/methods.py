"""The checkpoint methods of MegaTPStrategy."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from lightning_megatp.checkpoint.agree import together
from lightning_megatp.checkpoint.averages import Averages, averaged_states
from lightning_megatp.checkpoint.background import BackgroundSave
from lightning_megatp.checkpoint.exceptions import AfterException
from lightning_megatp.checkpoint.files import check_zip
from lightning_megatp.checkpoint.folder import Folder, is_folder, save_folder, to_bytes
from lightning_megatp.checkpoint.full import (
    full_optimizer_state,
    full_state_dict,
    local_optimizer_state,
    without_data,
)
from lightning_megatp.checkpoint.sharded import (
    ELSEWHERE,
    NOT_TENSORS,
    elsewhere_on_all_stages,
    load_sharded_model,
    load_sharded_optimizer,
    put_back,
    sharded_optimizer_state,
    sharded_state_dict,
    split_content,
)
from lightning_megatp.checkpoint.single import durable_checkpoint_io
from lightning_megatp.checkpoint.stages import (
    gather_optimizer_state,
    gather_state_dict,
    load_own,
    own_optimizer_state,
)
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.module import ParallelModule
from lightning_megatp.parts import Parts
from lightning_megatp.pipeline.detour import Detour
from lightning_megatp.randomness import gather_random_states, set_random_state
from lightning_megatp.shim.lightning import averages, default_store, restart_loaders


class CheckpointMethods(Parts):
    """What Lightning calls to save and to load, in one file or in a folder."""

    def _set_up_checkpoints(self, checkpoint: str, async_save: bool) -> None:
        """Raises:
        ValueError: a format that there isn't, or one that can't be saved in the background.
        """
        if checkpoint not in ("file", "folder"):
            raise ValueError(
                f'MegaTPStrategy: checkpoint={checkpoint!r}, but there are "file" (one .ckpt that any Trainer loads)'
                ' and "folder" (to which all ranks write at once).'
            )
        if async_save and checkpoint != "folder":
            raise ValueError('MegaTPStrategy: async_save=True needs checkpoint="folder": a file is put together first.')
        self.checkpoint, self.async_save = checkpoint, async_save
        self._durable_io = durable_checkpoint_io(self.namespace.checkpoint_io)
        self._background = BackgroundSave()
        self._background_group: dist.ProcessGroup | None = None
        self._after_exception: AfterException | None = None
        self._averages: Averages | None = None
        self._detours: list[Detour] = []
        self._random_states: list[dict[str, Any]] | None = None
        self._folder: Folder | None = None
        self._not_tensors: dict[str, Any] = {}
        self._whole_model = False
        self._optimizer_order: dict[int, list[str]] = {}
        """At pp > 1, id(optimizer) -> the names of its parameters in the user's order."""
        self._is_split = False
        """Whether `setup` of this run is past the split: what is loaded from then on goes to the split module."""

    @property
    def checkpoint_io(self) -> Any:
        """The plugin for files: the user's, given here or as `Trainer(plugins=...)`, or ours. A plugin around another
        (AsyncCheckpointIO) is put around ours."""
        if self._checkpoint_io is None:
            return self._durable_io
        plugin: Any = self._checkpoint_io
        if getattr(plugin, "checkpoint_io", self) is None:
            plugin.checkpoint_io = self._durable_io
        return plugin

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: Any) -> None:
        self._checkpoint_io = plugin

    def _is_copy(self) -> bool:
        """Whether a file can do without this rank: another data-parallel one has the same."""
        return self.checkpoint == "file" and self._mesh().rank("dp") > 0 and not self._parallel().divided

    # ---------------------------------------------------------------- saving

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model under canonical names. For a file: whole, on global rank 0, and empty on the others, or without
        data where there is an `on_save_checkpoint`, which finds the same names. For a folder: what each rank writes.

        Raises:
            RuntimeError: where the stages of a pipeline do different things.

        Communication: with such a hook one object broadcast over the world, of names and shapes.
        """
        assert self.lightning_module is not None
        if self.pipeline is not None and self.pipeline.metrics.are_apart:
            raise RuntimeError(
                "MegaTPStrategy: a checkpoint needs all ranks, and is saved where the last pipeline stage is alone: in"
                " a step, or in a hook of a LightningModule whose steps leave something on it. Save it in a callback."
            )
        parallel, mesh = self._parallel(), self._mesh()
        if self._cannot_gather():
            return {}
        if not self._apart() and not self._is_copy():
            parallel.check_replicas(mesh.group("tp"))
        if self.checkpoint == "folder":
            return sharded_state_dict(self._state_dict(), parallel, mesh)
        state = self._gathered(self._state_dict())
        if self._apart() or not self._has_hook("on_save_checkpoint"):
            return state
        outline = self.broadcast(without_data(state))
        return state if self.is_global_zero else outline

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        parallel, mesh = self._parallel(), self._mesh()
        if self._cannot_gather() or self._is_copy():
            return {}
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if self.checkpoint == "folder":
            return sharded_optimizer_state(optimizer, parallel, mesh)
        if not optimizer.param_groups:
            return optimizer.state_dict()  # Lightning's stand-in, where `configure_optimizers` returns None
        state = full_optimizer_state(optimizer, parallel, keep=mesh.rank("tp") == mesh.rank("dp") == 0)
        if self.pp == 1:
            return state
        return gather_optimizer_state(state, optimizer, self._optimizer_order.get(id(optimizer), []), parallel, mesh)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self._cannot_gather():
            warn_once_per_run(
                f"no checkpoint was written to {filepath}: after an exception the other ranks, which hold the rest of"
                " the model, can't be asked for it. The last regular checkpoint is the newest."
            )
            return
        if self._apart():
            agreed: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        else:
            agreed = together(f"the checkpoint {filepath} was not saved")
            if (states := gather_random_states(self._mesh())) is not None:
                checkpoint["random_states"] = states
        for place, key in averaged_states(checkpoint):
            state = place[key]
            folder = self.checkpoint == "folder"
            place[key] = sharded_state_dict(state, self._parallel(), self._mesh()) if folder else self._gathered(state)
        if self.checkpoint == "folder":
            self._save_folder(checkpoint, filepath, storage_options)
            return
        with agreed:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def _state_dict(self) -> dict[str, Any]:
        """What this rank has of the model; of what is divided its rows, also where an exception left it gathered."""
        assert self.lightning_module is not None
        sharding = self._parallel().sharding
        with contextlib.nullcontext() if sharding is None else sharding.as_rows():
            state: dict[str, Any] = self.lightning_module.state_dict()
        return state

    def _gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """The whole, on global rank 0, of what this rank has of a state dict: the module's, or a callback's copy's."""
        if self._is_copy():
            return {}
        parallel, mesh = self._parallel(), self._mesh()
        state = full_state_dict(state, parallel, keep=mesh.rank("tp") == mesh.rank("dp") == 0)
        return gather_state_dict(state, parallel, mesh) if self.pp > 1 else state

    def _save_folder(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None) -> None:
        if storage_options is not None or "://" in str(filepath):
            raise ValueError(_no_folders(f"{filepath} or with storage_options"))
        mesh = self._mesh()
        path = Path(self.broadcast(str(filepath)))
        self.wait_for_checkpoints()
        with together(f"the checkpoint {path} was not saved"):
            tensors, rest = split_content(checkpoint, mesh)
        rest[ELSEWHERE] = elsewhere_on_all_stages(rest[ELSEWHERE], mesh)
        with together(f"the checkpoint {path} was not saved"):
            meta = to_bytes(rest) if self.is_global_zero else b""
        if not self._saves_in_background():
            save_folder(path, tensors, meta)
            return
        if self._background_group is None:
            self._background_group = dist.new_group(backend="gloo")
        for chunks in tensors.values():
            chunks.stage()
        self._background.start(functools.partial(save_folder, path, tensors, meta, self._background_group))

    def _saves_in_background(self) -> bool:
        """Only within fit, whose end waits for it."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        return self.async_save and trainer.state.fn == "fit" and trainer.state.status == "running"

    def wait_for_checkpoints(self) -> None:
        """Until what is saved in the background is complete; every rank has to call it.

        Raises:
            RuntimeError: on every rank, if it could not be saved.
        """
        self._background.wait()

    def remove_checkpoint(self, filepath: Any) -> None:
        """Lightning removes what the checkpoint before made superfluous; that one may still be under way."""
        self._background.afterwards(functools.partial(super().remove_checkpoint, filepath))

    def on_train_end(self) -> None:
        self.wait_for_checkpoints()
        super().on_train_end()

    # ---------------------------------------------------------------- loading

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
        self._random_states = checkpoint.get("random_states") if fitting else None
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
        module = self.lightning_module
        assert module is not None
        trainer: Any = module.trainer
        return any(_has_own(x, name) for x in (module, *trainer.callbacks))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Lightning restores the model before `setup` splits it. From a file it gets all, or its shards if an earlier
        run has split it; from a folder, later, what is left of it after the split. In the middle of a run
        (LearningRateFinder) both load at once."""
        assert self.lightning_module is not None
        if self._folder is not None and not self._whole_model:
            if self._is_split:
                self._load_split_model()
            return
        split: ParallelModule | None = self.parallelism.split_form(self.lightning_module)
        load = functools.partial(self.lightning_module.load_state_dict, strict=strict)
        with contextlib.nullcontext() if self._building is None else self._building.record():
            if split is None:
                load(checkpoint["state_dict"])
            else:
                self._cut_averages(split)  # their callbacks load next
                load_own(checkpoint["state_dict"], split, load)

    def _cut_averages(self, parallel: ParallelModule) -> None:
        """Let averaged copies hold what the split module does; once in a run."""
        assert self.lightning_module is not None
        if self._averages is None:
            self._averages = Averages(averages(self.lightning_module.trainer), parallel, self._mesh())

    def _leave_averages(self) -> None:
        if self._averages is not None:
            self._averages.close()
            self._averages = None

    def _load_split_model(self) -> None:
        """In `setup`, after the split: this rank's part of a folder."""
        self._is_split = True
        if self._folder is None or self._whole_model:
            return
        module = self.lightning_module
        assert module is not None
        load_sharded_model(
            self._folder, module, self._parallel(), self._mesh(), self._not_tensors, module.strict_loading
        )
        if module.trainer.state.fn != "fit":
            self._folder = None

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        parallel, mesh = self._parallel(), self._mesh()
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise RuntimeError(
                f"MegaTPStrategy: the checkpoint has {len(states)} optimizers, and the module configures"
                f" {len(self.optimizers)}. Configure them as they were when it was saved."
            )
        for index, (optimizer, state) in enumerate(zip(self.optimizers, states, strict=True)):
            if not optimizer.param_groups:
                continue  # Lightning's stand-in, as in `optimizer_state`
            if self._folder is not None:
                load_sharded_optimizer(self._folder, index, state, optimizer, parallel, mesh)
                continue
            if self.pp > 1:
                order = self._optimizer_order.get(id(optimizer), [])
                state = own_optimizer_state(state, optimizer, order, parallel, mesh)
            optimizer.load_state_dict(local_optimizer_state(state, optimizer, parallel))
        self._folder = None
        self._resume_random()  # the last thing restored before the first batch
        assert self.lightning_module is not None
        restart_loaders(self.lightning_module.trainer)

    def _resume_random(self) -> None:
        """Go on with the random numbers of the checkpoint that was loaded."""
        states, mesh = self._random_states, self._mesh()
        if states is not None and len(states) == mesh.size("dp"):
            set_random_state(states[mesh.rank("dp")])

    # ---------------------------------------------------------------- after an exception

    def _check_places(self, trainer: Any) -> None:
        """Raises:
        ValueError: a callback shall save folders where only files can be written, or by a plugin for files.
        """
        if self.checkpoint == "folder" and self._checkpoint_io is not None:
            raise ValueError(
                'MegaTPStrategy: checkpoint="folder" is written by the strategy, and the'
                f" {type(self._checkpoint_io).__name__} given as a plugin writes single files. Use"
                ' checkpoint="file", or leave the plugin out (async_save=True saves folders in the background).'
            )
        for callback in trainer.checkpoint_callbacks if self.checkpoint == "folder" else ():
            place = str(getattr(callback, "dirpath", None) or "")
            if "://" in place:
                raise ValueError(_no_folders(place))

    def _watch_exceptions(self, trainer: Any) -> None:
        """Let callbacks that save after an exception do so if all ranks can."""
        if self.world_size == 1:
            return
        store = default_store()
        run = store.add(f"megatp_exceptions/runs/{self.global_rank}", 1)
        store = dist.PrefixStore(f"megatp_exceptions/{run}", store)
        self._after_exception = AfterException(store, self.global_rank, self.world_size)
        saving = [c for c in trainer.checkpoint_callbacks if getattr(c, "save_on_exception", True)]
        self._detours = [
            Detour(c, "on_exception", self._save_after_exception) for c in saving if _has_own(c, "on_exception")
        ]

    def _leave_exceptions(self) -> None:
        for detour in self._detours:
            detour.end()
        self._detours = []

    def _save_after_exception(self, save: functools.partial[Any]) -> None:
        """In place of a callback's `on_exception`. Lightning's own does more than to save: it links and removes."""
        exception, mesh = save.args[-1], self._mesh()
        assert self._after_exception is not None and self.lightning_module is not None
        step = self.lightning_module.trainer.global_step
        why = self._after_exception.agree(exception, step, self._groups_for_saving())
        if not why or not self._cannot_gather():
            save()
            return
        warnings.warn(
            f"MegaTPStrategy: no checkpoint was saved after the {type(exception).__name__} on {mesh.describe()}: {why}."
            " Each rank holds a part of the model, so that all have to raise at the same point. The last regular"
            " checkpoint is the newest.",
            stacklevel=2,
        )

    def _groups_for_saving(self) -> dict[str, Any]:
        mesh, rows = self._mesh(), self._parallel().rows_group
        groups = {f"{axis} {mesh.ranks(axis)}": mesh.group(axis) for axis in ("tp", "pp", "dp")}
        if rows is not None:
            groups[f"rows {dist.get_process_group_ranks(rows)}"] = rows
        return {"world": dist.group.WORLD, **groups}

    def _cannot_gather(self) -> bool:
        """Whether the others, whose parts are needed, can't be asked for them."""
        divided = self._mesh().size("tp") * self.pp > 1 or bool(self._parallel().divided)
        alone = not divided and (self.checkpoint == "file" or self.world_size == 1)
        return self._apart() and not alone

    def _apart(self) -> bool:
        """Whether this rank has raised, and can't count on the others to do what it does."""
        return self._interrupted() and not (self._after_exception is not None and self._after_exception.together)

    def _interrupted(self) -> bool:
        trainer = getattr(self.lightning_module, "_trainer", None)
        return trainer is not None and bool(trainer.interrupted)


def _no_folders(place: str) -> str:
    return (
        f'MegaTPStrategy: checkpoint="folder" writes to a file system that all ranks share, not to {place}. Use a'
        ' mounted path, or checkpoint="file".'
    )


def _has_own(owner: Any, name: str) -> bool:
    """Whether an object has a method of its own instead of Lightning's empty hook."""
    return name in vars(owner) or sum(name in vars(kind) for kind in type(owner).__mro__) > 1
