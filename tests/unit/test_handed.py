"""What units return in functions and objects is found, and made anew with other tensors."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn

from lightning_megatp.containers import tensors_in, with_tensors
from lightning_megatp.pipeline.slicing.handed import opened

T = TypeVar("T")


class Held:
    """An object of the user's."""

    def __init__(self, x: Any) -> None:
        self.x, self.name = x, "held"

    def twice(self) -> Tensor:
        return 2 * self.x


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Made(Held):
    """It can't be made without what `__new__` does."""

    def __new__(cls, x: Tensor) -> Made:
        made = super().__new__(cls)
        made.seen = True
        return made

    seen: bool


class Registered:
    """Its derived classes say of what kind they are."""

    def __init_subclass__(cls, kind: str) -> None:
        cls.kind = kind


class Kind(Registered, kind="one"):
    kind: str

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Typed(Generic[T]):
    def __init__(self, x: T) -> None:
        self.x = x


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own = Held(torch.ones(1))

    def forward(self) -> None:
        """Nobody calls it."""


def _found(value: Any) -> list[Tensor]:
    return tensors_in(opened(value, Unit().forward))


def _doubled(value: Any) -> Any:
    return with_tensors(lambda x: 2 * x, opened(value, Unit().forward))


def _function(x: Tensor) -> Any:
    return lambda y: y + x


def _late(x: Tensor) -> Any:
    """Of its variables one is set after it was made, and one never."""

    def function(y: Tensor, more: bool = False) -> Tensor:
        return y + x + later + (never if more else 0)

    later = x
    if x.isnan().any():
        never = x
    return function


X = torch.arange(3.0)


@pytest.mark.parametrize("function", [_function(X), functools.partial(torch.add, X), lambda y, x=X: y + x, _late(X)])
def test_functions_are_made_anew(function: Any) -> None:
    assert all(x is X for x in _found(function))
    assert torch.equal(opened(function, Unit().forward)(X), function(X))
    assert torch.equal(_doubled(function)(X) - X, 2 * (function(X) - X))
    assert torch.equal(_doubled(_doubled(function))(X) - X, 4 * (function(X) - X))


def test_functions_call_themselves_anew() -> None:
    def often(y: Tensor, times: int) -> Tensor:
        return often(y + X, times - 1) if times else y

    x = X

    def own(y: Tensor, times: int) -> Tensor:
        return own(y + x, times - 1) if times else y

    assert opened(often, Unit().forward) is often  # X is a global
    assert torch.equal(_doubled(_doubled(own))(X, 2), 9 * X)


def test_functions_keep_their_names() -> None:
    def scale(y: Tensor) -> Tensor:
        """Scales."""
        return y * x

    x, scale.kind = X, "affine"  # type: ignore[attr-defined]
    made = _doubled(scale)
    assert (made.__name__, made.__doc__, made.kind) == ("scale", "Scales.", "affine")


@pytest.mark.parametrize("value", [Held(X), Held([{"x": X}]), SimpleNamespace(x=X), Held(_function(X)), Typed(X)])
def test_objects_are_made_anew(value: Any) -> None:
    before = dict(vars(value))
    (found,) = _found([value])
    assert found is X
    made = _doubled({"made": value})["made"]
    assert isinstance(made, type(value)) and type(made).__qualname__ == type(value).__qualname__
    assert torch.equal(tensors_in(made)[0], 2 * X)
    assert vars(value) == before and vars(made).keys() == before.keys()


def test_objects_hold_each_other() -> None:
    outer = Held(X)
    outer.inner = Held(3 * X)  # type: ignore[attr-defined]
    outer.inner.outer = outer  # type: ignore[attr-defined]
    made = _doubled(outer)
    assert torch.equal(made.twice(), 4 * X) and torch.equal(made.inner.twice(), 12 * X)


def test_distributions_are_made_anew() -> None:
    normal = torch.distributions.Independent(torch.distributions.Normal(X, 1 + X), 1)
    made = _doubled(normal)
    assert torch.equal(made.mean, 2 * X) and torch.equal(made.stddev, 2 + 2 * X)
    other = torch.distributions.Independent(torch.distributions.Normal(2 * X, 2 + 2 * X), 1)
    assert torch.distributions.kl_divergence(made, other) == 0


def test_what_is_not_made_anew() -> None:
    """What holds no tensors, can't be made of its attributes, or goes on being used by the unit."""
    unit = Unit()
    for value in (Held(1), lambda y: y, Slotted(X), Made(X), Kind(X), nn.Linear(1, 1), Held, X, "x", None, unit.own):
        assert opened(value, unit.forward) is value


def test_objects_that_units_are_given_stay_closed() -> None:
    """A class is not opened with the first object that was: other units may fill theirs by themselves."""
    opened(Held(X), Unit().forward)
    assert tensors_in(Held(X)) == []
