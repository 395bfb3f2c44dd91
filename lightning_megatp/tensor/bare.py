"""Linear layers that are no modules: a module's own parameters that it gives to `F.linear`, and code that does so."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_megatp.plan.layer import BareLinear
from lightning_megatp.tensor.context import TensorContext
from lightning_megatp.tensor.layers import ParallelLayer
from lightning_megatp.tensor.outside import LayerParameters


class BareLayer(ParallelLayer):
    """What becomes a parallel layer of parameters that another module holds, and goes on holding: in its state dict,
    under the names it has.

    Args:
        owner: the module; it lives longer.
        names: of its parameters.
    """

    def __init__(self, owner: nn.Module, names: BareLinear) -> None:
        super().__init__()
        self.__dict__["_owner"] = weakref.ref(owner)
        self.leaves = {"weight": names.weight, "bias": names.bias}
        self.transposed = names.transposed

    @property
    def owner(self) -> nn.Module:
        """The module."""
        owner: nn.Module | None = self.__dict__["_owner"]()
        assert owner is not None
        return owner

    @property
    def training(self) -> bool:
        """As its owner."""
        return self.owner.training

    @training.setter
    def training(self, mode: bool) -> None: ...

    def of(self, owner: nn.Module) -> BareLayer:
        """The same of a copy of its owner."""
        twin = copy.copy(self)
        twin.__dict__["_owner"] = weakref.ref(owner)
        return twin

    def _held(self, name: str) -> Tensor | None:
        leaf = self.leaves[name]
        return None if leaf is None else dict.get(self.owner.__dict__["_parameters"], leaf)

    def _names(self) -> Collection[str]:
        return self.leaves.keys()


def parallel_layers(module: nn.Module) -> Iterator[ParallelLayer]:
    """All in a module, with those that are no modules."""
    for child in module.modules():
        if isinstance(child, ParallelLayer):
            yield child
        held = child.__dict__["_parameters"]
        if isinstance(held, LayerParameters):
            yield from held.layers.values()


def bare_layer(owner: nn.Module, names: BareLinear, context: TensorContext) -> BareLayer:
    """What is to become a parallel layer, and does its work where code gives the weight to `F.linear`."""
    held = owner.__dict__["_parameters"]
    if not isinstance(held, LayerParameters):
        held = owner.__dict__["_parameters"] = LayerParameters(held, context, owner)
    layer = held.layers[names.weight] = BareLayer(owner, names)
    return layer


def runs_as_step(module: nn.Module, context: TensorContext) -> None:
    """Let a module's code see whole parameters, as in a step, wherever it is called: in a hook that draws samples."""
    before: list[bool] = []

    def enter(module: nn.Module, args: Any) -> None:
        before.append(context.user_code)
        context.user_code = True

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        context.user_code = before.pop()

    module.register_forward_pre_hook(enter)
    module.register_forward_hook(leave, always_call=True)
