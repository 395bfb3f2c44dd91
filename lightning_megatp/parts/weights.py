"""Split parameters in hooks of the user outside of steps, where each tensor rank finds its part of them.

What treats every element by itself (an averaged copy, a limit for values, decay) is right on parts, too. A norm, a
projection, values that are drawn anew are not: where a hook does such a thing, `WeightWatch` says so. Where it puts the
result into a weight, which would train another model, it is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_megatp.origins import THIS_PACKAGE, callers_frame, module_of_frame
from lightning_megatp.parts.coupled import Coupled
from lightning_megatp.parts.mode import HookMode
from lightning_megatp.parts.positions import Positions
from lightning_megatp.parts.rows import address_of
from lightning_megatp.plan.shard import ShardedTensorSpec
from lightning_megatp.shim.torch import tree_leaves
from lightning_megatp.tensor.features.rules.table import POINTWISE
from lightning_megatp.tensor.functions import (
    argument,
    bare_name,
    called_by_this_package,
    couples,
    is_assignment,
    is_in_place,
    multiplies,
    operation_name,
    operation_names,
    sets_data,
)

_FOLLOWED = POINTWISE | operation_names(
    "data T mT t transpose view reshape flatten ravel squeeze unsqueeze to cpu cuda"
)
"""Operations of which the result is still about the weight."""
_SAME_PLACES = POINTWISE | {"data"}
"""Operations whose result has each element where that lies of which it was made."""
_DIM_AT = {
    **dict.fromkeys(["norm", "vector_norm", "normalize", "topk", "kthvalue", "quantile"], 2),
    **dict.fromkeys(operation_names("sum mean amax amin std var nansum nanmean max min argmax argmin median"), 1),
    **dict.fromkeys(operation_names("std_mean var_mean cumsum cumprod prod logsumexp softmax log_softmax"), 1),
}
"""The position of the dims that operations go along, among their arguments."""
_WRITES = "untyped_storage"
"""What torch.save and safetensors ask a tensor for; copying a weight, or loading into it, does not."""


def writes(operation: str) -> bool:
    """Whether an operation is what files are written with."""
    return operation == _WRITES


def _is_asked_by_fsdp() -> bool:
    """Whether FSDP2 asks, which looks at its parameters when they have loaded a state dict."""
    frame = callers_frame(sys._getframe(1), THIS_PACKAGE)
    return module_of_frame(frame).startswith("torch.distributed.fsdp.")


def part_written(hook: str, weight: str) -> str:
    """What is said of a hook that writes a part of a weight to a file.

    Args:
        hook: its name.
        weight: the parameter's.
    """
    return (
        f"`{hook}` writes `{weight}`, of which each rank holds a part, to a file by itself: the file has the part of"
        " the rank that writes it. `trainer.save_checkpoint(path, weights_only=True)`, on all ranks, writes the whole"
        " model (`megatp convert` makes safetensors of it). With tp and dp alone a hook may also write inside of `with"
        " self.trainer.strategy.whole_parameters():`, entered on all ranks."
    )


class _Part(NamedTuple):
    """A parameter, and how it lies in memory."""

    name: str
    spec: ShardedTensorSpec
    strides: tuple[int, ...]


class WeightWatch(HookMode):
    """While a hook runs.

    Args:
        parameters: the split ones: name, tensor and how it is split.
        positions: what hooks do by numbers of rows.
        say: is told operation and parameter.
        written: is told a parameter that is written to a file.
        explain: makes an error of operation, parameter and what this rank has of it, for an operation that failed.
        refuse: makes an error of an operation that looked at several elements of a part, and the parameter into which a
            hook is about to put what it made of that.
        briefly: look at what hooks do by position only; all else costs microseconds at every operation.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, Tensor, ShardedTensorSpec]],
        positions: Positions,
        say: Callable[[str, str], None],
        written: Callable[[str], None],
        explain: Callable[[str, str, Tensor], Exception],
        refuse: Callable[[str, str], Exception],
        briefly: bool = False,
    ) -> None:
        super().__init__()
        self._briefly = briefly
        self._parameters, self._positions = parameters, positions
        self._by_address: dict[int, _Part] | None = None
        self._made: Any = WeakIdKeyDictionary()
        self._beside: Any = WeakIdKeyDictionary()
        """Tensor -> how the parameter is split that it was made of, element by element."""
        self._coupled = Coupled()
        self._say, self._written, self._explain, self._refuse = say, written, explain, refuse

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = bare_name(operation_name(func))
        if self._briefly and not self._positions.concern(operation):
            return func(*args, **kwargs)
        weight, mixes = None, couples(operation) or multiplies(operation)
        mixes = mixes or (operation == "linear" and not called_by_this_package())  # layers do so with their parts
        if mixes or operation in _FOLLOWED or writes(operation):
            weight = next((name for x in (*args, *kwargs.values()) if (name := self._name(x)) is not None), None)
        by = self._coupled.of((*args[1:], kwargs))
        if weight is not None and mixes:
            if not self._is_beside_split(operation, args, kwargs):
                self._say(operation, weight)
                by = operation if couples(operation) else by
        elif weight is not None and writes(operation) and not _is_asked_by_fsdp():
            self._written(weight)
        if is_in_place(operation):
            self._positions.check_view(args[0] if args else None)
        name, spec = self._found(args[0]) if args else ("", None)
        if by is not None and (is_in_place(operation) or is_assignment(func)):
            for x in args[0] if isinstance(args[0], list | tuple) else args[:1]:
                if changed := self._found(x)[0]:
                    raise self._refuse(by, changed)
        before = address_of(args[0]) if sets_data(func) else 0
        self._positions.check_meeting((*args, *kwargs.values()))
        how = self._positions.carry_out(name, spec, operation, args, kwargs)
        if how == "done":
            return args[0]
        if how == "read":
            self._say(operation, name)
        try:
            result = func(*args, **kwargs)
        except (RuntimeError, IndexError) as error:
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            for x in given if len(given) > 1 or isinstance(error, IndexError) else ():
                if (weight := self._name(x)) is not None:
                    raise self._explain(operation_name(func), weight, x) from error
            raise
        if how == "read":
            self._positions.note(name, operation, result)
        self._positions.follow(name, spec, operation, args, result)
        if before and self._by_address is not None and before in self._by_address:
            self._by_address[address_of(args[0])] = self._by_address.pop(before)
        if weight is not None and operation in _FOLLOWED and isinstance(result, Tensor):
            self._made[result] = weight
            self._note_places(operation, args, result)
        if (by := by or self._coupled.of(args[:1])) is not None:
            self._coupled.note(operation, result, by)
        return result

    def _note_places(self, operation: str, given: Iterable[Any], result: Tensor) -> None:
        """Note how the parameter is split whose elements lie as those of a result do, if there is one."""
        alike = [x for x in given if isinstance(x, Tensor) and x.shape == result.shape]
        specs = [spec for x in alike if operation in _SAME_PLACES and (spec := self._spec(x)) is not None]
        if specs:
            self._beside[result] = specs[0]

    def _spec(self, x: Any) -> ShardedTensorSpec | None:
        """How a parameter is split, that this is or was made of element by element."""
        if not isinstance(x, Tensor):
            return None
        part = self._parts_by_address().get(address_of(x))
        return self._beside.get(x) if part is None or part.strides != x.stride() else part.spec

    def _is_beside_split(self, operation: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an operation goes along dims of a parameter that are whole on each rank (a norm of each row)."""
        spec = self._spec(args[0]) if args else None
        at = _DIM_AT.get(operation)
        if spec is None or at is None or args[0].dim() != len(spec.shape):
            return False
        given = argument(args, kwargs, at, "dim", default=1 if operation == "normalize" else None)
        dims = given if isinstance(given, (tuple, list)) else [given]
        return all(isinstance(dim, int) and dim % len(spec.shape) != spec.dim for dim in dims)

    def _name(self, x: Any) -> str | None:
        """The name of the parameter that a tensor is, or was made of."""
        if isinstance(x, list | tuple):
            return next((name for y in x if (name := self._name(y)) is not None), None)
        if not isinstance(x, Tensor):
            return None
        found: str | None = self._made.get(x)
        return self._found(x)[0] or None if found is None else found

    def _found(self, x: Any) -> tuple[str, ShardedTensorSpec | None]:
        """A parameter that lies where a tensor does."""
        if not isinstance(x, Tensor):
            return "", None
        part = self._parts_by_address().get(address_of(x))
        return ("", None) if part is None else (part.name, part.spec)

    def _parts_by_address(self) -> dict[int, _Part]:
        if self._by_address is None:  # most hooks do nothing with tensors
            self._by_address = {
                at: _Part(name, spec, p.stride()) for name, p, spec in self._parameters if (at := address_of(p))
            }
        return self._by_address
