"""Around the hooks of the user, of module and callbacks: the contexts in which they run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_megatp.detour import Detour
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.module import ParallelModule
from lightning_megatp.parts.divided import DataWatch, explaining_written_rows
from lightning_megatp.parts.positions import Positions
from lightning_megatp.parts.rows import DividedParameter, finds_rows
from lightning_megatp.parts.values import WholeValues
from lightning_megatp.parts.weights import WeightWatch, part_written
from lightning_megatp.plan.shard import ShardedTensorSpec
from lightning_megatp.shim.fakes import DataDependentOutputException
from lightning_megatp.shim.lightning import finetuning_callbacks
from lightning_megatp.steps import EVALUATION
from lightning_megatp.tensor.user_functions import functions_take_whole
from lightning_megatp.user_hooks import STEP_IN_HOOK, Hook, mentions, users_hooks

READ_OR_CHANGE_WEIGHTS = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad"),
    *("on_train_batch_end", "on_train_epoch_end", "on_validation_start", "on_validation_epoch_start"),
    *("on_validation_batch_end", "on_validation_epoch_end", "on_validation_end", "on_train_end", "optimizer_step"),
    *(kind.method for kind in EVALUATION),
)
"""Hooks in which users read or change weights, and steps that are run as such. (Those around a backward are watched by
`WholeNorms`.)"""
_AMONG_RANKS = frozenset(
    [
        *("world_size", "num_devices", "get_world_size", "all_gather_object", "all_gather_into_tensor", "all_reduce"),
        *("all_gather_single", "gather_object", "broadcast_object_list", "reduce_scatter_tensor"),
        *("reduce_scatter_single", "all_to_all_single"),
    ]
)
"""What is asked for, or called, by hooks that deal with samples."""
_CALLS = 1000
"""In which all that a hook does is looked at; that costs a few microseconds at every operation."""


def with_whole_groups(trainer: Any, whole: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[Detour]:
    """Let BaseFinetuning and its kinds, which count the optimizer's groups and add some, see those of one device.

    Args:
        trainer: about to fit.
        whole: a context in which the optimizers have the module's parameters, of all stages.
    """
    for callback in finetuning_callbacks(trainer):
        for hook in ("on_fit_start", "on_train_epoch_start"):
            yield Detour(callback, hook, functools.partial(_within, whole))


def finding_divided(
    hooks: Iterable[Hook], divided: Callable[[], contextlib.AbstractContextManager[None]]
) -> Iterator[Detour]:
    """Let hooks between a step's forward and its backward, where some parameters are gathered and others are not, find
    all of them divided, as every other hook does.

    Args:
        hooks: the user's.
        divided: a context in which all are.
    """
    return around_hooks(hooks, lambda hook: divided(), lambda owner, hook: hook == "on_before_zero_grad")


def finding_states(
    hooks: Iterable[Hook], found: Callable[[], contextlib.AbstractContextManager[None]]
) -> Iterator[Detour]:
    """Let hooks that ask for a `state` find those of optimizers by the parameters of the module.

    Args:
        hooks: the user's.
        found: a context in which they are.
    """
    return around_hooks(hooks, lambda hook: found(), lambda owner, hook: mentions(owner, {"state"}, hook))


def keeping_data(trainer: Any, hooks: Iterable[Hook], parameters: Sequence[DividedParameter]) -> Iterator[Detour]:
    """Let hooks set the `.data` of divided parameters, and explain what fails where they compute with these.

    Args:
        trainer: about to run.
        hooks: the user's.
        parameters: those.
    """

    @contextlib.contextmanager
    def watched(hook: str) -> Iterator[None]:
        try:
            with DataWatch(parameters).around(*_step_in(hook, trainer)), explaining_written_rows(hook):
                yield
        except RuntimeError as error:
            if not finds_rows(error):
                raise
            raise RuntimeError(
                f"MegaTPStrategy: `{hook}` computes with parameters that are divided outside of steps"
                f" (zero={trainer.strategy.zero.level}). In hooks between steps, calls of a block, of what is in no"
                " block and of the whole model gather them; so do training, validation, test and predict steps."
                " Take one of these, `.full_tensor()` of a parameter, on all ranks, or zero=0."
            ) from error

    return around_hooks(hooks, watched)


def logging_whole(trainer: Any, meet: Callable[[str], None]) -> Iterator[Detour]:
    """Let `self.log` take the whole of what a hook has made of divided parameters, all ranks together: loggers and
    callbacks read it later, some on one rank alone, and would find what this rank's rows make.

    Args:
        trainer: about to fit.
        meet: raises an error where this rank alone logs something; see `hooks.meeting`.
    """

    def whole(x: Any) -> Any:
        if not isinstance(x, DTensor):
            return x
        meet("self.log")
        return x.full_tensor()

    def log(call: functools.partial[Any]) -> Any:
        return call.func(*map(whole, call.args), **{name: whole(x) for name, x in call.keywords.items()})

    yield Detour(trainer.lightning_module, "log", log)


def with_whole_functions(hooks: Iterable[Hook], parallel: ParallelModule) -> Iterator[Detour]:
    """Let autograd functions and scripted ones, in forwards that hooks run (samples after an epoch), take whole tensors
    as they do in steps.

    Args:
        hooks: the user's.
        parallel: the split module.
    """
    return around_hooks(hooks, lambda hook: functions_take_whole(parallel.context))


def among_copies(
    hooks: Iterable[Hook], counted: Callable[[], contextlib.AbstractContextManager[None]]
) -> Iterator[Detour]:
    """Let hooks that have to do with the number of ranks, or send something by torch.distributed, find copies of the
    model in the place of processes: they deal with samples, of which all ranks of a copy see the same. Others write
    files, which one process does.

    Args:
        hooks: the user's.
        counted: a context in which copies are counted, and talk.
    """
    return around_hooks(hooks, lambda hook: counted(), lambda owner, hook: mentions(owner, _AMONG_RANKS, hook))


def set_up_among_copies(trainer: Any, counted: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Let the next call of `setup` and `configure_model` find copies of the model in the place of processes: these also
    share out a batch size among devices, or scale a rate by their number. Each is the user's own method again once it
    is called: datamodules are pickled.

    Args:
        trainer: about to set up.
        counted: a context in which copies are counted, and talk.
    """

    def once(owner: Any, hook: str) -> None:
        def run(call: Callable[[], Any]) -> Any:
            detour.end()
            with counted():
                return call()

        detour = Detour(owner, hook, run)

    owners = (trainer.lightning_module, trainer.datamodule, *trainer.callbacks)
    for owner, hook in users_hooks((x for x in owners if x is not None), ("setup", "configure_model")):
        if mentions(owner, _AMONG_RANKS, hook):
            once(owner, hook)


def with_whole_values(trainer: Any, hooks: Iterable[Hook], parallel: ParallelModule) -> Iterator[Detour]:
    """Let what hooks put into weights and gradients, random numbers and whole tensors, be this rank's part of it.

    Args:
        trainer: about to run.
        hooks: the user's.
        parallel: the split, divided module.
    """
    return around_hooks(hooks, lambda hook: WholeValues(parallel.parts).around(*_step_in(hook, trainer)))


def watching_weights(trainer: Any, hooks: Iterable[Hook], parallel: ParallelModule) -> Iterator[Detour]:
    """Say what the user's hooks make of weights of which a tensor rank holds a part, in their first calls; put numbers
    into the rows that are meant, in all.

    Args:
        trainer: about to run.
        hooks: the user's.
        parallel: the split module.
    """
    said: set[str] = set()
    positions = Positions(parallel.context.rank)

    def watch(hook: str, briefly: bool) -> WeightWatch:
        def say(operation: str, weight: str) -> None:
            if operation not in said:
                said.add(operation)
                warn_once_per_run(
                    f"`{hook}` uses `{operation}` on `{weight}`, of which each tensor rank holds a part: what comes out"
                    " is about that part, and another than on one device. Do it inside of"
                    " `with self.trainer.strategy.whole_parameters():`, on all ranks."
                )

        def written(weight: str) -> None:
            warn_once_per_run(part_written(hook, weight))

        def explain(operation: str, weight: str, part: Tensor) -> RuntimeError:
            spec = parallel.spec_of(weight)
            whole = "" if spec is None else f" of {tuple(spec.shape)}"
            return RuntimeError(
                f"MegaTPStrategy: `{hook}`: `{operation}` fails on `{weight}`, of which each tensor rank holds a part,"
                f" here {tuple(part.shape)}{whole}. A copy that was made before the model was split, as in"
                " `__init__`, has the whole shape, unless it is in a list or dict with those of all other parameters of"
                " a module. Make it in `on_fit_start`, or work on whole values, on all ranks, inside of `with"
                " self.trainer.strategy.whole_parameters():`."
            )

        def refuse(operation: str, weight: str) -> RuntimeError:
            return RuntimeError(
                f"MegaTPStrategy: `{hook}` puts into `{weight}`, of which each tensor rank holds a part, what it has"
                f" made by `{operation}` of several elements of a part (a norm, a mean, a threshold): the model would"
                " be trained differently than on one device. Do it inside of"
                " `with self.trainer.strategy.whole_parameters():`, on all ranks, or leave the layer out of the plan."
            )

        return WeightWatch(_split(trainer, parallel), positions, say, written, explain, refuse, briefly)

    def run(hook: str, left: Iterator[int], call: Callable[[], Any]) -> Any:
        watching = watch(hook, briefly=next(left, None) is None)
        with watching.around((trainer, "save_checkpoint"), *_step_in(hook, trainer)):
            return call()

    for owner, hook in hooks:
        if hook in READ_OR_CHANGE_WEIGHTS:
            yield Detour(owner, hook, functools.partial(run, hook, iter(range(_CALLS))))


def _split(trainer: Any, parallel: ParallelModule) -> Iterator[tuple[str, Tensor, ShardedTensorSpec]]:
    """Split weights, their gradients, and what optimizers keep of each of their elements: name, tensor and how it is
    split."""
    for name, p in parallel.names.items():
        if (spec := parallel.spec(p)) is not None:
            yield name, p, spec
            if p.grad is not None:
                yield f"{name}.grad", p.grad, spec
            states = [optimizer.state.get(parallel.held(p), {}) for optimizer in trainer.optimizers]
            for key, x in (item for state in states for item in state.items()):
                if isinstance(x, Tensor) and x.shape == p.shape:
                    yield f"{key} of {name}", x, spec


def explaining_stages(hooks: Iterable[Hook]) -> Iterator[Detour]:
    """Explain what fails in hooks since it is on other stages: values and gradients of parameters. Where some
    `next(part.parameters())` finds nothing, Lightning would take StopIteration for the end of the data, and that rank
    would leave the others waiting.

    Args:
        hooks: the user's, where a module is cut into stages.
    """
    return around_hooks(hooks, explained)


@contextlib.contextmanager
def explained(hook: str) -> Iterator[None]:
    """Around a hook that may find what stands for parameters of other stages.

    Raises:
        RuntimeError: it fails on that.
    """
    try:
        yield
    except StopIteration:
        raise RuntimeError(
            f"MegaTPStrategy: `{hook}` raised StopIteration: some `next(...)` found nothing. With pp > 1 a part of"
            " the model has its parameters on its own pipeline stage only. For where and what they are take"
            " `self.device` and `self.dtype`."
        ) from None  # with it as the cause, contextlib would go on with the StopIteration
    except (AssertionError, TypeError, AttributeError, DataDependentOutputException) as error:
        if isinstance(error, AttributeError) and isinstance(error.obj, nn.Module):
            raise RuntimeError(
                f"MegaTPStrategy: `{hook}` failed ({error}). If its forward sets that: with pp > 1 the other pipeline"
                f" stages are told after the batch, where a hook names it (`self.blocks[0].{error.name}`). Name it in"
                " the hook itself, or return it from the forward."
            ) from error
        of_values = isinstance(error, DataDependentOutputException)
        if not of_values and "FakeTensor" not in str(error) and "NoneType" not in str(error):
            raise
        raise RuntimeError(
            f"MegaTPStrategy: `{hook}` failed ({type(error).__name__}: {str(error)[:80]}). With pp > 1 a part of"
            " the model has its parameters on its own pipeline stage only: here they have no values and no"
            " gradients (`grad` is None). Leave out those without gradients, or do it where the layer runs, in a"
            " step or in a hook of `register_hook`."
        ) from error


def around_hooks(
    hooks: Iterable[Hook],
    context: Callable[[str], contextlib.AbstractContextManager[Any]],
    where: Callable[[Any, str], bool] = lambda owner, hook: True,
) -> Iterator[Detour]:
    """Run hooks in contexts.

    Args:
        hooks: the user's.
        context: makes one for a hook, by its name.
        where: which of them, by owner and name.
    """
    for owner, hook in hooks:
        if where(owner, hook):
            yield Detour(owner, hook, functools.partial(_within, functools.partial(context, hook)))


def _within(context: Callable[[], contextlib.AbstractContextManager[Any]], call: Callable[[], Any]) -> Any:
    with context():
        return call()


def _step_in(hook: str, trainer: Any) -> list[tuple[Any, str]]:
    """What is the step's in a hook: its forward and backward, of which that may call the closure by itself, and the
    optimizer's own work, of which it calls `super()`."""
    return [(trainer.strategy, name) for name in STEP_IN_HOOK] if hook == "optimizer_step" else []
