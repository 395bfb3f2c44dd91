"""The checkpoint methods of MegaTPStrategy: saving, also after an exception."""

from __future__ import annotations

import contextlib
import functools
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from lightning_megatp.averaged_buffers import agree_on_buffers, versions_of
from lightning_megatp.checkpoint.agree import together
from lightning_megatp.checkpoint.averages import averaged_states
from lightning_megatp.checkpoint.background import BackgroundSave
from lightning_megatp.checkpoint.by_hooks import watch_saving
from lightning_megatp.checkpoint.exceptions import AfterException
from lightning_megatp.checkpoint.folder import save_folder, to_bytes
from lightning_megatp.checkpoint.full import full_optimizer_state, full_state_dict, without_data
from lightning_megatp.checkpoint.sharded import (
    ELSEWHERE,
    elsewhere_on_all_stages,
    sharded_optimizer_state,
    sharded_state_dict,
    split_content,
)
from lightning_megatp.checkpoint.single import durable_checkpoint_io
from lightning_megatp.checkpoint.stages import gather_optimizer_state, gather_state_dict, held_entries
from lightning_megatp.detour import Detour, end_all
from lightning_megatp.mesh import TALKING
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.optimizers.elementwise import unwrap
from lightning_megatp.optimizers.nested import inner_optimizers, method_replaced
from lightning_megatp.shim.lightning import default_store, trainer_of
from lightning_megatp.strategy.after_run import refuse_others, warn_of_parts
from lightning_megatp.strategy.loading import LoadingMethods, has_own
from lightning_megatp.strategy.randomness import gather_random_states


class CheckpointMethods(LoadingMethods):
    """What Lightning calls to save and to load, in one file or in a folder."""

    def _set_up_checkpoints(self, checkpoint: str, async_save: bool) -> None:
        """Take the arguments that are about checkpoints.

        Raises:
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
        self._detours: list[Detour] = []
        self._set_up_loading()

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

    def _in_parts(self) -> bool:
        """Whether ranks hold parts of the model."""
        return self._mesh().size("tp") * self.pp > 1 or bool(self._parallel().divided)

    # ---------------------------------------------------------------- saving

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The model under canonical names. For a file: whole, on global rank 0, and on each rank that holds all of it;
        on others empty, or without data where there is an `on_save_checkpoint`, which finds the same names. For a
        folder: what each rank writes.

        Raises:
            RuntimeError: where the stages of a pipeline do different things.

        Communication: for a file of a model in parts one all-reduce of an element over the world; with such a hook on
        some rank one object broadcast, of names and shapes.
        """
        if self.pipeline is not None and self.pipeline.metrics.are_apart:
            raise RuntimeError(
                "MegaTPStrategy: a checkpoint needs all ranks, and is saved where the last pipeline stage is alone: in"
                " a step, or in a hook of a LightningModule whose steps leave something on it. Save it in a callback."
            )
        parallel, mesh = self._parallel(), self._mesh()
        if self._cannot_gather():
            return {}
        parallel.adopt_copies()
        if not self._apart() and not self._is_copy():
            parallel.check_replicas(mesh.group("tp"))
        with contextlib.nullcontext() if parallel.shadows is None else parallel.shadows.buffers_as_whole():
            if parallel.buffer_versions is not None and not self._apart():
                agree_on_buffers(parallel.module, parallel.buffer_versions, mesh)
                parallel.buffer_versions = versions_of(parallel.module)
            state = self._state_dict()
        if self.checkpoint == "folder":
            return sharded_state_dict(state, parallel, mesh)
        return self._outlined(self._gathered(state))

    def _outlined(self, state: dict[str, Any]) -> dict[str, Any]:
        """What global rank 0 has of the whole; on the others its outline, where an `on_save_checkpoint` of some rank
        will look at it."""
        if not self._in_parts():
            return state
        if not self.reduce_boolean_decision(self._has_hook("on_save_checkpoint"), all=False):
            return state
        outline: dict[str, Any] = self.broadcast(without_data(state))
        return state if self.is_global_zero else outline

    def _check_optimizers(self) -> None:
        """Before training.

        Raises:
            ValueError: what an optimizer saves can't be put where checkpoints are to be.
        """
        nested = [optimizer for optimizer in self.optimizers if inner_optimizers(optimizer)]
        if nested and self.checkpoint == "folder":
            raise ValueError(
                f"MegaTPStrategy: {type(nested[0]).__name__} holds other optimizers, whose states are something"
                ' which a checkpoint folder has no place for. Use checkpoint="file".'
            )

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The state of an optimizer of the module that was trained, which need not be the one that was validated
        since; where, and by what communication, as `lightning_module_state_dict`."""
        parallel, mesh = self._groups.parallel, self._mesh()
        if self._cannot_gather():
            return {}
        optimizer = unwrap(optimizer)
        inner = inner_optimizers(optimizer)
        if self.checkpoint == "folder":
            return sharded_optimizer_state(optimizer, self._groups.order(optimizer), parallel, mesh)
        if not self._in_parts():
            state: dict[str, Any] = optimizer.state_dict()
            return state
        with method_replaced(inner, "state_dict", self._inner_state):
            state = {} if self._is_copy() else self._whole_optimizer_state(optimizer)
        return self._outlined(state)

    def _inner_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """What another optimizer puts into its own: of the ranks that save nothing, something to look into."""
        return self._whole_optimizer_state(optimizer) or {"state": {}, "param_groups": []}

    def _whole_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        parallel, mesh = self._groups.parallel, self._mesh()
        if not optimizer.param_groups:
            stand_in: dict[str, Any] = type(optimizer).state_dict(optimizer)  # `configure_optimizers` returned None
            return stand_in
        state = full_optimizer_state(optimizer, parallel, keep=mesh.rank("tp") == mesh.rank("dp") == 0)
        if self.pp == 1:
            return state
        return gather_optimizer_state(state, optimizer, self._groups.order(optimizer), parallel, mesh)

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
            self._put_modules(checkpoint)
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def _put_modules(self, checkpoint: dict[str, Any]) -> None:
        """In place of split ones what one device saves."""
        if self.is_global_zero and (outlines := self._parallel().outlines) is not None:
            outlines.put_into(checkpoint, self._module().CHECKPOINT_HYPER_PARAMS_KEY)

    def _state_dict(self) -> dict[str, Any]:
        """What this rank has of the model; of what is divided its rows, also where an exception left it gathered."""
        parallel = self._parallel()
        rows = contextlib.nullcontext() if parallel.sharding is None else parallel.sharding.as_rows()
        with parallel.parts_expected(), rows:
            state: dict[str, Any] = self._module().state_dict()
        if self.pipeline is None:
            return state
        others = tuple(f"{unit}." for unit in self.pipeline.stage_of_unit.keys() - set(self.pipeline.own_units))
        held = held_entries(state)
        return {k: x for k, x in held.items() if not (k.endswith("_extra_state") and k.startswith(others))}

    def _gathered(self, state: dict[str, Any]) -> dict[str, Any]:
        """The whole, on global rank 0, of what this rank has of a state dict: the module's, or a callback's copy's."""
        if not self._in_parts():
            return state
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
            self._put_modules(checkpoint)
            tensors, rest = split_content(checkpoint, mesh)
        rest[ELSEWHERE] = elsewhere_on_all_stages(rest[ELSEWHERE], mesh)
        with together(f"the checkpoint {path} was not saved"):
            meta = to_bytes(rest) if self.is_global_zero else b""
        if not self._saves_in_background():
            save_folder(path, tensors, meta)
            return
        if self._background_group is None:
            self._background_group = dist.new_group(backend="gloo", timeout=mesh.timeout)
        for chunks in tensors.values():
            chunks.stage()
        self._background.start(functools.partial(save_folder, path, tensors, meta, self._background_group))

    def _saves_in_background(self) -> bool:
        """Only within fit, whose end waits for it."""
        trainer = self._trainer()
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

    # ---------------------------------------------------------------- after an exception

    def _check_places(self, trainer: Any) -> None:
        """See whether checkpoints can be written where plugins and callbacks want them.

        Raises:
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

    def _watch_saving(self, trainer: Any) -> None:
        """Complete what hooks put into checkpoints of a model that is in parts."""
        parallel = self._parallel()
        end_all(parallel.saving)
        if self._in_parts():
            parallel.saving += watch_saving(trainer, parallel, self._mesh(), lambda: not self._cannot_gather())
            if parallel.expects_parts is None:
                warn_of_parts(parallel)
                refuse_others(parallel, CheckpointMethods)
            parallel.expects_parts = True

    def _watch_exceptions(self, trainer: Any) -> None:
        """Let callbacks that save after an exception do so if all ranks can."""
        if self.world_size == 1:
            return
        store = default_store()
        run = store.add(f"megatp_exceptions/runs/{self.global_rank}", 1)
        store = dist.PrefixStore(f"megatp_exceptions/{run}", store)
        self._after_exception = AfterException(store, self.global_rank, self.world_size)
        saving = [c for c in trainer.checkpoint_callbacks if getattr(c, "save_on_exception", True)]
        self._detours += [
            Detour(c, "on_exception", self._save_after_exception) for c in saving if has_own(c, "on_exception")
        ]

    def _end_detours(self) -> None:
        """Give callbacks, hooks and the Trainer their own methods back."""
        end_all(self._detours)

    def _save_after_exception(self, save: functools.partial[Any]) -> None:
        """In place of a callback's `on_exception`. Lightning's own does more than to save: it links and removes."""
        exception, mesh = save.args[-1], self._mesh()
        assert self._after_exception is not None
        why = self._after_exception.agree(exception, self._trainer().global_step, self._groups_for_saving())
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
        groups |= {f"hosts of {axes} {mesh.ranks(*axes)}": mesh.hosts(*axes) for axes in TALKING}
        if rows is not None:
            groups[f"rows {dist.get_process_group_ranks(rows)}"] = rows
        return {"world": dist.group.WORLD, **groups}

    def _cannot_gather(self) -> bool:
        """Whether the others, whose parts are needed, can't be asked for them."""
        alone = not self._in_parts() and (self.checkpoint == "file" or self.world_size == 1)
        return self._apart() and not alone

    def _apart(self) -> bool:
        """Whether this rank has raised, and can't count on the others to do what it does."""
        return self._interrupted() and not (self._after_exception is not None and self._after_exception.together)

    def _interrupted(self) -> bool:
        trainer = trainer_of(self.lightning_module)
        return trainer is not None and bool(trainer.interrupted)


def _no_folders(place: str) -> str:
    return (
        f'MegaTPStrategy: checkpoint="folder" writes to a file system that all ranks share, not to {place}. Use a'
        ' mounted path, or checkpoint="file".'
    )
