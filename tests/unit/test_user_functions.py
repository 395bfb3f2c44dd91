"""The user's autograd functions get their own containers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_megatp.tensor.user_functions import functions_take_whole


class Fills(torch.autograd.Function):
    """As fairscale's checkpoint does: what is no tensor comes back in a container."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, into: Any) -> Tensor:
        into.update(largest=x.max()) if isinstance(into, dict) else into.append(x.max())
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None


@pytest.mark.parametrize("into", [{}, [], {"known": torch.ones(2)}, [torch.ones(2)]], ids=repr)
def test_a_function_fills_the_container_that_it_is_given(into: Any) -> None:
    before = len(into)
    with functions_take_whole():
        Fills.apply(torch.arange(3.0, requires_grad=True), into).sum().backward()
    assert len(into) == before + 1
