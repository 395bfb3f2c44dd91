"""From shards to full tensors and back: the state dicts of a `.ckpt` that any Lightning Trainer loads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatp.module import ParallelModule
from lightning_megatp.plan.shard import ShardedTensorSpec
from lightning_megatp.tensor.parameters import gather_shards


def full_state_dict(state: Mapping[str, Any], parallel: ParallelModule, keep: bool) -> dict[str, Any]:
    """A module's state dict with full tensors, on the CPU where they were gathered.

    Args:
        state: `module.state_dict()`, which the user may have overridden.
        keep: whether this rank wants the result; the others help to gather, one tensor at a time.

    Communication: one all-gather over tp per sharded entry; every rank of the group has to call it.
    """
    by_storage = {p.data_ptr(): spec for name, p in parallel.names.items() if (spec := parallel.spec_of(name))}
    full: dict[str, Any] = {}
    for name, value in state.items():
        spec = parallel.spec_of(name)
        if spec is None and isinstance(value, Tensor) and value.numel() > 0:
            spec = by_storage.get(value.data_ptr())  # a user's state_dict() may rename entries
        if spec is not None:
            value = gather_shards(value, spec, parallel.context.group)
            value = value.cpu() if keep else None
        full[name] = value
    return full if keep else {}


def local_state_dict(state: Mapping[str, Any], parallel: ParallelModule) -> dict[str, Any]:
    """This rank's part of a full state dict.

    Raises:
        RuntimeError: a sharded entry whose shape isn't that of the model; nothing was changed then.
    """
    local = dict(state)
    wrong = []
    for name, value in state.items():
        spec = parallel.spec_of(name)
        if spec is None or not isinstance(value, Tensor):
            continue
        if tuple(value.shape) != spec.shape:
            wrong.append(f"`{name}` is {tuple(value.shape)} in the checkpoint and {spec.shape} in the model")
        else:
            local[name] = spec.spec(parallel.context.rank).take(value)
    if wrong:
        raise RuntimeError(
            f"MegaTPStrategy: the checkpoint does not fit the model: {'; '.join(wrong)}. Build the model with the"
            " hyperparameters it was saved with, or load another checkpoint."
        )
    return local


def full_optimizer_state(optimizer: Optimizer, parallel: ParallelModule, keep: bool) -> dict[str, Any]:
    """An optimizer's state dict with full tensors, where `keep` says that this rank wants it.

    Communication: one all-gather over tp per sharded state tensor; every rank of the group has to call it.
    """

    def gather(value: Tensor, spec: ShardedTensorSpec) -> Tensor | None:
        if value.shape != spec.spec(parallel.context.rank).local_shape:
            return value
        full = gather_shards(value, spec, parallel.context.group)
        return full.cpu() if keep else None

    state = _map_state(optimizer.state_dict(), optimizer, parallel, gather)
    return state if keep else {}


def local_optimizer_state(state: Mapping[str, Any], optimizer: Optimizer, parallel: ParallelModule) -> dict[str, Any]:
    """This rank's part of a full optimizer state dict."""

    def take(value: Tensor, spec: ShardedTensorSpec) -> Tensor:
        return spec.spec(parallel.context.rank).take(value) if tuple(value.shape) == spec.shape else value

    return _map_state(state, optimizer, parallel, take)


def _map_state(
    state: Mapping[str, Any],
    optimizer: Optimizer,
    parallel: ParallelModule,
    change: Callable[[Tensor, ShardedTensorSpec], Tensor | None],
) -> dict[str, Any]:
    """Apply a change to the state tensors of sharded parameters; the state dict numbers parameters in group order."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    changed = dict(state["state"])
    with torch.no_grad():
        for index, parameter in enumerate(parameters):
            spec = parallel.spec(parameter)
            if spec is not None and index in changed:
                changed[index] = {
                    key: change(value, spec) if isinstance(value, Tensor) and value.dim() else value
                    for key, value in changed[index].items()
                }
    return {**state, "state": changed}
