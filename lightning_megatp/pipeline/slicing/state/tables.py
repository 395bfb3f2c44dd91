"""What a step makes once, between units, for all later steps: masks, tables of positions.

`if self.mask is None: self.mask = make(n)` does other operations in the first step than in the next one, which in a
pipeline is the next microbatch. A table that depends on shapes alone may as well be there before the first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from lightning_megatp.containers import tensors_in
from lightning_megatp.snapshots.snapshot import PLAIN, Snapshot

if TYPE_CHECKING:
    from lightning_megatp.pipeline.slicing.dry_run.values import Value
    from lightning_megatp.pipeline.slicing.plan import SlicePlan


class _Entry(NamedTuple):
    """What a dict holds under a key."""

    holder: dict[Any, Any]
    key: Any
    value: Any


def _tensors_of(value: Any) -> list[Tensor]:
    """A tensor, or those that a tuple or a list holds (cosines and sines of positions, anchors of several scales)."""
    return tensors_in(value) if isinstance(value, (Tensor, tuple, list)) else []


class Left:
    """What a dry run has left on the module that every stage makes for itself; before it is undone.

    Args:
        module: whose step it was.
        snapshot: of the module before.
        values: all that it has left.
        asks_batch: whether the step's code read values of the batch.
    """

    def __init__(self, module: nn.Module, snapshot: Snapshot, values: Iterable[Value], asks_batch: bool) -> None:
        left = {id(value.tensor): value for value in values if value.stage is None}
        self.any = bool(left)
        self._changes = snapshot.changes() if left else None
        self._buffers_of = {id(child.__dict__): child.__dict__["_buffers"] for child in module.modules()}
        self._entries = {plain: self._entries_with(left, plain) for plain in (False, True)}
        constant = all(value.constant and not value.tensor.requires_grad for value in left.values())
        complete = {id(x) for entry in self.entries for x in _tensors_of(entry.value)} == set(left)
        self.are_tables = self.any and complete and constant and not asks_batch
        """Whether it depends neither on the batch, nor on chance, nor on what is trained; `put` finds its places."""

    @property
    def entries(self) -> list[_Entry]:
        """Attributes and entries of dicts that hold the tensors, or tuples of them."""
        return self._entries[False]

    def _entries_with(self, tensors: Collection[int], plain: bool) -> list[_Entry]:
        """With `plain` also the numbers and the like that changed beside them."""
        dicts = [(holder, new) for holder, new in self._changes or () if isinstance(holder, dict)]

        def has(value: Any) -> bool:
            held = _tensors_of(value)
            return bool(held) and all(id(x) in tensors for x in held)

        having = {id(holder) for holder, new in dicts if any(map(has, new.values()))}
        return [
            _Entry(holder, key, x)
            for holder, new in dicts
            if id(holder) in having
            or id(self._buffers_of.get(id(holder))) in having
            or any(id(value) in having for value in holder.values())
            for key, x in new.items()
            if has(x) or (plain and type(x) in PLAIN)
        ]

    def put(self, plain: bool) -> None:
        """Put it where the step had put it.

        Args:
            plain: with the numbers and the like that it set beside (a table's length).
        """
        for holder, key, value in self._entries[plain]:
            holder[key] = value

    def put_everything(self) -> bool:
        """Put also there what has no data, and all else that the step has changed; False if it can't be done."""
        for holder, new in self._changes or ():
            if isinstance(holder, (dict, set)):
                holder.update(new)
            else:
                holder.clear()
                holder.extend(new)
        return self._changes is not None


class Tables:
    """The tables that steps have made, and which of them each plan found when it was made or last tried. As long as
    these are the ones that are there, a step does not make others."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, Any], _Entry] = {}
        self._found: dict[int, tuple[SlicePlan, list[Any]]] = {}

    def note(self, plan: SlicePlan, left: Left) -> None:
        """A plan of a step that found what another had left."""
        self._places.update({(id(entry.holder), entry.key): entry for entry in left.entries})
        self._found[id(plan)] = plan, self._held()

    def note_if_unchanged(self, plan: SlicePlan, before: Snapshot) -> None:
        """A plan has been tried and fits, from that moment on."""
        held = self._held()
        if all(id(x) in before.tensors for kept in held for x in _tensors_of(kept)):
            self._found[id(plan)] = plan, held

    def are_those_of(self, plan: SlicePlan) -> bool:
        """Whether the module has the tables which the plan found."""
        if not self._places:
            return True
        _, found = self._found.get(id(plan), (plan, []))
        held = self._held()
        return len(found) == len(held) and all(x is y for x, y in zip(found, held, strict=True))

    def _held(self) -> list[Any]:
        return [entry.holder.get(entry.key) for entry in self._places.values()]
