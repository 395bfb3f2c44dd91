"""Whether each stage by itself does what it does on one device, where the units of all stages run.

What crosses a boundary are tensors. A unit, or the step between units, may go by something else that units of other
stages change in their forward: a counter in an object that all blocks hold, a dict of numbers that is passed along, a
generator of random numbers. So after the dry run of a whole step each stage's part is run alone, on tensors without
data as well, and compared by its operations, those inside of units among them, and by the plain arguments of each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_megatp.containers import tensors_in
from lightning_megatp.pipeline.slicing.dry_run.deeds import Deed, Deeds, Moment, deed_of
from lightning_megatp.pipeline.slicing.dry_run.tracer import Tracer
from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.pipeline.slicing.operations import (
    NeedsValues,
    StepEnded,
    by_positions,
    cut_by_numbers,
    masks_read,
)
from lightning_megatp.pipeline.slicing.plan import Relay, SlicePlan
from lightning_megatp.pipeline.slicing.running import StageMode
from lightning_megatp.pipeline.slicing.script import Instruction
from lightning_megatp.pipeline.slicing.state.kept import Kept
from lightning_megatp.pipeline.slicing.surroundings import Surroundings
from lightning_megatp.shim.fakes import FakeTensorMode
from lightning_megatp.shim.torch import tensor_version, tree_map
from lightning_megatp.tensor.functions import operation_name


class Difference(NamedTuple):
    """The first operation that a stage does otherwise alone."""

    stage: int
    unit: str
    """In which it is; "" between units."""
    where: str
    """The user's line."""
    planned: Deed | None
    """As on one device; None for nothing more."""
    alone: Deed | None

    def error(self) -> SliceError:
        """What the user is told."""
        by = f"`{self.unit}`" if self.unit else "the step"
        planned, alone = ("nothing more" if deed is None else str(deed) for deed in (self.planned, self.alone))
        return SliceError(
            f"on one device {by} does {planned}, and on pipeline stage {self.stage}, where modules of other stages"
            f" don't run, {alone} ({self.where}). It goes by something that these change in their forward and do not"
            " return: a counter in an object that blocks share, a dict or list that is passed along, a generator of"
            " random numbers. Give each module what it needs when it is made (its number, a generator of its own), let"
            " the forward return it as a tensor, or keep both on one stage by `stages=[[...], ...]`."
        )


class Reading(NamedTuple):
    """A stage reads a Python value that a unit of another stage sets on itself."""

    stage: int
    of: int
    """The unit's stage."""
    unit: str
    kept: Kept
    where: str
    """The user's line."""

    def error(self) -> SliceError:
        """What the user is told."""
        return SliceError(
            f"`{self.kept}` is read on pipeline stage {self.stage} ({self.where}), and the forward of `{self.unit}`"
            f" sets it on stage {self.of}: no other stage has it before the batch is over. Let the forward return it,"
            " as a tensor; read it in a hook (`on_train_batch_end`), which finds it on all stages; or keep both on one"
            " stage by `stages=[[...], ...]`."
        )


class Alone(StageMode):
    """One stage's run without data and without the others.

    Args:
        plan: of the step.
        stage: whose part.
        tracer: after the dry run that the plan is of.
        seed: as in that.
        around: of the module.
    """

    def __init__(
        self,
        plan: SlicePlan,
        stage: int,
        tracer: Tracer,
        seed: int,
        around: Surroundings,
    ) -> None:
        received = {relay.key: _without_data(relay, around.fake_mode) for relay in plan.relays[stage]}
        values = tracer.values.by_key
        received.update((key, values[key].tensor) for key in plan.recalled_on(stage) if key in values)
        super().__init__(plan, stage, received, seed, around)
        self._tracer, self._at = tracer, stage
        self._opaquely = ""
        """The unit or function that is called."""
        self._stage_of_unit = around.stage_of_unit
        self._set: set[Kept] = set()
        """Python values of units that the step sets."""
        self.difference: Difference | Reading | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args = cut_by_numbers(func, args, lambda x: self.__torch_function__(torch.Tensor.__index__, types, (x,)))
        return super().__torch_function__(func, types, args, kwargs)

    def metric(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Metrics are not tried here, as in the whole dry run."""
        instruction = None if self.inside or self.done else self._next(name)
        if instruction is None:
            raise StepEnded
        return instruction.ghosts

    def log(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Nothing is logged."""

    def setting(self, _: str, kept: Kept) -> None:
        """A Python value of a unit's module is set."""
        self._set.add(kept)

    def reading(self, unit: str, kept: Kept) -> None:
        """A Python value of a unit's module is read."""
        of, set_inside = self._stage_of_unit[unit], kept in self._tracer.kept or unit in self._tracer.guesses.unseen
        if of != self._at and set_inside and kept not in self._set and not self.done:
            self.difference = Reading(self._at, of, unit, kept, self._locator.here())
            raise StepEnded

    def _opaque(
        self, function: Callable[..., Any], what: Any, is_own: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self._opaquely = what if isinstance(what, str) else operation_name(what)
        try:
            return super()._opaque(function, what, is_own, args, kwargs)
        finally:
            self._opaquely = ""

    def _compute(
        self, instruction: Instruction, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        planned, name = self._tracer.record.deeds[self._index], instruction.operation.name
        if self._opaquely:
            witnessed = self._witnessed(function, planned, self._opaquely, instruction.ghosts)
            return super()._compute(instruction, witnessed, args, kwargs)
        self.compare("", planned.inside[0], deed_of(name, args, kwargs, self._tracer.values.name))

        def evaluate(*args: Any, **kwargs: Any) -> Any:
            follow = by_positions(function, args) if masks_read(function, args, int) else function
            fakes = [(x, fake := self._tracer.values.fake(x), tensor_version(fake)) for x in tensors_in(args, kwargs)]
            out = self._tracer.fakes.evaluate(name, follow, args, kwargs)
            given = {}
            for x, fake, version in fakes:
                if not self._tracer.values.is_of_unit(x) or tensor_version(fake) != version:
                    given[id(fake)] = x  # changed in place, maybe
                elif any(y is x or y is fake for y in tensors_in(out)):
                    with self._tracer.fakes.mode:  # what comes out as it is (`weight.to(dtype)`) is not the unit's then
                        given[id(x)] = given[id(fake)] = fake.view_as(fake)
            return tree_map(lambda x: given.get(id(x), x), out)

        return super()._compute(instruction, evaluate, args, kwargs)

    def _drawing(self, generators: Sequence[torch.Generator]) -> contextlib.AbstractContextManager[None]:
        """The whole dry run has drawn from where the generators were."""
        self._tracer.record.deeds[self._index].begin.put()
        return contextlib.nullcontext()

    def _call_freely(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise StepEnded

    def _witnessed(self, function: Callable[..., Any], planned: Deeds, unit: str, ghosts: Any) -> Callable[..., Any]:
        """A unit that draws what it has drawn before. What the step draws behind it is what it draws in a run, where
        units of other stages draw nothing.

        Args:
            ghosts: what it returns if it can't be followed to its end.
        """

        def witnessed(*args: Any, **kwargs: Any) -> Any:
            witness, before = Witness(self, self._tracer, planned, unit), Moment.now()
            planned.begin.put()
            try:
                with witness, self._tracer.fakes.inside():
                    out = function(*args, **kwargs)
            except NeedsValues:
                return ghosts
            finally:
                if before != planned.begin:
                    before.put()
            witness.end()
            return out

        return witnessed

    def compare(self, unit: str, planned: Deed | None, alone: Deed | None) -> None:
        """Leave the step if this is not what was done before."""
        if planned != alone:
            self.difference = Difference(self._at, unit, self._locator.here(), planned, alone)
            raise StepEnded


class Witness(TorchFunctionMode):
    """Runs a call on fakes, and compares what happens inside.

    Args:
        alone: is told of it.
        tracer: of the whole dry run.
        planned: what the call did there.
        unit: its name.
    """

    def __init__(self, alone: Alone, tracer: Tracer, planned: Deeds, unit: str) -> None:
        super().__init__()
        self._alone, self._tracer, self._planned, self._unit = alone, tracer, planned, unit
        self._done, self._lost = 0, False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = operation_name(func), kwargs or {}
        if not self._lost:
            self._compare(deed_of(name, args, kwargs, self._tracer.values.name, drawing=True))
        self._done += 1
        try:
            return self._tracer.fakes.evaluate(name, func, args, kwargs)
        except NeedsValues:  # the call is left, and its contexts (`no_grad`) on the way
            self._lost = True
            raise

    def end(self) -> None:
        """After the call."""
        if self._done < len(self._planned.inside):
            self._compare(None)

    def _compare(self, found: Deed | None) -> None:
        if self._planned.compared:
            inside = self._planned.inside
            self._alone.compare(self._unit, inside[self._done] if self._done < len(inside) else None, found)


def _without_data(relay: Relay, fake_mode: FakeTensorMode) -> Tensor:
    with fake_mode:
        made = torch.empty_strided(relay.shape, relay.stride, dtype=relay.dtype, device=relay.device)
    return made.requires_grad_(relay.requires_grad)
