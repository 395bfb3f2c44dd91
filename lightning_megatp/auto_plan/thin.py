"""Thin copies of blocks: float64, unit-scale random values, and linear layers whose weights are of low rank.

What a plan may split is a matter of which features meet, not of the weights' values. A layer y = U (V^T x) + b with a
few random columns in U and V lets every output depend on every input, as a dense one does, at a vanishing cost: a block
of a 7-billion-parameter model is probed in milliseconds, and needs none of its weights.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatp.auto_plan.blocks import Call, is_linear
from lightning_megatp.auto_plan.copies import copied_object, uncopied
from lightning_megatp.plan.layer import TRANSPOSED, BareLinear, MatrixDims
from lightning_megatp.shim.torch import DisableTorchFunction, tree_map
from lightning_megatp.shim.transformers import is_conv1d
from lightning_megatp.tensor.functions import operation_name
from lightning_megatp.tensor.shards import (
    NO_VALUES,
    LayerWeight,
    WeightMatrix,
    changes_nothing,
    is_linear_of_layer,
    linear_of_layer,
)

RANK = 6
"""Columns of U and V."""

_MOST_COPIED = 2**24
"""Elements of a module that a block is given, for it to be copied with each probe."""


class ThinLinear(nn.Linear):
    """y = U (V^T x) + b. `weight` is there for `F.linear` and for who asks for its shape, and nan for who computes
    anything else with it.

    Parameters: `left` U (out, r), `right` V (in, r), `bias` (out) or None.
    """

    left: Tensor
    right: Tensor
    split: Any = None
    """What a simulated rank does around it; see `simulate`."""
    record: list[tuple[Tensor, Tensor]] | None = None
    """Inputs and outputs of its calls, while a probe listens."""

    cut: bool = False
    """Whether its output is a leaf, while a probe looks at what lies between layers."""
    touched: bool = False
    """Whether something else than `F.linear` used the weight."""
    was_read: bool = False
    """Whether anything asked for the weight."""
    is_function: bool = False
    """Whether `F.linear` was called with its weight, instead of the layer."""
    has_other_bias: bool = False
    """Whether its bias is used otherwise than in its calls: these were given none, or one that is made of it."""
    matrix_dims: MatrixDims
    """Of the weight of the layer that it is made of."""
    shape: tuple[int, ...]
    """The weight's."""
    units: tuple[int, int]
    """Outputs, and inputs, that stay together, where the weight has more than two dims."""

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        self.was_read = True
        return _ThinWeight.of(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.bias)

    def run(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Its call, with a bias that may be another."""
        y = self.compute(x, bias) if self.split is None else self.split(self, x, bias)
        if self.cut:
            with DisableTorchFunction():  # no mode shall take it for something that the block does
                y = y.detach().requires_grad_()
        if self.record is not None:
            self.record.append((x, y))
        return y.clone() if self.cut else y  # a leaf can't be changed in place

    def compute(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The layer's own work, on the rows of U and V that are here."""
        y = (x @ self.right) @ self.left.T
        return y if bias is None else y + bias

    @torch.no_grad()
    def turn(self, signs: Tensor) -> None:
        """Let it compute signs * y; signs (out)."""
        self.left.mul_(signs[:, None])
        if self.bias is not None:
            self.bias.mul_(signs)


class _HiddenLinear(ThinLinear):
    """A thin layer made of a module's own parameters. Code that calls all modules in there would call one that the
    module has not."""

    def forward(self, x: Tensor) -> Tensor:
        raise TypeError("a weight that belongs to no layer was called as one")


class _ThinWeight(LayerWeight):
    """(out, in), or as its layer has it; nan."""

    layer: ThinLinear

    @staticmethod
    def of(layer: ThinLinear) -> _ThinWeight:
        nan = torch.full((), math.nan, dtype=torch.float64)
        with DisableTorchFunction():
            weight = nan.expand(layer.shape).as_subclass(_ThinWeight)
        weight.layer, weight.matrix_dims = layer, layer.matrix_dims
        return weight

    def linear(self, x: Any, bias: Any = None) -> Any:
        layer = self.layer
        if isinstance(x, LayerWeight | WeightMatrix):
            return F.linear(x, self.matrix_dims.matrix(self.whole("linear")), bias)
        layer.is_function = True
        layer.has_other_bias |= layer.bias is not None and bias is not layer.bias
        return layer.run(x, bias)

    @property
    def plain(self) -> Tensor:
        """This weight as a plain tensor."""
        with DisableTorchFunction():
            return self.as_subclass(Tensor)

    def whole(self, operation: str) -> Tensor:
        self.layer.touched = True
        return self.plain

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, operation_name(func)
        first = args[0] if args else None
        if is_linear_of_layer(name, args, kwargs):
            return linear_of_layer(name, args, kwargs)
        if isinstance(first, _ThinWeight):
            matrix = WeightMatrix.seen(first, func, name, *args[1:], **kwargs)
            if matrix is not None:
                return matrix
        if isinstance(first, _ThinWeight) and changes_nothing(func, name, first.plain, *args[1:], **kwargs):
            return first
        if isinstance(first, _ThinWeight) and name in NO_VALUES:
            with DisableTorchFunction():
                return func(*args, **kwargs)
        args, kwargs = tree_map(lambda x: x.whole(name) if isinstance(x, _ThinWeight) else x, (args, kwargs))
        return func(*args, **kwargs)


def name_in_copy(weight: str) -> str:
    """The name of a thin layer in the place of a weight, whose own name its owner's code goes on using."""
    return f"{weight}()"


def thin_copy(
    block: nn.Module, seed: int, dense: Collection[str] = (), bare: Mapping[str, BareLinear] | None = None
) -> nn.Module:
    """A thin copy of a block, on the CPU, in training mode.

    Args:
        dense: linear layers that keep a weight, since the block uses it otherwise than by calling them.
        bare: linear layers that are no modules, by the names of their weights. In the copy they are, under
            `name_in_copy`.

    Raises:
        Exception: whatever deepcopy raises for a block that can't be copied.
    """
    generator = torch.Generator().manual_seed(seed)
    linears = {name: child for name, child in block.named_modules() if is_linear(child) and name not in dense}
    memo: dict[int, Any] = {
        id(child.weight): nn.Parameter(torch.empty(0), requires_grad=False) for child in linears.values()
    }
    memo |= uncopied(block)
    bare = {name: leaves for name, leaves in (bare or {}).items() if name_in_copy(name) not in dense}
    memo |= {id(weight): nn.Parameter(weight.new_empty(0)) for weight in map(block.get_parameter, bare)}
    twin = copy.deepcopy(block, memo)
    for name, child in linears.items():
        layer = twin.get_submodule(name)
        layer.__class__ = ThinLinear
        for own in ("weight", "bias"):
            layer._parameters.pop(own, None)
        dims = TRANSPOSED if is_conv1d(child) else MatrixDims()
        _make_thin(layer, child.get_parameter("weight"), dims, child.bias is not None, generator)
    for name, leaves in bare.items():
        _hide(twin.get_submodule(name.rpartition(".")[0]), leaves, block.get_parameter(name), generator)
    for child in twin.modules():
        for key, parameter in child._parameters.items():
            made = isinstance(child, ThinLinear) and key in _OWN
            if parameter is not None and not made:
                child._parameters[key] = _random_parameter(parameter, generator)
        for key, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[key] = concrete(buffer.detach(), generator)
    twin.train()
    return twin


_OWN = "left", "right", "bias"
"""The parameters of a thin layer; it may have others, which users gave to the layer that it is made of."""
LARGE = 2**20
"""Elements of parameters whose values copies share."""


def block_copy(block: nn.Module, train: bool = True) -> nn.Module:
    """A deep copy, in a mode. (`train` of a class of the user's may forget to return it.)

    Of a thin block much of it are the empty dictionaries of hooks that every module has. These are made anew, which is
    faster than copying them: 0.42 ms for a Llama layer, not 0.71. The values of large parameters (those of no linear
    layer) are shared: a block may be copied for each simulated rank.
    """
    held = [x for child in block.modules() for x in vars(child).values()]
    memo: dict[int, Any] = {id(x): type(x)() for x in held if type(x) in (dict, OrderedDict) and not x}
    large = [p for p in block.parameters() if p.numel() >= LARGE and type(p) is nn.Parameter]
    memo |= {id(p): nn.Parameter(p.detach(), requires_grad=p.requires_grad) for p in large}
    copied = copy.deepcopy(block, memo)
    copied.train(train)
    return copied


def concrete_call(call: Call, seed: int, noise: float = 0.0) -> Call:
    """A call's arguments on the CPU, floating ones in float64 with some noise, and fresh leaves.

    Those that needed a gradient do, and so does the first floating tensor: the hidden states, if embeddings are frozen.
    Tensors on meta become random ones of their shape. Values that mean minus infinity stay as they are, and so do zeros
    and ones that may be a mask: multiplied by minus infinity, noise in them would decide everything. Of small modules,
    whose tensors the block may use (a grid of positions), thin copies are given.
    """
    generator = torch.Generator().manual_seed(seed)

    first = True

    def make(x: Any) -> Any:
        nonlocal first
        if isinstance(x, nn.Module):
            return _thin_argument(x, seed)
        if not isinstance(x, Tensor):
            return copied_object(x, lambda held: leaf(held, held.requires_grad))
        needs, floating = x.requires_grad or (first and x.is_floating_point()), x.is_floating_point()
        first = first and not floating
        return leaf(x, needs)

    def leaf(x: Tensor, needs: bool) -> Tensor:
        x = concrete(x.detach(), generator)
        if not x.is_floating_point():
            return x
        if noise and x.numel() and bool((x > -1e4).all()) and bool(x.isfinite().all()) and not _is_mask(x):
            x = x + noise * torch.randn(x.shape, generator=generator, dtype=x.dtype)
        return x.clone().requires_grad_(needs)

    return Call(*tree_map(make, (call.args, call.kwargs)))


def _thin_argument(module: nn.Module, seed: int) -> nn.Module:
    """A thin copy of a module that a block is given, if it is small and can be copied, and isn't the whole model."""
    held = sum(x.numel() for x in (*module.parameters(), *module.buffers()))
    if held > _MOST_COPIED or hasattr(module, "training_step"):
        return module
    try:
        return thin_copy(module, seed)
    except Exception:  # a module may be anything
        return module


def _is_mask(x: Tensor) -> bool:
    return bool(((x == 0) | (x == 1)).all()) and bool(x.any())


def concrete(x: Tensor, generator: torch.Generator) -> Tensor:
    """A tensor on the CPU, in float64 if it is floating; random if it had no values."""
    wide = torch.float64 if x.is_floating_point() else x.dtype
    if not x.is_meta:
        return x.to("cpu", wide)
    if x.is_floating_point() or x.is_complex():
        return torch.randn(x.shape, generator=generator, dtype=wide)
    if x.dtype == torch.bool:
        return torch.ones(x.shape, dtype=x.dtype)
    return (
        torch.arange(x.shape[-1], dtype=x.dtype).expand(x.shape).contiguous()
        if x.dim()
        else x.new_zeros((), device="cpu")
    )


def _hide(owner: nn.Module, leaves: BareLinear, weight: Tensor, generator: torch.Generator) -> None:
    """Put a thin layer in the place of a module's own parameters, which the module's code still finds there."""
    layer = _HiddenLinear.__new__(_HiddenLinear)
    nn.Module.__init__(layer)
    _make_thin(layer, weight, leaves.dims, leaves.bias is not None, generator)
    name = name_in_copy(leaves.weight)
    shown = {leaves.weight: property(lambda self: self._modules[name].weight)}
    if leaves.bias is not None:
        shown[leaves.bias] = property(lambda self: self._modules[name].bias)
    for leaf in shown:
        del owner._parameters[leaf]
    owner._modules[name] = layer
    kind = type(owner)
    owner.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **shown})


def _make_thin(twin: Any, weight: Tensor, dims: MatrixDims, has_bias: bool, generator: torch.Generator) -> None:
    outputs, inputs = dims.sizes(weight.shape)
    twin.in_features, twin.out_features = inputs, outputs
    twin.matrix_dims, twin.shape, twin.units = dims, tuple(weight.shape), dims.units(weight.shape)
    left = torch.randn(outputs, RANK, generator=generator, dtype=torch.float64) * 1.5 / math.sqrt(RANK)
    right = torch.randn(inputs, RANK, generator=generator, dtype=torch.float64) / math.sqrt(inputs)
    bias = torch.randn(outputs, generator=generator, dtype=torch.float64) * 0.2 if has_bias else None
    for name, value in (("left", left), ("right", right), ("bias", bias)):
        twin.register_parameter(name, None if value is None else nn.Parameter(value))


def _random_parameter(parameter: Tensor, generator: torch.Generator) -> nn.Parameter:
    if not parameter.is_floating_point():
        return nn.Parameter(concrete(parameter.detach(), generator), requires_grad=False)
    value = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    if parameter.dim() >= 2:
        value *= 1.5 / math.sqrt(parameter.shape[-1])
    else:
        value = value * 0.2 + (1.0 if parameter.is_meta else parameter.detach().to("cpu", torch.float64))
    return nn.Parameter(value)
