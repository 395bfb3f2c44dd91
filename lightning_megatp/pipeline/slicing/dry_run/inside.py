"""The dry run of what is one operation: a unit, or an autograd function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from lightning_megatp.containers import tensors_in
from lightning_megatp.pipeline.slicing.dry_run.call import Call
from lightning_megatp.pipeline.slicing.dry_run.deeds import Deed, deed_of
from lightning_megatp.pipeline.slicing.dry_run.fakes import Fakes
from lightning_megatp.pipeline.slicing.dry_run.lineages import Lineages
from lightning_megatp.pipeline.slicing.dry_run.packing import on_whole_sequences
from lightning_megatp.pipeline.slicing.dry_run.provenance import Provenance
from lightning_megatp.pipeline.slicing.dry_run.refusals import refuse_stand_in
from lightning_megatp.pipeline.slicing.dry_run.values import Value, Values
from lightning_megatp.pipeline.slicing.errors import SideDoor, SliceError
from lightning_megatp.pipeline.slicing.operations import HOST_READS, NeedsValues, random_states
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import DisableTorchFunction, tensor_version, tree_map
from lightning_megatp.tensor.functions import check_caller, operation_name


class Inside(TorchFunctionMode):
    """Runs a call on fakes; notes what it reads besides its arguments, and what it makes.

    Args:
        call: what runs.
        values: the tensors of the step.
        fakes: evaluates operations.
        provenance: of the tensors.
        guesses_numbers: those that it reads on the host are made up, too.
    """

    def __init__(self, call: Call, values: Values, fakes: Fakes, provenance: Provenance, guesses_numbers: bool) -> None:
        super().__init__()
        self._guesses_numbers = guesses_numbers
        self._call, self._values, self._fakes, self._provenance = call, values, fakes, provenance
        self._lineages = Lineages(values, provenance.alike)
        self._inputs = {id(value.tensor) for value in call.inputs}
        self._stages: set[int] = set()
        self.made: dict[int, Tensor] = {}
        """What the operations inside returned: kept, so that no other tensor gets the id."""
        self.deeds: list[Deed] = []
        self.missed: NeedsValues | None = None
        """Why results inside had to be made up."""
        self.guessed_numbers = False
        """Whether numbers had to be, too."""
        self._answers = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        check_caller(func)
        kwargs = kwargs or {}
        tensors = [x for x in tensors_in(args, kwargs) if id(x) not in self._inputs and id(x) not in self.made]
        for x in tensors:
            self._read_besides(x)
        name = operation_name(func)
        self.deeds.append(deed_of(name, args, kwargs, self._values.name, drawing=True))
        shown = [
            (x, self._values.fake(x)) for x in tensors if not self._is_own(x)
        ]  # held: another fake has its own count
        before = [_versions(*pair) for pair in shown]
        lineage = self._lineages.of_result(name, args, kwargs)
        drawn = random_states(args, kwargs) if lineage is not None else []
        packed = any(isinstance(x, PackedSequence) for x in self._call.args)
        if not packed:  # or its sizes are those of one microbatch
            func, args = on_whole_sequences(name, func, args)
        try:
            out = self._fakes.evaluate(name, func, args, kwargs)
        except NeedsValues as error:
            if not self._call.is_unit or self._call.collects or packed:
                raise
            self.missed = self.missed or error
            out = self._made_up(name, func, args, kwargs)
        if lineage is not None and drawn != random_states(args, kwargs):
            lineage = None
        changed = [pair[0] for pair, versions in zip(shown, before, strict=True) if _versions(*pair) != versions]
        if not all(self._is_of_stage(x) and self._lineages.overwrites_alike(name, x, lineage) for x in changed):
            raise SliceError(
                f"`{name}` in {self._call.by} changes a tensor in place that is neither the module's own nor an"
                " argument: other pipeline stages would not see it. Return what it becomes, or make it a buffer of the"
                " module."
            )
        self.made.update((id(x), x) for x in tensors_in(out))
        self._lineages.note(name, args, kwargs, out, lineage, self.made.values())
        return out

    def missed_by(self, error: Exception) -> bool:
        """Whether an error is that values are needed, or may come of made-up ones; from then on results are made up."""
        if isinstance(error, NeedsValues):
            self.missed = self.missed or error
        return self.missed is not None and not isinstance(error, SliceError)

    def is_given(self, x: Tensor) -> bool:
        """Whether a tensor is among the arguments, and does not outlive the step."""
        return id(x) in self._inputs and not self._values.is_persistent(x)

    def enter_unit(self, name: str, stage: int) -> None:
        """A unit inside of an autograd function (activation checkpointing with use_reentrant=True), or of a unit."""
        self._stages.add(stage)
        if name not in self._call.units:
            self._call.units.append(name)

    def find_stage(self, stage: int | None) -> int | None:
        """The stage of the whole: the latest of what it reads and of the units inside.

        Args:
            stage: by its arguments.

        Raises:
            SliceError: there are units of several stages inside.
        """
        if self._call.is_unit:
            return self._call.unit_stage
        if len(self._stages) > 1:
            raise SliceError(
                f"{self._call.by} runs modules of several pipeline stages: {', '.join(self._call.units)}. Keep them on"
                " one stage, by `stages=[[...], ...]`, or checkpoint single blocks."
            )
        read = [value.stage for value in self._call.inputs if value.stage is not None]
        return max([*self._stages, *read], default=stage)

    def _made_up(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A result where values are needed (which tokens an expert gets): that of ones. What a unit returns rarely
        depends on it, and the run compares.

        Raises:
            NeedsValues: a number is read; or a loop waits for another answer.
        """
        assert self.missed is not None
        self._answers += 1
        is_number = name in HOST_READS and name != "__bool__"
        if (is_number and not self._guesses_numbers) or self._answers > _MOST_ANSWERS:
            raise self.missed
        self.guessed_numbers |= is_number
        if name == "__bool__":
            return True
        ones = {id(x): torch.ones(x.shape, dtype=x.dtype, device=x.device) for x in tensors_in(args, kwargs)}
        with torch.no_grad():
            given = tree_map(lambda x: ones[id(x)] if isinstance(x, Tensor) else x, (args, kwargs))
            out = function(*given[0], **given[1])
        learning = [x for x in tensors_in(args, kwargs) if x.requires_grad and torch.is_grad_enabled()]
        became = {}
        for x in tensors_in(args, kwargs):
            if tensor_version(ones[id(x)]):
                became[id(ones[id(x)])] = self._change(self._values.fake(x), learning)
        return tree_map(lambda y: became.get(id(y), self._like(y, learning)) if isinstance(y, Tensor) else y, out)

    def _like(self, x: Tensor, learning: Sequence[Tensor]) -> Tensor:
        with self._fakes.mode:
            made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            learns = bool(learning) and (made.is_floating_point() or made.is_complex())
            return made.requires_grad_().clone() if learns else made  # no leaf: it may be changed in place

    def _change(self, x: Tensor, learning: Sequence[Tensor]) -> Tensor:
        """In place, by values that learn."""
        with self._fakes.mode:
            return x.add_(sum(0 * self._values.fake(y).sum() for y in learning)) if learning else x.zero_()

    @property
    def _stage(self) -> int | None:
        """The stage of the unit that runs: the call itself, or one inside of it."""
        return next(iter(self._stages)) if len(self._stages) == 1 else self._call.unit_stage

    def _is_own(self, x: Tensor) -> bool:
        return self._values.owners.get(id(x)) == {self._call.unit_stage}

    def _is_of_stage(self, x: Tensor) -> bool:
        """Whether units of the same stage have it."""
        return self._stage in self._values.owners.get(id(x), ())

    def _read_besides(self, x: Tensor) -> None:
        """A tensor from an attribute, a closure or a global. A value of the step, or a parameter that is not the unit's
        own, is an input like any other."""
        stage = self._stage
        self._provenance.check_is_of_step(x, self._call.by)
        value = self._values.get(x)
        if value is not None and value.stage is not None:
            refuse_stand_in(value, stage, f"a tensor that {self._call.by} takes from an attribute")
            self._add_input(value)
        elif self._values.is_persistent(x) and not self._is_of_stage(x):
            self._add_input(self._provenance.find(x, self._call.by))
        maker, of_stage, _ = self._provenance.side_door(x)
        if value is None and maker and of_stage != stage and not self._is_cached_apart(x):
            raise SideDoor(
                f"{self._call.by} uses a tensor that came out of {maker} by a side door (an attribute, a cache), on"
                f" another pipeline stage ({of_stage}). Pass it through the forwards of the modules, or keep both on"
                " one stage, by `stages=[[...], ...]`.",
                self._provenance.hook_of(x),
                self._provenance.attribute_with(x),
            )

    def _is_cached_apart(self, x: Tensor) -> bool:
        """Whether it is a table in no module, but in a cache of functions (`functools.lru_cache`), of which each
        process has its own: found there, or made anew, it is the same."""
        alike = self._lineages.is_of_numbers(x) and not is_fake(x)
        return alike and not self._provenance.hangs_on_the_module(x)

    def _add_input(self, value: Value) -> None:
        self._call.inputs.append(value)
        self._inputs.add(id(value.tensor))


_MOST_ANSWERS = 1000
"""Made-up answers in one unit, at most: `while mask.any()` would not end."""


def _versions(x: Tensor, fake: Tensor) -> tuple[int, int]:
    with DisableTorchFunction():
        return tensor_version(x), tensor_version(fake)
