"""Hooks on a unit, or on layers inside of it, that keep what they are given for the step: features for another loss
(REPA, distillation), attention weights.

A unit runs on one stage, and so do its hooks. Those that hand something to the step are called after the unit instead,
on all stages: the unit also returns what they would have been given, so that it is a value like any other.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn

from lightning_megatp.origins import is_frameworks
from lightning_megatp.shim.torch import tree_map
from lightning_megatp.tensor.functions import without_arguments
from lightning_megatp.tensor.shards import gathered


@dataclass(frozen=True)
class Hook:
    """A hook on a module, of the user's."""

    module: nn.Module
    holder: dict[int, Callable[..., Any]]
    key: int
    call: Callable[..., Any]

    @property
    def code(self) -> Any:
        """What the hooks of one line of code share: a step may register them anew each time."""
        function = without_arguments(self.call)
        function = getattr(function, "__func__", function)
        return getattr(function, "__code__", type(function))


class UserHooks:
    """Finds the hooks that users have put on units.

    Args:
        module: the whole.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def of(self, unit: str) -> list[Hook]:
        """The user's hooks around forwards of a unit and its parts, in an order that is the same on all stages."""
        return self._found(unit, lambda module: (module._forward_pre_hooks, module._forward_hooks))

    def keeping(self, units: Iterable[str], handed_on: Collection[Any]) -> list[str]:
        """The modules with hooks that keep what they see, for later than the step.

        Args:
            units: whose hooks.
            handed_on: codes of those that keep it for the step.
        """
        names = {id(x): name for name, x in self._module.named_modules()}
        found = (hook for unit in units for hook in (*self.of(unit), *self._of_backward(unit)))
        hooks = (hook for hook in found if hook.code not in handed_on and keeps(hook.code))
        return list(dict.fromkeys(names[id(hook.module)] for hook in hooks))

    def _of_backward(self, unit: str) -> list[Hook]:
        return self._found(unit, lambda module: (module._backward_pre_hooks, module._backward_hooks))

    def _found(self, unit: str, holders: Callable[[nn.Module], Iterable[dict[int, Callable[..., Any]]]]) -> list[Hook]:
        return [
            hook
            for module in self._module.get_submodule(unit).modules()
            for holder in holders(module)
            for hook in [Hook(module, holder, key, call) for key, call in holder.items()]
            if not is_frameworks(without_arguments(hook.call), "transformers")
        ]

    def late(self, unit: str, codes: Collection[Any]) -> LateCalls:
        """The calls, after a unit, of its hooks with one of these codes."""
        return LateCalls([hook for hook in self.of(unit) if hook.code in codes] if codes else [])


@dataclass
class LateCalls:
    """The calls of hooks after one call of a unit.

    Args:
        hooks: that are called after it.
    """

    hooks: Sequence[Hook]
    _given: Sequence[tuple[int, Any]] = ()

    def carried(self, carry_out: Callable[..., Any]) -> Callable[..., Any]:
        """`carry_out(function, *told)` for a function that also returns what the hooks would have been given."""
        if not self.hooks:
            return carry_out

        def carry(function: Callable[..., Any], *told: Any) -> Any:
            out, self._given = carry_out(functools.partial(self._noting, function), *told)
            return out

        return carry

    def run(self) -> list[Any]:
        """Call the hooks, and return what they return."""
        return [self.hooks[i].call(self.hooks[i].module, *given) for i, given in self._given]

    def _noting(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, list[tuple[int, Any]]]:
        given: list[tuple[int, Any]] = []

        def note(i: int, _: nn.Module, *what: Any) -> None:
            given.append((i, what))

        with replaced(self.hooks, [functools.partial(note, i) for i in range(len(self.hooks))]):
            out = function(*args, **kwargs)
        return out, tree_map(gathered, given)


def keeps(code: Any) -> bool:
    """Whether a hook looks like one that keeps what it sees, as its code says: it adds to a container, or sets
    something and returns nothing."""
    if not isinstance(code, CodeType):
        return False
    if not _ADDS.isdisjoint(code.co_names):
        return True
    steps = list(dis.get_instructions(code))
    returns = [before for before, at in itertools.pairwise(steps) if at.opname == "RETURN_VALUE"]
    sets = any(step.opname in _SETS for step in steps)
    return sets and all(step.opname == "LOAD_CONST" and step.argval is None for step in returns)


_ADDS = frozenset({"append", "appendleft", "extend", "setdefault", "update"})
_SETS = frozenset({"STORE_SUBSCR", "STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF"})


@contextlib.contextmanager
def replaced(hooks: Sequence[Hook], others: Sequence[Callable[..., Any]]) -> Iterator[None]:
    """Meanwhile others are called in their place."""
    for hook, other in zip(hooks, others, strict=True):
        hook.holder[hook.key] = other
    try:
        yield
    finally:
        for hook in hooks:
            hook.holder[hook.key] = hook.call
