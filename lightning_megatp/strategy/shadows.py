"""The strategy's part in it: when they are looked for, and whose hooks find which form of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from lightning_megatp.detour import Detour
from lightning_megatp.mesh import AXES
from lightning_megatp.module import ParallelModule
from lightning_megatp.origins import package_of
from lightning_megatp.shadows.finding import Found, Weights, find_shadows
from lightning_megatp.shadows.shadows import Shadows, agree, owners_of, synchronize, warn_unclear
from lightning_megatp.snapshots.leftovers import is_own_object
from lightning_megatp.steps import StepKind
from lightning_megatp.strategy.state import StrategyState
from lightning_megatp.user_hooks import codes_of, users_hooks, words_of


class ShadowMethods(StrategyState):
    """Tensors that a user keeps beside the weights."""

    _detours: list[Detour]

    def _find_shadows(self) -> tuple[list[Found], Weights | None]:
        """Before the module is divided; or of a divided one again, to which a checkpoint may have given others.

        Returns:
            What was found, and the weights of the whole module, if it is.

        Communication: two object all-gathers over the world, and see `synchronize`.

        Warns:
            UserWarning: some can't be told apart, and hooks will find other lists of parameters than they follow.
        """
        module: Any = self.lightning_module
        if self.tp * self.pp == 1 and self.zero.level == 0:
            return [], None
        split: ParallelModule | None = self.parallelism.split_form(module)
        shadows = None if split is None else split.shadows
        if split is not None and shadows is None:
            return [], None
        weights = Weights(module) if shadows is None else shadows.whole
        found, unclear = find_shadows(owners_of(module.trainer), weights)
        if self.pp > 1 and split is None:
            warn_unclear(unclear, "Hooks of a pipeline stage find its own parameters only, and not as many as these")
        found = agree(found, self._mesh(), *AXES)
        synchronize(found, self._mesh())
        return found, weights if split is not None else weights.without_values()

    def _show_shadows(self, trainer: Any, parallel: ParallelModule, found: list[Found], whole: Weights | None) -> None:
        """From now on."""
        if self._undivided or whole is None:
            return
        if parallel.shadows is None:
            parallel.shadows = Shadows(whole, parallel, self._mesh())
        parallel.shadows.add(found)
        hooks = users_hooks((trainer.lightning_module, *trainer.callbacks))
        self._detours += parallel.shadows.around(trainer, hooks)

    def _averages_in(self, kind: StepKind) -> list[str]:
        """Attributes of the module that hold a tensor for each weight, and of which its steps of a kind know while its
        training steps don't: averages, which these steps put in the weights' place.

        Args:
            kind: one of evaluation.

        Communication: an object all-gather over the world, if there are attributes that might.
        """
        module = self._module()
        words, trained = (
            set[str]().union(*map(words_of, codes_of(module, method)))
            for method in (kind.method, StepKind.TRAIN.method)
        )
        held = {**vars(module), **module._modules}
        named = {name: held[name] for name in sorted((words - trained) & held.keys())}
        named = {name: x for name, x in named.items() if isinstance(x, (list, dict, nn.Module)) or is_own_object(x)}
        named = {name: x for name, x in named.items() if package_of(type(x)) != "torchmetrics"}  # most have one
        if not named:
            return []
        late, _ = find_shadows({"": SimpleNamespace(**named)}, Weights(module))
        shadows = self._parallel().shadows
        paths = [x.path for x in late] + ([] if shadows is None else shadows.paths)
        own = sorted(named.keys() & {path.partition(".")[0] for path in paths})
        return sorted(set[str]().union(*self._mesh().exchange(own, *AXES)))
