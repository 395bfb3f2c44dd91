"""What a step makes once, between units, for all later steps: masks, tables of positions.

`if self.mask is None: self.mask = make(n)` does other operations in the first step than in the next one, which in a
pipeline is the next microbatch. A table that depends on shapes alone may as well be there before the first.

A table of another length takes its place where a step comes to it, which earlier stages may have left by then. So these
are told what the last stage finds there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_megatp.containers import tensors_in
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import tree_map
from lightning_megatp.snapshots.leftovers import Path
from lightning_megatp.snapshots.snapshot import PLAIN, Snapshot

if TYPE_CHECKING:
    from lightning_megatp.pipeline.slicing.dry_run.values import Value
    from lightning_megatp.pipeline.slicing.plan import SlicePlan


class _Entry(NamedTuple):
    """What a dict holds under a key."""

    holder: dict[Any, Any]
    key: Any
    value: Any

    @property
    def place(self) -> tuple[int, Any]:
        return id(self.holder), self.key


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
        self._values = {id(value.tensor): value for value in values if value.stage is None}
        self.any = bool(self._values)
        self._changes = snapshot.changes()
        self._buffers_of = {id(child.__dict__): child.__dict__["_buffers"] for child in module.modules()}
        self._counts: set[tuple[int, Any]] = set()
        constant = all(value.constant and not value.tensor.requires_grad for value in self._values.values())
        complete = {id(x) for entry in self.entries for x in _tensors_of(entry.value)} == self._values.keys()
        self.are_tables = self.any and complete and constant and not asks_batch
        """Whether it depends neither on the batch, nor on chance, nor on what is trained; `put` finds its places."""

    @property
    def entries(self) -> list[_Entry]:
        """Attributes and entries of dicts that hold the tensors, or tuples of them."""
        return self._entries(self._values, plain=False)

    @property
    def beside(self) -> list[_Entry]:
        """The numbers and the like that changed beside them (a table's length)."""
        around = self._entries(self._values, plain=True)
        return [entry for entry in around if type(entry.value) in PLAIN]

    def late(self, plan: SlicePlan) -> list[_Entry]:
        """The entries, and what is beside them, to which not every stage comes.

        Args:
            plan: of the step that left them.
        """
        reached = min((plan.script(stage).last for stage in range(plan.n_stages - 1)), default=len(plan.operations))
        made_at = {key: value.made_at for key, value in self._values.items()}
        return self._entries([key for key, at in made_at.items() if at is None or at.operation > reached], plain=True)

    def _entries(self, tensors: Collection[int], plain: bool) -> list[_Entry]:
        """Those of some tensors, with `plain` also what is beside."""
        dicts = [(holder, new) for holder, new in self._changes if isinstance(holder, dict)]

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
            if has(x) or (plain and type(x) in PLAIN and (id(holder), key) not in self._counts)
        ]

    def put(self, plain: bool) -> None:
        """Put it where the step had put it.

        Args:
            plain: with what it set beside.
        """
        for holder, key, value in self._entries(self._values, plain):
            holder[key] = value

    def leave_out(self, again: Left) -> None:
        """Leave out of what is beside the numbers that are others after a step that found the rest: these count
        calls."""
        since = {id(holder): new for holder, new in again._changes if isinstance(holder, dict)}
        for holder, new in self._changes:
            if isinstance(holder, dict):
                later = since.get(id(holder), {})
                self._counts |= {(id(holder), key) for key, x in new.items() if not _is_same(later.get(key, x), x)}

    def put_everything(self) -> None:
        """Put also there what has no data, and all else that the step has changed."""
        for holder, new in self._changes:
            if isinstance(holder, (dict, set)):
                holder.update(new)
            else:
                holder.clear()
                holder.extend(new)


class Tables:
    """The tables that steps have made, and which of them each plan found when it was made or last tried. As long as
    these are the ones that are there, a step does not make others."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, Any], _Entry] = {}
        self._beside: set[tuple[int, Any]] = set()
        """Where steps keep what tables are for."""
        self._late: dict[tuple[int, Any], _Entry] = {}
        """Where steps leave tables, and numbers beside them, that not every stage comes to; and what all have there."""
        self._found: dict[int, tuple[SlicePlan, list[Any]]] = {}

    def note(self, plan: SlicePlan, left: Left, maker: SlicePlan) -> None:
        """A plan of a step that found what another had left, which is there now.

        Args:
            maker: the plan of that.
        """
        self.note_places(left, maker)
        self._found[id(plan)] = plan, self._held()

    def note_places(self, left: Left, maker: SlicePlan) -> None:
        """A step of this plan leaves tables. They may be there by now."""
        self._places.update((entry.place, entry) for entry in left.entries)
        self._beside.update(entry.place for entry in left.beside)
        for entry in left.late(maker):
            is_there = _is_same(entry.holder.get(entry.key), entry.value)
            self._late[entry.place] = entry if is_there else entry._replace(value=_UNKNOWN)

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

    def lengths_among(self, values: Mapping[Path, bytes], modules: Mapping[str, nn.Module]) -> dict[Path, bytes]:
        """The Python values that say what tables are for, among those that a stage has set on modules."""
        early = self._beside - self._late.keys()
        places = {path: (id(vars(modules[path[0]])), path[1]) for path in values if len(path) == 2}
        return {path: values[path] for path, place in places.items() if place in early}

    def changes(self) -> dict[int, Any]:
        """On the last stage: what is now in places to which not every stage comes, and was not when this was asked
        last; by the number of the place. The others are to `adopt` it."""
        found = {}
        for number, (place, entry) in enumerate(self._late.items()):
            held = entry.holder.get(entry.key)
            if _is_same(held, entry.value):
                continue
            self._late[place] = entry._replace(value=held)
            tensors = _tensors_of(held)
            if type(held) in PLAIN or (tensors and not any(map(is_fake, tensors))):
                found[number] = tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, held)
        return found

    def adopt(self, changes: Mapping[int, Any], device: torch.device) -> None:
        """On another stage, which has made the same plans."""
        places = list(self._late) if changes else []
        for number, value in changes.items():
            entry = self._late[places[number]]
            entry.holder[entry.key] = mine = tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, value)
            self._late[entry.place] = entry._replace(value=mine)

    def _held(self) -> list[Any]:
        return [entry.holder.get(entry.key) for entry in self._places.values()]


_UNKNOWN = object()


def _is_same(x: Any, y: Any) -> bool:
    return x is y or (type(x) is type(y) and type(x) in PLAIN and x == y)
