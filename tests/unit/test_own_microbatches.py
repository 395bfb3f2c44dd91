"""`split_batch` and `loss_weight` are ours where they take what ours take, and names like others where they don't."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatp.batches.own import own_split, own_weight


class Ours(nn.Module):
    def split_batch(self, x: Any, n: int) -> list[Any]:
        return [x] * n

    def loss_weight(self, x: Any) -> float:
        return float(len(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.zeros(())


class Called(nn.Module):
    """Its step calls what is there for the pipeline."""

    def loss_weight(self, batch: Any) -> float:
        return float(len(batch))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.zeros(()) / self.loss_weight(batch)


class Theirs(nn.Module):
    """As diffusion models weigh times, and others divide batches into inputs and targets."""

    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        return batch[0], batch[1]

    def loss_weight(self, times: Tensor) -> Tensor:
        return 1 / times**2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.losses(*self.split_batch(batch))

    def losses(self, x: Tensor, times: Tensor) -> Tensor:
        return self.loss_weight(times)


def test_methods_with_these_arguments_are_ours() -> None:
    split, weight, called = own_split(Ours()), own_weight(Ours()), own_weight(Called())
    assert split is not None and split([1], 2) == [[1], [1]]
    assert weight is not None and weight([1, 2]) == 2.0
    assert called is not None


@pytest.mark.parametrize("value", [0.5, torch.ones(2), {"mse": 1.0}, nn.Identity(), lambda: 1.0])
def test_other_things_of_these_names_are_not(value: Any) -> None:
    module = nn.Linear(1, 1)
    module.loss_weight = module.split_batch = value
    assert own_split(module) is None and own_weight(module) is None


def test_methods_of_a_steps_own_are_not() -> None:
    assert own_split(Theirs()) is None and own_weight(Theirs()) is None
