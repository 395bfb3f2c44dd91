"""Clipping and the loss scale of fp16, which all ranks have to see alike."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.optim import Optimizer

from lightning_megatp.gradients.norm import clip_by_norm
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.messages import with_article
from lightning_megatp.module import ParallelModule
from lightning_megatp.origins import is_lightnings
from lightning_megatp.shim.lightning import around_clipping
from lightning_megatp.shim.torch import unscale_before_step

_OTHERS = {"FSDPPrecision", "DeepSpeedPrecision", "XLAPrecision"}
"""What only other strategies can carry out."""


def check_precision(plugin: Any, pp: int) -> None:
    """Refuse precision plugins that don't do all of what they say with this strategy.

    Raises:
        ValueError: a precision plugin that would do a part of what it says, or nothing.
    """
    if _OTHERS & {kind.__name__ for kind in type(plugin).__mro__}:
        raise ValueError(
            f"MegaTPStrategy: the precision plugin {type(plugin).__name__} works with its own strategy only. Use"
            f" Trainer(precision={plugin.precision!r}) instead."
        )
    for method in ("pre_backward", "backward") if pp > 1 else ():
        if not is_lightnings(getattr(type(plugin), method)):  # which scales the loss and calls hooks
            raise ValueError(
                f"MegaTPStrategy: the precision plugin {type(plugin).__name__} has its own `{method}`, which would not"
                f" be called: with pp={pp} the pipeline's schedule runs the backward of each microbatch. Do it in"
                " training_step (a factor of the loss) or in on_before_optimizer_step, or use pp=1."
            )


def agree_on_precision(
    plugin: Any, parallel: ParallelModule, mesh: ParallelMesh, optimizers: Iterable[Optimizer]
) -> None:
    """Clip by the norm of the unsplit model, and let all ranks skip a step when one found inf or nan.

    Args:
        plugin: Lightning's precision plugin; changed in place.
        parallel: the module, split and divided.
        mesh: where it is.
        optimizers: of this rank. Where ranks have parts of gradients, the scaler unscales those of fused ones too:
            in their own kernels each rank would skip a step by itself.

    Raises:
        ValueError: a scaler of a kind whose ranks would disagree.
    """
    if parallel.sharding is not None:
        around_clipping(plugin, parallel.sharding.shown.take_over)
    plugin.clip_grad_by_norm = functools.partial(_clip_grad_by_norm, plugin, parallel, mesh)
    plugin.clip_grad_by_value = functools.partial(_clip_grad_by_value, plugin)
    scaler = getattr(plugin, "scaler", None)
    if scaler is None:
        return
    if not isinstance(scaler, ShardedGradScaler):  # that of the user, or of an earlier fit
        plugin.scaler = _shared(scaler, mesh)
    if mesh.size("tp") * mesh.size("pp") > 1 or parallel.divided:
        for optimizer in optimizers:
            unscale_before_step(optimizer)


def _shared(scaler: Any, mesh: ParallelMesh) -> ShardedGradScaler:
    if type(scaler) is not torch.amp.GradScaler:
        raise ValueError(
            f"MegaTPStrategy: the precision plugin's scaler is {with_article(type(scaler).__name__)}, whose ranks"
            " would disagree on skipped steps. Use torch.amp.GradScaler or ShardedGradScaler."
        )
    return ShardedGradScaler(
        mesh.device.type,
        init_scale=scaler.get_scale(),
        growth_factor=scaler.get_growth_factor(),
        backoff_factor=scaler.get_backoff_factor(),
        growth_interval=scaler.get_growth_interval(),
        enabled=scaler.is_enabled(),
        process_group=dist.group.WORLD,
    )


def _clip_grad_by_norm(
    plugin: Any, parallel: ParallelModule, mesh: ParallelMesh, optimizer: Optimizer, clip_val: float
) -> None:
    """Stands in for the precision plugin's method of that name: there is no hook of the strategy for it."""
    clip_by_norm(plugin.main_params(optimizer), clip_val, parallel, mesh)


def _clip_grad_by_value(plugin: Any, optimizer: Optimizer, clip_val: float) -> None:
    """The same of `clip_grad_by_value`. torch's function fails where a pipeline stage trains nothing."""
    held = [parameter for parameter in plugin.main_params(optimizer) if parameter.grad is not None]
    if held:
        torch.nn.utils.clip_grad_value_(held, clip_value=clip_val)
