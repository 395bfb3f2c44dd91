"""Lightning under its two names, and its private names. Seen in 2.5 and 2.6.

`lightning.pytorch` and `pytorch_lightning` are separate copies of the same classes, and a Trainer of one refuses a
strategy of the other (Lightning issues 20526 and 17445). So what we build on is looked up by namespace.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch.distributed as dist
from torch.optim.swa_utils import AveragedModel

from lightning_megatp.random_states import is_random_state, random_state, set_random_state
from lightning_megatp.shim.launcher import subprocess_launcher
from lightning_megatp.shim.torch import DisableTorchFunction


@dataclass(frozen=True)
class Namespace:
    """The classes of one copy of Lightning."""

    parallel_strategy: type
    launcher: type
    """`_SubprocessScriptLauncher`: what DDPStrategy starts its ranks with; there is no public name for it."""
    precision: Any
    """The base of all precision plugins, whose `pre_backward` calls the hooks and nothing else."""
    double: Any
    """The float64 precision plugin."""
    checkpoint_io: Any
    """`TorchCheckpointIO`: checkpoints in one file."""
    silent_logger: type
    """`DummyLogger`, which takes all and writes nothing, as in a fast_dev_run."""
    registry: Any
    """`StrategyRegistry`, for `Trainer(strategy="megatp")`."""
    sigterm: type[BaseException]
    """`SIGTERMException`, which ends a run after SIGTERM."""

    @classmethod
    def load(cls, name: str) -> Namespace:
        """Import one copy of Lightning.

        Args:
            name: "lightning.pytorch" or "pytorch_lightning".
        """
        strategies = importlib.import_module(f"{name}.strategies")
        launchers = importlib.import_module(f"{name}.strategies.launchers.subprocess_script")
        return cls(
            parallel_strategy=strategies.ParallelStrategy,
            launcher=subprocess_launcher(launchers._SubprocessScriptLauncher),
            precision=importlib.import_module(f"{name}.plugins.precision").Precision,
            double=importlib.import_module(f"{name}.plugins.precision").DoublePrecision,
            checkpoint_io=importlib.import_module(f"{name}.plugins.io").TorchCheckpointIO,
            silent_logger=importlib.import_module(f"{name}.loggers.logger").DummyLogger,
            registry=strategies.StrategyRegistry,
            sigterm=importlib.import_module(f"{name}.utilities.exceptions").SIGTERMException,
        )


def default_store() -> dist.Store:
    """The store of the default process group, whoever created the group (Lightning, torchrun, the user). torch
    2.11-2.13 have no public way to ask for it."""
    return dist.distributed_c10d._get_default_store()


def averages(trainer: Any) -> list[tuple[Any, Any]]:
    """Callback, and its averaged copy of the module. StochasticWeightAveraging and WeightAveraging hold it as
    `_average_model`, made in their `setup`, before the strategy's; the latter within torch's AveragedModel."""
    found = []
    for callback in trainer.callbacks:
        average = getattr(callback, "_average_model", None)
        if average is not None:
            found.append((callback, average.module if isinstance(average, AveragedModel) else average))
    return found


def saves_averages_as_model(callback: Any) -> bool:
    """Whether a callback puts its averages where a checkpoint has the model: WeightAveraging and what is derived of it,
    known by the method that exchanges the two (2.6)."""
    return hasattr(callback, "_swap_models")


def finetuning_callbacks(trainer: Any) -> list[Any]:
    """BaseFinetuning callbacks, which map the optimizer's parameters to names of the module's (`_store`)."""
    return [callback for callback in trainer.callbacks if hasattr(callback, "finetune_function")]


def throughputs(trainer: Any) -> list[Any]:
    """What ThroughputMonitor callbacks count with, one per stage of the Trainer (`_throughputs`, 2.5-2.6)."""
    return [found for callback in trainer.callbacks for found in getattr(callback, "_throughputs", {}).values()]


def summaries(trainer: Any) -> list[Any]:
    """ModelSummary and its kinds, which run the module's example if it has one (`_summary`, 2.5-2.6)."""
    return [callback for callback in trainer.callbacks if hasattr(callback, "_summary")]


def draws_graph(logger: Any) -> bool:
    """A TensorBoardLogger(log_graph=True): it traces the module on global rank 0 (2.5-2.6)."""
    return bool(getattr(logger, "_log_graph", False))


def without_sync_advice() -> None:
    """Leave out the advice to log with `sync_dist=True`. Lightning gives it wherever there is a process group, also to
    those who do, though the ranks hold the same value (2.5-2.6)."""
    warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True\)`")


def around_clipping(plugin: Any, call: Callable[[], None]) -> None:
    """Call something after the hooks before an optimizer's step, and again when gradients are clipped. Lightning has no
    hook there; every precision plugin's `_after_closure` ends in `_clip_gradients` (2.5-2.6)."""
    clip = type(plugin)._clip_gradients

    def clip_gradients(*args: Any, **kwargs: Any) -> None:
        call()
        clip(plugin, *args, **kwargs)
        call()

    plugin._clip_gradients = clip_gradients


def within_hooks(caller: Any, name: str, context: Callable[[], AbstractContextManager[None]] | None) -> None:
    """Let the method of an object of Lightning's that calls a user's hooks run in a context; None takes that back. Of a
    precision plugin there is no other way around the hooks of a module and its callbacks: `_after_closure` calls those
    before an optimizer's step (2.5-2.6), the public `post_backward` those after a backward."""
    vars(caller).pop(name, None)
    if context is None:
        return
    method = getattr(caller, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        with context():
            return method(*args, **kwargs)

    setattr(caller, name, run)


def around_loader_hooks(trainer: Any, context: Callable[[], AbstractContextManager[None]]) -> None:
    """Let `train_dataloader` and its like, of the module or the datamodule, be called in a context. Each loop has a
    `_data_source` that calls its hook (2.5-2.6); a detour on the datamodule itself would be pickled with it."""
    loops = trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop
    for loop in (*loops, trainer.predict_loop):
        within_hooks(loop._data_source, "dataloader", context)


def around_training_step(trainer: Any, context: Callable[[], AbstractContextManager[None]] | None) -> None:
    """Let a training step be judged in a context, or in none: that it returns None, to skip its batch, is refused where
    `trainer.world_size` is above 1. The method that looks has a private name (2.5-2.6)."""
    within_hooks(trainer.fit_loop.epoch_loop.automatic_optimization, "_training_step", context)


def first_loaders(trainer: Any) -> Any:
    """The loaders of the run that is about to start, as the user gave them; of several for evaluation, the first. They
    are set up now rather than a moment later: the loop's own call finds it done, but for its random numbers. The loops
    keep them under a private name."""
    state = trainer.state.fn.value
    loop = getattr(trainer, f"{state}_loop")
    if state == "fit" and loop._combined_loader is None:
        _SetUpEarly.of(loop)
    elif state != "fit":
        loop.setup_data()
    combined = loop._combined_loader
    if combined is None:
        return None
    return combined.iterables if state == "fit" else next(iter(combined.flattened), None)


class _SetUpEarly:
    """The call of a fit loop's `setup_data` in its place, after it was done early. It draws the loaders' seed: what
    hooks seed or draw until then comes first, as on one device."""

    @classmethod
    def of(cls, loop: Any) -> None:
        """Do it early."""
        before = random_state()
        with _as_resumed(loop):
            loop.setup_data()
        if loop._combined_loader is not None:
            loop.setup_data = cls(loop, before, random_state())
        set_random_state(before)

    def __init__(self, loop: Any, before: dict[str, Any], drawn: dict[str, Any]) -> None:
        self._loop, self._before, self._drawn = loop, before, drawn

    def __call__(self) -> None:
        del self._loop.setup_data
        if is_random_state(self._before):
            set_random_state(self._drawn)
        else:
            iter(self._loop._data_fetcher)


@contextmanager
def _as_resumed(loop: Any) -> Iterator[None]:
    """Meanwhile a fit loop has counted as far as the checkpoint to go on from: who makes loaders may ask for the epoch,
    and Lightning notes for which it has them. It restores loops later, from the checkpoint that it keeps until then
    under a private name (`_loaded_checkpoint`, 2.5-2.6)."""
    loops = (loop.trainer._checkpoint_connector._loaded_checkpoint or {}).get("loops") or {}
    resumed = loops.get("fit_loop", {})
    counts = {name: state for name, state in loop.state_dict().items() if name.endswith("progress") and name in resumed}
    for name in counts:
        attrgetter(name)(loop).load_state_dict(resumed[name])
    try:
        yield
    finally:
        for name, state in counts.items():
            attrgetter(name)(loop).load_state_dict(state)


def restart_loaders(trainer: Any) -> None:
    """Let training data begin where a checkpoint has it, if `first_loaders` set it up before the loops were restored:
    Lightning hands loaders their states, and draws the order of an epoch, when it sets them up. A DataLoader keeps the
    iterator of persistent workers (`_iterator`, torch 2.11-2.13), which draws its seed when it is made."""
    loop = trainer.fit_loop
    vars(loop).pop("setup_data", None)
    if loop._combined_loader is not None:
        loop._load_combined_loader_states()
        for loader in loop._combined_loader.flattened:
            if getattr(loader, "persistent_workers", False):
                loader._iterator = None
        iter(loop._data_fetcher)


def trainer_of(module: Any) -> Any:
    """A LightningModule's Trainer, None if it has none: the public property raises then (`_trainer`, 2.5-2.6)."""
    return getattr(module, "_trainer", None)


def around_metrics(trainer: Any, context: Callable[[], AbstractContextManager[None]]) -> AbstractContextManager[None]:
    """Let a Trainer's `callback_metrics` and its kinds be read in a context. They are computed when they are read,
    by an object under a private name (`_logger_connector`, 2.5-2.6)."""
    names = ("callback_metrics", "logged_metrics", "progress_bar_metrics")
    return _reading_in(trainer._logger_connector, names, context)


def around_progress(trainer: Any, context: Callable[[], AbstractContextManager[None]]) -> AbstractContextManager[None]:
    """Let the step and the epoch that a Trainer is at be read in a context, also by `self.global_step` and its like of
    its modules. Both are properties of the Trainer's class."""
    return _reading_in(trainer, ("global_step", "current_epoch"), context)


@contextmanager
def _reading_in(
    owner: Any, names: tuple[str, ...], context: Callable[[], AbstractContextManager[None]]
) -> Iterator[None]:
    """Let properties of an object be read in a context, by giving it another class meanwhile."""
    before: Any = type(owner)
    owner.__class__, owner.around_reading = _read_in_context(before, names), context
    try:
        yield
    finally:
        owner.__class__ = before
        del owner.around_reading


@functools.cache
def _read_in_context(kind: type, names: tuple[str, ...]) -> type:
    def read(name: str) -> property:
        def value(owner: Any) -> Any:
            with owner.around_reading():
                return getattr(kind, name).fget(owner)

        return property(value)

    return type(kind.__name__, (kind,), {name: read(name) for name in names})


class _Later(list[Any]):
    """A list that is filled when it is looked at."""

    def __init__(self, fill: Callable[[], list[Any]]) -> None:
        super().__init__()
        self._fill: Callable[[], list[Any]] | None = fill

    def _filled(self) -> None:
        fill, self._fill = self._fill, None
        if fill is not None:
            self.extend(fill())

    def __len__(self) -> int:
        self._filled()
        return super().__len__()

    def __iter__(self) -> Iterator[Any]:
        self._filled()
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self._filled()
        return super().__getitem__(index)


@contextmanager
def idle_optimizers(trainer: Any) -> Iterator[None]:
    """While a step is tried out before a fit has its optimizers: it finds those that `configure_optimizers` makes, if
    it asks for any, `manual_backward` makes no gradients for them, their steps run the user's closure alone, and to
    toggle them freezes nothing. `Strategy` keeps wrapped ones for `self.optimizers()` under a private name."""
    strategy, module = trainer.strategy, trainer.lightning_module
    names = ("_optimizers", "_lightning_optimizers", "lr_scheduler_configs")
    before = {name: getattr(strategy, name) for name in names}

    def made(name: str) -> list[Any]:
        if isinstance(getattr(strategy, name), _Later):
            with DisableTorchFunction():  # states that some make at once (Adagrad) are no use of weights by the step
                strategy.namespace.parallel_strategy.setup_optimizers(strategy, trainer)
        return list(getattr(strategy, name))

    if not strategy.optimizers:
        vars(strategy).update({name: _Later(partial(made, name)) for name in names})
    plugin = strategy.precision_plugin
    clip = vars(plugin).get("clip_gradients")
    plugin.clip_gradients = lambda *_, **__: None
    strategy.backward = lambda loss, *_, **__: loss
    strategy.optimizer_step = lambda optimizer, closure, *_, **__: closure()  # there are no gradients
    toggles = {name: vars(module).get(name) for name in ("toggle_optimizer", "untoggle_optimizer")}
    vars(module).update(dict.fromkeys(toggles, lambda *_: None))
    try:
        yield
    finally:
        for name, own in toggles.items():
            if own is None:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = own
        del strategy.backward, strategy.optimizer_step, plugin.clip_gradients
        if clip is not None:
            plugin.clip_gradients = clip
        vars(strategy).update(before)


def steps_by_hand(trainer: Any) -> Any:
    """What counts the steps of optimizers in manual optimization: `trainer.global_step` is its `completed`. No public
    name leads there."""
    return trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total


def batch_hook(trainer: Any, name: str) -> Any:
    """The hook on a batch's way to the device: the datamodule's if it has its own, else the module's. Only the private
    selector knows which."""
    return getattr(trainer._data_connector._datahook_selector.get_instance(name), name)
