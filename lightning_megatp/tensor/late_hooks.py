"""Hooks that the user's code puts on modules after they were split, mostly for some steps, to look at activations."""

from __future__ import annotations

from collections import Counter

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_megatp.origins import is_frameworks
from lightning_megatp.tensor.functions import without_arguments


class LateHooks:
    """Notices them, so that each step in which there are some is watched.

    Args:
        module: just split. What hooks it has by now, its plan knows of.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known = self._counted()
        self._last = RemovableHandle.next_id
        self._any = False

    def any(self) -> bool:
        """Whether there are some now. torch numbers all hooks as they are registered, so that nothing is walked over
        while there are no new ones."""
        if self._any or self._last != RemovableHandle.next_id:
            self._last = RemovableHandle.next_id
            self._any = any(count > self._known[module] for module, count in self._counted().items())
        return self._any

    def _counted(self) -> Counter[int]:
        """id(module) -> how many hooks of the user's it has."""
        counts: Counter[int] = Counter()
        for child in self._module.modules():
            held = (child._forward_hooks, child._forward_pre_hooks, child._backward_hooks, child._backward_pre_hooks)
            for hook in (hook for of_kind in held for hook in of_kind.values()):
                bare = without_arguments(hook)
                counts[id(child)] += not (is_frameworks(type(bare)) or is_frameworks(bare))
        return counts
