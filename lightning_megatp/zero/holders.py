"""What stands around the user's modules for FSDP2: a holder per unit, and one around the step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from lightning_megatp.parts.rows import DividedParameter
from lightning_megatp.shim.autograd import forward_mode_is_active, tensor_hooks
from lightning_megatp.shim.fsdp import (
    accumulated_gradients,
    end_backward,
    forget_accumulated,
    look_at_shards,
    reduce_accumulated,
)
from lightning_megatp.shim.torch import is_view, tree_map
from lightning_megatp.tensor.context import TensorContext
from lightning_megatp.tensor.features.shard import FeatureShard
from lightning_megatp.tensor.sequence import SequenceShard

REDUCES_UNUSED = hasattr(FSDPModule, "set_reduce_scatter_unused_params")
"""Whether FSDP2 can do that: in torch 2.13, not in 2.11, where ranks would add up gradients of different parameters."""


class Group(nn.Module):
    """What FSDP2 makes a group of, if it has parameters: gathered and let go together."""

    def stay(self) -> None:
        """Gradients that the step itself asks for (`autograd.grad`) don't end the group's use, nor are they reduced."""
        if isinstance(self, FSDPModule):
            self.set_reshard_after_backward(False, recurse=False)
            self.set_requires_gradient_sync(False, recurse=False)

    def prepare(self, reduces: bool, frees: bool) -> None:
        """The next backward reduces its gradients, or adds to them; and lets go of its parameters, or not."""
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(reduces, recurse=False)
            self.set_reshard_after_backward(frees, recurse=False)

    def skip(self) -> None:
        """The next backward is not about it."""
        if isinstance(self, FSDPModule):
            self.set_requires_gradient_sync(False, recurse=False)

    @torch.no_grad()
    def accumulated(self) -> list[Tensor]:
        """The gradients that wait for a later backward to be reduced, all of one dtype."""
        return accumulated_gradients(self) if isinstance(self, FSDPModule) else []

    @torch.no_grad()
    def reduce(self, factor: Tensor | None, frees: bool) -> None:
        """Reduce what backwards have added up, times a factor if there is one, and let go of the parameters, or not."""
        if isinstance(self, FSDPModule):
            gradients = self.accumulated()
            if gradients and factor is not None:
                wide = gradients[0].dtype.itemsize > 2  # one kernel for all; of 16 bits it would be another number
                torch._foreach_mul_(gradients, factor.to(gradients[0]) if wide else factor)
            self.prepare(True, frees)
            reduce_accumulated(self)
            self.skip()

    def reduce_unused(self) -> None:
        """Ranks that have used other parameters of it still reduce the same ones."""
        if isinstance(self, FSDPModule) and REDUCES_UNUSED:
            self.set_reduce_scatter_unused_params(True)

    def forget(self) -> None:
        """The gradients that wait for a later backward to be reduced."""
        if isinstance(self, FSDPModule):
            forget_accumulated(self)

    def see_shards(self, context: TensorContext) -> None:
        """Split layers show FSDP2 what they hold, also while a step loads a state dict, which sees whole parameters."""
        if isinstance(self, FSDPModule):
            look_at_shards(self, functools.partial(context.running, user_code=False))

    def gather(self) -> None:
        if isinstance(self, FSDPModule):
            self.unshard()

    def free(self) -> None:
        if isinstance(self, FSDPModule):
            self.reshard()


class Holder(Group):
    """Stands around one unit of the user's.

    Shards of sequences and features pass FSDP2's hooks as plain tensors: those put autograd functions around them,
    which tensor subclasses don't survive.
    """

    def __init__(self, unit: nn.Module) -> None:
        super().__init__()
        self.unit = unit
        self.on = True
        self.divided: list[DividedParameter] = []
        """The unit's parameters."""
        self.called = False
        """With gradients, since somebody has set this to False."""
        self._inside = False
        self._replaced: list[tuple[dict[str, Any], str, Tensor]] = []
        """What the unit is called with in the place of its parameters; see `DividedParameter.replaced`."""

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method of the unit, its parameters gathered meanwhile, but for those that have others in their places,
        which FSDP2 would put them back into."""
        if self._inside or not self.on:
            return function(*args, **kwargs)
        own = [parameter for parameter in self.divided if not parameter.replaced]
        if self.divided and not own:
            return function(*args, **kwargs)
        for parameter in own:
            parameter.agree_on_trained()
        if len(own) == len(self.divided):
            return self._run(function, args, kwargs)
        self._replaced = [place for parameter in self.divided for place in parameter.replaced]
        gathered = own[0].is_gathered
        try:
            return self._run(function, args, kwargs)
        finally:
            self.gather() if gathered else self.free()  # for then the module's own are put back as they were
            self._replace()
            self._replaced = []

    def _run(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bare, wraps = _bare((args, kwargs))
        tangents = forward_mode_is_active()  # with graphs of their own, of which FSDP2's hooks don't know
        if tangents and isinstance(self, FSDPModule):
            self.set_reshard_after_forward(False, recurse=False)
        # Containers FSDP2 would take apart, and what the unit does to them would be lost.
        if tangents or _in_containers((args, kwargs)):
            result = self(function, _Boxed(args, kwargs), None)
        else:
            result = self(function, bare, wraps)
        return _dressed(*result)

    def forward(self, function: Callable[..., Any], bare: Any, wraps: Wraps | None) -> Any:
        args, kwargs = (bare.args, bare.kwargs) if wraps is None else _dressed(bare, wraps)
        self._replace()
        self._inside = True
        self.called = self.called or torch.is_grad_enabled()
        try:
            outputs, wraps = _bare(function(*args, **kwargs))
            return tree_map(_hookable, outputs), wraps
        finally:
            self._inside = False

    def _replace(self) -> None:
        for held, leaf, value in self._replaced:
            held[leaf] = value


class Root(Group):
    """Stands around a step. Holds what no unit does."""

    def __init__(self, module: nn.Module, holders: Iterable[Holder]) -> None:
        super().__init__()
        self.holders = nn.ModuleList(holders)
        self.module = module

    def forward(self, function: Callable[[], Any]) -> Any:
        return tree_map(_hookable, function())

    def end_backward(self) -> None:
        """Wait for what is reduced."""
        if isinstance(self, FSDPModule):
            self.set_is_last_backward(True)
            end_backward(self)

    def tell_last(self, last: bool) -> None:
        """Whether the next backward ends with waiting for what FSDP2 reduces meanwhile, on streams of its own."""
        if isinstance(self, FSDPModule):
            self.set_is_last_backward(last)


class Sharder:
    """`fully_shard` with one run's options."""

    def __init__(self, mesh: DeviceMesh, offload: bool, reduce_dtype: torch.dtype | None) -> None:
        pinned = mesh.device_type == "cuda"
        self._options: dict[str, Any] = {
            "mesh": mesh,
            "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy(),
            "mp_policy": MixedPrecisionPolicy(reduce_dtype=reduce_dtype, cast_forward_inputs=False),
        }

    def __call__(self, group: Group, parameters: set[nn.Parameter], frees: bool) -> None:
        ignored = set(group.parameters()) - parameters
        fully_shard(group, reshard_after_forward=frees, ignored_params=ignored, **self._options)


Wraps = list[Callable[[Tensor], Tensor] | None]


def _bare(tree: Any) -> tuple[Any, Wraps]:
    """Plain tensors in place of shards, and what makes shards of them again."""
    wraps: Wraps = []

    def strip(x: Any) -> Any:
        if isinstance(x, SequenceShard):
            wraps.append(functools.partial(SequenceShard.wrap, layout=x.tokens))
            return x.plain
        if isinstance(x, FeatureShard):
            wraps.append(functools.partial(FeatureShard.wrap, layout=x.features))
            return x.plain
        wraps.append(None)
        return x

    return tree_map(strip, tree), wraps


class _Boxed:
    """Arguments that FSDP2 does not look into, as it does into dataclasses, nor gives to functions of its own. It then
    reduces the unit's gradients at the end of backward."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs


def _in_containers(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> bool:
    """Whether arguments have lists or dicts, which a unit may change."""
    args, kwargs = arguments

    def holds(x: Any) -> bool:
        return isinstance(x, (list, dict)) or (isinstance(x, tuple) and any(map(holds, x)))

    return any(map(holds, (*args, *kwargs.values())))


def _dressed(tree: Any, wraps: Wraps) -> Any:
    if not any(wraps):
        return tree
    order = iter(wraps)

    def dress(x: Any) -> Any:
        wrap = next(order)
        return x if wrap is None else wrap(x)

    return tree_map(dress, tree)


class _Identity(torch.autograd.Function):
    """A tensor of the same memory and version that is no view, and has no hooks yet."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _hookable(x: Any) -> Any:
    """FSDP2 hooks a unit's outputs, to gather for backward: an operation in place on a view would lose the hook, and
    hooks of the user's (implicit gradients of a fixed point) would run before it, the parameters not there."""
    if not isinstance(x, Tensor) or not x.requires_grad or forward_mode_is_active():
        return x
    return _Identity.apply(x) if is_view(x) or tensor_hooks(x) else x
