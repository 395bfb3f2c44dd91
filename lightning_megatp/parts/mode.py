"""Tensors of which this rank has a part, in hooks of the user: which ones they are, and what meets them whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_megatp.detour import Detour
from lightning_megatp.parts.rows import address_of, own_part
from lightning_megatp.plan.shard import ShardSpec
from lightning_megatp.shim.torch import DisableTorchFunction, WithoutMode
from lightning_megatp.tensor.features.rules.table import POINTWISE
from lightning_megatp.tensor.functions import is_in_place, operation_names, sets_data

_KEEP_PLACES = POINTWISE | operation_names("new new_empty new_zeros new_ones new_full data")
"""Operations whose result, if it is as large, has an element for each of their tensor's."""


@dataclass(frozen=True, eq=False)
class Part:
    """A tensor with an element for each of those that this rank has of a parameter."""

    shard: ShardSpec
    shown: tuple[int, ...]
    """The shape that it tells."""
    like: DTensor | None
    """A tensor that is divided as it is."""

    @classmethod
    def of(cls, x: Tensor, shard: ShardSpec) -> Part:
        return cls(shard, tuple(x.shape), x if isinstance(x, DTensor) else None)

    def take(self, whole: Tensor) -> Tensor:
        """This rank's elements of a whole."""
        return self.shown_as(self.shard.take(whole))

    def shown_as(self, own: Tensor) -> Tensor:
        """This rank's elements, in the form of the part."""
        like = self.like
        if like is None or tuple(own.shape) != self.shard.local_shape:
            return own
        return DTensor.from_local(
            own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def own(self, x: Tensor) -> Tensor | None:
        """What meets this rank's elements, of a tensor that would meet all of the whole, or these; None if it would
        meet neither."""
        if isinstance(x, DTensor):
            return x.to_local() if tuple(x.shape) == self.shown else None
        if x.dim() > len(self.shown):
            return None
        for dim in range(-1, -x.dim() - 1, -1):
            ranges = self.shard.ranges[dim]
            size, whole, own = x.shape[dim], self.shard.shape[dim], self.shard.local_shape[dim]
            if size == whole != own:
                x = torch.cat(
                    [x.narrow(dim, start, stop - start) for start, stop in ranges] or [x.narrow(dim, 0, 0)], dim
                )
            elif size not in (1, own):
                return None
        return x


class HookMode(TorchFunctionMode):
    """A mode for the time that a hook runs."""

    _pauses = False

    @contextlib.contextmanager
    def around(self, *others: tuple[Any, str]) -> Iterator[None]:
        """Around a hook.

        Args:
            others: methods, by owner and name, that the hook may call and that are no part of it, such as the
                `optimizer_step` of the strategy, which has the step in it. They may call each other.
        """
        with self, contextlib.ExitStack() as ends:
            for owner, name in others:
                ends.callback(Detour(owner, name, self._pause).end)
            yield

    def _pause(self, call: Callable[[], Any]) -> Any:
        if self._pauses:
            return call()
        self._pauses = True
        try:
            with WithoutMode(self):
                return call()
        finally:
            self._pauses = False


class PartsMode(HookMode):
    """While a hook runs: finds parts, and what was made of them element by element.

    Args:
        parts: what lies where, of what this rank has a part. Asked when an operation needs it.
    """

    def __init__(self, parts: Callable[[], Iterable[tuple[Tensor, ShardSpec]]]) -> None:
        super().__init__()
        self._parts = parts
        self._by_address: dict[int, ShardSpec] | None = None
        self._made: Any = WeakIdKeyDictionary()
        """Tensor -> whose elements it has; parts without elements, which lie nowhere, too."""

    def first(self, tensors: Iterable[Tensor]) -> Part | None:
        return next((part for x in tensors if (part := self.part(x)) is not None), None)

    def part(self, x: Tensor) -> Part | None:
        if self._by_address is None:
            self._by_address = {}
            for tensor, of in self._parts():
                if at := address_of(tensor):
                    self._by_address[at] = of
                else:
                    self._made[tensor] = of
        shard: ShardSpec | None = self._made.get(x) or self._by_address.get(address_of(x))
        if shard is None or tuple(own_part(x).shape) != shard.local_shape:
            return None
        return Part.of(x, shard)

    def note(self, name: str, tensors: Iterable[Tensor], result: Any) -> None:
        """What an operation has made of tensors."""
        if name in _KEEP_PLACES and not is_in_place(name) and isinstance(result, Tensor) and self.part(result) is None:
            part = self.first(tensors)
            if part is not None and tuple(own_part(result).shape) == part.shard.local_shape:
                self._made[result] = part.shard

    def noted(self, part: Part, whole: Tensor) -> Tensor:
        """This rank's part of a result."""
        with DisableTorchFunction():
            own = part.take(whole)
        self._made[own] = part.shard
        return own

    def call(self, func: Callable[..., Any], name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Do an operation. Where a whole tensor meets a part, element by element (a mask of rows, values from a file),
        this rank's part of it is meant."""
        if sets_data(func) and (part := self.part(args[0])) is not None and is_whole(args[1], part):
            return func(args[0], part.take(args[1]))
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            if not is_elementwise(name) or "out" in kwargs:
                raise
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            part = self.first(tensors)
            changed = tensors[0] if is_in_place(name) else None
            if part is None or (changed is not None and self.part(changed) is None):
                raise
            own = {id(x): part.own(x) for x in tensors}
            if any(x is None for x in own.values()) or all(own[id(x)] is x for x in tensors):
                raise
        result = func(*(own.get(id(x), x) for x in args), **{key: own.get(id(x), x) for key, x in kwargs.items()})
        return part.shown_as(result) if changed is None else changed


def is_elementwise(name: str) -> bool:
    """Whether an operation treats every element by itself."""
    return name in POINTWISE or name.rstrip("_") in POINTWISE or name == "where"


def is_whole(x: Any, part: Part) -> bool:
    """Whether it is a tensor of the whole's shape, and a part is smaller."""
    shape = part.shard.shape
    return isinstance(x, Tensor) and not isinstance(x, DTensor) and tuple(x.shape) == shape != part.shard.local_shape
