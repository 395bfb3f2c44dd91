"""What the user's objects keep of a module's parameters, where set-up puts others in their places."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatp.pipeline.slicing.snapshot import CONTAINERS, LARGE, holders_of, refill
from lightning_megatp.shim.lightning import trainer_of


def replace_held(module: nn.Module, new: Mapping[int, Tensor]) -> None:
    """Put other tensors where a LightningModule, its callbacks and the user's objects on them keep some
    (`self.decayed = list(self.net.parameters())`): in attributes, lists, dicts, sets, tuples in these, weak references;
    not in optimizers.

    Args:
        new: id of a tensor -> what takes its place.
    """
    trainer = trainer_of(module)
    owners = [*module.modules(), *(() if trainer is None else trainer.callbacks)]

    def changed(x: Any) -> Any:
        if isinstance(x, Tensor):
            return new.get(id(x), x)
        if isinstance(x, weakref.ref):
            held = x()
            return weakref.ref(new[id(held)]) if id(held) in new else x
        if isinstance(x, tuple) and any(map(operator.is_not, parts := [*map(changed, x)], x)):
            return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)
        return x

    for holder in holders_of(owners, Optimizer):
        if not isinstance(holder, CONTAINERS) or len(holder) > LARGE:
            continue
        before = list(holder.values()) if isinstance(holder, dict) else list(holder)
        after = list(map(changed, before))
        if any(map(operator.is_not, after, before)):
            refill(holder, dict(zip(holder, after, strict=True)) if isinstance(holder, dict) else after)
