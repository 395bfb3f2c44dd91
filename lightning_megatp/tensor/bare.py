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
        self.matrix_dims, self.weight_shape = names.dims, names.shape

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
        """A copy of this layer, for a copy of its owner."""
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


def run_as_step(module: nn.Module, owners: Collection[nn.Module], context: TensorContext) -> None:
    """Let code see whole parameters, as in a step, wherever it is called (in a hook that draws samples): that of all
    modules that hold some of these.

    Args:
        module: the whole.
        owners: of weights that are used by layers which are not called.
    """
    used = set(map(id, owners))
    for child in module.modules():
        if not isinstance(child, ParallelLayer) and not used.isdisjoint(map(id, child.modules())):
            code = _CodeOfStep(context)
            child.register_forward_pre_hook(code.enter)
            child.register_forward_hook(code.leave, always_call=True)


class _CodeOfStep:
    """Around the calls of one module."""

    def __init__(self, context: TensorContext) -> None:
        self.context = context
        self._before: list[bool] = []

    def __deepcopy__(self, memo: dict[int, object]) -> _CodeOfStep:
        return _CodeOfStep(self.context)

    def enter(self, module: nn.Module, args: Any) -> None:
        self._before.append(self.context.user_code)
        self.context.user_code = True

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.context.user_code = self._before.pop() if self._before else False
        if not self.context.user_code:
            self.context.seen.clear()  # values may change before the next code that sees them
