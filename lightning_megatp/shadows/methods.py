"""The strategy's part in it: when they are looked for, and whose hooks find which form of them."""

from __future__ import annotations

from typing import Any

from lightning_megatp.mesh import AXES
from lightning_megatp.module import ParallelModule
from lightning_megatp.parts import Parts
from lightning_megatp.pipeline.detour import Detour
from lightning_megatp.shadows.finding import Found, find_shadows
from lightning_megatp.shadows.shadows import Shadows, agree, owners_of, synchronize, warn_unclear


class ShadowMethods(Parts):
    """Tensors that a user keeps beside the weights."""

    _detours: list[Detour]

    def _find_shadows(self) -> list[Found]:
        """Of a module that is about to be divided. None of one that is already: then they are known.

        Communication: two object all-gathers over the world, and see `synchronize`.

        Warns:
            UserWarning: some can't be told apart, and hooks will find other lists of parameters than they follow.
        """
        module: Any = self.lightning_module
        if (self.tp * self.pp == 1 and self.zero.level == 0) or self.parallelism.split_form(module) is not None:
            return []
        found, unclear = find_shadows(owners_of(module.trainer), module)
        if self.pp > 1:
            warn_unclear(unclear, "Hooks of a pipeline stage find its own parameters only, and not as many as these")
        found = agree(found, self._mesh(), *AXES)
        synchronize(found, self._mesh())
        return found

    def _show_shadows(self, trainer: Any, parallel: ParallelModule, found: list[Found]) -> None:
        """From now on."""
        if self._undivided:
            return
        if parallel.shadows is None:
            parallel.shadows = Shadows(found, parallel, self._mesh())
        self._detours += parallel.shadows.around_hooks(trainer)
