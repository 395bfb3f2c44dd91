"""Forwards that hooks run between steps (samples after an epoch), where parameters are divided or on stages."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from lightning_megatp.calls import calls_surrounded
from lightning_megatp.detour import Detour
from lightning_megatp.module import ParallelModule
from lightning_megatp.user_hooks import Hook
from lightning_megatp.zero.sharding import ZeroSharding

_AROUND_A_STEP = ("backward", "optimizer_step", "zero_grad", "gradient_clipping", "scheduler_step")
"""Ends of the names of hooks within a step, of which a backward may need what is gathered."""


class Forwards:
    """Lets the user's hooks between steps run forwards, without a graph.

    Args:
        running: a context, given the hook's name, in which modules may be called.
    """

    def __init__(self, running: Callable[[str], contextlib.AbstractContextManager[None]]) -> None:
        self._running = running

    def around(self, hooks: Iterable[Hook]) -> Iterator[Detour]:
        """Detours around the user's hooks, but for those within a step."""
        for owner, hook in hooks:
            if not hook.endswith(_AROUND_A_STEP):
                yield Detour(owner, hook, functools.partial(self._run, hook))

    def _run(self, hook: str, call: Callable[[], Any]) -> Any:
        try:
            with self._running(hook):
                return call()
        except RuntimeError as error:
            if "does not require grad" not in str(error):
                raise
            raise RuntimeError(
                f"MegaTPStrategy: `{hook}` computes gradients of what needs none. If that is of a forward that it runs:"
                " with zero > 0 or pp > 1, forwards outside of steps are run without gradients. Do it in a step."
            ) from error


class GatheredCalls:
    """Lets modules that a hook calls compute with whole parameters: the outermost call gathers them, as a step does.
    What comes out has no graph, since what it would need for a backward is let go of.

    Args:
        parallel: the divided module, not cut into stages.
        sharding: what divides it.

    Communication: that of a validation step for each of these calls; all data-parallel ranks have to do them.
    """

    def __init__(self, parallel: ParallelModule, sharding: ZeroSharding) -> None:
        self._context, self._sharding = parallel.context, sharding
        owners = {owner for parameter in sharding.parameters for owner, _ in parameter.owners}
        inside = tuple(f"{unit}." for unit in sharding.units)
        self._around = {
            module: functools.partial(self._call, name or type(module).__name__)
            for name, module in parallel.module.named_modules()
            if not name.startswith(inside) and not owners.isdisjoint(module.modules())
        }
        self._inside = False

    def running(self, hook: str) -> contextlib.AbstractContextManager[None]:
        """Around a hook."""
        return calls_surrounded(self._around)

    def _call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inside:
            return function(*args, **kwargs)
        self._context.meet(name)
        self._inside = True
        try:
            with torch.no_grad():
                return self._sharding.between_steps(functools.partial(function, *args, **kwargs))
        finally:
            self._inside = False
