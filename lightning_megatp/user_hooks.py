"""Which hooks of a LightningModule or a callback are the user's own."""

from __future__ import annotations

import dis
from collections.abc import Collection, Iterable, Iterator
from functools import partial, partialmethod
from types import CodeType, FunctionType, MethodType
from typing import Any

from lightning_megatp.detour import Detour
from lightning_megatp.origins import THIS_PACKAGE, is_frameworks, is_installed, is_lightnings, package_of
from lightning_megatp.steps import EVALUATION, StepKind

HOOKS = (
    *("on_fit_start", "on_fit_end", "on_sanity_check_start", "on_sanity_check_end"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_before_zero_grad"),
    *("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"),
    *(kind.hook(f"model_{mode}") for kind in EVALUATION for mode in ("eval", "train")),
    *(
        kind.hook(moment)
        for kind in StepKind
        for moment in ("start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end")
    ),
)
"""Hooks during which the module's parameters are this rank's parts."""
STEP_IN_HOOK = ("optimizer_step", "training_step", "backward")
"""Methods of the strategy that have the step in them, of those that an `optimizer_step` of the user's calls: by
`super()` or the optimizer, or by the closure alone (a batch of which the gradients are left for the next)."""
Hook = tuple[Any, str]
"""Whose it is, a LightningModule's or a callback's, and which."""

_BEHIND = {
    "on_predict_batch_end": ("write_on_batch_end",),
    "on_predict_epoch_end": ("write_on_epoch_end",),
    "on_train_epoch_start": ("finetune_function",),
}
"""Hooks of Lightning's BasePredictionWriter and BaseFinetuning -> the methods of a user's subclass that they call."""
_RANKS = frozenset(["is_global_zero", "global_rank", "local_rank", "get_rank"])
_DEEP = 8
"""Decorators around a function, at most."""


def is_users(x: Any, name: str) -> bool:
    """Whether a hook of a module or callback is the user's own, or one of Lightning's that runs the user's code."""
    return any(_is_own(x, hook) for hook in (name, *_BEHIND.get(name, ())))


def users_hooks(owners: Iterable[Any], hooks: Collection[str] = HOOKS) -> Iterator[Hook]:
    """Which hooks of modules and callbacks are the user's own."""
    return ((owner, hook) for owner in owners for hook in hooks if is_users(owner, hook))


def _is_own(x: Any, name: str) -> bool:
    hook = vars(x).get(name, getattr(type(x), name, None))
    return hook is not None and not (is_lightnings(hook) or package_of(hook) == THIS_PACKAGE)


def mentions(owner: Any, names: Collection[str], hook: str | None = None) -> bool:
    """Whether the user's code on an object, with the functions and own methods that it calls, has to do with attributes
    or functions of some names.

    Args:
        owner: a module or callback.
        names: those.
        hook: only this method, with what it calls; None for all.
    """
    return any(not words_of(code).isdisjoint(names) for code in codes_of(owner, hook))


def codes_of(owner: Any, hook: str | None) -> Iterator[CodeType]:
    """The user's code on an object, with that of the functions and own methods that it calls; without what lies inside
    of functions, which `words_of` looks into.

    Args:
        owner: a module or callback.
        hook: only this method, with what it calls; None for all.
    """
    return (function.__code__ for _, function in _functions_of(owner, hook))


def is_for_rank_zero(owner: Any, hook: str) -> bool:
    """Whether a hook, or what it calls, may do something on rank 0 only: asks `is_global_zero` or for a rank, or is
    decorated by Lightning's `rank_zero_only`."""
    for stands_in, function in _functions_of(owner, hook):
        decorator = getattr(stands_in, "__code__", None) if stands_in is not function else None
        if not _RANKS.isdisjoint(words_of(function.__code__)):
            return True
        if decorator is not None and "rank_zero_only" in decorator.co_names:
            return True
    return False


def _functions_of(owner: Any, hook: str | None) -> Iterator[tuple[Any, FunctionType]]:
    """What stands for a function, and the function."""
    held: dict[str, Any] = {}
    for x in (*reversed(type(owner).__mro__), owner):
        held.update(vars(x))
    seen: set[CodeType] = set()
    own = {package_of(kind) for kind in type(owner).__mro__}
    waiting = list(held.values()) if hook is None else [held.get(x) for x in (hook, *_BEHIND.get(hook, ()))]
    while waiting:
        stands_in = waiting.pop()
        function = function_of(stands_in)
        if function is None or function.__code__ in seen:
            continue
        if is_installed(function.__code__) and package_of(function) not in own:
            continue  # a library, which does what it does for other reasons
        seen.add(function.__code__)
        yield stands_in, function
        for word in words_of(function.__code__):
            waiting += [places.get(word) for places in (function.__globals__, held)]


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
    return x if isinstance(x, FunctionType) and not is_frameworks(x, "torchmetrics") else None


def words_of(code: CodeType) -> set[str]:
    """The names and strings in a function's code, and in that of functions inside of it."""
    words = {*code.co_names, *code.co_freevars, *(c for c in code.co_consts if isinstance(c, str))}
    return words.union(*(words_of(c) for c in code.co_consts if isinstance(c, CodeType)))


def stored_in(code: CodeType) -> set[str]:
    """The names of the attributes, of whatever object, that a function's code sets, and functions inside of it."""
    stored = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_ATTR"}
    return stored.union(*(stored_in(c) for c in code.co_consts if isinstance(c, CodeType)))


def loaded_in(code: CodeType) -> set[str]:
    """The names of the attributes, of whatever object, that a function's code reads, and functions inside of it."""
    loaded = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_ATTR", "LOAD_METHOD")}
    return loaded.union(*(loaded_in(c) for c in code.co_consts if isinstance(c, CodeType)))
