"""Tensors without data: torch's fake tensors. Seen in 2.11, 2.13, 2.14 and 2.15."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import DisableTorchFunction
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

# FakeTensorMode (what torch.compile and torch.export plan with: shapes, dtypes and devices without data) has no public
# import path, TorchDispatchMode only the one that "Extending PyTorch" names.
__all__ = [
    "CopiesFakes",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GroupedProductsOnMeta",
    "UnsupportedOperatorException",
    "as_subclass",
    "attributes_of_fakes",
    "failures_of_fakes_unlogged",
    "fake_beside",
    "fake_of",
    "fake_tensor_mode",
    "forget_fakes",
    "is_fake",
    "know_grouped_products",
    "making_fakes",
    "missed_data",
    "real_again",
    "subclassed_fake",
]

T = TypeVar("T", bound=Tensor)


def missed_data(error: RuntimeError) -> bool:
    """Whether a kernel failed since it reads the memory of a fake tensor; only torch's words tell (2.11-2.13)."""
    return "data is not allocated yet" in str(error) or "Cannot access data pointer of Tensor" in str(error)


@contextlib.contextmanager
def failures_of_fakes_unlogged() -> Iterator[None]:
    """Operations that fail on fake tensors are errors to who tries them; torch prints their tracebacks besides, by the
    logger of this module (2.11-2.13)."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def subclassed_fake(error: Exception) -> str:
    """The class that somebody tried to make a fake tensor of (`Tensor.as_subclass`), which no mode sees; only torch's
    words tell (2.11-2.13)."""
    found = re.search(
        r"Creating a new Tensor subclass (\w+) but the raw .* python object of type FakeTensor", str(error)
    )
    return "" if found is None else found[1]


def is_fake(x: object) -> bool:
    """Whether this is a tensor without data, as a dry run has them. Collectives return one of the right shape for it:
    the c10d operations have no fake kernels for a real process group (2.13)."""
    return isinstance(x, FakeTensor)


def fake_of(mode: FakeTensorMode, x: Tensor) -> Tensor:
    """A tensor without data like x. In torch 2.14 that of a number would remember it, in `item_memo`. Modes that watch
    torch's functions need not see the fifty attributes that are read for it."""
    with DisableTorchFunction():
        fake: Any = mode.from_tensor(x)
    fake.item_memo = None
    return fake


def fake_beside(ghost: Tensor, x: Tensor) -> Tensor:
    """A tensor without data like x, that operations may take together with a ghost: `FakeTensor.fake_mode`, torch 2.11
    to 2.14, made it."""
    return x.detach() if is_fake(x) else fake_of(ghost.fake_mode, x)  # type: ignore[attr-defined]


def making_fakes(ghost: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Meanwhile all that is made is without data, too, as numbers are that an operation takes for tensors."""
    mode: FakeTensorMode = ghost.fake_mode  # type: ignore[attr-defined]
    return mode


@contextlib.contextmanager
def real_again() -> Iterator[None]:
    """Tensors have data, though a FakeTensorMode was entered and not yet left: what a look at a step puts back is real.
    There is one slot for such modes, without a public name (2.11-2.13)."""
    mode = torch._C._unset_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    try:
        yield
    finally:
        if mode is not None:
            torch._C._set_dispatch_mode(mode)


def as_subclass(x: Tensor, kind: type[T]) -> T:
    """`x.as_subclass(kind)`, for fake tensors too: these are a subclass of Tensor already, and a view of one can become
    an object of both (2.11-2.13)."""
    if type(x) is Tensor or not is_fake(x):
        return x.as_subclass(kind)
    view: Any = x.view_as(x)
    view.__class__ = _fake_kind(kind)
    found: T = view
    return found


@functools.cache
def _fake_kind(kind: type[Tensor]) -> type[Tensor]:
    return type(f"Fake{kind.__name__}", (kind, FakeTensor), {})


class CopiesFakes(TorchFunctionMode):
    """Lets `copy.deepcopy` copy tensors inside of a FakeTensorMode (a new metric's defaults). There torch 2.13 sets a
    storage with data for a fake tensor or the other way round, and the process may end by a segmentation fault."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__ or not (is_fake(args[0]) or type(args[0]) is Tensor):
            return func(*args, **(kwargs or {}))
        x, memo = args
        if id(x) not in memo:
            memo[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
        return memo[id(x)]


def forget_fakes(mode: FakeTensorMode) -> None:
    """Let a mode forget the tensors it made. It keeps weak references to them (2.13), which `torch.utils.swap_tensors`
    refuses."""
    mode.fake_tensor_converter.meta_converter.tensor_memo.clear()


def attributes_of_fakes(x: Tensor) -> frozenset[str]:
    """The attributes that a fake tensor has by itself; whatever else it has, somebody gave it. They have no public
    names (2.13)."""
    if not is_fake(x):
        return frozenset()
    with fake_tensor_mode():
        return frozenset(vars(torch.empty(0)))


# ---------------------------------------------------------------- grouped products
# torch's shape function for them refuses all dtypes but bfloat16, while the operation itself takes others (2.13).


def fake_tensor_mode(allow_non_fake_inputs: bool = False) -> FakeTensorMode:
    """A mode that knows grouped products. No class of its own: by torch's, operations of higher order (FlexAttention)
    find what they do in it."""
    mode = FakeTensorMode(allow_non_fake_inputs=allow_non_fake_inputs)
    know_grouped_products(mode)
    return mode


def know_grouped_products(mode: FakeTensorMode) -> None:
    """`dispatch` is what `__torch_dispatch__` calls."""
    dispatch = mode.dispatch

    def knowing(func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if _is_refused(func, args):
            with mode:
                return _grouped_product(*args, **(kwargs or {}))
        return dispatch(func, types, args, kwargs or {})

    mode.__dict__["dispatch"] = knowing


class GroupedProductsOnMeta(TorchDispatchMode):
    """A mode that knows grouped products of tensors on the meta device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if _is_refused(func, args) and args[0].is_meta:
            return _grouped_product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _is_refused(func: Any, args: Sequence[Any]) -> bool:
    return func is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16


def _grouped_product(
    x: Tensor, y: Tensor, offs: Tensor | None = None, _: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """A grouped product without data: (rows, n) of (rows, k) and (groups, k, n); (groups, m, n) of two matrices, where
    groups lie along k; where they lie along the columns of y, or both have a dim for them, as of any two matrices."""
    groups: tuple[int, ...] = ()
    if x.dim() == 3 and y.dim() == 3:
        groups = (x.shape[0],)
    elif x.dim() == 2 and y.dim() == 2:
        groups = (0 if offs is None else offs.shape[0],)
    return torch.empty((*groups, x.shape[-2], y.shape[-1]), dtype=out_dtype or x.dtype, device=x.device)
