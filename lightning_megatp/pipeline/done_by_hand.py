"""What is done by hand in a batch: each thing once. Runs of the step find it as it was where it was done."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.slicing.slicer import Slicer
from lightning_megatp.pipeline.told.telling import Options, options_of, set_options
from lightning_megatp.shim.lightning import steps_by_hand
from lightning_megatp.snapshots.leftovers import Path, PlainValues
from lightning_megatp.user_hooks import users_hooks

_HOOKS = ("on_after_backward", "on_before_optimizer_step", "optimizer_step", "optimizer_zero_grad")


class DoneByHand:
    """Does by hand what steps ask for, and each thing once in a batch.

    Args:
        parallel: the module.
        slicer: cuts its steps.
        opened: the modules on which hooks may set Python values, by name.
    """

    def __init__(self, parallel: ParallelModule, slicer: Slicer, opened: Mapping[str, nn.Module]) -> None:
        self._parallel, self._slicer, self._opened = parallel, slicer, opened
        self._module: Any = parallel.module
        self._steps = 0
        """The Trainer's count of optimizer steps before the batch."""
        self._options: list[Options] = []
        """Of the optimizers, before the batch and after each action."""
        self._results: list[Any] = []
        """What each action returned."""
        self.losses: list[Tensor] = []
        """The batch's, (), of the parts that were run."""
        self.set_by_hooks: dict[Path, bytes] = {}
        """The Python values that hooks have set which ran in actions."""
        self.acts = False
        """Something is being done: what it calls is its own affair."""

    def begin(self) -> None:
        """A batch begins."""
        trainer = self._module.trainer
        self._steps, self._options = steps_by_hand(trainer).completed, [options_of(trainer.optimizers)]
        self._results, self.losses = [], []

    def __len__(self) -> int:
        return len(self._results)

    @contextlib.contextmanager
    def from_the_beginning(self, acts: bool) -> Iterator[None]:
        """Around a run: steps of optimizers are counted, and their options found, as if each were done where it is
        called.

        Args:
            acts: what it does stays.
        """
        steps, optimizers = steps_by_hand(self._module.trainer), self._module.trainer.optimizers
        completed, options = steps.completed, options_of(optimizers)
        steps.completed = self._steps
        set_options(optimizers, self._options[0])
        try:
            yield
        finally:
            if not acts:
                steps.completed = completed
                set_options(optimizers, options)

    def act(self, number: int, call: Callable[[], Any], tells: bool = False) -> Any:
        """Do something, or go on as if it was done now.

        Args:
            number: how many actions come before it.
            call: does it.
            tells: it tells one parameter something, of many maybe: no hook runs in that, and it is an operation that
                was met.

        Returns:
            What that returned.
        """
        optimizers = self._module.trainer.optimizers
        if number < len(self):
            set_options(optimizers, self._options[number + 1])
            return self._results[number]
        before = PlainValues(self._opened) if self._has_hooks and not tells else None
        self.acts = True
        try:
            with contextlib.nullcontext() if tells else self._on_its_own():
                result = call()
        finally:
            self.acts = False
        if before is not None:
            self.set_by_hooks |= PlainValues(self._opened).changes(before)
        self._options.append(options_of(optimizers))
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
