"""Operations of a dry run are carried out: each on its stage, on values where every stage has them, else without."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_megatp.containers import tensors_in
from lightning_megatp.pipeline.slicing.dry_run.call import Call
from lightning_megatp.pipeline.slicing.dry_run.ending import Ending
from lightning_megatp.pipeline.slicing.dry_run.fakes import Fakes
from lightning_megatp.pipeline.slicing.dry_run.guesses import (
    Guesses,
    guess_unit,
    guessed_where_they_fail,
    parts_of,
    returns_alike,
)
from lightning_megatp.pipeline.slicing.dry_run.inside import Inside
from lightning_megatp.pipeline.slicing.dry_run.manner import Manner
from lightning_megatp.pipeline.slicing.dry_run.provenance import Maker, Provenance
from lightning_megatp.pipeline.slicing.dry_run.record import Record
from lightning_megatp.pipeline.slicing.dry_run.values import Values, versions
from lightning_megatp.pipeline.slicing.dry_run.watched import watched
from lightning_megatp.pipeline.slicing.errors import ReadsValues, SliceError
from lightning_megatp.pipeline.slicing.operations import (
    LIKE_ANOTHER,
    SHAPE_ONLY,
    NeedsValues,
    random_states,
    with_memory,
)
from lightning_megatp.shim.autograd import untransformed


class Evaluator:
    """Finds the stage of an operation, and its result.

    Args:
        values: the tensors of the step.
        record: its operations.
        fakes: computes without data.
        provenance: of the tensors.
        guesses: of results.
        ending: of the step.
        manner: how to follow the step.
    """

    def __init__(
        self,
        values: Values,
        record: Record,
        fakes: Fakes,
        provenance: Provenance,
        guesses: Guesses,
        ending: Ending,
        manner: Manner,
    ) -> None:
        self._values, self._record, self._fakes, self._provenance = values, record, fakes, provenance
        self._guesses, self._ending, self._manner = guesses, ending, manner
        self.inside: Inside | None = None
        """The unit or autograd function that runs."""
        self.transforms = False
        """An operation under torch.func runs, which may lift the transforms for its parts."""

    def evaluate(self, call: Call) -> Any:
        """Find the stage of an operation, and its result: computed if it is replicated, else without data.

        Raises:
            SliceError: it needs values that no stage before the last knows.
            StepEnded: the last stage does it, and needs values.
        """
        call.stage = self._stage_of(call)
        try:
            if call.is_unit or call.opaque:
                return self._look_inside(call)
            if call.stage is not None:
                return self._fakes.evaluate(call.name, call.function, call.args, call.kwargs)
        except NeedsValues as error:
            self._guesses.unseen.update(call.units)
            with self._fakes.mode:
                guessed = guess_unit(call) if call.is_unit else None
            if guessed is not None:
                self._guesses.note_unit(call)
                return guessed
            if call.stage == self._values.last_stage:
                self._ending.end_at(call, error)
            raise SliceError(
                f"{call.by} can't be planned on pipeline stage {call.stage}: {error}. Values are known on the last"
                f" stage ({self._values.last_stage}) only. Do it after the loss, in a hook, or on that stage; or inside"
                " the forward of a module that returns what has the shape of its first input (a recurrent layer: pack,"
                " run, and pad with `total_length`)."
            ) from error
        args, kwargs = with_memory(call.args, call.kwargs) if call.shape_only else (call.args, call.kwargs)
        return call.function(*args, **kwargs)

    def evaluate_transformed(self, call: Call) -> Any:
        """The result of an operation under a transform (`torch.func.vmap`), of which the plan says nothing: each stage
        computes what it has all of (a mask of the batch).

        Raises:
            SliceError: stages would not get the same, or can't follow.
        """
        given = [untransformed(x) for x in tensors_in(call.args, call.kwargs)]
        why = "is a module that one stage has" if call.is_unit else ""
        if any(self._fakes.is_without_data(x) or x.requires_grad for x in given):
            why = "takes a value that not every stage has, or one that learns"
        there = [x for x in given if self._values.is_persistent(x) or self._values.get(x) is not None]
        inputs = [self._provenance.find(x, call.by) for x in there]
        before, random_before = versions(inputs), random_states(call.args, call.kwargs)
        self.transforms = True
        try:
            out = None if why else call.function(*call.args, **call.kwargs)
        finally:
            self.transforms = False
        if versions(inputs) != before:
            why = "changes a tensor in place"
        elif random_states(call.args, call.kwargs) != random_before:
            why = "draws random numbers"
        if why:
            raise SliceError(
                f"{call.by} runs under torch.func, or forward-mode differentiation, between the pipeline's units, and"
                f" {why}. Do it inside the forward of a module that is never cut: one that a ModuleList or a Sequential"
                " holds."
            )
        for value in inputs:
            self._values.look_at(value, self._record.next)
        return out

    def _stage_of(self, call: Call) -> int | None:
        """The stage of an operation by its inputs."""
        stages = [value.stage for value in call.inputs if value.stage is not None]
        call.shape_only = bool(stages) and not call.is_unit and self._asks_for_shapes(call)
        stage = call.unit_stage
        if stage is None and not call.shape_only:
            homes = [min(self._values.owners[id(v.tensor)]) for v in call.inputs if self._values.is_of_unit(v.tensor)]
            stage = max(stages or homes, default=None)
        return self._or_tail(call, stage)

    def _or_tail(self, call: Call, stage: int | None) -> int | None:
        """The stage of an operation, or the tail, if it is of that: not what weights alone are made into, which is the
        same for all microbatches."""
        in_tail = self._manner.tail is not None and self._record.next in self._manner.tail
        if stage is None or call.units or not in_tail:
            return stage
        return self._values.last_stage if any(value.stage is not None for value in call.inputs) else stage

    def _asks_for_shapes(self, call: Call) -> bool:
        """Whether an operation reads no data of a stage's tensors."""
        if call.name in LIKE_ANOTHER and isinstance(call.args[0], Tensor):
            return call.inputs[0].stage is None and not self._values.is_of_unit(call.args[0])
        return call.name in SHAPE_ONLY

    def _look_inside(self, call: Call) -> Any:
        guesses_parts = self._manner.guesses_parts
        self.inside = inside = Inside(call, self._values, self._fakes, self._provenance, not guesses_parts)
        parts = parts_of(call.function) if call.is_unit and not call.collects else []
        call.deeds.inside, call.deeds.compared = inside.deeds, False
        try:
            with (
                guessed_where_they_fail(parts if guesses_parts else [], inside.missed_by),
                inside,
                self._fakes.inside(),
                watched(call.hooks, inside, self._provenance.note_hook),
            ):
                out = call.function(*call.args, **call.kwargs)
            if inside.guessed_numbers and not returns_alike(call, out):
                assert inside.missed is not None
                raise inside.missed
        except Exception as error:
            if isinstance(error, SliceError) or not inside.missed_by(error):
                raise
            if parts and not guesses_parts:
                raise ReadsValues(str(error)) from error
            if inside.missed is None:
                raise
            raise inside.missed from error  # made-up results led it astray
        finally:
            self.inside = None
        call.deeds.compared = not call.hooks
        if inside.missed is not None:
            self._guesses.note_unit(call)
        call.stage = self._or_tail(call, inside.find_stage(call.stage))
        maker = Maker(call.by, call.stage, call.what if call.is_unit else "")
        self._provenance.note_inside(inside.made.values(), maker)
        return out
