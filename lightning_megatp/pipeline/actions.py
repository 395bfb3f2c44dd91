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
from lightning_megatp.pipeline.done_by_hand import DoneByHand
from lightning_megatp.pipeline.learning import Learning, RunLearning
from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.pipeline.slicing.operations import StepEnded
from lightning_megatp.pipeline.slicing.slicer import Slicer
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.gradients import ClipCall, clipping_by, zero_grad_by
from lightning_megatp.shim.lightning import steps_by_hand
from lightning_megatp.shim.torch import DisableTorchFunction, tree_leaves
from lightning_megatp.tensor.outside import WholeParameter


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
    learning: RunLearning
    part: int = 0
    """Which is run, or tried: the step is left at the backward behind it."""
    goes_backward: bool = True
    """Whether it was planned that there is one."""
    backwards: int = 0
    """How many there were so far."""
    actions: int = 0
    """How often something was, or would have been, done by hand so far."""
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
        self._parallel, self._slicer, self._clip_held = parallel, slicer, clip
        self._module: Any = parallel.module
        self.learning = Learning(parallel, slicer, names_of)
        self.done = DoneByHand(parallel, slicer, opened)
        self._run: _Run | None = None

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Around all runs of the step for a batch."""
        module, trainer = self._module, self._module.trainer
        self.done.begin()
        detours: list[Detour] = []

        def through(owner: Any, name: str, way: _Way) -> None:
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
            with self._running(_Run(how, RunLearning(self.learning), number, goes_backward)):
                result = step(microbatch)
        except _Backward as backward:
            return backward.loss
        if how is _How.IN_PARTS and goes_backward:
            raise SliceError(
                "the step ended without a `manual_backward` that other microbatches come to. Until a `manual_backward`"
                " is over, numbers that a step reads (`if kl > 0.02: break`) are those of the microbatch. Go by them"
                " behind it, where they are the batch's, or multiply the loss by zero."
            )
        return result

    def acting(self, step: Step) -> Step:
        """A step on a microbatch, for what it does by hand and was not done before."""

        def acting(microbatch: Any) -> Any:
            with self._running(_Run(_How.ACTING, RunLearning(self.learning))):
                return step(microbatch)

        return acting

    @contextlib.contextmanager
    def _running(self, run: _Run) -> Iterator[None]:
        with self.done.from_the_beginning(acts=run.how is _How.ACTING):
            self._run = run
            self._slicer.follows.follow_by_hand(self._tell)
            try:
                yield
            finally:
                self._run = None
                run.learning.end()
                if run.how is _How.TRIED:
                    self.learning.told = run.learning.told

    def _meet(self, way: _Way, call: functools.partial[Any]) -> Any:
        """A call of something by hand."""
        if self.done.acts or self._run is None:
            return call()
        return None if self._slicer.follows.done else way(self._run, call)

    def _plain(self, run: _Run, call: functools.partial[Any]) -> Any:
        """Something that is done as it is called."""
        if run.how is _How.ACTING and any(map(is_fake, tensors_in(call.args, call.keywords))):
            raise SliceError(
                f"`{call.func.__name__}` is given a tensor that one pipeline stage has, and all do this by hand. Give"
                " it the number, which all are told: `loss.item()`."
            )
        return self._act(run, call)

    def _act(self, run: _Run, call: Callable[[], Any], tells: bool = False) -> Any:
        """Do something, where it is done.

        Args:
            tells: see `DoneByHand.act`.

        Returns:
            What that returned, once it is done; None before.
        """
        number, run.actions = run.actions, run.actions + 1
        self._slicer.follows.note_action()
        done = number < len(self.done) or run.how is _How.ACTING
        return self.done.act(number, call, tells) if done else None

    def _clip(self, call: ClipCall) -> Any:
        """`torch.nn.utils.clip_grad_norm_`, or `clip_grad_value_`."""
        run = self._run
        if self.done.acts or run is None:
            return call.of(call.parameters)
        names = [name for name in (self._name_of(run, x) for x in call.parameters) if name is not None]
        if not names:
            return call.of(call.parameters)
        call.check_known(len(names))
        norm = None
        if not self._slicer.follows.done:
            norm = self._act(run, functools.partial(self._clip_own, call, names))
        return self._stand_in(run, call.limit) if norm is None and call.limit is not None else norm

    def _clip_own(self, call: ClipCall, names: Sequence[str]) -> Tensor | None:
        own = [self._parallel.names[name] for name in names if name in self._parallel.names]
        return self._clip_held(call, list(map(self._parallel.held, own)))

    def _stand_in(self, run: _Run, limit: float) -> Tensor:
        """For the norm of gradients that are not there yet: one that was within the limit. A part that is run has no
        use for it before they are clipped.

        Args:
            limit: the largest norm.
        """
        with DisableTorchFunction():
            norm = torch.tensor(min(limit, 1.0))
            return norm if run.how is _How.TRIED else self._slicer.ghost(norm)

    def _step(self, run: _Run, call: functools.partial[Any]) -> Any:
        """An optimizer's step. A closure is the step's code."""
        closure, *rest = call.args or (call.keywords.get("closure"),)
        options = {name: x for name, x in call.keywords.items() if name != "closure"}
        result = None if closure is None else closure()
        done = self._act(run, functools.partial(call.func, *([None, *rest] if rest else []), **options))
        return done if closure is None else result

    def _step_counted(self, run: _Run, call: functools.partial[Any]) -> Any:
        """That of one that Lightning counts."""
        done = len(self.done)
        result = self._step(run, call)
        if done == len(self.done):
            steps_by_hand(self._module.trainer).completed += 1
        return result

    def _go_backward(self, run: _Run, call: functools.partial[Any]) -> Any:
        loss = call.args[0] if call.args else call.keywords["loss"]
        options = {name: x for name, x in call.keywords.items() if name != "loss"}
        reached, run.backwards = run.backwards, run.backwards + 1
        follows = self._slicer.follows
        if run.how is _How.ACTING:
            if reached == len(self.done.losses):  # that part comes next
                follows.end_part(False, {})
                raise StepEnded
            follows.begin_part()
            return self._act(run, functools.partial(call.func, self.done.losses[reached], *call.args[1:], **options))
        if reached == run.part:
            if not run.goes_backward:
                raise SliceError(
                    "the step calls `manual_backward` where it could not be followed when it was planned, behind what"
                    " depends on values of one pipeline stage: a loop over them, `tolist()`, `numpy()`. Do that after"
                    " the last `manual_backward`, or in a hook."
                )
            _check(loss, options, call.args[1:])
            follows.end_part(bool(options.get("retain_graph")), run.learning.now())
            raise _Backward(loss)
        follows.begin_part()
        return self._act(run, call)

    def _toggle(self, run: _Run, call: functools.partial[Any]) -> Any:
        """`toggle_optimizer`: its parameters learn, and those of others don't. Where it is tried, on all stages."""
        optimizer = _unwrapped(call.args[0] if call.args else call.keywords["optimizer"])
        run.learning.told.append((f"optimizer {self._module.trainer.optimizers.index(optimizer)}", True))
        if self._toggles_itself(run):
            run.learning.toggle(optimizer)
        return self._act(run, functools.partial(self.learning.toggle, optimizer))

    def _untoggle(self, run: _Run, call: functools.partial[Any]) -> Any:
        if self._toggles_itself(run):
            run.learning.untoggle()
        return self._act(run, self.learning.untoggle)

    def _toggles_itself(self, run: _Run) -> bool:
        """Whether a run toggles parameters until it is over: a try, and a part, where it comes behind what it computed,
        and so was not done before it."""
        return run.how is _How.TRIED or (run.how is _How.IN_PARTS and run.actions >= len(self.done))

    def _tell(self, parameter: Tensor, told: Told) -> None:
        """The step tells a parameter something."""
        run = self._run
        assert run is not None
        name = self._name_of(run, parameter)
        if told is Told.CLEAR:
            self._act(run, functools.partial(self._clear, name), tells=True)
            return
        assert name is not None, "of a parameter of the module"
        learns = told is Told.LEARN
        run.learning.told.append((name, learns))
        if self._toggles_itself(run):
            run.learning.let(name, learns)
        self._act(run, functools.partial(self.learning.let, {name: learns}), tells=True)

    def _clear(self, name: str | None) -> None:
        """`parameter.grad = None`."""
        if name in self._parallel.names:  # and not one of another stage
            self._parallel.clear_gradient(self._parallel.names[name])

    def _name_of(self, run: _Run, parameter: Tensor) -> str | None:
        """None if it is none of the module's."""
        if isinstance(parameter, WholeParameter):  # a split layer shows it in place of its own
            return parameter.spec.name
        if id(parameter) not in run.known:  # with zero > 0 modules show one form of it, or another
            run.known.update((id(self._slicer.parameter(name)), name) for name in self._parallel.order)
        return run.known.get(id(parameter))


_Way = Callable[[_Run, "functools.partial[Any]"], Any]
"""How a run meets a call of something by hand."""


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
