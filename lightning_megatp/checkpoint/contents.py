"""What a checkpoint of a split model holds: for every local tensor its canonical name, and what part of it is here."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_megatp.checkpoint.chunks import Chunks, whole
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.module import ParallelModule
from lightning_megatp.places import address
from lightning_megatp.plan.shard import ShardSpec

MODEL = "state_dict."
"""Before the names of the model's tensors, in a folder."""


@dataclass(frozen=True)
class Entry:
    """One local tensor of a model or an optimizer."""

    name: str
    """Canonical, as on one device; an optimizer's is `<parameter>.<key>`."""
    spec: ShardSpec
    tensor: Tensor
    trained: bool = True
    """Whether it is the same on all ranks of its replicated axes. Buffers may not be: the first rank's count."""

    def to_write(self, mesh: ParallelMesh) -> Chunks:
        """What this rank writes of it. Replicas take turns, by name."""
        ways, index = 1, 0
        for axis in self.spec.replicated:
            ways, index = ways * mesh.size(axis), index * mesh.size(axis) + mesh.rank(axis)
        turn = zlib.crc32(self.name.encode()) % ways if self.trained else 0
        return Chunks.to_write(self.tensor, self.spec, index == turn)


def model_entries(state: Mapping[str, Any], parallel: ParallelModule) -> Iterator[Entry]:
    """The tensors of a module's state dict.

    Args:
        state: `module.state_dict()`. A user may have overridden it: entries are found by name, and else by memory.
    """
    held = {name: parallel.held(parameter) for name, parameter in parallel.names.items()}
    parameters = {p.data_ptr(): p for p in held.values() if p.numel()}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            continue
        value = value.to_local() if isinstance(value, DTensor) else value
        parameter = held.get(name)
        if parameter is None and value.numel():
            parameter = parameters.get(address(value))
        if parameter is None or parameter.shape != value.shape:
            yield Entry(name, whole(name, value), value, trained=False)
        else:
            yield Entry(name, parallel.shard(name, parameter), value)


def optimizer_entries(optimizer: Optimizer, parallel: ParallelModule) -> Iterator[Entry]:
    """The tensors of an optimizer's state.

    Raises:
        RuntimeError: a state that is neither shaped like its split parameter nor a single number.
    """
    for group, names in zip(optimizer.param_groups, group_names(optimizer, parallel), strict=True):
        for name, parameter in zip(names, group["params"], strict=True):
            spec, stepped = parallel.shard(name, parameter), id(parameter) in parallel.stepped_whole
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    entry = f"{name}.{key}"
                    yield Entry(entry, state_spec(entry, tuple(value.shape), spec, spec.local_shape, stepped), value)


def state_spec(
    name: str, shape: tuple[int, ...], parameter: ShardSpec, like: tuple[int, ...], stepped_whole: bool
) -> ShardSpec:
    """What part a state tensor is of the whole one, given its parameter's spec.

    Args:
        name: of the state.
        shape: of the state tensor, local or full.
        like: the parameter's shape, local or full.
        stepped_whole: whether the optimizer sees the whole parameter, so that states of other shapes are whole, too.

    Raises:
        RuntimeError: it isn't shaped like its parameter, which is split.
    """
    if shape == like and shape:
        return replace(parameter, name=name)
    full = ShardSpec.of_whole(name, shape)
    if parameter.local_shape == parameter.shape or full.numel <= 1 or stepped_whole:
        return full
    raise RuntimeError(
        f"MegaTPStrategy: the optimizer's state `{name}` has the shape {shape}, its parameter {like}, of which each"
        " rank holds a part. What part of the state belongs to it can't be known. Use an optimizer whose states are"
        " shaped like their parameters, or leave the layer out of the plan."
    )


def group_names(optimizer: Optimizer, parallel: ParallelModule) -> list[list[str]]:
    """The canonical names of the parameters of each group; of a tied one the first."""
    names = {id(parallel.held(parameter)): name for name, parameter in reversed(parallel.names.items())}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def numbered_groups(groups: Iterable[Mapping[str, Any]], names: Iterable[Sequence[str]]) -> list[dict[str, Any]]:
    """Groups of an optimizer's state dict with the parameters of these names, numbered from the first group to the
    last, as `Optimizer.load_state_dict` takes them."""
    numbered: list[dict[str, Any]] = []
    start = 0
    for group, members in zip(groups, names, strict=True):
        numbered.append({**group, "params": list(range(start, start + len(members)))})
        if "param_names" in group:
            numbered[-1]["param_names"] = members
        start += len(members)
    return numbered
