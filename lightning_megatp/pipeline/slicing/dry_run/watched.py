"""What goes out of a unit through the user's hooks on it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from lightning_megatp.containers import tensors_in
from lightning_megatp.pipeline.slicing.dry_run.inside import Inside
from lightning_megatp.pipeline.slicing.late_hooks import Hook, replaced
from lightning_megatp.pipeline.slicing.operations import NeedsValues
from lightning_megatp.shim.torch import tree_map


def watched(
    hooks: Sequence[Hook], inside: Inside, note: Callable[[Tensor, Any], None]
) -> contextlib.AbstractContextManager[None]:
    """Around a unit.

    Args:
        hooks: on it and its parts.
        inside: its dry run.
        note: is told each tensor that a hook was given, or has made, and the hook's code.
    """
    return replaced(hooks, [functools.partial(_watch, hook, inside, note) for hook in hooks])


def _watch(hook: Hook, inside: Inside, note: Callable[[Tensor, Any], None], module: nn.Module, *given: Any) -> Any:
    """Call a hook with other objects for what the unit was given, which the step knows: one that the hook keeps would
    be there on the unit's stage alone. One that reads values can't be followed, and need not be."""
    before, missed, out = set(inside.made), inside.missed, None
    given = tree_map(lambda x: x.view_as(x) if isinstance(x, Tensor) and inside.is_given(x) else x, given)
    with contextlib.suppress(NeedsValues):
        out = hook.call(module, *given)
    if inside.missed is not missed:
        inside.missed, out = missed, None
    for x in [*tensors_in(given), *(x for key, x in inside.made.items() if key not in before)]:
        note(x, hook.code)
    return out
