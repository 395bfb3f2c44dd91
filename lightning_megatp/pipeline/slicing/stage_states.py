"""Modules that units of several stages share, and what these leave on them: the cosines of positions, which the first
block makes and the others find (one `RotaryEmbedding` in all attentions).

On a stage that does not run the first block, its own first block makes them. That comes to the same if they depend
neither on the batch's values, nor on what is trained, nor on chance. A dry run, which goes through the units of all
stages, then shows to each what is there on its own stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from lightning_megatp.pipeline.slicing.snapshot import PLAIN, Snapshot
from lightning_megatp.shim.torch import tree_leaves

SharedModules = Mapping[str, Sequence[nn.Module]]
"""Unit -> the modules in it that are in units of other stages, too."""


@dataclass(frozen=True)
class Constant:
    """A tensor made inside of a unit, which every stage would make alike: of shapes, of numbers, and of tensors of the
    module that are not trained."""

    tensor: Tensor
    origins: frozenset[int]
    """id of those."""


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
    """The states of shared modules on each stage, during one dry run.

    Args:
        shared: those modules, which no unit has changed before the first `enter`.
    """

    def __init__(self, shared: SharedModules) -> None:
        self._shared = shared
        self._before: dict[nn.Module, Snapshot] = {}
        self._left: dict[tuple[nn.Module, int], Snapshot] = {}
        self._at: dict[nn.Module, int] = {}
        """The stage whose units the module was last used in."""

    def enter(self, unit: str, stage: int, constants: Mapping[int, Constant]) -> None:
        """A unit is about to run.

        Args:
            constants: by id of the tensor, also of the module's own that were overwritten by such.
        """
        for child in self._shared.get(unit, ()):
            if child not in self._before:
                self._before[child] = Snapshot(child, submodules=False)
            last = self._at.get(child, stage)
            if last != stage:
                if not self._has_tables_alone(child, constants):
                    continue  # what the unit uses of it is refused
                self._left[child, last] = Snapshot(child, submodules=False)
                self._left.get((child, stage), self._before[child]).restore()
            self._at[child] = stage

    def _has_tables_alone(self, child: nn.Module, constants: Mapping[int, Constant]) -> bool:
        """Whether tensors were left on it, and they and plain values are all that was. What goes on from its own value
        before (a count of calls) is none: it would have been called less often."""
        before = self._before[child]
        new = [value for _, entries in before.changes() for value in tree_leaves(entries)]
        if not all(id(x) in constants if isinstance(x, Tensor) else type(x) in PLAIN for x in new):
            return False
        left = [constants[id(x)] for x in (*new, *child.buffers(recurse=False)) if id(x) in constants]
        replaced = {id(x) for _, x in before.replaced_tensors()}
        return bool(left) and not any(replaced & constant.origins for constant in left)
