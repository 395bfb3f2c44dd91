"""ParallelMesh on real ranks: its groups reach the ranks they say, and nobody else."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_megatp import MeshShape, ParallelMesh
from lightning_megatp.mesh import AXES
from lightning_megatp.shim.lightning import default_store
from tests.ranks import RankError, run_ranks

SHAPES = [
    MeshShape(tp=4),
    MeshShape(dp=4),
    MeshShape(dp=2, tp=2),
    MeshShape(pp=2, tp=2),
    MeshShape(pp=2, dp=2),
    MeshShape(pp=4),
    MeshShape(cp=2, tp=2),
]


def _look(rank: int, world_size: int, shape: MeshShape) -> dict[str, Any]:
    mesh = ParallelMesh(shape)
    sums = {}
    for axis in AXES:
        value = torch.tensor([float(10**rank)])
        dist.all_reduce(value, group=mesh.group(axis))
        sums[axis] = int(value)
    return {
        "rank": {axis: mesh.rank(axis) for axis in AXES},
        "size": {axis: mesh.size(axis) for axis in AXES},
        "ranks": {axis: mesh.ranks(axis) for axis in AXES},
        "group_ranks": {axis: dist.get_process_group_ranks(mesh.group(axis)) for axis in AXES},
        "device_mesh": {axis: dist.get_process_group_ranks(mesh.device_mesh.get_group(axis)) for axis in AXES},
        "device_mesh_rank": {axis: mesh.device_mesh.get_local_rank(axis) for axis in AXES},
        "sums": sums,
        "stage": mesh.stage,
        "is_last": mesh.is_last_stage,
        "describe": mesh.describe(),
        "rank_3": mesh.describe(3),
        "group_count": len({id(mesh.group(axis)) for axis in AXES}),
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_groups_reach_the_ranks_of_their_axis(shape: MeshShape) -> None:
    for rank, found in enumerate(run_ranks(4, _look, shape)):
        expected = {axis: next(g for g in shape.groups(axis) if rank in g) for axis in AXES}
        assert found["rank"] == shape.coordinates(rank)
        assert found["size"] == {axis: getattr(shape, axis) for axis in AXES}
        assert found["ranks"] == found["group_ranks"] == found["device_mesh"] == expected
        assert found["sums"] == {axis: sum(10**peer for peer in expected[axis]) for axis in AXES}
        assert found["device_mesh_rank"] == shape.coordinates(rank)


def test_axes_of_size_1_share_one_group() -> None:
    assert [found["group_count"] for found in run_ranks(4, _look, MeshShape(tp=4))] == [2] * 4
    assert [found["group_count"] for found in run_ranks(4, _look, MeshShape(dp=2, tp=2))] == [3] * 4


def test_stages() -> None:
    found = run_ranks(4, _look, MeshShape(pp=2, tp=2))
    assert [f["stage"] for f in found] == [1, 1, 0, 0], "global rank 0 is on the last stage"
    assert [f["is_last"] for f in found] == [True, True, False, False]
    assert all(f["is_last"] for f in run_ranks(4, _look, MeshShape(dp=2, tp=2)))


def test_a_rank_in_words() -> None:
    assert [f["describe"] for f in run_ranks(4, _look, MeshShape(dp=2, tp=2))] == [
        "rank 0 (tp 0, dp 0)", "rank 1 (tp 1, dp 0)", "rank 2 (tp 0, dp 1)", "rank 3 (tp 1, dp 1)",
    ]  # fmt: skip
    assert {f["rank_3"] for f in run_ranks(4, _look, MeshShape(pp=2, tp=2))} == {"rank 3 (tp 1, stage 0)"}
    assert {f["rank_3"] for f in run_ranks(4, _look, MeshShape(cp=2, tp=2))} == {"rank 3 (tp 1, cp 1)"}


def _table(rank: int, world_size: int, shape: MeshShape) -> tuple[list[str], list[list[str]]]:
    columns = ParallelMesh(shape).table().columns
    rows = [[str(cell) for cell in row] for row in zip(*(column.cells for column in columns), strict=True)]
    return [str(column.header) for column in columns], rows


def test_the_table_says_who_is_where() -> None:
    header = ["pipeline (pp)", "data (dp)", "tensor (tp)", "global ranks"]
    rows = [["stage 0", "dp 0", "tp 0..1", "0, 1"], ["stage 0", "dp 1", "tp 0..1", "2, 3"]]
    assert run_ranks(4, _table, MeshShape(dp=2, tp=2)) == [(header, rows)] * 4
    rows = [["stage 1 (last)", "dp 0", "tp 0", "0"], ["stage 1 (last)", "dp 1", "tp 0", "1"]]
    rows += [["stage 0 (first)", "dp 0", "tp 0", "2"], ["stage 0 (first)", "dp 1", "tp 0", "3"]]
    assert run_ranks(4, _table, MeshShape(pp=2, dp=2))[3] == (header, rows)


def _alone(rank: int, world_size: int) -> tuple[str, int]:
    mesh = ParallelMesh(MeshShape())
    return mesh.describe(), mesh.size("tp")


def test_one_rank() -> None:
    assert run_ranks(1, _alone) == [("rank 0", 1)]


def _wait_for_a_peer_that_never_comes(rank: int, world_size: int, replicas: int) -> None:
    """Rank 0 alone calls a collective on a group of two; the others wait until it has given up."""
    shape = MeshShape(dp=2, tp=2) if replicas == 1 else MeshShape(dp=4)
    mesh = ParallelMesh(shape, timeout=timedelta(milliseconds=300))
    group = mesh.group("tp") if replicas == 1 else mesh.divided_data(replicas).get_group("dp_shard")
    store = dist.PrefixStore("test", default_store())
    if rank == 0:
        try:
            dist.all_reduce(torch.ones(1), group=group)
        finally:
            store.set("done", "")
    store.wait(["done"])


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_timeout_reaches_the_groups(replicas: int) -> None:
    with pytest.raises(RankError, match=re.compile("timed? ?out", re.IGNORECASE)) as error:
        run_ranks(4, _wait_for_a_peer_that_never_comes, replicas)
    assert [failure.rank for failure in error.value.failures] == [0]


def _make(rank: int, world_size: int, shape: MeshShape) -> None:
    ParallelMesh(shape)


def test_a_shape_for_another_world() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(2, _make, MeshShape(dp=2, tp=2))
    messages = {failure.message for failure in error.value.failures}
    assert messages == {"ParallelMesh: MeshShape(pp=1, dp=2, cp=1, tp=2) needs 4 ranks, the process group has 2."}
    assert len(error.value.failures) == 2
