"""The parts of a step that goes backward by hand, as a dry run finds them: what one takes of those before it.

A part ends with a backward. To run a later one, each stage runs the step from its beginning: what stages computed in
earlier parts is skipped, and what the part takes of it was kept. What every stage computes is computed once more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.pipeline.slicing.plan import Key

if TYPE_CHECKING:
    from lightning_megatp.pipeline.slicing.dry_run.values import Value


class Parts:
    """What is known of the part that the dry run is in."""

    def __init__(self, last_stage: int) -> None:
        self._last_stage = last_stage
        self.number = 0
        """How often the step has gone backward before."""
        self.begins = 0
        """Its first operation."""
        self.goes_backward = False
        """Whether it ends with a backward."""
        self.retains_graph = False
        """Whether that leaves the graph as it is."""
        self.learns: Mapping[str, bool] = {}
        """`requires_grad` at that backward of the parameters that the step has toggled so far, by name."""
        self._recalled: set[Key] = set()
        """Values of earlier parts that it takes."""
        self._of_parameters: dict[int, Value] = {}
        """id() of what every stage made in earlier parts of parameters, which may be others by now."""
        self._made_of_these: dict[int, Value] = {}
        """The same, of what they made of that in this part."""
        self._changed_alike = ""
        """What changed a tensor that outlives the step, on every stage."""

    @property
    def recalled(self) -> frozenset[Key]:
        """Values of earlier parts that it takes."""
        return frozenset(self._recalled)

    def begin(self, operation: int, values: Iterable[Value], parameters: Collection[int]) -> None:
        """See `Values.begin_part`."""
        if self._changed_alike:
            raise SliceError(
                f"{self._changed_alike} changes a tensor of the module, between the pipeline's units, in a step that"
                " goes on after its `manual_backward`. Each stage runs such a step from its beginning for each part,"
                " and would change it again. Do that in a hook such as `on_train_batch_start`."
            )
        self.number, self.begins = self.number + 1, operation
        self._recalled.clear()
        self._made_of_these.clear()
        for value in values:
            value.consumers.clear()
            value.became_before += [(stage, made) for stage, made in value.became if made is not None]
            value.became.clear()
            if value.stage is None and not (value.origins - {id(value.tensor)}).isdisjoint(parameters):
                self._of_parameters[id(value.tensor)] = value

    def end(self, retains_graph: bool, learns: Mapping[str, bool]) -> None:
        """See `Follows.end_part`."""
        self.goes_backward, self.retains_graph, self.learns = True, retains_graph, learns

    def take(self, value: Value, stage: int | None, by: str) -> None:
        """An operation of the part takes a value. What was made of parameters the last stage keeps: it runs a part to
        its end.

        Raises:
            SliceError: another stage would find another value, since it makes it anew.
        """
        if self._of_parameters.get(id(value.tensor)) is value and stage in (None, self._last_stage):
            if value.made_at is None:  # it was changed in place
                self.refuse_stale(value, by)
            else:
                self._recalled.add(value.made_at)
        elif stage not in (None, self._last_stage):
            self.refuse_stale(value, by)
        if value.key is not None and value.key.operation < self.begins:
            self._recalled.add(value.key)

    def refuse_stale(self, value: Value, by: str) -> None:
        """Refuse to use again what was made before a backward.

        Raises:
            SliceError: it was made in an earlier part, of a parameter.
        """
        if self.is_stale(value):
            raise SliceError(
                f"{by} uses what {value.maker} made of a parameter before a `manual_backward`, and each pipeline stage"
                " would make that anew, of the updated one. Take the number where it is made, before `manual_backward`"
                " (`.item()`), or compute it again where it is used."
            )

    def follow(self, inputs: Iterable[Value], made: Iterable[Value]) -> None:
        """Every stage makes something: where it is made of what parameters were, the last stage alone has it right."""
        if any(map(self.is_stale, inputs)):
            self._made_of_these.update((id(value.tensor), value) for value in made)

    def is_stale(self, value: Value) -> bool:
        """Whether a value was made of parameters that may be others by now."""
        known = self._of_parameters, self._made_of_these
        return any(values.get(id(value.tensor)) is value for values in known)

    def change(self, value: Value, stage: int | None, by: str, lasts: bool) -> None:
        """An operation of the part changes a value in place.

        Args:
            lasts: it outlives the step.

        Raises:
            SliceError: an earlier part made it.
        """
        if value.key is not None and value.key.operation < self.begins:
            raise SliceError(
                f"{by} changes in place what {value.maker} made before a `manual_backward`. Use the operation that"
                " returns a new tensor."
            )
        if stage is None and lasts:
            self._changed_alike = by

    def go_back(self, value: Value) -> None:
        """At the end of the step: let the gradient of what an earlier part made of a value come back to it. Where that
        was on a later stage, it is sent on once more, so that a message goes back; the stage takes the leaf of then."""
        for stage, made in value.became_before if self.goes_backward and value.stage is not None else ():
            if made.reaches_loss and (stage, made) not in value.became:
                value.became.append((stage, made))
                if value.key is not None and stage > (value.stage or 0):
                    value.consumers.add(stage)
                    self._recalled.add(value.key)
