"""What planning and running have to know about single operations, and what ends a step early."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_megatp.calls import Told
from lightning_megatp.containers import leaves_in, tensors_in
from lightning_megatp.shim.autograd import generator_bytes
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import tree_map
from lightning_megatp.tensor.functions import operation_names
from lightning_megatp.tensor.random import default_generator


class StepEnded(BaseException):
    """Leaves a user's step when nothing is left to do or to learn. No Exception: `except Exception` lets it pass."""


class NeedsValues(Exception):
    """An operation on a ghost that needs its data."""


def told_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Told | None:
    """What a parameter is told; None for any other operation."""
    sets = func is torch.Tensor.requires_grad_ or func == _SETS_REQUIRES_GRAD
    if not (sets or func == _SETS_GRADIENT) or not isinstance(args[0], nn.Parameter):
        return None
    if not sets:
        return Told.CLEAR if args[1] is None else None
    learns = args[1] if len(args) > 1 else (kwargs or {}).get("requires_grad", True)
    return Told.LEARN if learns else Told.FREEZE


def is_conversion(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> bool:
    """`x.type(kind)`, an operation, while `x.type()` tells what kind x is of."""
    return func is torch.Tensor.type and len(args) + len(kwargs or ()) > 1


def sets_values(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """`buffer.data = values`, which is done as `buffer.copy_(values)`: so other stages see that there are others."""
    if function != _SET_DATA:
        return False
    x, values = args
    alike = isinstance(values, Tensor) and (x.shape, x.dtype) == (values.shape, values.dtype)
    return alike and not x.requires_grad


def is_bookkeeping(function: Any) -> bool:
    """Autograd functions of activation checkpointing that only hold on to its arguments."""
    return function.__module__ == "torch.utils.checkpoint" and function.__name__ != "CheckpointFunction"


def with_memory(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Ghosts as real tensors with arbitrary values, for operations that only read shapes."""

    def allocate(x: Any) -> Any:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) if is_fake(x) else x

    return tree_map(allocate, (args, kwargs))


def cut_by_numbers(
    function: Callable[..., Any], args: tuple[Any, ...], read: Callable[[Tensor], int]
) -> tuple[Any, ...]:
    """The arguments of an index into a ghost, with numbers in place of the replicated tensors that are read as such
    (`h[:, :n]`): without data it can't be done otherwise.

    Args:
        read: gives the number, and sees to it that this counts as a look at values.
    """
    if function not in _INDEXING or not is_fake(args[0]):
        return args

    def number(x: Any) -> Any:
        if type(x) is slice:
            return slice(number(x.start), number(x.stop), number(x.step))
        is_number = isinstance(x, Tensor) and x.dim() == 0 and x.dtype in _INTEGERS and not is_fake(x)
        return read(x) if is_number else x

    first, index, *rest = args
    return first, tuple(map(number, index)) if type(index) is tuple else number(index), *rest


def masks_read(function: Callable[..., Any], args: tuple[Any, ...], read: Callable[[Tensor], int]) -> bool:
    """Whether an operation takes what replicated masks keep of a ghost (`h[mask]`): how much that is, decides its
    shape.

    Args:
        read: is called with the count of each, and sees to it that this counts as a look at values.
    """
    masks = [x for x in _index_of(args) if _is_mask(x)] if function is Tensor.__getitem__ and is_fake(args[0]) else []
    for mask in masks:
        read(mask.sum())
    return bool(masks)


def at_positions(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of such an index, with the positions that masks keep in place of these: tensors without data can
    follow them."""
    index = [y for x in _index_of(args) for y in (x.nonzero(as_tuple=True) if _is_mask(x) else (x,))]
    return args[0], tuple(index)


def by_positions(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
    """The index as a function that is given masks, and looks up their positions beforehand."""
    _, index = at_positions(args)
    return lambda x, _: function(x, index)


def _index_of(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[1] if type(args[1]) is tuple else (args[1],)


def _is_mask(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype == torch.bool and x.dim() > 0 and not is_fake(x)


_INDEXING = frozenset([Tensor.__getitem__, Tensor.__setitem__])
_INTEGERS = frozenset([torch.int8, torch.int16, torch.int32, torch.int64])


def generators_given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Generator]:
    """The generators among an operation's arguments."""
    return [x for x in leaves_in(args, kwargs) if isinstance(x, torch.Generator)]


def generators_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Generator]:
    """The generators that an operation may draw from."""
    devices = {x.device for x in tensors_in(args, kwargs)} | {torch.device(kwargs.get("device") or "cpu")}
    given = generators_given(args, kwargs)
    return given + [default_generator(device) for device in sorted(devices, key=str) if device.type in ("cpu", "cuda")]


def random_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[bytes]:
    """The states of the generators that an operation with these arguments may draw from; they change when it has
    drawn."""
    return [generator_bytes(g) for g in generators_of(args, kwargs)]


EFFECTS = operation_names("register_hook retain_grad register_post_accumulate_grad_hook")
"""They return no tensor, but do something for good."""

HOST_READS = operation_names(
    """
    item tolist numpy data_ptr equal allclose is_nonzero
    __bool__ __float__ __int__ __index__ __complex__ __array__ __contains__ __dlpack__ __format__
    """
)
"""Operations that fake tensors answer by other errors than one about missing data, or answer wrongly."""

SHAPE_ONLY = operation_names(
    """
    zeros_like ones_like empty_like full_like rand_like randn_like randint_like
    new_zeros new_ones new_empty new_full
    """
)
"""They read nothing but the shape and dtype of their tensors: replicated, whatever stage those are of."""

CONVERSIONS = operation_names("to type_as type float double half bfloat16 cpu cuda")
"""Give the same values in another dtype, or elsewhere."""
LIKE_ANOTHER = operation_names("to type_as expand_as view_as reshape_as")
"""They read nothing but that of any tensor after the first: a replicated mask stays so in `mask.to(hidden)`."""
_SETS_GRADIENT = torch.Tensor.grad.__set__  # type: ignore[union-attr]
_SETS_REQUIRES_GRAD = torch.Tensor.requires_grad.__set__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
