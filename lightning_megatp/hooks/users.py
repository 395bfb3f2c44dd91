"""Which hooks of a LightningModule or a callback are the user's own."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial, partialmethod
from types import CodeType, FunctionType, MethodType
from typing import Any

from lightning_megatp.pipeline.detour import Detour

HOOKS = (
    *("on_fit_start", "on_fit_end", "on_sanity_check_start", "on_sanity_check_end"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
    *("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"),
    *(f"on_{kind}_model_{mode}" for kind in ("validation", "test", "predict") for mode in ("eval", "train")),
    *(
        f"on_{kind}_{moment}"
        for kind in ("train", "validation", "test", "predict")
        for moment in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
    ),
)
"""Those which find this rank's parts of the weights."""

_DEEP = 8
"""Decorators around a function, at most."""
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "lightning_megatp", "torchmetrics")


def is_users(x: Any, name: str) -> bool:
    """Whether a hook of a module or callback is the user's own."""
    hook = vars(x).get(name, getattr(type(x), name, None))
    module = getattr(hook, "__module__", None) or ""
    return hook is not None and module.split(".")[0] not in ("lightning", "pytorch_lightning", "lightning_megatp")


def mentions(owner: Any, names: Collection[str], hook: str | None = None) -> bool:
    """Whether the user's code on an object, with the functions and own methods that it calls, has to do with attributes
    or functions of some names.

    Args:
        owner: a module or callback.
        names: those.
        hook: only this method, with what it calls; None for all.
    """
    held: dict[str, Any] = {}
    for x in (*reversed(type(owner).__mro__), owner):
        held.update(vars(x))
    seen: set[CodeType] = set()
    own = {_package(kind) for kind in type(owner).__mro__}

    def found_in(x: Any) -> bool:
        function = function_of(x)
        if function is None or function.__code__ in seen:
            return False
        if "site-packages" in function.__code__.co_filename and _package(function) not in own:
            return False  # a library, which does what it does for other reasons
        words = _words(function.__code__, seen)
        called = (places.get(word) for word in words for places in (function.__globals__, held))
        return not words.isdisjoint(names) or any(map(found_in, called))

    return any(map(found_in, held.values() if hook is None else [held.get(hook)]))


def function_of(x: Any) -> FunctionType | None:
    """A function that the user wrote, of what stands for it: a method, a decorated one, a detour."""
    for _ in range(_DEEP):
        if isinstance(x, (staticmethod, classmethod, MethodType)):
            x = x.__func__
        elif isinstance(x, property):
            x = x.fget
        elif isinstance(x, (partial, partialmethod)):
            x = x.func
        elif isinstance(x, (FunctionType, Detour)) and hasattr(x, "__wrapped__"):
            x = x.__wrapped__
    return x if isinstance(x, FunctionType) and _package(x) not in _LIBRARIES else None


def _package(x: Any) -> str:
    return (getattr(x, "__module__", None) or "").split(".")[0]


def _words(code: CodeType, seen: set[CodeType]) -> set[str]:
    """The names and strings in a function's code, and in that of functions inside of it."""
    seen.add(code)
    words = {*code.co_names, *code.co_freevars, *(c for c in code.co_consts if isinstance(c, str))}
    return words.union(*(_words(c, seen) for c in code.co_consts if isinstance(c, CodeType)))
