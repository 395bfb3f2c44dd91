"""Copies of weights that hooks make after set-up and training steps read: the anchor of a penalty (L2-SP), the means of
elastic weight consolidation.

A hook finds this rank's weights and makes copies of these; a step finds whole ones, of all stages. So after the hook
they are put together, and are from then on as if they had been made before the split.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from lightning_megatp.mesh import AXES, ParallelMesh
from lightning_megatp.module import ParallelModule
from lightning_megatp.shadows.entries import Entry, merge_stages
from lightning_megatp.shadows.finding import Found, Weights, find_shadows
from lightning_megatp.shadows.shadow import Shadow
from lightning_megatp.shim.torch import DisableTorchFunction
from lightning_megatp.snapshots.leftovers import is_own_object
from lightning_megatp.user_hooks import codes_of, stored_in, users_hooks, words_of

if TYPE_CHECKING:
    from lightning_megatp.shadows.shadows import Shadows


class _Slot(NamedTuple):
    path: str
    holder: dict[str, Any]
    key: str

    @property
    def value(self) -> Any:
        return self.holder.get(self.key)


class LateCopies:
    """Copies that hooks make of weights and hang on a LightningModule, or on an object of the user's there.

    Args:
        shadows: gets them.
        parallel: the module, cut into stages and divided.
        mesh: who is where.
    """

    def __init__(self, shadows: Shadows, parallel: ParallelModule, mesh: ParallelMesh) -> None:
        self._shadows, self._parallel, self._mesh = shadows, parallel, mesh
        module = parallel.module
        in_steps = set[str]().union(*map(words_of, codes_of(module, "training_step")))
        self.names: Mapping[str, Sequence[str]] = {
            hook: names for _, hook in users_hooks([module]) if (names := sorted(_set_by(module, hook) & in_steps))
        }
        """Hook -> the attributes that it sets, or fills, and training steps read."""
        self._whole: dict[str, int] = {}
        """Path -> id of what was put together."""

    def after(self, hook: str) -> None:
        """On all ranks, after a hook of the module.

        Communication: if it is one of those, an object all-gather over the world, of names. Where something was made,
        an all-gather over tp for each tensor that is cut, and at pp > 1 an object all-gather of them.
        """
        if hook in self.names:
            with DisableTorchFunction():  # hooks are watched for what they make of weights
                self._look(hook)

    def _look(self, hook: str) -> None:
        slots = {slot.path: slot for slot in self._slots(self.names[hook])}
        new = [path for path, slot in slots.items() if self._whole.get(path) != id(slot.value)]
        found, _ = find_shadows({"": self._parallel.module}, Weights(self._parallel.module)) if new else ([], [])
        own = {x.path: x for x in found if x.path in new}
        names = self._mesh.exchange({path: dict(x.names) for path, x in own.items()}, *AXES)
        by_rank = dict(zip(self._mesh.ranks(*AXES), names, strict=True))
        of_stage = [by_rank[rank] for rank in self._mesh.ranks("dp", "tp")]
        alike = {path for path in of_stage[0] if all(each.get(path) == of_stage[0][path] for each in of_stage)}
        for path in sorted({path for each in names for path in each}):
            self._put_together(slots.get(path), path, own.get(path) if path in alike else None)

    def _put_together(self, slot: _Slot | None, path: str, found: Found | None) -> None:
        parts = [] if found is None else list(Shadow(found, self._parallel, is_part=True).gathered())
        entries = [Entry(key, name, x.cpu()) for key, name, x in parts]
        if self._mesh.size("pp") > 1:
            entries = merge_stages(self._mesh.exchange(entries, "pp"), self._parallel.order, path)
        if slot is None or not entries:
            return
        made = [entry._replace(value=entry.value.to(self._mesh.device)) for entry in entries]
        if isinstance(slot.value, dict):
            whole: Any = {entry.key: entry.value for entry in made}
            names = {entry.key: entry.name for entry in made}
        else:
            whole = [entry.value for entry in made]
            names = dict(enumerate(entry.name for entry in made))
        slot.holder[slot.key] = whole
        self._whole[path] = id(whole)
        if self._parallel.pipeline is not None:
            self._parallel.pipeline.plans.forget()  # steps may go on to use it
        self._shadows.renew(Found(path, slot.holder, slot.key, names))

    def _slots(self, names: Sequence[str]) -> Iterator[_Slot]:
        held = vars(self._parallel.module)
        for name in names:
            value = held.get(name)
            if isinstance(value, (list, dict)):
                yield _Slot(name, held, name)
            elif is_own_object(value) and not isinstance(value, nn.Module):
                inner = vars(value)
                yield from (
                    _Slot(f"{name}.{key}", inner, key) for key, x in inner.items() if isinstance(x, (list, dict))
                )


def _set_by(module: nn.Module, hook: str) -> set[str]:
    """The attributes of a module that a hook sets; or names, where they hold a list, a dict or an object of the
    user's. Without what its class has: methods, properties."""
    codes = list(codes_of(module, hook))
    filled = {name for name, x in vars(module).items() if isinstance(x, (list, dict)) or is_own_object(x)}
    named = set[str]().union(*map(stored_in, codes)) | (filled & set[str]().union(*map(words_of, codes)))
    return {name for name in named if not hasattr(getattr(type(module), name, None), "__get__")} - {"_modules"}
