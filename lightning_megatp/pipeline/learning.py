"""Which parameters learn, in a step that optimizes by hand: `toggle_optimizer`, and `requires_grad` where it is set.

A step that trains two networks in turn lets one of them learn at a time. On every stage the parameters of all stages
have to, or not: what stands for one of another stage decides about the graph of what is sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.slicing.slicer import Slicer
from lightning_megatp.shim.fakes import forget_fakes
from lightning_megatp.shim.torch import DisableTorchFunction

Learns = Mapping[str, bool]
"""Name of a parameter -> whether it requires a gradient."""


class Learning:
    """Lets parameters learn, or not.

    Args:
        parallel: the module.
        slicer: has what stands for the parameters of other stages.
        names_of: of the parameters that an optimizer has, on all stages.
    """

    def __init__(
        self, parallel: ParallelModule, slicer: Slicer, names_of: Callable[[Optimizer], Sequence[str]]
    ) -> None:
        self._parallel, self._slicer, self._names_of = parallel, slicer, names_of
        self._module: Any = parallel.module
        self.toggled: Learns = {}
        """Before the last `toggle_optimizer` that was done."""
        self.told: list[tuple[str, bool]] = []
        """What the step that was tried last has told parameters: to learn, or not."""
        self._tells = False
        """Whether a step has told some."""

    def now(self, names: Iterable[str] | None = None) -> dict[str, bool]:
        """Which parameters learn.

        Args:
            names: of these; by default of those of optimizers, on all stages.
        """
        if names is None:
            names = [name for x in self._module.trainer.optimizers for name in self._names_of(x)]
        with DisableTorchFunction():  # no operations of the step's
            return {name: self._slicer.parameter(name).requires_grad for name in names}

    def kind(self) -> tuple[bool, ...]:
        """Which parameters of optimizers learn, once a step has told some to, or not to: so that steps differ by it."""
        self._tells = self._tells or bool(self.told)
        return tuple(self.now().values()) if self._tells else ()

    def let(self, learns: Learns) -> None:
        """Let parameters, or what stands for them, learn, or not."""
        with DisableTorchFunction():
            for name, learning in learns.items():
                self._slicer.parameter(name).requires_grad_(learning)
            for divided in self._parallel.divided.values():
                if divided.name in learns:
                    divided.agree_on_trained()
        forget_fakes(self._slicer.fake_mode)

    @contextlib.contextmanager
    def meanwhile(self, learns: Learns) -> Iterator[None]:
        """Around a backward of a part: parameters require gradients as at the line that goes backward, though stages
        have left the step before it.

        Args:
            learns: as planned.
        """
        before = {name: learning for name, learning in self.now(learns).items() if learning != learns[name]}
        if before:
            self.let({name: learns[name] for name in before})
        try:
            yield
        finally:
            if before:
                self.let(before)

    def let_alone(self, optimizer: Optimizer) -> dict[str, bool]:
        """Let the parameters of an optimizer learn as they do, and those of others not.

        Returns:
            Which did before.
        """
        before, own = self.now(), set(self._names_of(optimizer))
        self.let({name: learning and name in own for name, learning in before.items()})
        return before

    def toggle(self, optimizer: Optimizer) -> None:
        """Do what `toggle_optimizer` does."""
        self.toggled = self.let_alone(optimizer)

    def untoggle(self) -> None:
        """Do what `untoggle_optimizer` does."""
        self.let(self.toggled)
        self.toggled = {}


class RunLearning:
    """What one run of a step lets learn until it is over.

    Args:
        learning: what is so beyond it.
    """

    def __init__(self, learning: Learning) -> None:
        self._learning = learning
        self.told: list[tuple[str, bool]] = []
        """What it has told parameters: to learn, or not."""
        self._before: dict[str, bool] = {}
        """Of those that it lets learn, or not."""
        self._toggled: Learns = {}
        """Before its last `toggle_optimizer`."""

    def now(self) -> dict[str, bool]:
        """Whether those learn that it lets learn, or not."""
        return self._learning.now(self._before)

    def let(self, name: str, learns: bool) -> None:
        """Let a parameter learn, or not."""
        self._before = self._learning.now([name]) | self._before
        self._learning.let({name: learns})

    def toggle(self, optimizer: Optimizer) -> None:
        """Do what `toggle_optimizer` does."""
        self._toggled = self._learning.let_alone(optimizer)
        self._before = {**self._toggled, **self._before}

    def untoggle(self) -> None:
        """Do what `untoggle_optimizer` does, also for one that was done before the run."""
        self._before = self._learning.now() | self._before
        self._learning.let(self._toggled or self._learning.toggled)
        self._toggled = {}

    def end(self) -> None:
        """The run is over."""
        self._learning.let(self._before)
