"""State dicts of a model whose layers are on several pipeline stages: put together for a checkpoint, and taken apart.

An optimizer's state numbers parameters. The whole model's numbers are those of one device: in the order in which the
user gave them to the optimizer. Groups that came later list theirs in the order of `named_parameters()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer

from lightning_megatp.checkpoint.contents import group_names, numbered_groups
from lightning_megatp.checkpoint.full import local_state_dict
from lightning_megatp.mesh import ParallelMesh, on_cpu
from lightning_megatp.module import ParallelModule
from lightning_megatp.shim.fakes import is_fake


def gather_state_dict(state: dict[str, Any], parallel: ParallelModule, mesh: ParallelMesh) -> dict[str, Any]:
    """The whole model's state dict on global rank 0, from each stage's; empty elsewhere.

    Args:
        state: of this stage, with full tensors; only tensor rank 0's counts.

    Communication: one object gather over pp, of all values.
    """
    if mesh.rank("tp") > 0 or mesh.rank("dp") > 0:
        return {}
    by_stage = _gather(state, mesh)
    # What several stages hold is the last one's: only there do steps change metrics, and buffers outside of modules.
    merged = {name: value for stage in reversed(by_stage) for name, value in stage.items()}
    known = {name: merged[name] for name in parallel.order if name in merged}
    return known | {name: value for name, value in merged.items() if name not in known}


def held_entries(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict without what stands for other stages' parameters. Modules that put their own into it (PyTorch
    Geometric's `Linear`) don't leave these out by themselves."""
    return {name: value for name, value in state.items() if not is_fake(value)}


def own_state_dict(state: Mapping[str, Any], parallel: ParallelModule) -> dict[str, Any]:
    """What this stage has of a whole state dict; names that no stage knows stay, so that loading reports them."""
    with parallel.parts_expected():
        own = held_entries(parallel.module.state_dict(keep_vars=True)).keys()
    elsewhere = set(parallel.order) - set(own)
    return {name: value for name, value in state.items() if name not in elsewhere}


def load_own(state: Mapping[str, Any], parallel: ParallelModule, load: Callable[[dict[str, Any]], Any]) -> Any:
    """Load into a split module what this rank holds of a whole state dict.

    Args:
        load: the module's own `load_state_dict`.
    """
    own = local_state_dict(state, parallel)
    parallel.buffer_versions = None
    if parallel.order:
        own = own_state_dict(own, parallel)
    if parallel.divided:
        rest = parallel.load_rows(own)
        own = rest | {name: parallel.names[name].detach() for name in own if name not in rest}
    return load(own)


def gather_optimizer_state(
    state: dict[str, Any], optimizer: Optimizer, order: list[str], parallel: ParallelModule, mesh: ParallelMesh
) -> dict[str, Any]:
    """An optimizer's state for the whole model on global rank 0, from each stage's; empty elsewhere.

    Args:
        order: of the parameters' names, as on one device.

    Communication: one object gather over pp, of all values.
    """
    if mesh.rank("tp") > 0 or mesh.rank("dp") > 0:
        return {}
    names = group_names(optimizer, parallel)
    flat = [name for group in names for name in group]
    by_name = {flat[index]: value for index, value in state["state"].items()}
    by_stage = _gather({"names": names, "by_name": by_name, "groups": state["param_groups"], "rest": state}, mesh)
    if not by_stage:
        return {}
    numbers = _numbers([stage["names"] for stage in by_stage], [*order, *parallel.order])
    merged = {name: value for stage in by_stage for name, value in stage["by_name"].items()}
    groups = []
    for index, group in enumerate(by_stage[0]["groups"]):
        members = [name for name, (of, _) in numbers.items() if of == index]
        groups.append({**group, "params": [numbers[name][1] for name in members]})
        if "param_names" in group:
            groups[-1]["param_names"] = members
    whole = {numbers[name][1]: value for name, value in merged.items()}
    return {**state, "state": dict(sorted(whole.items())), "param_groups": groups}


def own_optimizer_state(
    state: Mapping[str, Any], optimizer: Optimizer, order: list[str], parallel: ParallelModule, mesh: ParallelMesh
) -> dict[str, Any]:
    """What this stage has of a whole model's optimizer state.

    Args:
        order: of the parameters' names, as on one device.

    Raises:
        RuntimeError: the checkpoint's groups hold other numbers of parameters than the optimizer's.

    Communication: one object all-gather over pp, of names.
    """
    names = group_names(optimizer, parallel)
    by_stage = mesh.exchange(names, "pp")
    numbers = _numbers(by_stage, [*order, *parallel.order])
    saved = [len(group["params"]) for group in state["param_groups"]]
    wanted = [sum(of == index for of, _ in numbers.values()) for index in range(len(names))]
    if saved != wanted:
        raise RuntimeError(
            f"MegaTPStrategy: the checkpoint's optimizer has groups of {saved} parameters, and this one's are {wanted}."
            " Configure the optimizer as it was when the checkpoint was saved."
        )
    flat = [name for group in names for name in group]
    own = {i: state["state"][numbers[name][1]] for i, name in enumerate(flat) if numbers[name][1] in state["state"]}
    return {**state, "state": own, "param_groups": numbered_groups(state["param_groups"], names)}


def _numbers(by_stage: list[list[list[str]]], order: list[str]) -> dict[str, tuple[int, int]]:
    """Parameter name -> its group, and its number on one device."""
    place = {name: index for index, name in enumerate(dict.fromkeys(order))}
    numbers: dict[str, tuple[int, int]] = {}
    for group in range(len(by_stage[0])):
        members = sorted({name for stage in by_stage for name in stage[group]}, key=place.__getitem__)
        for stage in by_stage:
            if stage[group] != sorted(stage[group], key=place.__getitem__):
                raise RuntimeError(
                    "MegaTPStrategy: a group added to an optimizer lists its parameters in another order than"
                    " `named_parameters()`, so its state can't be numbered over pipeline stages. Build the group in"
                    " that order."
                )
        for name in members:
            numbers[name] = group, len(numbers)
    return numbers


def _gather(value: Any, mesh: ParallelMesh) -> list[Any]:
    """The stages' values on the rank of the last stage, tensors on the CPU; nothing elsewhere."""
    gathered: list[Any] | None = [None] * mesh.size("pp") if mesh.is_last_stage else None
    dist.gather_object(on_cpu(value), gathered, dst=mesh.ranks("pp")[0], group=mesh.hosts("pp"))
    return gathered or []
