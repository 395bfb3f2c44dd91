"""Tensors that outlive a step and that it changes in place between units: counters, running means, queues."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from lightning_megatp.pipeline.slicing.errors import SliceError

UNNAMED = "a tensor of the module"
"""What is no parameter or buffer."""


class Changed(NamedTuple):
    """What a step changes."""

    by_stage: dict[str, int]
    """Name -> the stage that does: only its copy is up to date."""
    alike: tuple[str, ...]
    """Names of those that every stage changes alike."""
    used: dict[str, tuple[int, ...]]
    """Name -> the stages that depend on it, changed or not; without those that only units use."""
    ids: frozenset[int]
    """id() of all that are changed."""


class LastingChanges:
    """What one step changes that outlives it.

    A change that only one stage computes is that stage's. One that every stage could compute is done by those that have
    not left the step by then: by all of them, if it comes before the last operation of each, or by the last one alone.

    Args:
        names: of the tensors that outlive the step, by id().
        n_stages: how many stages run it.
    """

    def __init__(self, names: Mapping[int, str], n_stages: int) -> None:
        self._names, self._n_stages = names, n_stages
        self._by_stage: dict[int, tuple[int, str]] = {}
        """id() -> the stage that changes it, and by what."""
        self._replicated: dict[int, list[tuple[int, str]]] = {}
        """id() -> before which operation it is changed, and by what."""
        self._made_of: dict[int, set[int]] = {}
        """id() -> of those that it becomes dependent on."""
        self._first_looks: dict[int, int] = {}
        """id() -> before which operation its value, or what was made of it, is looked at first."""

    def note(self, tensor_id: int, stage: int | None, before: int, by: str, origins: Collection[int]) -> None:
        """A tensor is changed.

        Args:
            stage: None if the change is replicated.
            before: which operation comes next.
            by: what does it.
            origins: id() of the tensors that it depends on from then on.
        """
        self._made_of.setdefault(tensor_id, set()).update(origins)
        if stage is None and self._n_stages > 1:
            self._replicated.setdefault(tensor_id, []).append((before, by))
        else:
            self._by_stage[tensor_id] = (stage or 0, by)

    def look(self, tensor_id: int, before: int) -> None:
        """Each stage that has not left the step by then looks at a tensor's value."""
        self._first_looks.setdefault(tensor_id, before)

    def decide(
        self, uses: Mapping[int, set[int | None]], owners: Mapping[int, set[int]], ends: Sequence[int]
    ) -> Changed:
        """At the end of the step: who changes what.

        Args:
            uses: id() -> stages that use a tensor, or what was made of it; None: those that look at it.
            owners: id(parameter or buffer of a unit) -> the stages of its units.
            ends: of each stage before the last: its last operation.

        Raises:
            SliceError: a stage would miss a change.
        """
        alike = set()
        for tensor_id, changes in self._replicated.items():
            if changes[-1][0] < min(ends):
                alike.add(tensor_id)
            elif changes[0][0] > max(ends):
                self._by_stage[tensor_id] = (self._n_stages - 1, changes[0][1])
            else:
                raise SliceError(
                    f"{changes[-1][1]} changes `{self._names[tensor_id]}`, which outlives the step, between the"
                    " pipeline's units: stages that end their part of the step earlier would miss the change, and later"
                    " ones would not. Do it before the first block, or after the last one, in the forward of a module"
                    " that belongs to a unit, or in a hook such as on_train_batch_end."
                )
        used = {tensor_id: self._users(tensor_id, uses, max(ends, default=-1)) for tensor_id in uses}
        for tensor_id in alike:
            used.update((origin, set(range(self._n_stages))) for origin in self._made_of[tensor_id])
        for tensor_id, (stage, by) in self._by_stage.items():
            users = used.get(tensor_id, set()) | owners.get(tensor_id, set())
            if users - {stage} or tensor_id in alike:
                raise SliceError(
                    f"{by} changes `{self._names[tensor_id]}` on pipeline stage {stage}, and other stages use it"
                    " too; they would not see the change. Keep the module that owns it and what reads it on one stage,"
                    " or make it a part of a unit's forward."
                )
        return Changed(
            {self._names[tensor_id]: stage for tensor_id, (stage, _) in self._by_stage.items()},
            tuple(self._names[tensor_id] for tensor_id in alike),
            {name: tuple(sorted(used[i])) for i in used if (name := self._names[i]) != UNNAMED},
            frozenset([*self._by_stage, *alike]),
        )

    def _users(self, tensor_id: int, uses: Mapping[int, set[int | None]], last_end: int) -> set[int]:
        users = uses[tensor_id]
        if None in users:
            by_all = self._first_looks.get(tensor_id, -1) <= last_end
            users = users | set(range(self._n_stages) if by_all else [self._n_stages - 1])
        return {stage for stage in users if stage is not None}
