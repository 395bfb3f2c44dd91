"""Which hooks of the user's on units a dry run sees something go out through."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from lightning_megatp.containers import tensors_in
from lightning_megatp.pipeline.slicing.dry_run.inside import Inside
from lightning_megatp.pipeline.slicing.late_hooks import Hook, replaced
from lightning_megatp.pipeline.slicing.operations import NeedsValues
from lightning_megatp.shim.torch import tree_map


class Watched:
    """In a dry run: which hook was given a tensor in a unit, or has made it there."""

    def __init__(self) -> None:
        self._codes: dict[int, Any] = {}

    def code(self, x: Tensor) -> Any:
        """The code of the hook that a tensor was given to, or made by; None if there is none."""
        return self._codes.get(id(x))

    def watching(self, hooks: Sequence[Hook], inside: Inside) -> contextlib.AbstractContextManager[None]:
        """Around a unit.

        Args:
            hooks: on it and its parts.
            inside: its dry run.
        """
        return replaced(hooks, [functools.partial(self._watch, hook, inside) for hook in hooks])

    def _watch(self, hook: Hook, inside: Inside, module: nn.Module, *given: Any) -> Any:
        """Call a hook with other objects for what the unit was given, which the step knows: one that the hook keeps
        would be there on the unit's stage alone. One that reads values can't be followed, and need not be."""
        before, missed, out = set(inside.made), inside.missed, None
        given = tree_map(lambda x: x.view_as(x) if isinstance(x, Tensor) and inside.is_given(x) else x, given)
        with contextlib.suppress(NeedsValues):
            out = hook.call(module, *given)
        if inside.missed is not missed:
            inside.missed, out = missed, None
        for x in [*tensors_in(given), *(x for key, x in inside.made.items() if key not in before)]:
            self._codes.setdefault(id(x), hook.code)
        return out
