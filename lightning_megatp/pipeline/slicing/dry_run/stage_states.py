"""What units of several stages share, and leave things on: one `RotaryEmbedding` in all attentions, whose cosines the
first block makes and the others find; a mask in an object that all blocks are given.

On a stage that does not run the first block, its own first block makes them. That comes to the same if they depend
neither on what other stages compute, nor on what is trained, nor on chance; on a module, which outlives the step, nor
on the batch's values. A dry run, which goes through the units of all stages, then shows to each what is there on its
own stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_megatp.pipeline.slicing.dry_run.by_tensor import ByTensor
from lightning_megatp.pipeline.slicing.dry_run.lineages import Lineage
from lightning_megatp.shim.torch import tree_leaves
from lightning_megatp.snapshots.leftovers import is_own_object
from lightning_megatp.snapshots.snapshot import PLAIN, Snapshot

SharedParts = Mapping[str, Sequence[Any]]
"""Unit -> the modules in it, and the user's own objects on them, that are in units of other stages, too."""


def shared_parts(module: nn.Module, stage_of_unit: Mapping[str, int]) -> SharedParts:
    """The parts that units of several stages share, in a module that is cut into stages by units."""
    inside = {unit: _parts(module.get_submodule(unit)) for unit in stage_of_unit}
    stages: dict[int, set[int]] = {}
    for unit, parts in inside.items():
        for part in parts:
            stages.setdefault(id(part), set()).add(stage_of_unit[unit])
    found = {unit: [part for part in parts if len(stages[id(part)]) > 1] for unit, parts in inside.items()}
    return {unit: shared for unit, shared in found.items() if shared}


def _parts(unit: nn.Module) -> list[Any]:
    modules = list(unit.modules())
    objects = {id(x): x for child in modules for x in vars(child).values() if is_own_object(x)}
    return [*modules, *(x for x in objects.values() if not isinstance(x, nn.Module))]


class StageStates:
    """The states of shared modules and objects on each stage, during one dry run.

    Args:
        shared: those which outlive the step. No unit has changed them before the first `enter`.
    """

    def __init__(self, shared: SharedParts) -> None:
        self._shared = shared
        self._lasting = {id(part) for parts in shared.values() for part in parts}
        self._before: dict[int, tuple[Any, Snapshot]] = {}
        """id of a module or an object, and what was there before units ran."""
        self._left: dict[tuple[int, int], Snapshot] = {}
        self._at: dict[int, int] = {}
        """The stage whose units it was last used in."""
        self.of_each: set[int] = set()
        """id of tensors that lay there before, in places where each stage keeps its own."""

    def enter(self, unit: str, stage: int, arguments: Any, alike: ByTensor[Lineage]) -> None:
        """A unit is about to run.

        Args:
            arguments: which it is given; objects of the user's among them are those of this step, and modules without
                parameters are no unit's.
            alike: what units have made that every stage would make alike; also tensors of the module that were
                overwritten by such.
        """
        leaves = tree_leaves(arguments, is_leaf=is_own_object)  # dataclasses are opened else
        modules = [child for x in leaves if isinstance(x, nn.Module) for child in x.modules() if not _learns(child)]
        given = [x for x in leaves if is_own_object(x) and not isinstance(x, nn.Module)]
        self._lasting.update(map(id, modules))
        for owner in {id(x): x for x in (*self._shared.get(unit, ()), *modules, *given)}.values():
            if id(owner) not in self._before:
                self._before[id(owner)] = owner, Snapshot(owner, submodules=False)
            _, before = self._before[id(owner)]
            last = self._at.get(id(owner), stage)
            if last != stage:
                if not _has_tables_alone(owner, before, alike, lasts=id(owner) in self._lasting):
                    continue  # what the unit uses of it is refused
                self._left[id(owner), last] = Snapshot(owner, submodules=False)
                self._left.get((id(owner), stage), before).restore()
                self.of_each.update(before.tensors)
            self._at[id(owner)] = stage


def _learns(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_tables_alone(owner: Any, before: Snapshot, alike: ByTensor[Lineage], lasts: bool) -> bool:
    """Whether tensors were left on it, and they and plain values are all that was. What goes on from its own value
    before (a count of calls) is none: it would have been called less often."""
    new = [value for _, entries in before.changes() for value in tree_leaves(entries)]
    if not all(x in alike if isinstance(x, Tensor) else type(x) in PLAIN for x in new):
        return False
    own = owner.buffers(recurse=False) if isinstance(owner, nn.Module) else ()
    left = [alike[x] for x in (*new, *own) if x in alike]
    replaced = {id(x) for _, x, _ in before.replaced_tensors()}
    return bool(left) and not any(replaced & lineage.origins or (lasts and lineage.of_batch) for lineage in left)
