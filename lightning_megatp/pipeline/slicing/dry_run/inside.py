"""The dry run of what is one operation: a unit, or an autograd function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.overrides import TorchFunctionMode

from lightning_megatp.containers import tensors_in
from lightning_megatp.pipeline.slicing.dry_run.call import Call
from lightning_megatp.pipeline.slicing.dry_run.deeds import Deed, deed_of
from lightning_megatp.pipeline.slicing.dry_run.stage_states import Known, Lineage, joined
from lightning_megatp.pipeline.slicing.dry_run.values import Value
from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.pipeline.slicing.operations import (
    HOST_READS,
    LIKE_ANOTHER,
    SHAPE_ONLY,
    NeedsValues,
    random_states,
)
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import DisableTorchFunction, tensor_version, tree_map
from lightning_megatp.tensor.draws import OF_TENSORS
from lightning_megatp.tensor.functions import check_caller, is_in_place, operation_name, operation_names

if TYPE_CHECKING:
    from lightning_megatp.pipeline.slicing.dry_run.tracer import Tracer


class Inside(TorchFunctionMode):
    """Runs a call on fakes; notes what it reads besides its arguments, and what it makes.

    Args:
        tracer: of the step.
        call: what runs.
    """

    def __init__(self, tracer: Tracer, call: Call) -> None:
        super().__init__()
        self._tracer, self._call = tracer, call
        self._inputs = {id(value.tensor) for value in call.inputs}
        self._stages: set[int] = set()
        self.made: dict[int, Tensor] = {}
        """What the operations inside returned: kept, so that no other tensor gets the id."""
        self.deeds: list[Deed] = []
        self.missed: NeedsValues | None = None
        """Why results inside had to be made up."""
        self._answers = 0
        self._by_values = False
        """Whether what it makes may depend on values that were read, which not every stage has."""
        self._by_batch = False
        """Whether what it makes may depend on values that were read, which every stage has."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        check_caller(func)
        tensors = [x for x in tensors_in(args, kwargs) if id(x) not in self._inputs and id(x) not in self.made]
        for x in tensors:
            self._read_besides(x)
        name = operation_name(func)
        self.deeds.append(deed_of(name, args, kwargs or {}, self._tracer.lasting, drawing=True))
        shown = [x for x in tensors if not self._is_own(x)]
        before = [self._version(x) for x in shown]
        lineage = self._lineage(name, args, kwargs or {})
        drawn = random_states(args, kwargs or {}) if lineage is not None else []
        try:
            out = self._tracer.fakes.evaluate(name, func, args, kwargs or {})
        except NeedsValues as error:
            packed = name == "_pack_padded_sequence" or any(isinstance(x, PackedSequence) for x in self._call.args)
            if not self._call.is_unit or self._call.collects or packed:
                raise  # lengths of one would tell another length of what is padded again
            self.missed = self.missed or error
            out = self._made_up(name, func, args, kwargs or {})
        if lineage is not None and drawn != random_states(args, kwargs or {}):
            lineage = None
        changed = [x for x, version in zip(shown, before, strict=True) if self._version(x) != version]
        if not all(self._may_overwrite(name, x, lineage) for x in changed):
            raise SliceError(
                f"`{name}` in {self._call.by} changes a tensor in place that is neither the module's own nor an"
                " argument: other pipeline stages would not see it. Return what it becomes, or make it a buffer of the"
                " module."
            )
        self._note(name, args, kwargs or {}, out, lineage)
        return out

    def missed_by(self, error: Exception) -> bool:
        """Whether an error is that values are needed, or may come of made-up ones; from then on results are made up."""
        if isinstance(error, NeedsValues):
            self.missed = self.missed or error
        return self.missed is not None and not isinstance(error, SliceError)

    def is_given(self, x: Tensor) -> bool:
        """Whether a tensor is among the arguments, and does not outlive the step."""
        return id(x) in self._inputs and not self._tracer.values.is_persistent(x)

    def _lineage(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lineage | None:
        """The lineage of what an operation makes, if every stage would make it alike; of one that overwrites its first
        tensor, of what it puts there."""
        tensors = tensors_in(args, kwargs)
        if name in SHAPE_ONLY:
            tensors = []
        elif name in LIKE_ANOTHER:
            tensors = tensors[:1]
        elif name in _OVERWRITE and tensors[:1] and self._lineage_of(tensors[0]) is not None:
            tensors = tensors[1:]
        if name in OF_TENSORS:
            return None
        found = []
        for x in tensors:
            if (lineage := self._lineage_of(x)) is None:
                return None
            found.append(lineage)
        return joined(found)

    def _lineage_of(self, x: Tensor) -> Lineage | None:
        if (known := self._tracer.known_alike.get(id(x))) is not None:
            return known.lineage
        value, is_persistent = self._tracer.values.get(x), self._tracer.values.is_persistent(x)
        if not (is_persistent if value is None else value.stage is None):
            return None
        with DisableTorchFunction():  # nobody has to see this
            if x.requires_grad:
                return None
        of_batch = value is not None and not value.constant
        return Lineage(frozenset([id(x)] if is_persistent else []), of_batch)

    def _note(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, lineage: Lineage | None
    ) -> None:
        """What an operation has made, or changed."""
        made, known = tensors_in(out), self._tracer.known_alike
        self.made.update((id(x), x) for x in made)
        changes = (is_in_place(name) and id(args[0]) in known) or "out" in kwargs
        if lineage is None:
            self._by_values |= name in HOST_READS or changes
        elif lineage.of_batch:
            self._by_batch |= name in HOST_READS or changes
        if changes and (lineage is None or lineage.of_batch):  # views of what is changed are among what was made
            for key in self.made.keys() & known.keys():
                x = known.pop(key)
                if lineage is not None:
                    known[key] = Known(x.tensor, x.lineage.with_batch())
        if lineage is not None and not self._by_values:
            lineage = lineage.with_batch() if self._by_batch else lineage
            known.update((id(x), Known(x, lineage)) for x in made)

    def _may_overwrite(self, name: str, x: Tensor, lineage: Lineage | None) -> bool:
        """Whether each stage overwrites its own copy of a tensor, that units of several stages share, alike."""
        alike = name in _OVERWRITE and lineage is not None and not self._by_values and id(x) not in lineage.origins
        if not (alike and self._stage in self._tracer.owners.get(id(x), ())):
            return False
        assert lineage is not None
        self._tracer.known_alike[id(x)] = Known(x, lineage.with_batch() if self._by_batch else lineage)
        return True

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
        if (name in HOST_READS and name != "__bool__") or self._answers > _MOST_ANSWERS:
            raise self.missed
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
                became[id(ones[id(x)])] = self._change(self._tracer.values.fake(x), learning)
        return tree_map(lambda y: became.get(id(y), self._like(y, learning)) if isinstance(y, Tensor) else y, out)

    def _like(self, x: Tensor, learning: Sequence[Tensor]) -> Tensor:
        with self._tracer.fake_mode:
            made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
            learns = bool(learning) and (made.is_floating_point() or made.is_complex())
            return made.requires_grad_().clone() if learns else made  # no leaf: it may be changed in place

    def _change(self, x: Tensor, learning: Sequence[Tensor]) -> Tensor:
        """In place, by values that learn."""
        with self._tracer.fake_mode:
            return x.add_(sum(0 * self._tracer.values.fake(y).sum() for y in learning)) if learning else x.zero_()

    @property
    def _stage(self) -> int | None:
        """The stage of the unit that runs: the call itself, or one inside of it."""
        return next(iter(self._stages)) if len(self._stages) == 1 else self._call.unit_stage

    def _is_own(self, x: Tensor) -> bool:
        return self._tracer.owners.get(id(x)) == {self._call.unit_stage}

    def _version(self, x: Tensor) -> tuple[int, int]:
        return tensor_version(x), tensor_version(self._tracer.values.fake(x))

    def _read_besides(self, x: Tensor) -> None:
        """A tensor from an attribute, a closure or a global. A value of the step, or a parameter that is not the unit's
        own, is an input like any other."""
        stage = self._stage
        value = self._tracer.values.get(x)
        if value is not None and value.stage is not None:
            self._tracer.record.refuse_stand_in(value, stage, f"a tensor that {self._call.by} takes from an attribute")
            self._add_input(value)
        elif self._tracer.values.is_persistent(x) and stage not in self._tracer.owners.get(id(x), ()):
            self._add_input(self._tracer.find(x, self._call.by))
        origin, of_stage = self._tracer.side_door(x)
        if value is None and origin is not None and of_stage != stage and not self._is_cached_apart(x):
            raise SliceError(
                f"{self._call.by} uses a tensor that came out of {origin} by a side door (an attribute, a cache), on"
                f" another pipeline stage ({of_stage}). Pass it through the forwards of the modules, or keep both on"
                " one stage, by `stages=[[...], ...]`."
            )

    def _is_cached_apart(self, x: Tensor) -> bool:
        """Whether it is a table in no module, but in a cache of functions (`functools.lru_cache`), of which each
        process has its own: found there, or made anew, it is the same."""
        known = self._tracer.known_alike.get(id(x))
        if known is None or known.lineage.of_batch or is_fake(x):
            return False
        return not self._tracer.hangs_on_the_module(x)

    def _add_input(self, value: Value) -> None:
        self._call.inputs.append(value)
        self._inputs.add(id(value.tensor))


_OVERWRITE = operation_names("__setitem__ copy_ fill_ zero_")
"""They read nothing of what they change."""
_MOST_ANSWERS = 1000
"""Made-up answers in one unit, at most: `while mask.any()` would not end."""
