"""What a step does by hand (`automatic_optimization = False`): its backwards, and what it does to optimizers.

A pipeline runs such a step many times for one batch: for each microbatch, stage and part. In these runs nothing is
done by hand. It is done once, on all ranks alike, in runs between the parts that do nothing else.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_megatp.calls import Told
from lightning_megatp.containers import tensors_in
from lightning_megatp.detour import Detour, end_all
from lightning_megatp.messages import with_article
from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.batch import Step
from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.pipeline.slicing.operations import StepEnded
from lightning_megatp.pipeline.slicing.slicer import Slicer
from lightning_megatp.pipeline.told.telling import Options, options_of, set_options
from lightning_megatp.shim.fakes import forget_fakes, is_fake
from lightning_megatp.shim.gradients import ClipCall, clipping_by, zero_grad_by
from lightning_megatp.shim.lightning import steps_by_hand
from lightning_megatp.shim.torch import DisableTorchFunction, tree_leaves
from lightning_megatp.snapshots.leftovers import Path, PlainValues
from lightning_megatp.tensor.outside import WholeParameter
from lightning_megatp.user_hooks import users_hooks

_HOOKS = ("on_after_backward", "on_before_optimizer_step", "optimizer_step", "optimizer_zero_grad")
_Learned = dict[str, bool]
"""Name of a parameter -> whether it required a gradient."""


class _How(Enum):
    """How a step is run."""

    TRIED = auto()
    """Without data, to plan it, or for what every stage computes, to choose a plan."""
    IN_PARTS = auto()
    """One stage's part, on a microbatch."""
    ACTING = auto()
    """For what it does by hand."""


@dataclass
class _Run:
    """One run of a step."""

    how: _How
    part: int = 0
    """Which is run, or tried: the step is left at the backward behind it."""
    goes_backward: bool = True
    """Whether it was planned that there is one."""
    backwards: int = 0
    """How many there were so far."""
    actions: int = 0
    """How often something was, or would have been, done by hand so far."""
    learned: _Learned = field(default_factory=dict)
    """`requires_grad` of parameters before the run changed it, which is restored behind it."""
    toggled: _Learned = field(default_factory=dict)
    """Likewise before its last `toggle_optimizer`: what `untoggle_optimizer` restores."""
    told: list[tuple[str, bool]] = field(default_factory=list)
    """What it has told parameters: to learn, or not."""
    known: dict[int, str] = field(default_factory=dict)
    """id(parameter) -> its name."""


class _Backward(BaseException):
    """Leaves a step at the backward behind the part that is run. No Exception: `except Exception` lets it pass."""

    def __init__(self, loss: Tensor) -> None:
        super().__init__()
        self.loss = loss


class Actions:
    """Stands in for what steps call by hand, in batches.

    Args:
        parallel: the module.
        slicer: cuts its steps.
        opened: the modules on which hooks may set Python values, by name.
        names_of: of the parameters that an optimizer has, on all stages.
        clip: does, on all ranks, what a call of torch's clipping asks for, to what this rank trains.
    """

    def __init__(
        self,
        parallel: ParallelModule,
        slicer: Slicer,
        opened: Mapping[str, nn.Module],
        names_of: Callable[[Optimizer], Sequence[str]],
        clip: Callable[[ClipCall, list[Tensor]], Tensor | None],
    ) -> None:
        self._parallel, self._slicer, self._opened = parallel, slicer, opened
        self._names_of, self._clip_held = names_of, clip
        self._module: Any = parallel.module
        self._run: _Run | None = None
        self._done = 0
        """How often something was done by hand in this batch."""
        self._losses: list[Tensor] = []
        """Of the parts that were run in this batch."""
        self._steps_before = 0
        """The Trainer's count of optimizer steps before this batch."""
        self._options: list[Options] = []
        """Of the optimizers, before this batch and after each of those: a run finds them as they were there."""
        self._results: list[Any] = []
        """What each of those returned."""
        self.told: list[tuple[str, bool]] = []
        """What the step that was tried last has told parameters: to learn, or not."""
        self.set_by_hooks: dict[Path, bytes] = {}
        """The Python values that hooks have set which ran in what was done by hand."""
        self._toggled: _Learned = {}
        """Before the last `toggle_optimizer`."""
        self._tells = False
        """Whether a step has told parameters to learn, or not to."""
        self._acts = False
        """Something is being done: what it calls is its own affair."""

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Around all runs of the step for a batch."""
        module, trainer = self._module, self._module.trainer
        self._done, self._losses, self._steps_before = 0, [], steps_by_hand(trainer).completed
        self._options, self._results = [options_of(trainer.optimizers)], []
        detours: list[Detour] = []

        def through(owner: Any, name: str, way: Callable[[functools.partial[Any]], Any]) -> None:
            detours.append(Detour(owner, name, functools.partial(self._meet, way)))

        through(module, "manual_backward", self._go_backward)
        through(module, "toggle_optimizer", self._toggle)
        through(module, "untoggle_optimizer", self._untoggle)
        through(module, "clip_gradients", self._plain)
        through(module, "zero_grad", self._plain)
        for optimizer in trainer.optimizers:
            through(optimizer, "step", self._step)
            through(optimizer, "zero_grad", self._plain)
        wrapped = module.optimizers()
        for optimizer in wrapped if isinstance(wrapped, list) else [wrapped]:
            through(optimizer, "step", self._step_counted)
            through(optimizer, "zero_grad", self._plain)
        for scheduler in self._schedulers():
            through(scheduler, "step", self._plain)
        try:
            with zero_grad_by(functools.partial(self._meet, self._plain)), clipping_by(self._clip):
                yield
        finally:
            end_all(detours[::-1])

    def _schedulers(self) -> list[Any]:
        """Those that Lightning knows, and those that the module keeps itself."""
        known = [config.scheduler for config in self._module.trainer.lr_scheduler_configs]
        own = (x for x in tree_leaves(vars(self._module)) if isinstance(x, LRScheduler))
        return list({id(x): x for x in (*known, *own)}.values())

    def tried(self, step: Step, number: int) -> Step:
        """A part of a step on a microbatch, to be planned. It returns the loss with which it goes backward; the last
        one what the step returns.

        Args:
            step: the user's, in its contexts.
            number: how many backwards there are before it.
        """
        return functools.partial(self._part, step, _How.TRIED, number, True)

    def part(self, step: Step, number: int, goes_backward: bool) -> Step:
        """A part of a step, as `tried`, to be run by a stage.

        Args:
            goes_backward: as it was planned.
        """
        return functools.partial(self._part, step, _How.IN_PARTS, number, goes_backward)

    def _part(self, step: Step, how: _How, number: int, goes_backward: bool, microbatch: Any) -> Any:
        try:
            with self._running(_Run(how, number, goes_backward)):
                return step(microbatch)
        except _Backward as backward:
            return backward.loss

    def acting(self, step: Step) -> Step:
        """A step on a microbatch, for what it does by hand and was not done before."""

        def acting(microbatch: Any) -> Any:
            with self._running(_Run(_How.ACTING)):
                return step(microbatch)

        return acting

    @contextlib.contextmanager
    def learning(self, learns: Mapping[str, bool]) -> Iterator[None]:
        """Around a backward of a part: parameters require gradients as at the line that goes backward, though stages
        have left the step before it.

        Args:
            learns: as planned.
        """
        with DisableTorchFunction():
            now = {name: self._slicer.parameter(name).requires_grad for name in learns}
        before = {name: learned for name, learned in now.items() if learned != learns[name]}
        if before:
            self._let_learn({name: learns[name] for name in before})
        try:
            yield
        finally:
            if before:
                self._let_learn(before)

    def learning_now(self) -> tuple[bool, ...]:
        """Which parameters of optimizers learn, once a step has told some to, or not to."""
        self._tells = self._tells or bool(self.told)
        return tuple(self._learned().values()) if self._tells else ()

    def went_backward(self, loss: Tensor) -> None:
        """A part was run.

        Args:
            loss: the batch's, ().
        """
        self._losses.append(loss)

    @contextlib.contextmanager
    def _running(self, run: _Run) -> Iterator[None]:
        """Steps of optimizers are counted, and their options found, as if each were done where it is called."""
        trainer = self._module.trainer
        steps, options = steps_by_hand(trainer), options_of(trainer.optimizers)
        now, steps.completed = steps.completed, self._steps_before
        set_options(trainer.optimizers, self._options[0])
        self._run = run
        self._slicer.follows.follow_by_hand(self._tell)
        try:
            yield
        finally:
            self._run = None
            self._let_learn(run.learned)
            if run.how is not _How.ACTING:
                steps.completed = now
                set_options(trainer.optimizers, options)
            if run.how is _How.TRIED:
                self.told = run.told

    def _meet(self, way: Callable[[functools.partial[Any]], Any], call: functools.partial[Any]) -> Any:
        """A call of something by hand."""
        if self._acts or self._run is None:
            return call()
        return None if self._slicer.follows.done else way(call)

    def _plain(self, call: functools.partial[Any]) -> Any:
        """Something that is done as it is called."""
        assert self._run is not None
        if self._run.how is _How.ACTING and any(map(is_fake, tensors_in(call.args, call.keywords))):
            raise SliceError(
                f"`{call.func.__name__}` is given a tensor that one pipeline stage has, and all do this by hand. Give"
                " it the number, which all are told: `loss.item()`."
            )
        return self._act(call)

    def _act(self, call: Callable[[], Any], tells: bool = False) -> Any:
        """Do something, where it is done.

        Args:
            tells: it tells one parameter something, of many maybe: no hook runs in that, and it is an operation that
                was met.

        Returns:
            What that returned, once it is done; None before.
        """
        assert self._run is not None
        self._run.actions += 1
        self._slicer.follows.note_action()
        if self._run.actions <= self._done:
            set_options(self._module.trainer.optimizers, self._options[self._run.actions])
            return self._results[self._run.actions - 1]
        if self._run.how is not _How.ACTING:
            return None
        before = PlainValues(self._opened) if self._has_hooks and not tells else None
        self._acts = True
        try:
            with contextlib.nullcontext() if tells else self._on_its_own():
                result = call()
        finally:
            self._acts = False
        if before is not None:
            self.set_by_hooks |= PlainValues(self._opened).changes(before)
        self._done += 1
        self._options.append(options_of(self._module.trainer.optimizers))
        self._results.append(result)
        return result

    @contextlib.contextmanager
    def _on_its_own(self) -> Iterator[None]:
        """Around what is done: it is neither an operation of the step's nor the user's code, and finds what this rank
        has."""
        with (
            self._slicer.follows.acting(),
            self._parallel.context.running(user_code=False),
            self._slicer.ownership.absent(),
        ):
            yield

    @functools.cached_property
    def _has_hooks(self) -> bool:
        """Whether hooks of the user's run in what is done by hand."""
        return any(users_hooks((self._module, *self._module.trainer.callbacks), _HOOKS))

    def _clip(self, call: ClipCall) -> Any:
        """`torch.nn.utils.clip_grad_norm_`, or `clip_grad_value_`."""
        if self._acts or self._run is None:
            return call.of(call.parameters)
        names = [name for name in (self._name_of(x, self._run) for x in call.parameters) if name is not None]
        if not names:
            return call.of(call.parameters)
        call.check_known(len(names))
        norm = None
        if not self._slicer.follows.done:
            norm = self._act(functools.partial(self._clip_own, call, names))
        return self._stand_in(call.limit) if norm is None and call.limit is not None else norm

    def _clip_own(self, call: ClipCall, names: Sequence[str]) -> Tensor | None:
        own = [self._parallel.names[name] for name in names if name in self._parallel.names]
        return self._clip_held(call, list(map(self._parallel.held, own)))

    def _stand_in(self, limit: float) -> Tensor:
        """For the norm of gradients that are not there yet: one that was within the limit. A part that is run has no
        use for it before they are clipped.

        Args:
            limit: the largest norm.
        """
        assert self._run is not None
        with DisableTorchFunction():
            norm = torch.tensor(min(limit, 1.0))
            return norm if self._run.how is _How.TRIED else self._slicer.ghost(norm)

    def _step(self, call: functools.partial[Any]) -> Any:
        """An optimizer's step. A closure is the step's code."""
        closure, *rest = call.args or (call.keywords.get("closure"),)
        options = {name: x for name, x in call.keywords.items() if name != "closure"}
        result = None if closure is None else closure()
        done = self._act(functools.partial(call.func, *([None, *rest] if rest else []), **options))
        return done if closure is None else result

    def _step_counted(self, call: functools.partial[Any]) -> Any:
        """That of one that Lightning counts."""
        done = self._done
        result = self._step(call)
        if done == self._done:
            steps_by_hand(self._module.trainer).completed += 1
        return result

    def _go_backward(self, call: functools.partial[Any]) -> Any:
        run = self._run
        assert run is not None
        loss = call.args[0] if call.args else call.keywords["loss"]
        options = {name: x for name, x in call.keywords.items() if name != "loss"}
        reached, run.backwards = run.backwards, run.backwards + 1
        follows = self._slicer.follows
        if run.how is _How.ACTING:
            if reached == len(self._losses):  # that part comes next
                follows.end_part(False, {})
                raise StepEnded
            follows.begin_part()
            return self._act(functools.partial(call.func, self._losses[reached], *call.args[1:], **options))
        if reached == run.part:
            if not run.goes_backward:
                raise SliceError(
                    "the step calls `manual_backward` where it could not be followed when it was planned, behind what"
                    " depends on values of one pipeline stage: a loop over them, `tolist()`, `numpy()`. Do that after"
                    " the last `manual_backward`, or in a hook."
                )
            _check(loss, options, call.args[1:])
            with DisableTorchFunction():
                learns = {name: self._slicer.parameter(name).requires_grad for name in run.learned}
            follows.end_part(bool(options.get("retain_graph")), learns)
            raise _Backward(loss)
        follows.begin_part()
        return self._act(call)

    def _toggle(self, call: functools.partial[Any]) -> Any:
        """`toggle_optimizer`: its parameters learn, and those of others don't. Where it is tried, on all stages."""
        run = self._run
        assert run is not None
        optimizer = _unwrapped(call.args[0] if call.args else call.keywords["optimizer"])
        run.told.append((f"optimizer {self._module.trainer.optimizers.index(optimizer)}", True))
        if self._toggles_itself(run):
            run.toggled = self._learned()
            run.learned = run.toggled | run.learned
            self._let_learn(run.toggled, optimizer)
        return self._act(functools.partial(self._toggle_own, optimizer))

    def _toggle_own(self, optimizer: Optimizer) -> None:
        self._toggled = self._learned()
        self._let_learn(self._toggled, optimizer)

    def _toggles_itself(self, run: _Run) -> bool:
        """Whether a run toggles parameters until it is over: a try, and a part, where it comes behind what it computed,
        and so was not done before it."""
        return run.how is _How.TRIED or (run.how is _How.IN_PARTS and run.actions >= self._done)

    def _untoggle(self, call: functools.partial[Any]) -> Any:
        run = self._run
        assert run is not None
        if self._toggles_itself(run):
            toggled = run.toggled or self._toggled
            run.learned = self._learned() | run.learned
            self._let_learn(toggled)
            run.toggled = {}
        return self._act(self._untoggle_own)

    def _untoggle_own(self) -> None:
        self._let_learn(self._toggled)
        self._toggled = {}

    def _learned(self) -> _Learned:
        """Which parameters of optimizers learn now, on all stages."""
        every = [name for optimizer in self._module.trainer.optimizers for name in self._names_of(optimizer)]
        with DisableTorchFunction():  # no operations of the step's
            return {name: self._slicer.parameter(name).requires_grad for name in every}

    def _tell(self, parameter: Tensor, told: Told) -> None:
        """The step tells a parameter something."""
        if told is Told.CLEAR:
            self._clear(parameter)
        else:
            self._learn(parameter, told is Told.LEARN)

    def _clear(self, parameter: Tensor) -> None:
        """`parameter.grad = None`."""
        assert self._run is not None
        name = self._name_of(parameter, self._run)

        def clear() -> None:
            if name in self._parallel.names:  # and not one of another stage
                self._parallel.clear_gradient(self._parallel.names[name])

        self._act(clear, tells=True)

    def _learn(self, parameter: Tensor, learns: bool) -> None:
        """The step lets a parameter learn, or not, as `toggle_optimizer` does."""
        run = self._run
        assert run is not None
        name = self._name_of(parameter, run)
        assert name is not None, "of a parameter of the module"
        run.told.append((name, learns))
        if self._toggles_itself(run):
            with DisableTorchFunction():
                run.learned.setdefault(name, parameter.requires_grad)
            self._let_learn({name: learns})
        self._act(functools.partial(self._let_learn, {name: learns}), tells=True)

    def _name_of(self, parameter: Tensor, run: _Run) -> str | None:
        """None if it is none of the module's."""
        if isinstance(parameter, WholeParameter):  # a split layer shows it in place of its own
            return parameter.spec.name
        if id(parameter) not in run.known:  # with zero > 0 modules show one form of it, or another
            run.known.update((id(self._slicer.parameter(name)), name) for name in self._parallel.order)
        return run.known.get(id(parameter))

    def _let_learn(self, learned: _Learned, optimizer: Optimizer | None = None) -> None:
        """Let parameters, or what stands for them, learn as they did.

        Args:
            optimizer: those alone that it has; None for all.
        """
        with DisableTorchFunction():
            only = learned if optimizer is None else set(self._names_of(optimizer))
            for name, learns in learned.items():
                self._slicer.parameter(name).requires_grad_(learns and name in only)
            for divided in self._parallel.divided.values():
                if divided.name in learned:
                    divided.agree_on_trained()
        forget_fakes(self._slicer.fake_mode)


def _unwrapped(optimizer: Any) -> Optimizer:
    """Without Lightning's wrapper."""
    inner: Optimizer = getattr(optimizer, "optimizer", optimizer)
    return inner


def _check(loss: Any, options: dict[str, Any], positional: Sequence[Any]) -> None:
    """See whether a loss and the options that come with it are such as a pipeline can go backward from.

    Raises:
        RuntimeError: they are not.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else None
        raise RuntimeError(
            f"MegaTPStrategy: `manual_backward` was given {found or with_article(type(loss).__name__)}, and with"
            " pp > 1 it takes one number, such as `loss.mean()`."
        )
    other = options.keys() - {"retain_graph"}
    if positional or other:
        what = f"`{min(other)}`" if other else "more than a loss"
        raise RuntimeError(
            f"MegaTPStrategy: `manual_backward` was given {what}, which a pipeline can't pass on to its stages. Give it"
            " a loss alone."
        )
