"""Where the user's code clips and clears gradients by functions of torch, which find parts of them.

`torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` are mostly imported by name. Each is a wrapper that calls a
function in its closure under `no_grad`: a cell without a public name (2.11-2.15).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from lightning_megatp.shim.standing import Standing


class ClipCall:
    """A call of one of the two functions.

    Args:
        function: it, bare.
        args: its arguments.
        kwargs: those by name.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._function = function
        self._given = inspect.signature(function).bind(*args, **kwargs).arguments
        self.is_of_one = isinstance(self._given["parameters"], Tensor)
        """Whether it is given one parameter, and no list."""
        self.parameters: list[Any] = [self._given["parameters"]] if self.is_of_one else [*self._given["parameters"]]

    @property
    def limit(self) -> float | None:
        """The largest norm; None where values are clipped."""
        return None if "clip_value" in self._given else float(self._given["max_norm"])

    @property
    def order(self) -> float:
        """The order of the norm."""
        return float(self._given.get("norm_type", 2.0))

    @property
    def has_to_be_finite(self) -> bool:
        """Whether any other norm is an error."""
        return bool(self._given.get("error_if_nonfinite"))

    def of(self, parameters: Sequence[Any]) -> Any:
        """Do it as torch does, to other parameters."""
        return self._function(**{**self._given, "parameters": parameters})

    def check_known(self, known: int) -> None:
        """See whether all parameters that the call is about are the module's.

        Args:
            known: how many of its parameters are the module's.

        Raises:
            RuntimeError: not all, and a rank may have parts of those.
        """
        if known < len(self.parameters):
            raise RuntimeError(
                "MegaTPStrategy: the step clips gradients of the module's parameters, of which a rank may have parts,"
                " together with those of other tensors. Clip them in two calls."
            )


@contextlib.contextmanager
def clipping_by(clip: Callable[[ClipCall], Any]) -> Iterator[None]:
    """Let calls of `torch.nn.utils.clip_grad_norm_` and `clip_grad_value_` go another way, by whatever name they were
    imported."""
    before = [(cell, cell.cell_contents) for cell, _ in _CLIPPING]

    def other(bare: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: clip(ClipCall(bare, args, kwargs))

    for cell, bare in _CLIPPING:
        cell.cell_contents = other(bare)
    try:
        yield
    finally:
        for cell, called in before:
            cell.cell_contents = called


def _cell(function: Any) -> Any:
    """Where a wrapper finds what it wraps."""
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)).get("func")


_FUNCTIONS: tuple[Any, ...] = clip_grad_norm_, clip_grad_value_
_CLIPPING = [
    (cell, function.__wrapped__)
    for function in _FUNCTIONS
    if (cell := _cell(function)) is not None  # else they do what they do, and are refused where that is wrong
]


_clearing = Standing()


@functools.cache
def _ask_always() -> None:
    """Ask `_clearing` in all calls of modules' `zero_grad`, for good."""
    bare = nn.Module.zero_grad

    @functools.wraps(bare)
    def zero_grad(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _clearing.call(self, bare, (self, *args), kwargs)

    nn.Module.zero_grad = zero_grad  # type: ignore[method-assign]


def zero_grad_by(zero_grad: Callable[[functools.partial[Any]], Any]) -> contextlib.AbstractContextManager[None]:
    """Let calls of any module's `zero_grad()` go another way.

    Args:
        zero_grad: is given a call; its first argument is the module.
    """
    _ask_always()
    return _clearing.by(lambda module, work, args, kwargs: zero_grad(functools.partial(work, *args, **kwargs)))
