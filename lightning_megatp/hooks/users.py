"""Which hooks of a LightningModule or a callback are the user's own."""

from __future__ import annotations

from typing import Any

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


def is_users(x: Any, name: str) -> bool:
    """Whether a hook of a module or callback is the user's own."""
    hook = vars(x).get(name, getattr(type(x), name, None))
    module = getattr(hook, "__module__", None) or ""
    return hook is not None and module.split(".")[0] not in ("lightning", "pytorch_lightning", "lightning_megatp")
