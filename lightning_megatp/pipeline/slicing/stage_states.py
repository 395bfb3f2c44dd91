"""What units of several stages share, and leave things on: one `RotaryEmbedding` in all attentions, whose cosines the
first block makes and the others find; a mask in an object that all blocks are given.

On a stage that does not run the first block, its own first block makes them. That comes to the same if they depend
neither on what other stages compute, nor on what is trained, nor on chance; on a module, which outlives the step, nor
on the batch's values. A dry run, which goes through the units of all stages, then shows to each what is there on its
own stage.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from lightning_megatp.pipeline.slicing.leftovers import is_own_object
from lightning_megatp.pipeline.slicing.snapshot import PLAIN, Snapshot
from lightning_megatp.shim.torch import tree_leaves

SharedModules = Mapping[str, Sequence[nn.Module]]
"""Unit -> the modules in it that are in units of other stages, too."""


class Lineage(NamedTuple):
    """Of what every stage would make alike inside of a unit, of shapes, numbers, and tensors that all of them have."""

    origins: frozenset[int] = frozenset()
    """id of the module's tensors among those; none is trained."""
    of_batch: bool = False
    """Whether values of the batch are among them."""

    def with_batch(self) -> Lineage:
        """The same, but of the batch, too."""
        return Lineage(self.origins, True)


class Known(NamedTuple):
    """A tensor that every stage would make alike."""

    tensor: Tensor
    """Kept, so that no other one gets its id."""
    lineage: Lineage


def joined(lineages: Iterable[Lineage]) -> Lineage:
    """Of what is made of several."""
    all_of_them = list(lineages)
    return Lineage(frozenset().union(*(x.origins for x in all_of_them)), any(x.of_batch for x in all_of_them))


def shared_modules(module: nn.Module, stage_of_unit: Mapping[str, int]) -> SharedModules:
    """Of a module, cut into stages by units."""
    inside = {unit: list(module.get_submodule(unit).modules()) for unit in stage_of_unit}
    stages: dict[nn.Module, set[int]] = {}
    for unit, modules in inside.items():
        for child in modules:
            stages.setdefault(child, set()).add(stage_of_unit[unit])
    found = {unit: [child for child in modules if len(stages[child]) > 1] for unit, modules in inside.items()}
    return {unit: shared for unit, shared in found.items() if shared}


class StageStates:
    """The states of shared modules and objects on each stage, during one dry run.

    Args:
        shared: those modules, which no unit has changed before the first `enter`.
    """

    def __init__(self, shared: SharedModules) -> None:
        self._shared = shared
        self._before: dict[int, tuple[Any, Snapshot]] = {}
        """id of a module or an object, and what was there before units ran."""
        self._left: dict[tuple[int, int], Snapshot] = {}
        self._at: dict[int, int] = {}
        """The stage whose units it was last used in."""

    def enter(self, unit: str, stage: int, arguments: Any, known: Mapping[int, Known]) -> None:
        """A unit is about to run.

        Args:
            arguments: which it is given; objects of the user's among them are those of this step.
            known: by id of the tensor, what units have made that every stage would make alike; also tensors of the
                module that were overwritten by such.
        """
        for owner in (*self._shared.get(unit, ()), *filter(is_own_object, tree_leaves(arguments))):
            if isinstance(owner, nn.Module) and owner not in self._shared.get(unit, ()):
                continue  # another's, given as an argument
            _, before = self._before.setdefault(id(owner), (owner, Snapshot(owner, submodules=False)))
            last = self._at.get(id(owner), stage)
            if last != stage:
                if not _has_tables_alone(owner, before, known):
                    continue  # what the unit uses of it is refused
                self._left[id(owner), last] = Snapshot(owner, submodules=False)
                self._left.get((id(owner), stage), before).restore()
            self._at[id(owner)] = stage


def _has_tables_alone(owner: Any, before: Snapshot, known: Mapping[int, Known]) -> bool:
    """Whether tensors were left on it, and they and plain values are all that was. What goes on from its own value
    before (a count of calls) is none: it would have been called less often."""
    new = [value for _, entries in before.changes() for value in tree_leaves(entries)]
    if not all(id(x) in known if isinstance(x, Tensor) else type(x) in PLAIN for x in new):
        return False
    lasts = isinstance(owner, nn.Module)
    own = owner.buffers(recurse=False) if lasts else ()
    left = [known[id(x)].lineage for x in (*new, *own) if id(x) in known]
    replaced = {id(x) for _, x in before.replaced_tensors()}
    return bool(left) and not any(replaced & lineage.origins or (lasts and lineage.of_batch) for lineage in left)
