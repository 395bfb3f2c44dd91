"""State dicts in which every rank holds its own part: what a folder is saved from, and loaded into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_megatp.checkpoint.agree import together
from lightning_megatp.checkpoint.chunks import Chunks, whole
from lightning_megatp.checkpoint.contents import (
    MODEL,
    Entry,
    group_names,
    model_entries,
    numbered_groups,
    optimizer_entries,
    state_spec,
)
from lightning_megatp.checkpoint.folder import Folder
from lightning_megatp.checkpoint.stages import held_entries
from lightning_megatp.containers import parameters_of
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.messages import with_article
from lightning_megatp.module import ParallelModule
from lightning_megatp.shim.torch import tree_leaves

NOT_TENSORS = "not_tensors"
"""Key, in `meta.pt`, of what else a module's state dict holds."""
ELSEWHERE = "tensors_elsewhere"
"""Key of where else in Lightning's checkpoint tensors of all ranks belong: name in the folder -> keys."""


def sharded_state_dict(state: Mapping[str, Any], parallel: ParallelModule, mesh: ParallelMesh) -> dict[str, Any]:
    """A module's state dict with this rank's Chunks as values; what isn't a tensor is collected from all stages.

    Communication: at pp > 1 one object all-gather of what isn't a tensor, over pp.
    """
    found: dict[str, Any] = {entry.name: entry.to_write(mesh) for entry in model_entries(state, parallel)}
    others = {name: value for name, value in state.items() if name not in found}
    return found | {name: value for stage in reversed(_over_stages(others, mesh)) for name, value in stage.items()}


def sharded_optimizer_state(
    optimizer: Optimizer, order: Sequence[str], parallel: ParallelModule, mesh: ParallelMesh
) -> dict[str, Any]:
    """An optimizer's state dict by names: this rank's Chunks; groups and what isn't a tensor from all stages.

    Args:
        order: of the parameters' names on all stages, as on one device.

    Raises:
        RuntimeError: a state holds parts of tensors in a dict or list.

    Communication: at pp > 1 one object all-gather of names and numbers, over pp.
    """
    names = group_names(optimizer, parallel)
    others = {
        f"{name}.{key}": value
        for group, of_group in zip(optimizer.param_groups, names, strict=True)
        for name, parameter in zip(of_group, group["params"], strict=True)
        for key, value in optimizer.state.get(parameter, {}).items()
        if not isinstance(value, Tensor)
    }
    for name, value in others.items():
        if any(isinstance(x, Tensor) and x.dim() for x in tree_leaves(value)):
            raise RuntimeError(
                f"MegaTPStrategy: the optimizer's state `{name}` holds tensors in"
                f" {with_article(type(value).__name__)}, which a checkpoint folder has no place for. Use"
                ' checkpoint="file".'
            )
    stages = _over_stages((names, others), mesh)
    place = {name: index for index, name in enumerate(dict.fromkeys([*order, *parallel.order]))}
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        members = list(dict.fromkeys(name for of_stage, _ in stages for name in of_stage[index]))
        if mesh.size("pp") > 1:
            members.sort(key=place.__getitem__)
        groups.append({**group, "params": members})
        if "param_names" in group:
            groups[-1]["param_names"] = members
    state: dict[str, Any] = {entry.name: entry.to_write(mesh) for entry in optimizer_entries(optimizer, parallel)}
    for _, of_stage in reversed(stages):
        state |= of_stage
    return {"state": state, "param_groups": groups}


def split_content(checkpoint: dict[str, Any], mesh: ParallelMesh) -> tuple[dict[str, Chunks], dict[str, Any]]:
    """Lightning's checkpoint as the tensors for all ranks to write, under the names they have in a folder, and the
    rest. Tensors that a user's hook added to the state dict are the first rank's."""
    tensors: dict[str, Chunks] = {}
    rest = {**checkpoint, NOT_TENSORS: {}}
    for name, value in rest.pop("state_dict", {}).items():
        if isinstance(value, Tensor):
            value = Entry(name, whole(name, value), value, trained=False).to_write(mesh)
        if isinstance(value, Chunks):
            tensors[MODEL + name] = value
        else:
            rest[NOT_TENSORS][name] = value
    if "optimizer_states" in rest:
        rest["optimizer_states"] = [dict(state) for state in rest["optimizer_states"]]
    for index, state in enumerate(rest.get("optimizer_states", ())):
        tensors |= {optimizer_name(index, name): x for name, x in state["state"].items() if isinstance(x, Chunks)}
        state["state"] = {name: x for name, x in state["state"].items() if not isinstance(x, Chunks)}
    rest[ELSEWHERE] = {}
    for key in ("current_model_state", "callbacks"):
        if key in rest:
            rest[key] = _without_chunks(rest[key], (key,), tensors, rest[ELSEWHERE])
    return tensors, rest


def elsewhere_on_all_stages(elsewhere: dict[str, Any], mesh: ParallelMesh) -> dict[str, Any]:
    """The places of all stages' tensors, in the order of the stages.

    Communication: at pp > 1 one object all-gather of names, over pp.
    """
    return {name: keys for stage in reversed(_over_stages(elsewhere, mesh)) for name, keys in stage.items()}


def put_back(checkpoint: dict[str, Any], folder: Folder) -> None:
    """Read whole what callbacks have saved of a module, and the module: they load it before the module is split."""
    checkpoint["state_dict"] |= {
        name.removeprefix(MODEL): _read_whole(folder, name) for name in folder.tensors if name.startswith(MODEL)
    }
    for name, keys in checkpoint.pop(ELSEWHERE, {}).items():
        place = checkpoint
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = _read_whole(folder, name)


def _read_whole(folder: Folder, name: str) -> Tensor:
    tensor = torch.empty(tuple(folder.tensors[name].size), dtype=folder.tensors[name].properties.dtype)
    folder.read({name: Chunks.to_read(tensor, whole(name, tensor))})
    return tensor


def _without_chunks(
    value: Any, keys: tuple[Any, ...], tensors: dict[str, Chunks], elsewhere: dict[str, tuple[Any, ...]]
) -> Any:
    if type(value) is not dict:
        return value
    left = {}
    for key, x in value.items():
        if isinstance(x, Chunks):
            name = ".".join(map(str, (*keys, key)))
            tensors[name], elsewhere[name] = x, (*keys, key)
        else:
            left[key] = _without_chunks(x, (*keys, key), tensors, elsewhere)
    return left


def optimizer_name(index: int, name: str = "") -> str:
    """What a state of the index-th optimizer is called in a folder."""
    return f"optimizer.{index}.state.{name}"


def load_sharded_model(
    folder: Folder,
    module: nn.Module,
    parallel: ParallelModule,
    others: Mapping[str, Any],
    strict: bool,
) -> None:
    """Read this rank's part of a model.

    Args:
        others: what of the state dict isn't a tensor.

    Raises:
        RuntimeError: on every rank, before anything is changed: names or shapes differ, a file is damaged.

    Memory: this rank's part once more, in host memory.
    Communication: one object all-gather over the world.
    """
    with together(f"the model was not loaded from {folder.path}"):
        state = held_entries(module.state_dict())
        specs = {x.name: (x.spec, x.tensor.dtype) for x in model_entries(state, parallel)}
        known = set(state) | set(parallel.order)
        saved = {name.removeprefix(MODEL) for name in folder.tensors if name.startswith(MODEL)} | set(others)
        _compare(folder, specs, saved, known, set(state), strict)
        staged = {
            name: torch.empty(spec.local_shape, dtype=dtype) for name, (spec, dtype) in specs.items() if name in saved
        }
        folder.read({MODEL + name: Chunks.to_read(tensor, specs[name][0]) for name, tensor in staged.items()})
    staged = parallel.load_rows(staged)
    others = {name: value for name, value in others.items() if name in state}
    module.load_state_dict({**staged, **others}, strict=False)  # names were compared


def load_sharded_optimizer(
    folder: Folder,
    index: int,
    saved: Mapping[str, Any],
    optimizer: Optimizer,
    parallel: ParallelModule,
    mesh: ParallelMesh,
) -> None:
    """Read this rank's part of an optimizer's state.

    Args:
        index: of the optimizer.
        saved: its entry in `meta.pt`.

    Raises:
        RuntimeError: on every rank, before this optimizer is changed: groups hold other parameters, a file is damaged.

    Communication: one object all-gather over the world; one of names over pp.
    """
    names = group_names(optimizer, parallel)
    stages = _over_stages(names, mesh)
    with together(f"optimizer {index} was not loaded from {folder.path}"):
        _compare_groups(folder, index, saved["param_groups"], stages)
        flat = [name for of_group in names for name in of_group]
        parameters = parameters_of(optimizer)
        state: dict[str, dict[str, Any]] = {name: {} for name in flat}
        targets = {}
        for full_name, stored in folder.tensors.items():
            name, _, key = full_name.removeprefix(optimizer_name(index)).rpartition(".")
            if full_name.startswith(optimizer_name(index)) and name in state:
                parameter = parameters[flat.index(name)]
                spec, stepped = parallel.shard(name, parameter), id(parameter) in parallel.stepped_whole
                spec = state_spec(f"{name}.{key}", tuple(stored.size), spec, spec.shape, stepped)
                state[name][key] = torch.empty(spec.local_shape, dtype=stored.properties.dtype)
                targets[full_name] = Chunks.to_read(state[name][key], spec)
        folder.read(targets)
        for full_name, value in saved["state"].items():
            name, _, key = full_name.rpartition(".")
            if name in state:
                state[name][key] = value
    numbered = {number: state[name] for number, name in enumerate(flat) if state[name]}
    optimizer.load_state_dict({"state": numbered, "param_groups": numbered_groups(saved["param_groups"], names)})


def _compare(
    folder: Folder,
    specs: Mapping[str, tuple[Any, Any]],
    saved: set[str],
    known: set[str],
    own: set[str],
    strict: bool,
) -> None:
    wrong = []
    if strict:
        wrong += [f"`{name}` is in the model alone" for name in sorted(own - saved)]
        wrong += [f"`{name}` is in the checkpoint alone" for name in sorted(saved - known)]
    for name in sorted(specs.keys() & saved):
        size, spec = tuple(folder.tensors[MODEL + name].size), specs[name][0]
        if size != spec.shape:
            wrong.append(f"`{name}` is {size} in the checkpoint and {spec.shape} in the model")
    if wrong:
        more = f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise RuntimeError(
            f"MegaTPStrategy: the checkpoint {folder.path} does not fit the model: {'; '.join(wrong[:8])}{more}. Build"
            " the model with the hyperparameters it was saved with, or load another checkpoint; `strict_loading ="
            " False` of the LightningModule allows names to differ."
        )


def _compare_groups(folder: Folder, index: int, saved: list[dict[str, Any]], stages: list[list[list[str]]]) -> None:
    here = [{name for stage in stages for name in stage[i]} for i in range(len(stages[0]))]
    there = [set(group["params"]) for group in saved]
    if here == there:
        return
    counts = [len(names) for names in there], [len(names) for names in here]
    one = next((name for names in zip(there, here, strict=False) for name in sorted(names[0] ^ names[1])), "")
    raise RuntimeError(
        f"MegaTPStrategy: optimizer {index} in {folder.path} has groups of {counts[0]} parameters, and this one's are"
        f" {counts[1]}{f'; they differ in `{one}`' if one else ''}. Configure the optimizer as it was when the"
        " checkpoint was saved."
    )


def _over_stages(value: Any, mesh: ParallelMesh) -> list[Any]:
    """Every stage's value, the last stage's first."""
    return mesh.exchange(value, "pp") if mesh.size("pp") > 1 else [value]
