"""What a program calls by `function.apply` is seen, wherever it keeps that."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_megatp.shim.autograd import handle_functions, unbind_functions, without_checkpoints


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


double = Double.apply
BY_NAME = {"double": Double.apply}
LISTED = [Double.apply]
PARTIAL = functools.partial(Double.apply)


class Holder:
    of_class = Double.apply

    def __init__(self) -> None:
        self.of_object = Double.apply


HOLDER = Holder()


def _closure() -> Callable[[Tensor], Tensor]:
    kept = Double.apply
    return lambda x: kept(x)


CLOSURE = _closure()


def _by_class(x: Tensor) -> Tensor:
    return Double.apply(x)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "class": _by_class,
    "global": lambda x: double(x),
    "dict": lambda x: BY_NAME["double"](x),
    "list": lambda x: LISTED[0](x),
    "partial": lambda x: PARTIAL(x),
    "class attribute": lambda x: HOLDER.of_class(x),
    "attribute": lambda x: HOLDER.of_object(x),
    "closure": CLOSURE,
}


@pytest.mark.parametrize("way", WAYS)
def test_functions_are_seen_wherever_they_are_bound(way: str) -> None:
    seen: list[Any] = []

    def handle(function: Any, apply: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen.append(function)
        return apply(*args, **kwargs)

    unbind_functions()
    x = torch.ones(2, requires_grad=True)
    with handle_functions(handle):
        y = WAYS[way](x)
    assert seen == [Double]
    WAYS[way](y).sum().backward()
    assert seen == [Double] and torch.equal(x.grad, torch.full((2,), 4.0))  # type: ignore[arg-type]


@pytest.mark.parametrize("kept", [False, True])
def test_without_checkpoints_nothing_is_run_again(kept: bool) -> None:
    runs: list[int] = []

    def inside(x: Tensor, factor: float = 1.0) -> Tensor:
        runs.append(1)
        return (x * factor).sin()

    x = torch.ones(2, requires_grad=True)
    with without_checkpoints() if kept else contextlib.nullcontext():
        checkpoint(inside, x, factor=2.0, use_reentrant=False).sum().backward()
    assert len(runs) == (1 if kept else 2)
