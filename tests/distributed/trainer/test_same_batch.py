"""Peers of a group get the first peer's batch, whatever they loaded themselves."""

from __future__ import annotations

import collections
import dataclasses
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_megatp.batches.same import HEADER_BYTES, SameBatch
from tests.ranks import RankError, run_ranks

DIFFERENT = "the ranks of a tensor-parallel group loaded different batches; the first rank's is used."


@dataclasses.dataclass
class Tokens:
    ids: Tensor
    mask: Tensor | None = None
    text: str = ""


class Pair(NamedTuple):
    x: Tensor
    y: Any


class Graph:
    """A user's own class; its tensors are in no container that anyone knows."""

    def __init__(self, nodes: Tensor, name: str) -> None:
        self.inner = {"nodes": nodes, "again": nodes}
        self.name = name


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    """As Hugging Face's BatchEncoding."""


class Labelled(Tensor):
    """A subclass with an attribute, as torchvision's bounding boxes."""

    label: str


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_structure(world_size: int) -> None:
    """Peers' own batches differ from the source's in values, shapes or structure."""
    run_ranks(world_size, _any_structure)


@pytest.mark.parametrize("world_size", [2, 4])
def test_any_tensor(world_size: int) -> None:
    """Every dtype; no elements, no dims, strided, expanded, conjugated, channels last, subclass, sparse."""
    run_ranks(world_size, _any_tensor)


@pytest.mark.parametrize("world_size", [2, 4])
def test_shapes_that_change(world_size: int) -> None:
    run_ranks(world_size, _changing_shapes)


def test_one_collective_per_batch() -> None:
    """Equal batches, unequal ones and new shapes; what is longer than all before costs one more, once, and the check of
    the first costs one."""
    for counts in run_ranks(2, _count_collectives):
        assert counts == {
            "first": ["broadcast", "all_gather"],
            "equal": ["broadcast"],
            "new shape": ["broadcast"],
            "long text": ["broadcast", "broadcast"],
            "as long": ["broadcast"],
            "no tensor": ["broadcast"],
        }


def test_one_rank_is_free() -> None:
    assert run_ranks(1, _one_rank) == [True]


def test_a_group_that_is_not_the_world() -> None:
    assert run_ranks(4, _subgroups) == [0, 1, 0, 1]


def test_loaders_that_differ() -> None:
    """An IterableDataset shuffled and augmented by rank, in a worker process: what tensor-parallel peers really get."""
    first, *others = run_ranks(2, _loaders)
    assert first["own"] != others[0]["own"]
    assert first["given"] == others[0]["given"] == first["own"]


def test_different_batches_are_said_once() -> None:
    (said,), nothing = run_ranks(2, _logged, True)
    assert DIFFERENT in said and nothing == []
    assert run_ranks(2, _logged, False) == [[], []]


def test_received_tensors_are_independent() -> None:
    """Changing one in place must not invalidate another that autograd has saved."""
    run_ranks(2, _independent)


def test_a_batch_that_cannot_be_sent_raises_everywhere() -> None:
    for message in run_ranks(2, _unpicklable):
        assert re.search(
            r"the batch.* can't be sent to the tensor-parallel peers: .*lambda.*Let the loader return", message
        )


def test_a_batch_that_arrives_changed_names_the_ranks() -> None:
    with pytest.raises(RankError) as error:
        run_ranks(4, _tampered)
    for failure in error.value.failures:
        assert (
            "rank 0 sent its first batch, and its tensor-parallel peers of rank 1, 3 hold another one"
            in failure.message
        )


# What follows runs in the ranks.


def _batch(rank: int) -> dict[str, Callable[[], Any]]:
    """Batches that differ between ranks; rank 0's is the one that all should get."""
    x, ids = torch.full((2, 3 + rank), float(rank)), torch.arange(4 + rank)
    return {
        "tensor": lambda: x,
        "dict": lambda: {"x": x, "ids": ids, "rank": rank, "name": f"from {rank}", "none": None},
        "other keys": lambda: {f"key of {rank}": x},
        "tuple": lambda: (x, (ids, [x, ids]), None),
        "other length": lambda: [x] * (rank + 1),
        "lists of text": lambda: [[f"text {rank}", 1.5, True, 3], {"deep": [{"x": x}]}],
        "other type": lambda: x if rank == 0 else {"x": x},
        "no tensor": lambda: {"rank": rank, "text": "a" * 10 * HEADER_BYTES},
        "none": lambda: None if rank == 0 else x,
        "empty": lambda: {} if rank == 0 else x,
        "dataclass": lambda: Tokens(ids, None if rank else x, f"{rank}"),
        "namedtuple": lambda: Pair(x, Pair(ids, rank)),
        "user dict": lambda: Encoding({"input_ids": ids, "length": rank}),
        "own class": lambda: Graph(x, f"{rank}"),
        "packed": lambda: pack_sequence([ids.float(), ids[:2].float()]),
        "many tensors": lambda: {f"feature {i}": x + i for i in range(200)},
        "unpicklable peer": lambda: x if rank == 0 else (x, lambda: None),
    }


def _any_structure(rank: int, world_size: int) -> None:
    same_batch = SameBatch(dist.group.WORLD, "cpu")
    for name, make in _batch(rank).items():
        expected, own = _batch(0)[name](), make()
        given = same_batch(own)
        assert type(given) is type(expected), name
        assert _equal(given, expected), (name, given, expected)
        if rank == 0:
            assert given is own
        if isinstance(given, Graph):
            assert given.inner["nodes"] is given.inner["again"]  # one tensor used twice stays one
        if isinstance(given, PackedSequence):
            assert torch.equal(given.data, expected.data)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (dict, collections.UserDict)):
        return list(a) == list(b) and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, (Tokens, Graph)):
        return _equal(vars(a), vars(b))
    return bool(a == b)


def _any_tensor(rank: int, world_size: int) -> None:
    same_batch = SameBatch(dist.group.WORLD, torch.device("cpu"))
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    dtypes += [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128]
    dtypes += [torch.float8_e4m3fn]
    tensors = {str(dtype): (torch.randn(3, 5) * 2).to(dtype) for dtype in dtypes}
    tensors |= {f"scalar {dtype}": torch.ones((), dtype=dtype) for dtype in dtypes}
    labelled = torch.randn(3).as_subclass(Labelled)
    labelled.label = "cat"
    tensors |= {
        "empty": torch.empty(0, 4),
        "empty int": torch.empty(0, dtype=torch.int64),
        "transposed": torch.randn(3, 4).T,
        "strided": torch.randn(10)[::3],
        "expanded": torch.randn(3, 1).expand(3, 4),
        "conjugate": torch.randn(3, dtype=torch.complex64).conj(),
        "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "labelled": labelled,
        "sparse": torch.eye(3).to_sparse(),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "last empty": torch.empty(4, 0, dtype=torch.complex128),
    }
    own = tensors if rank == 0 else {key: torch.zeros(()) for key in tensors}
    before = {key: value.clone() for key, value in tensors.items()}
    for _ in range(2):
        given = same_batch(own)
        assert given.keys() == tensors.keys()
        for key, expected in tensors.items():
            value = given[key]
            assert type(value) is type(expected), key
            assert (
                value.dtype == expected.dtype and value.shape == expected.shape and value.layout == expected.layout
            ), key
            assert value.requires_grad == expected.requires_grad, key
            raw, want = (t.to_dense() if t.is_sparse else t.detach() for t in (value, expected))
            as_float = raw.dtype is torch.float8_e4m3fn
            assert torch.equal(raw.float() if as_float else raw, want.float() if as_float else want), key
        assert given["channels last"].is_contiguous(memory_format=torch.channels_last)
        assert given["transposed"].stride() == tensors["transposed"].stride()
        assert given["labelled"].label == "cat"
        strides: list[Any] = [None] * world_size
        dist.all_gather_object(strides, {key: x.stride() for key, x in given.items() if not x.is_sparse})
        assert all(of_rank == strides[0] for of_rank in strides), "those of what isn't dense, too"
    assert all(
        torch.equal(value.detach(), before[key].detach()) for key, value in tensors.items() if not value.is_sparse
    )


def _changing_shapes(rank: int, world_size: int) -> None:
    same_batch = SameBatch(dist.group.WORLD, "cpu")
    for step in range(12):
        lengths = torch.Generator().manual_seed(step)
        length = int(torch.randint(0, 9, (), generator=lengths))
        source = {"x": torch.full((2, length), float(step)), "n": length, "ids": torch.arange(step % 3)}
        own = source if rank == 0 else {"x": torch.randn(rank, step + 1), "n": -1, "ids": torch.arange(rank)}
        assert _equal(same_batch(own), source)


def _count_collectives(rank: int, world_size: int) -> dict[str, list[str]]:
    same_batch = SameBatch(dist.group.WORLD, "cpu")
    counts: dict[str, list[str]] = {}
    seen: list[str] = []

    def spy(name: str) -> Any:
        real = getattr(dist, name)

        def call(*args: Any, **options: Any) -> Any:
            seen.append(name)
            return real(*args, **options)

        return mock.patch.object(dist, name, call)

    batches = {
        "first": {"x": torch.ones(3)},
        "equal": {"x": torch.ones(3)},
        "new shape": {"x": torch.ones(4, 5), "y": torch.ones(2)},
        "long text": {"x": torch.ones(3), "text": "a" * 3 * HEADER_BYTES},
        "as long": {"x": torch.ones(2), "text": "b" * 3 * HEADER_BYTES},
        "no tensor": {"rank": rank},
    }
    with spy("broadcast"), spy("all_gather"):
        for name, batch in batches.items():
            seen.clear()
            same_batch(batch)
            counts[name] = list(seen)
    return counts


def _one_rank(rank: int, world_size: int) -> bool:
    batch = {"x": torch.ones(2), "f": lambda: None}  # not even looked at
    return SameBatch(dist.group.WORLD, "cpu")(batch) is batch


def _subgroups(rank: int, world_size: int) -> int:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return int(SameBatch(groups[rank % 2], "cpu")(torch.tensor(rank)))


class _Stream(IterableDataset):  # type: ignore[type-arg]
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[Tensor]:
        assert get_worker_info() is not None
        generator = torch.Generator().manual_seed(100 + self.rank)
        for _ in range(6):
            yield torch.randn(4, generator=generator)


def _loaders(rank: int, world_size: int) -> dict[str, list[list[list[float]]]]:
    same_batch = SameBatch(dist.group.WORLD, "cpu")
    loader = DataLoader(_Stream(rank), batch_size=2, num_workers=1)
    own = list(loader)
    return {"own": [batch.tolist() for batch in own], "given": [same_batch(batch).tolist() for batch in own]}


def _logged(rank: int, world_size: int, different: bool) -> list[str]:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning_megatp.batches.same")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        same_batch = SameBatch(dist.group.WORLD, "cpu")
        for _ in range(3):
            same_batch({"x": torch.full((2,), float(rank if different else 7))})
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return messages


def _independent(rank: int, world_size: int) -> None:
    given = SameBatch(dist.group.WORLD, "cpu")({"x": torch.ones(3), "mask": torch.zeros(3)})
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * given["x"]).sum()
    given["mask"].fill_(1.0)
    loss.backward()
    assert torch.equal(given["x"], torch.ones(3))


def _unpicklable(rank: int, world_size: int) -> str:
    same_batch = SameBatch(dist.group.WORLD, "cpu")
    try:
        same_batch({"x": torch.ones(2), "f": lambda: None} if rank == 0 else torch.ones(2))
    except TypeError as error:
        assert int(same_batch(torch.tensor(rank))) == 0  # and the group is still in step
        return str(error)
    return "no error"


def _tampered(rank: int, world_size: int) -> None:
    real = dist.broadcast

    def tamper(tensor: Tensor, **options: Any) -> None:
        real(tensor, **options)
        if rank % 2 and tensor.numel() != HEADER_BYTES:
            tensor[0] += 1

    with mock.patch.object(dist, "broadcast", tamper):  # of what did not fit in the first message
        SameBatch(dist.group.WORLD, "cpu")({"x": torch.ones(HEADER_BYTES)})
