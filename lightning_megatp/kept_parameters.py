"""What the user's objects keep of a module's parameters, where set-up puts others in their places."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatp.shim.lightning import trainer_of
from lightning_megatp.snapshots.snapshot import CONTAINERS, LARGE, holders_of, refill


def kept_parameters(module: nn.Module) -> dict[int, str]:
    """The parameters that a LightningModule, its callbacks and the user's objects on them keep beside the modules
    (`self.decayed = list(self.net.parameters())`): in attributes, lists, dicts, sets, tuples in these, weak references;
    not in optimizers.

    Returns:
        id of the parameter, or of the reference, -> name. They live as long as they are kept.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    found: dict[int, str] = {}

    def note(x: Any) -> None:
        if isinstance(x, tuple):
            for part in x:
                note(part)
        held = x() if isinstance(x, weakref.ref) else x
        if id(held) in names:
            found[id(x)] = names[id(held)]

    for holder in _holders(module):
        for x in holder.values() if isinstance(holder, dict) else holder:
            note(x)
    return found


def replace_kept(module: nn.Module, new: Mapping[int, Tensor]) -> None:
    """Put other tensors in their places.

    Args:
        new: id of what is kept, as `kept_parameters` gives it, -> what takes its place.
    """

    def changed(x: Any) -> Any:
        if isinstance(x, tuple) and any(map(operator.is_not, parts := [*map(changed, x)], x)):
            return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
        found = new.get(id(x))
        if found is None:
            return x
        return weakref.ref(found) if isinstance(x, weakref.ref) else found

    for holder in _holders(module) if new else ():
        before = list(holder.values()) if isinstance(holder, dict) else list(holder)
        after = list(map(changed, before))
        if any(map(operator.is_not, after, before)):
            refill(holder, dict(zip(holder, after, strict=True)) if isinstance(holder, dict) else after)


def _holders(module: nn.Module) -> Iterator[Any]:
    trainer, modules = trainer_of(module), list(module.modules())
    registered = {id(child._parameters) for child in modules}
    for holder in holders_of([*modules, *(() if trainer is None else trainer.callbacks)], Optimizer):
        if isinstance(holder, CONTAINERS) and len(holder) <= LARGE and id(holder) not in registered:
            yield holder
