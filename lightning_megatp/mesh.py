"""Who talks to whom: the pp, dp, cp and tp axes over one torch DeviceMesh.

tp varies fastest (tensor groups sit on NVLink neighbours) and global rank 0 holds the *last* pipeline stage, because
Lightning's loggers, progress bar and file names live on rank 0 and the loss is born on the last stage.
Source: Megatron-LM's order of axes (Narayanan et al. 2021, section 3).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from numbers import Integral
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_megatp.messages import with_article
from lightning_megatp.shim.torch import tree_map
from lightning_megatp.tables import Titled

AXES = ("pp", "dp", "cp", "tp")
"""Slowest to fastest varying."""
JOINT = (("pp", "tp"), ("dp", "tp"))
"""Axes that also act together: the ranks of one copy of the model (pp, tp), which work on the same batch, and those of
one stage (dp, tp), which hold the same whole parameters."""
TALKING = (("pp",), ("pp", "tp"), ("dp",), ("dp", "tp"), AXES)
"""The axes, alone and joint, along which hosts tell each other what their devices need not know; AXES is the world."""


def on_cpu(value: Any) -> Any:
    """Tensors at any depth of containers moved to the CPU: a pickled one would arrive on the sender's device."""
    return tree_map(lambda x: x.cpu() if isinstance(x, Tensor) else x, value)


def check_sizes(**sizes: Any) -> None:
    """Check the sizes of mesh axes.

    Raises:
        ValueError: one that is no whole number, or below 1.
    """
    for axis, size in sizes.items():
        if type(size) is bool or not isinstance(size, Integral):
            raise ValueError(
                f"MegaTPStrategy: {axis}={size!r} is {with_article(type(size).__name__)}, but every axis needs a whole"
                " number, such as 2."
            )
        if size < 1:
            raise ValueError(f"MegaTPStrategy: {axis}={size}, but every axis needs a size of 1 or more.")


@dataclass(frozen=True)
class MeshShape:
    """The size of each axis, and where a global rank sits. Pure arithmetic: no process group needed."""

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def fit(cls, world_size: int, *, tp: int = 1, pp: int = 1, cp: int = 1, dp: int | None = None) -> MeshShape:
        """Fill in dp from the world size.

        Raises:
            ValueError: a size that is no whole number or below 1, or sizes whose product is not the world size.
        """
        check_sizes(tp=tp, pp=pp, cp=cp, dp=1 if dp is None else dp)
        model = tp * pp * cp
        sizes = f"tp * pp = {model}" if cp == 1 else f"tp * pp * cp = {model}"
        if world_size % model:
            below, above = world_size // model * model, (world_size // model + 1) * model
            use = f"{above}" if below == 0 else f"{below} or {above}"
            raise ValueError(
                f"MegaTPStrategy: world size {world_size} is not divisible by {sizes}. "
                f"Use {use} devices, or change tp or pp. (Trainer(devices=...) times num_nodes is the world size;"
                f" on CPU Lightning's default is one device.)"
            )
        if dp is not None and dp * model != world_size:
            raise ValueError(
                f"MegaTPStrategy: dp={dp} times {sizes} is {dp * model}, but the world size is {world_size}. "
                f"Use {dp * model} devices, or dp={world_size // model}, or leave dp out."
            )
        return cls(pp=pp, dp=world_size // model, cp=cp, tp=tp)

    @property
    def world_size(self) -> int:
        """Ranks of all axes together."""
        return self.pp * self.dp * self.cp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis -> index of this global rank on it."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found

    def stage(self, rank: int) -> int:
        """Pipeline stage of a global rank; rank 0 holds the last stage."""
        return self.pp - 1 - self.coordinates(rank)["pp"]

    def describe(self, rank: int) -> str:
        """A global rank in words: `rank 3 (tp 1, dp 1)`; axes of size 1 are left out."""
        at = self.coordinates(rank)
        where = [f"{axis} {at[axis]}" for axis in ("tp", "cp", "dp") if getattr(self, axis) > 1]
        if self.pp > 1:
            where.append(f"stage {self.stage(rank)}")
        return f"rank {rank}" + (f" ({', '.join(where)})" if where else "")

    def groups(self, *axes: str) -> list[list[int]]:
        """The global ranks of every group along one axis, or along several together, each in ascending order."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            at = self.coordinates(rank)
            groups.setdefault(tuple(at[other] for other in AXES if other not in axes), []).append(rank)
        return list(groups.values())


class ParallelMesh:
    """The process groups of one run and this rank's place in them; passed around explicitly, never global.

    Args:
        shape: the size of each axis; its product is the world size.
        device_type: "cpu", "cuda", ...
        timeout: of every collective on the groups made here, now and later; None keeps torch's default.
        host_backend: of the groups that hosts have for themselves if the device is not the CPU, see `hosts`.

    Communication: one rendezvous per group that is not the world, at construction. Every rank has to construct it.
    """

    def __init__(
        self,
        shape: MeshShape,
        device_type: str = "cpu",
        timeout: timedelta | None = None,
        host_backend: str = "gloo",
    ) -> None:
        world_size = dist.get_world_size()
        if shape.world_size != world_size:
            raise ValueError(
                f"ParallelMesh: {shape} needs {shape.world_size} ranks, the process group has {world_size}."
            )
        self.shape = shape
        self.global_rank = dist.get_rank()
        self._at = shape.coordinates(self.global_rank)
        self.device = torch.device(device_type)
        self.timeout = timeout
        every: list[tuple[str, ...]] = [*((axis,) for axis in AXES), *JOINT, AXES]
        self._ranks = {axes: next(g for g in shape.groups(*axes) if self.global_rank in g) for axes in every}
        self._groups = self._make_groups(every)
        self._hosts = self._groups
        if self.device.type != "cpu":
            self._hosts = self._make_groups(TALKING, host_backend)
        self.device_mesh = DeviceMesh.from_group(
            [self._groups[(axis,)] for axis in AXES],
            device_type,
            mesh=torch.arange(world_size).view(*(getattr(shape, axis) for axis in AXES)),
            mesh_dim_names=AXES,
        )

    def _make_groups(
        self, every: Sequence[tuple[str, ...]], backend: str | None = None
    ) -> dict[tuple[str, ...], dist.ProcessGroup]:
        """One group per axis, and per joint axes. Those with the same ranks share one, and one as long as the world is
        the world, unless it asks for another backend: fewer communicators, less memory."""
        groups: dict[tuple[str, ...], dist.ProcessGroup] = {}
        made: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}
        for axes in every:
            ranks = self.shape.groups(*axes)
            key = tuple(map(tuple, ranks))
            if key not in made:
                world = dist.group.WORLD if len(ranks) == 1 and backend is None else None
                made[key] = world or self._make(ranks, backend)
            groups[axes] = made[key]
        return groups

    def _make(self, ranks: list[list[int]], backend: str | None = None) -> dist.ProcessGroup:
        """This rank's of some groups that divide the world."""
        group: dist.ProcessGroup
        group, _ = dist.new_subgroups_by_enumeration(ranks, timeout=self.timeout, backend=backend)
        return group

    def divided_data(self, replicas: int) -> DeviceMesh:
        """The dp axis for sharded data parallelism: as it is, or as two axes, copies and shards. Every rank calls it.

        Args:
            replicas: copies; the ranks that divide one copy are neighbours.

        Raises:
            ValueError: dp is not divisible by it.
        """
        if replicas == 1:
            return self.device_mesh["dp"]
        dp = self.size("dp")
        if dp % replicas:
            raise ValueError(f"MegaTPStrategy: dp_replicate={replicas} copies don't divide dp={dp} ranks evenly.")
        each = dp // replicas
        axes = self.shape.groups("dp")
        shards = [ranks[i * each : (i + 1) * each] for ranks in axes for i in range(replicas)]
        copies = [ranks[i::each] for ranks in axes for i in range(each)]
        groups = [self._make(ranks) for ranks in (copies, shards)]
        names = ("dp_replicate", "dp_shard")
        ranks = torch.tensor(self.ranks("dp")).view(replicas, each)
        return DeviceMesh.from_group(groups, self.device.type, mesh=ranks, mesh_dim_names=names)

    def new_group(self, axis: str) -> dist.ProcessGroup:
        """Another group over the ranks of an axis, with a communicator of its own. Every rank has to call it."""
        return self._make(self.shape.groups(axis))

    def size(self, axis: str) -> int:
        """How many ranks lie along an axis."""
        return int(getattr(self.shape, axis))

    def rank(self, axis: str) -> int:
        """This rank's index on an axis."""
        return self._at[axis]

    def group(self, *axes: str) -> dist.ProcessGroup:
        """The process group of the ranks that differ from this one on that axis (or those of `JOINT`) only."""
        return self._groups[axes]

    def hosts(self, *axes: str) -> dist.ProcessGroup:
        """The group of the ranks in `group`, for CPU tensors: what the host has to know to go on.

        A message through a GPU has to be read from it, and that waits for all that was launched before: the GPU would
        then have nothing to do until the host has launched more. On CPUs it is the same group.

        Args:
            axes: one of `TALKING`.
        """
        return self._hosts[axes]

    def exchange(self, value: Any, *axes: str) -> list[Any]:
        """What every rank along an axis has, in their order; tensors arrive on the CPU.

        Args:
            value: this rank's, picklable.
            axes: one of `TALKING`.

        Communication: one object all-gather between the hosts.
        """
        found: list[Any] = [None] * len(self.ranks(*axes))
        dist.all_gather_object(found, on_cpu(value), group=self.hosts(*axes))
        return found

    def ranks(self, *axes: str) -> list[int]:
        """Global ranks of this rank's group on an axis, or on joint ones."""
        return self._ranks[axes]

    @property
    def stage(self) -> int:
        """This rank's pipeline stage, 0 first."""
        return self.shape.stage(self.global_rank)

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last pipeline stage, where the loss is; so does global rank 0."""
        return self.stage == self.shape.pp - 1

    def describe(self, rank: int | None = None) -> str:
        """One rank in words: `rank 3 (tp 1, dp 1)`; axes of size 1 are left out."""
        return self.shape.describe(self.global_rank if rank is None else rank)

    def table(self, stages: Sequence[Sequence[int]] | None = None) -> Table:
        """Who is where, as a rich table: one row per stage and dp index, with the ranks of its tensor group.

        Args:
            stages: those of each index on the pp axis, in ascending order; one each by default.
        """
        shape = self.shape
        stages = stages or [[shape.pp - 1 - at] for at in range(shape.pp)]
        last = max(map(max, stages))
        sizes = ", ".join(f"{axis}={getattr(shape, axis)}" for axis in AXES if axis != "cp" or shape.cp > 1)
        table = Titled(title=f"Who is where: {sizes}")
        for column in ("pipeline (pp)", "data (dp)", "tensor (tp)", "global ranks"):
            table.add_column(column)
        for ranks in shape.groups("tp"):
            at = shape.coordinates(ranks[0])
            own = stages[at["pp"]]
            ends = ["first"] * (own[0] == 0 < last) + ["last"] * (own[-1] == last > 0)
            table.add_row(
                f"stage{'s' * (len(own) > 1)} {', '.join(map(str, own))}" + (f" ({', '.join(ends)})" if ends else ""),
                f"dp {at['dp']}",
                f"tp 0..{len(ranks) - 1}" if len(ranks) > 1 else "tp 0",
                f"{ranks[0]}..{ranks[-1]}" if len(ranks) > 2 else ", ".join(map(str, ranks)),
            )
        return table


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Meanwhile this process has no default process group, as on one device: code that communicates by itself (`if
    dist.is_initialized(): ...`) doesn't, or fails. The other ranks would not answer."""
    world = dist.group.WORLD
    dist.group.WORLD = None
    try:
        yield
    finally:
        dist.group.WORLD = world
