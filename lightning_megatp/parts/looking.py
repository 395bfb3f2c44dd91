"""A mode that follows what a hook of the user does with parameters and gradients of which a rank holds parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from lightning_megatp.parts.coupled import Coupled
from lightning_megatp.parts.positions import Positions
from lightning_megatp.parts.rows import address_of, own_part
from lightning_megatp.plan.shard import ShardedTensorSpec
from lightning_megatp.shim.torch import foreach_norm, tensor_version
from lightning_megatp.tensor.functions import argument, is_assignment, is_in_place, operation_name, operation_names

_NORMS: dict[Any, tuple[str, Any]] = {
    Tensor.norm: ("p", "fro"),
    torch.norm: ("p", "fro"),
    torch.linalg.norm: ("ord", None),
    torch.linalg.vector_norm: ("ord", 2),
    foreach_norm: ("ord", 2),
}
"""Function -> its second argument, and the default of that."""
_SAME_NORM = operation_names(
    "grad data T mT detach float double half bfloat16 to cpu cuda clone contiguous view reshape flatten ravel abs neg"
)
"""Functions whose result has the norm of their argument."""
_REDUCTIONS = {
    **dict.fromkeys(operation_names("norm vector_norm linalg_norm linalg_vector_norm"), 2),
    **dict.fromkeys(operation_names("sum nansum mean nanmean std var prod amax amin max min logsumexp"), 1),
}
"""Name -> which argument says over which dims."""
_SCALES = operation_names("mul_ div_ _foreach_mul_ _foreach_div_ __imul__ __itruediv__")


@dataclass
class Version:
    """The version of tensors in one storage, which count together: those in a bucket do."""

    number: int


@dataclass(frozen=True)
class KnownPart:
    """What is known of a tensor with as many elements as this rank holds of a parameter."""

    what: str
    """The tensor, e.g. "the gradient of `head.weight`"."""
    numel: int
    split: bool
    """Over tensor ranks."""
    parted: bool
    """Over any ranks."""
    is_gradient: bool = False
    parameter: str = ""
    """Its name."""
    norm: Tensor | None = None
    """The norm of the whole tensor, where that was summed."""
    source: Tensor | None = None
    """What was summed."""
    version: Version | None = None
    """The version of `source`, then; or since the last change that was seen, of whatever else lies beside it."""
    shape: tuple[int, ...] = ()
    """The shape of what this rank holds."""
    spec: ShardedTensorSpec | None = None
    """How tensor ranks divide it."""

    @property
    def unchanged(self) -> bool:
        """Whether nothing has happened to its source that was not seen."""
        return self.source is None or self.version is None or tensor_version(self.source) == self.version.number


class Judge(Protocol):
    """Whom `Looking` asks and tells."""

    def norm_of(self, part: KnownPart, order: Any) -> Tensor | None:
        """A hook asks for the norm of a part: that of the whole, if it is known."""

    def computed(self, name: str, part: KnownPart) -> None:
        """A hook has made a number of a part, by the operation `name`."""

    def check_scaling(self, part: KnownPart, made_of: frozenset[str]) -> None:
        """A hook is about to multiply a part by a number in a tensor.

        Args:
            part: what is multiplied.
            made_of: the parameters of whose whole values or gradients the number was made, as far as is known.

        Raises:
            RuntimeError: each stage, or each rank, would take its own.
        """

    def check_made(self, part: KnownPart, by: str) -> None:
        """A hook is about to put into a part what it made of several elements of one, by an operation that has looked
        at those of this rank.

        Raises:
            RuntimeError: each rank would put something else there.
        """


class Looking(TorchFunctionMode):
    """While hooks run.

    Args:
        judge: whom to ask and to tell.
        rank: in the tensor group.
        parts: tells what lies where. It is asked when the first operation is about to run: many hooks run none.
    """

    def __init__(self, judge: Judge, rank: int, parts: Callable[[], Iterable[tuple[Tensor, KnownPart]]]) -> None:
        super().__init__()
        self._judge, self._positions = judge, Positions(rank)
        self._made: Any = WeakIdKeyDictionary()
        """Tensor -> the part of which it was made, element by element; also what has no address, since it is empty."""
        self._numbers: Any = WeakIdKeyDictionary()
        """Number in a tensor -> the parameters of which it was made, if this rank has all that it was made of."""
        self._coupled = Coupled()
        self.show(parts)

    def show(self, parts: Callable[[], Iterable[tuple[Tensor, KnownPart]]]) -> None:
        """From now on these."""
        self._made.clear()
        self._not_asked: Callable[[], Iterable[tuple[Tensor, KnownPart]]] | None = parts
        self._alive: list[tuple[Tensor, KnownPart]] = []
        """So that nothing else comes to lie at their addresses."""
        self._parts: dict[int, KnownPart] = {}
        """By address."""

    def _ask(self, parts: Callable[[], Iterable[tuple[Tensor, KnownPart]]]) -> None:
        self._not_asked = None
        self._alive = list(parts())
        for tensor, part in self._alive:
            if address := address_of(tensor):
                self._parts[address] = part
            else:
                self._made[tensor] = part

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [y for x in (*args, *kwargs.values()) for y in _each(x)]
        if self._not_asked is not None and any(isinstance(x, Tensor) and x.dim() for x in given):  # not just a loss
            self._ask(self._not_asked)
        parts = [part for x in given if (part := self._part(x)) is not None]
        name, coupled = operation_name(func), self._coupled.of(given)
        if not parts:
            result = self._of_numbers(given, func(*args, **kwargs))
            if coupled is not None:
                self._coupled.note(name, result, coupled)
            return result
        part = next((part for part in parts if part.parted), parts[0])
        self._positions.check_meeting(given)
        how = self._by_position(name, args, kwargs)
        if how == "done":
            return args[0]
        if name in _SCALES and len(args) > 1 and isinstance(args[1], Tensor) and args[1].numel() == 1:
            self._judge.check_scaling(part, self._numbers.get(args[1], frozenset()))
        if (is_in_place(name) or is_assignment(func)) and (by := self._coupled.of((*args[1:], kwargs))) is not None:
            changed_parts = [self._parts.get(address_of(x)) for first in args[:1] for x in _each(first)]
            for written in filter(None, changed_parts):
                self._judge.check_made(written, by)
        if name in _REDUCTIONS and _divides(part, name, args, kwargs):
            self._judge.computed(name, part)
            coupled = name
        if (order := _order(func, args, kwargs)) is not None:
            return self._norms(func, order, args, kwargs)
        first = args[0] if args else None
        changed = first if is_in_place(name) else kwargs.get("out")
        known = [x for x in map(self._part, _each(changed)) if x is not None and x.unchanged]
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            if part.spec is None or len(given) < 2:
                raise
            raise _failed(name, part, part.spec) from error
        if how == "read":
            self._positions.note(part.what.replace("`", ""), name, result)
        of_first = self._part(args[0]) if args else None
        spec = None if of_first is None else of_first.spec
        self._positions.follow(part.what.replace("`", ""), spec, name, args, result)
        for x in known:
            if x.source is not None and x.version is not None:
                x.version.number = tensor_version(x.source)
        if changed is None:
            self._note(name, part, first, result)
        else:
            self._changed(changed)
        if coupled is not None:
            self._coupled.note(name, result, coupled)
        return result

    def _by_position(self, name: str, args: Any, kwargs: dict[str, Any]) -> str:
        """See `Positions.carry_out`."""
        part = self._part(args[0]) if args else None
        if is_in_place(name):
            self._positions.check_view(args[0] if args else None)
        if part is None or part.spec is None:
            return ""
        how = self._positions.carry_out(part.what.replace("`", ""), part.spec, name, args, kwargs)
        if how == "done":
            self._changed(args[0])
        elif how == "read":
            self._judge.computed(name, part)
        return how

    def _norms(self, func: Callable[..., Any], order: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The norm of one tensor, or of each in a list: that of the whole where it is known."""
        several, of = func is foreach_norm, _each(args[0])
        parts = [self._part(x) for x in of]
        known = [None if part is None else self._judge.norm_of(part, order) for part in parts]
        found = known if all(norm is not None for norm in known) else func(*args, **kwargs)
        results = []
        for x, part, norm, own in zip(of, parts, known, found if several or found is known else [found], strict=True):
            if norm is None and part is not None:
                self._judge.computed("norm", part)
                if part.parted:
                    self._coupled.note("norm", own, "norm")
            results.append(own if norm is None else norm.to(own_part(x).device, x.dtype, copy=True))
            if part is not None and (norm is not None or not part.parted):
                self._numbers[results[-1]] = frozenset([part.parameter])
        return results if several else results[0]

    def _of_numbers(self, given: Sequence[Any], result: Any) -> Any:
        """What was made of numbers alone is one of all that these were made of; of a number of unknown origin, too."""
        tensors = [x for x in given if isinstance(x, Tensor)]
        known = [self._numbers[x] for x in tensors if x in self._numbers]
        if known and isinstance(result, Tensor):
            made_of = known if len(known) == len(tensors) else [*known, frozenset([""])]
            self._numbers[result] = frozenset().union(*made_of)
        return result

    def _part(self, x: Any) -> KnownPart | None:
        if not isinstance(x, Tensor):
            return None
        part: KnownPart | None = self._made.get(x) or self._parts.get(address_of(x))
        return part if part is None or part.numel == own_part(x).numel() else replace(part, norm=None)  # a slice of it

    def _changed(self, tensors: Any) -> None:
        """In place, maybe through `.data`: what was summed is no longer true."""
        for x in _each(tensors):
            if (part := self._part(x)) is None:
                continue
            if x in self._made:
                self._made[x] = replace(part, norm=None)
            else:
                self._parts[address_of(x)] = replace(part, norm=None)

    def _note(self, name: str, part: KnownPart, first: Any, result: Any) -> None:
        """What was made of a part: as many elements, several such in one, or a number."""
        if isinstance(result, list | tuple):
            sources = first if isinstance(first, list | tuple) and len(first) == len(result) else [first] * len(result)
            for source, x in zip(sources, result, strict=True):
                self._note(name, self._part(source) or part, source, x)
            return
        if not isinstance(result, Tensor) or result is first:
            return
        numel = own_part(result).numel()
        if numel == part.numel and name in _SAME_NORM:
            if self._part(result) is None:  # the gradient of a parameter has a part of its own
                self._made[result] = part
        elif isinstance(result, DTensor) and not part.split:
            pass  # it knows of the other ranks' rows
        elif numel == 1 < part.numel:
            self._judge.computed(name, part)
            if part.parted:
                self._coupled.note(name, result, name)
            else:
                self._numbers[result] = frozenset([part.parameter])
        elif numel <= part.numel or part.split or isinstance(first, list | tuple):  # else gathered from other ranks
            self._made[result] = replace(part, numel=numel, norm=None)


def _failed(name: str, part: KnownPart, spec: ShardedTensorSpec) -> RuntimeError:
    return RuntimeError(
        f"MegaTPStrategy: in a hook, `{name}` fails on {part.what}, of which each tensor rank holds a part, here"
        f" {part.shape} of {spec.shape}. A hook of `register_hook` is given whole gradients; for whole weights, work on"
        " all ranks inside of `with self.trainer.strategy.whole_parameters():`."
    )


def _divides(part: KnownPart, name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a reduction goes over the dim of a part that tensor ranks divide, and leaves others."""
    at = _REDUCTIONS[name]
    over = argument(args, kwargs, at, "dim")
    if part.spec is None or not args or tuple(own_part(args[0]).shape) != part.shape:
        return False
    return part.spec.dim in {dim % len(part.shape) for dim in _each(over) if type(dim) is int}


def _each(x: Any) -> Sequence[Any]:
    return x if isinstance(x, list | tuple) else (x,)


def _order(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """The order of a norm of all elements; None where it is none, or more is asked of it."""
    if func not in _NORMS or not 1 <= len(args) <= 2:
        return None
    keyword, default = _NORMS[func]
    if any(value is not None and value is not False for key, value in kwargs.items() if key != keyword):
        return None
    order = argument(args, kwargs, 1, keyword, default=default)
    if func is torch.linalg.norm and order not in (None, "fro") and args[0].dim() > 1:
        return None  # of a matrix
    return 2 if order in (None, "fro") else order
