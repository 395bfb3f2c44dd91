"""Clipping by hand: by the norm of one stage's gradients, where that of the model is meant."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_megatp.pipeline.detour import Detour
from lightning_megatp.pipeline.hooks import is_lightnings
from lightning_megatp.shim.torch import tree_leaves, without_mode
from lightning_megatp.tensor.functions import operation_name, operation_names

_HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
_SCALING = operation_names("mul_ div_ _foreach_mul_ _foreach_div_ __imul__ __itruediv__")


def watched_hooks(owners: Iterable[Any], module: nn.Module) -> Iterator[Detour]:
    """Let the user's hooks that may change gradients raise where they scale these by what a stage alone computed, as
    `torch.nn.utils.clip_grad_norm_` does.

    Args:
        owners: the module and the callbacks.
        module: the LightningModule.
    """
    for owner in owners:
        for name in _HOOKS:
            if hasattr(owner, name) and not is_lightnings(owner, name):
                yield Detour(owner, name, functools.partial(_watched, module, name))


def _watched(module: Any, name: str, call: Callable[[], Any]) -> Any:
    mode = _RefusesScaling(module, name)
    ours = Detour(module.trainer.precision_plugin, "clip_grad_by_norm", mode.lifted)  # knows all stages' norms
    try:
        with mode:
            return call()
    finally:
        ours.end()


class _RefusesScaling(TorchFunctionMode):
    def __init__(self, module: nn.Module, hook: str) -> None:
        super().__init__()
        self._module, self._hook = module, hook

    def lifted(self, call: Callable[[], Any]) -> Any:
        with without_mode(self):
            return call()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if operation_name(func) in _SCALING and len(args) > 1 and isinstance(args[1], Tensor) and not args[1].dim():
            scaled = {id(x) for x in tree_leaves(args[0])}
            if any(id(parameter.grad) in scaled for parameter in self._module.parameters()):
                raise RuntimeError(
                    f"MegaTPStrategy: `{self._hook}` scales gradients by a number that each pipeline stage computes of"
                    " its own ones (torch.nn.utils.clip_grad_norm_?), so that stages would be trained differently. Use"
                    " Trainer(gradient_clip_val=...), or self.clip_gradients(optimizer, ...) in"
                    " `configure_gradient_clipping`: they take the norm of the whole model."
                )
        return func(*args, **(kwargs or {}))
