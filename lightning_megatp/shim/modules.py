"""Private names of torch's modules. Seen in 2.11, 2.13, 2.14 and 2.15."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import _WeightNorm
from torch.nn.utils.weight_norm import WeightNorm


def modules_in(module: nn.Module) -> list[nn.Module]:
    """What `module.modules()` gives, in its order, a few times faster: that asks a generator per level for each of
    them, to name it. `_modules` are the children (2.11-2.13)."""
    found: dict[nn.Module, None] = {}
    waiting = [module]
    while waiting:
        child = waiting.pop()
        if child not in found:
            found[child] = None
            waiting += [x for x in reversed(child._modules.values()) if x is not None]
    return list(found)


def first_before_state_dict(module: nn.Module, hook: Any) -> None:
    """Register a hook that comes before all others of its kind, also where the module is pickled: hooks are kept in the
    order in which they are called (`_state_dict_pre_hooks`, an OrderedDict, 2.11-2.13); FSDP2's can't be pickled."""
    handle = module.register_state_dict_pre_hook(hook)
    hooks: Any = module._state_dict_pre_hooks
    hooks.move_to_end(handle.id, last=False)


@contextlib.contextmanager
def weights_of_recurrent_layers_renewed(module: nn.Module) -> Iterator[None]:
    """Around a change of what a module's parameters are. Recurrent layers keep lists of theirs, one of weak references,
    which `torch.utils.swap_tensors` refuses; no public name makes these lists anew (2.11-2.13)."""
    layers = [child for child in module.modules() if isinstance(child, nn.RNNBase)]
    for layer in layers:
        layer._flat_weights = layer._flat_weight_refs = []
    try:
        yield
    finally:
        for layer in layers:
            layer._init_flat_weights()


@contextlib.contextmanager
def modules_convert_without_data() -> Iterator[None]:
    """Let `module.to(...)`, `.float()` and the like replace the parameters and buffers that they convert to another
    dtype or device, and leave others as they are. Of fakes, `nn.Module._apply` would swap the contents instead, which
    fails where something has a weak reference to them (2.11-2.13)."""

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for child in self.modules() if recurse else [self]:
            kinds: tuple[dict[str, Any], ...] = (child._parameters, child._buffers)
            for held in kinds:
                for name in list(held):
                    held[name] = None if held[name] is None else _converted(held[name], fn)
        return self

    with _conversions_by(apply):
        yield


@contextlib.contextmanager
def conversions_around(context: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Let `module.to(...)`, `.float()` and the like run in a context, and leave a module as it is if all of it has the
    dtype and the device that they ask for: the contents of fakes can't be swapped, see above."""
    original = nn.Module._apply

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        with context():
            held = [*self.parameters(recurse), *self.buffers(recurse)]
            return self if all(_converted(x, fn) is x for x in held) else original(self, fn, recurse)

    with _conversions_by(apply):
        yield


class Convertible(nn.Module):
    """A module that `module.to(...)`, `.float()` and the like (`nn.Module._apply`, 2.11-2.15) leave as it is, while it
    may not be converted, if all of it has the dtype and the device that they ask for."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        with self.about_to_convert() as held:
            if held is not None and all(_converted(x, fn) is x for x in held):
                return self
        return super()._apply(fn, recurse)

    def about_to_convert(self) -> contextlib.AbstractContextManager[list[Tensor] | None]:
        """Around a look at it: its parameters and buffers, or None at any other time."""
        return contextlib.nullcontext()


@contextlib.contextmanager
def _conversions_by(apply: Callable[..., nn.Module]) -> Iterator[None]:
    original = nn.Module._apply
    nn.Module._apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module._apply = original  # type: ignore[method-assign]


def _converted(x: Tensor, fn: Callable[[Tensor], Tensor]) -> Tensor:
    with torch.no_grad():
        found = fn(x)
    if (found.dtype, found.device) == (x.dtype, x.device):
        return x
    return nn.Parameter(found, x.requires_grad) if isinstance(x, nn.Parameter) else found


_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


def runs_own_convolution(module: nn.Module) -> bool:
    """Whether a module's forward is that of torch's convolution. The work is in `_conv_forward` (`_output_padding` for
    transposed ones), which a subclass may replace as well as `forward`: 2.11 and 2.13."""
    kind = next((kind for kind in _CONVOLUTIONS if isinstance(module, kind)), None)
    methods = ("forward", "__call__", "__getattr__", "_conv_forward", "_output_padding")
    return kind is not None and all(getattr(type(module), m, None) is getattr(kind, m, None) for m in methods)


class WeightNormed(NamedTuple):
    """How torch computes a module's weight g v / |v|."""

    norm: Any
    """What does: a parametrization that takes g and v, or a hook before the forward."""
    length: str
    """Name of g, behind the module's."""
    direction: str
    """Name of v, behind the module's."""
    dim: int
    """The one that |v| is not taken over, counted from the first; -1 for none."""

    @property
    def is_hook(self) -> bool:
        """Whether the weight is an attribute, computed before each forward."""
        return isinstance(self.norm, WeightNorm)


def weight_norm_of(module: nn.Module) -> WeightNormed | None:
    """What `torch.nn.utils.parametrizations.weight_norm`, or the older `torch.nn.utils.weight_norm`, made of a
    module's weight, if nothing else computes it. The parametrization's class has no public name, nor has a module's
    list of hooks (2.11 and 2.13)."""
    held = getattr(module, "parametrizations", {})
    found = list(held["weight"]) if list(held) == ["weight"] else []
    if len(found) == 1 and type(found[0]) is _WeightNorm:
        return _weight_normed(
            module, found[0], "parametrizations.weight.original0", "parametrizations.weight.original1"
        )
    hooks = [hook for hook in module._forward_pre_hooks.values() if isinstance(hook, WeightNorm)]
    if not held and len(hooks) == 1 and hooks[0].name == "weight":
        return _weight_normed(module, hooks[0], "weight_g", "weight_v")
    return None


def _weight_normed(module: nn.Module, norm: Any, length: str, direction: str) -> WeightNormed:
    """-1 is no dim to torch, and -2 the last but one."""
    dim = int(norm.dim)
    return WeightNormed(norm, length, direction, dim if dim >= -1 else dim + module.get_parameter(direction).dim())


def compute_weight(g: torch.Tensor, v: torch.Tensor, dim: int) -> torch.Tensor:
    """g v / |v|, as both of torch's weight norms compute it; the operation has no public name (2.11 and 2.13)."""
    return torch._weight_norm(v, g, dim)
