"""MeshShape: where a global rank sits. Pure arithmetic."""

from __future__ import annotations

import itertools
import re

import pytest

from lightning_megatp import MeshShape
from lightning_megatp.mesh import AXES

SHAPES = [MeshShape(*sizes) for sizes in itertools.product([1, 2, 3], [1, 2], [1, 2], [1, 2, 4])]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_rank_has_coordinates_of_its_own(shape: MeshShape) -> None:
    seen = set()
    for rank in range(shape.world_size):
        at = shape.coordinates(rank)
        assert set(at) == set(AXES)
        assert all(0 <= at[axis] < getattr(shape, axis) for axis in AXES)
        assert rank == ((at["pp"] * shape.dp + at["dp"]) * shape.cp + at["cp"]) * shape.tp + at["tp"]
        seen.add(tuple(at.values()))
    assert len(seen) == shape.world_size == shape.pp * shape.dp * shape.cp * shape.tp


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_groups_of_an_axis_hold_every_rank_once_and_differ_on_that_axis_only(shape: MeshShape) -> None:
    for axis in AXES:
        groups = shape.groups(axis)
        assert sorted(itertools.chain(*groups)) == list(range(shape.world_size))
        for ranks in groups:
            at = [shape.coordinates(rank) for rank in ranks]
            assert [a.pop(axis) for a in at] == list(range(getattr(shape, axis)))
            assert all(a == at[0] for a in at)


def test_tensor_groups_are_neighbours_and_stages_far_apart() -> None:
    shape = MeshShape(pp=2, dp=2, tp=2)
    assert shape.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert shape.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert shape.groups("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert shape.groups("cp") == [[rank] for rank in range(8)]


def test_global_rank_0_holds_the_last_stage() -> None:
    shape = MeshShape(pp=3, tp=2)
    assert [shape.stage(rank) for rank in range(6)] == [2, 2, 1, 1, 0, 0]
    assert MeshShape(tp=4).stage(3) == 0


@pytest.mark.parametrize(
    ("world_size", "sizes", "expected"),
    [
        (1, {}, MeshShape()),
        (8, {"tp": 2}, MeshShape(dp=4, tp=2)),
        (8, {"tp": 2, "dp": 4}, MeshShape(dp=4, tp=2)),
        (12, {"tp": 2, "pp": 3}, MeshShape(pp=3, dp=2, tp=2)),
        (8, {"tp": 2, "cp": 2, "pp": 2, "dp": 1}, MeshShape(pp=2, dp=1, cp=2, tp=2)),
    ],
)
def test_dp_fills_the_world(world_size: int, sizes: dict[str, int], expected: MeshShape) -> None:
    shape = MeshShape.fit(world_size, **sizes)
    assert shape == expected
    assert shape.world_size == world_size


@pytest.mark.parametrize(
    ("world_size", "sizes", "text"),
    [
        (6, {"tp": 4}, "world size 6 is not divisible by tp * pp = 4. Use 4 or 8 devices, or change tp or pp."),
        (6, {"tp": 2, "pp": 2}, "world size 6 is not divisible by tp * pp = 4. Use 4 or 8 devices"),
        (3, {"tp": 4}, "world size 3 is not divisible by tp * pp = 4. Use 4 devices, or change tp or pp."),
        (6, {"tp": 2, "cp": 2}, "world size 6 is not divisible by tp * pp * cp = 4. Use 4 or 8 devices"),
        (8, {"tp": 2, "dp": 2}, "dp=2 times tp * pp = 2 is 4, but the world size is 8. Use 4 devices, or dp=4,"),
        (8, {"tp": 0}, "tp=0, but every axis needs a size of 1 or more."),
        (8, {"dp": 0}, "dp=0, but every axis needs a size of 1 or more."),
        (8, {"pp": -1}, "pp=-1, but every axis needs a size of 1 or more."),
        (8, {"cp": 0}, "cp=0, but every axis needs a size of 1 or more."),
        (8, {"tp": "2"}, "tp='2' is a str, but every axis needs a whole number, such as 2."),
        (8, {"pp": 2.0}, "pp=2.0 is a float, but every axis needs a whole number, such as 2."),
    ],
)
def test_sizes_that_do_not_fit_the_world(world_size: int, sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape("MegaTPStrategy: " + text)):
        MeshShape.fit(world_size, **sizes)
