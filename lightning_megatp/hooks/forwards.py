"""Forwards that hooks run (samples after an epoch) where parameters are divided over data-parallel ranks (zero > 0)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lightning_megatp.gradients.sharding import ZeroSharding
from lightning_megatp.hooks.users import HOOKS, is_users
from lightning_megatp.module import ParallelModule
from lightning_megatp.pipeline.detour import Detour
from lightning_megatp.pipeline.slicing.calls import calls_surrounded

_AROUND_A_STEP = (
    "backward",
    "optimizer_step",
    "zero_grad",
    "optimizer_zero_grad",
    "gradient_clipping",
    "scheduler_step",
)
"""Hooks within a step, of which a backward may need what is gathered."""


class GatheredCalls:
    """Lets modules that a hook calls compute with whole parameters: the outermost call gathers them, as a step does.
    What comes out has no graph, since what it would need for a backward is let go of.

    Args:
        parallel: the divided module.
        sharding: what divides it.

    Communication: that of a validation step for each of these calls; all data-parallel ranks have to do them.
    """

    def __init__(self, parallel: ParallelModule, sharding: ZeroSharding) -> None:
        self._context, self._sharding = parallel.context, sharding
        owners = {owner for parameter in sharding.parameters for owner, _ in parameter.owners}
        inside = tuple(f"{unit}." for unit in sharding.units)
        self._modules = {
            name: module
            for name, module in parallel.module.named_modules()
            if not name.startswith(inside) and not owners.isdisjoint(module.modules())
        }
        self._running = self._without_graph = False

    def around_hooks(self, trainer: Any) -> Iterator[Detour]:
        """Of the module and callbacks, but for those within a step.

        Args:
            trainer: about to run.
        """
        for owner in (trainer.lightning_module, *trainer.callbacks):
            for hook in HOOKS:
                if is_users(owner, hook) and not hook.endswith(_AROUND_A_STEP):
                    yield Detour(owner, hook, functools.partial(self._run, hook))

    def _run(self, hook: str, call: Callable[[], Any]) -> Any:
        around = {module: functools.partial(self._call, name) for name, module in self._modules.items()}
        self._without_graph = False
        try:
            with calls_surrounded(around):
                return call()
        except RuntimeError as error:
            if not self._without_graph or "does not require grad" not in str(error):
                raise
            raise RuntimeError(
                f"MegaTPStrategy: `{hook}` computes gradients of a forward that it runs. Outside of steps, where"
                f" parameters are divided (zero={self._sharding.options.level}), forwards gather them and are run"
                " without gradients. Do it in a step, or take zero=0."
            ) from error

    def _call(self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._running:
            return function(*args, **kwargs)
        if self._context.meet is not None:
            self._context.meet(name or type(self._modules[name]).__name__)
        self._running, self._without_graph = True, self._without_graph or torch.is_grad_enabled()
        try:
            with torch.no_grad(), self._sharding.evaluating():
                return self._sharding.step(functools.partial(function, *args, **kwargs))
        finally:
            self._running = False
