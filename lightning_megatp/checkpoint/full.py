"""From shards to full tensors and back: the state dicts of a `.ckpt` that any Lightning Trainer loads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_megatp.containers import parameters_of
from lightning_megatp.module import ParallelModule
from lightning_megatp.places import address
from lightning_megatp.shim.torch import tree_map
from lightning_megatp.tensor.parameters import gather_shards


def full_state_dict(state: Mapping[str, Any], parallel: ParallelModule, keep: bool) -> dict[str, Any]:
    """A module's state dict with full tensors, on the CPU where they were gathered.

    Args:
        state: `module.state_dict()`, which the user may have overridden.
        keep: whether this rank wants the result; the others help to gather, one tensor at a time.

    Communication: one all-gather over tp per sharded entry; every rank of the group has to call it.
    """
    held = {name: parallel.held(p) for name, p in parallel.names.items()}
    by_storage = {p.data_ptr(): name for name, p in reversed(held.items()) if p.numel() > 0}
    full: dict[str, Any] = {}
    for name, value in state.items():
        value = value.to_local() if isinstance(value, DTensor) else value
        known = name
        if name not in held and isinstance(value, Tensor) and value.numel() > 0:
            known = by_storage.get(address(value), name)  # a user's state_dict() may rename entries
        if known in held:
            spec, divided = parallel.spec_of(known), id(held[known]) in parallel.divided
            value = parallel.of_tensor_rank(held[known], value)
            value = value if spec is None else gather_shards(parallel.to_send(value), spec, parallel.context.group)
            if divided or spec is not None:
                value = value.cpu() if keep else None
        full[name] = value
    return full if keep else {}


def without_data(state: Any) -> Any:
    """A state dict, of a module or an optimizer, with its tensors on the meta device."""
    return tree_map(lambda x: x.detach().to("meta") if isinstance(x, Tensor) else x, state)


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

    def gather(value: Tensor, parameter: Tensor) -> Tensor | None:
        if value.shape != parameter.shape:
            return value
        full = parallel.whole_value(parameter, value)
        return full.cpu() if keep else None

    state = _map_state(type(optimizer).state_dict(optimizer), optimizer, parallel, gather)
    return state if keep else {}


def local_optimizer_state(state: Mapping[str, Any], optimizer: Optimizer, parallel: ParallelModule) -> dict[str, Any]:
    """This rank's part of a full optimizer state dict."""

    def take(value: Tensor, parameter: Tensor) -> Tensor:
        return parallel.part_of(parameter, value) if value.shape == parallel.whole_shape(parameter) else value

    return _map_state(state, optimizer, parallel, take)


def _map_state(
    state: Mapping[str, Any],
    optimizer: Optimizer,
    parallel: ParallelModule,
    change: Callable[[Tensor, Tensor], Tensor | None],
) -> dict[str, Any]:
    """Apply a change to the state tensors of split and divided parameters; the state dict numbers parameters in the
    order of the groups."""
    parameters = parameters_of(optimizer)
    changed = dict(state["state"])
    with torch.no_grad():
        for index, parameter in enumerate(parameters):
            partly = parallel.spec(parameter) is not None or id(parameter) in parallel.divided
            if partly and index in changed:
                one = functools.partial(_changed, parameter=parameter, change=change)
                changed[index] = {key: tree_map(one, value) for key, value in changed[index].items()}
    return {**state, "state": changed}


def _changed(value: Any, parameter: Tensor, change: Callable[[Tensor, Tensor], Tensor | None]) -> Any:
    """One value of a parameter's state after a change. There may be several in a list: AggMo has a tensor for each
    beta."""
    return change(value, parameter) if isinstance(value, Tensor) and value.dim() else value
