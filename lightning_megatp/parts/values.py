"""Whole values that hooks of the user put into weights and gradients, of which ranks have parts. Random numbers (noise,
masks, weights that begin anew) are drawn for the whole on all ranks, and each keeps its part: parts drawn by themselves
would be equal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_megatp.origins import module_of_frame
from lightning_megatp.parts.mode import Part, PartsMode, is_elementwise
from lightning_megatp.parts.rows import own_part
from lightning_megatp.plan.shard import ShardSpec
from lightning_megatp.shim.torch import DisableTorchFunction
from lightning_megatp.tensor.draws import LIKE_SHAPES, OF_ELEMENTS
from lightning_megatp.tensor.functions import operation_name, operation_names

_FOR_TENSORS = OF_ELEMENTS | operation_names("kaiming_uniform_ kaiming_normal_")
_SHAPES = operation_names("shape size __len__")
_BY_THE_WHOLE = frozenset(["orthogonal_", "sparse_", "eye_", "dirac_", "_no_grad_trunc_normal_"])
"""Functions of torch.nn.init that don't draw one number for each element, and once."""


def draws_for_tensors(name: str) -> bool:
    """Whether an operation draws a number for each element of its tensors."""
    return name in _FOR_TENSORS


class WholeValues(PartsMode):
    """While a hook runs: whole tensors and random numbers that meet parts are cut to them."""

    def __init__(self, parts: Callable[[], Iterable[tuple[Tensor, ShardSpec]]]) -> None:
        super().__init__(parts)
        self._drawn: Any = WeakIdKeyDictionary()
        """Random numbers for nothing known."""
        self._asked: Part | None = None
        """What was last asked for its shape."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, operation_name(func)
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if name in LIKE_SHAPES and not tensors:
            return self._draw_shape(func, args, kwargs)
        if name in _FOR_TENSORS and (part := self.first(tensors)) is not None:
            _caller_in_init(part.shard)
            return self._draw(func, args, kwargs, part)
        if name in _SHAPES and (part := self.first(tensors)) is not None:
            self._asked = part
            if _caller_in_init(part.shard):  # for the fans of a layer
                return func(torch.empty(part.shard.shape, device="meta"), *args[1:], **kwargs)
        drawn = any(x in self._drawn for x in tensors) if self._drawn else False
        if drawn:
            self._check_meeting(name, tensors)
        result = self.call(func, name, args, kwargs)
        if drawn or name in _FOR_TENSORS:
            if isinstance(result, Tensor) and result.dim() > 0:
                self._drawn[result] = True
        else:
            self.note(name, tensors, result)
        return result

    @torch.no_grad()
    def _draw(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], part: Part) -> Any:
        """An operation on the whole, of which this rank's elements are known."""
        shard, widened = part.shard, {}

        def widen(x: Any) -> Any:
            if not isinstance(x, Tensor) or tuple(own_part(x).shape) != shard.local_shape:
                return x
            own = own_part(x.detach())
            whole = torch.zeros(shard.shape, dtype=own.dtype, device=own.device)
            shard.put(whole, own)
            widened[id(whole)] = x
            return whole

        with DisableTorchFunction():
            result = func(*map(widen, args), **{key: widen(x) for key, x in kwargs.items()})
        changed = widened.get(id(result))
        if changed is None:
            return self.noted(part, result)
        with DisableTorchFunction():
            own = shard.take(result)
        own_part(changed.detach()).copy_(own)
        return changed

    def _draw_shape(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Numbers for a shape: if it is that of what was last asked for its own, for that."""
        part = self._asked
        wide = None if part is None else _with_shape(args, kwargs, part.shown, part.shard.shape)
        if part is None or wide is None:
            result = func(*args, **kwargs)
            if isinstance(result, Tensor) and result.dim() > 0:
                self._drawn[result] = True
            return result
        return self.noted(part, func(*wide[0], **wide[1]))

    def _check_meeting(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Refuse to let random numbers that weren't drawn for a whole parameter meet a part of one.

        Raises:
            RuntimeError: numbers that were drawn by themselves are about to meet a part, element by element.
        """
        part = self.first(tensors)
        if part is None or not (is_elementwise(name) or name == "data"):
            return
        whole, own = part.shard.shape, part.shard.local_shape
        for x in (own_part(x) for x in tensors if x in self._drawn):
            shape = (1,) * (len(own) - x.dim()) + tuple(x.shape)
            if any(n == m != size and n > 1 for n, m, size in zip(shape, own, whole, strict=False)):
                raise _refused("draws random numbers for", part.shard)


def _with_shape(
    args: tuple[Any, ...], kwargs: dict[str, Any], shape: tuple[int, ...], instead: tuple[int, ...]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of a function that makes a tensor of a shape, with another shape; None if it makes none of that."""
    if args[: len(shape)] == shape and len(args) == len(shape):
        return instead, kwargs
    for i, x in enumerate(args):
        if isinstance(x, (tuple, list)) and tuple(x) == shape:
            return (*args[:i], instead, *args[i + 1 :]), kwargs
    given = kwargs.get("size")
    if given is not None and tuple(given) == shape:
        return args, {**kwargs, "size": instead}
    return None


def _caller_in_init(shard: ShardSpec) -> bool:
    """Whether torch.nn.init calls an operation.

    Raises:
        RuntimeError: for what can't be done to a part of a parameter.
    """
    caller = sys._getframe(2)
    if module_of_frame(caller) != torch.nn.init.__name__:
        return False
    if (name := caller.f_code.co_name) in _BY_THE_WHOLE:
        raise _refused(f"calls `{name.removeprefix('_no_grad_')}` on", shard)
    return True


def _refused(does: str, shard: ShardSpec) -> RuntimeError:
    return RuntimeError(
        f"MegaTPStrategy: a hook {does} `{shard.name}`, or its gradient, of which each rank holds a part, here"
        f" {shard.local_shape} of {shard.shape}: drawn for parts, random numbers are equal where they should differ."
        " Draw them by `torch.randn_like(x)`, `x.normal_()` and the like, or by `torch.randn(x.shape)`: then they are"
        " those of one device. Or do it in `__init__`, or to a checkpoint."
    )
