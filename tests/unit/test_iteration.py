"""Loaders that are iterated in a context are still what they were."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_megatp.strategy.iteration import iterate_freely, iterate_in

ENTERED: list[int] = []


@contextlib.contextmanager
def context() -> Iterator[None]:
    ENTERED.append(1)
    yield


class Collates(DataLoader[Any]):
    """Its worker processes are given a method of the loader, and so the loader."""

    def __init__(self, rows: Any, **options: Any) -> None:
        super().__init__(rows, collate_fn=self.collate, **options)

    def collate(self, rows: list[Tensor]) -> Tensor:
        return torch.stack(rows)


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "multiprocessing_context": "spawn"}])
def test_a_loader_that_collates_itself(workers: dict[str, Any]) -> None:
    loader = Collates(torch.arange(6), batch_size=3, **workers)
    iterate_in(loader, context)
    ENTERED.clear()
    assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5]]
    assert ENTERED and isinstance(loader, Collates)


def test_a_pickled_loader_is_of_its_own_class_and_copies_are_read_in_the_context() -> None:
    loader = Collates(torch.arange(6), batch_size=3)
    iterate_in(loader, context)
    assert type(pickle.loads(pickle.dumps(loader))) is Collates
    for twin in (copy.copy(loader), copy.deepcopy(loader)):
        ENTERED.clear()
        assert len(list(twin)) == 2 and ENTERED
        iterate_freely(twin)
        assert type(twin) is Collates
    iterate_freely(loader)
    assert type(loader) is Collates


def test_rows_of_a_tensor_given_as_a_loader_are_plain_tensors() -> None:
    loader = torch.arange(6).view(2, 3)
    iterate_in(loader, context)
    assert {type(row) for row in loader} == {Tensor}
