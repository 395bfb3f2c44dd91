"""Who stands for methods of torch's classes: asked from the innermost on, without changing a class in every step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_megatp.shim.autograd import handle_functions
from lightning_megatp.shim.gradients import zero_grad_by
from lightning_megatp.shim.standing import Handle, Standing


def _note(name: str, met: list[str]) -> Handle:
    def handle(of: Any, work: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        met.append(f"{name} of {of}")
        return work(*args, **kwargs) + 1

    return handle


def test_the_inner_one_is_asked_first_and_does_it_by_the_outer_one() -> None:
    standing, met = Standing(), list[str]()

    def add(x: int, y: int = 0) -> int:
        return x + y

    with standing.by(_note("outer", met)):
        with pytest.raises(KeyError), standing.by(_note("inner", met)):
            assert standing.call("it", add, (1,), {"y": 2}) == 5
            raise KeyError
        assert standing.call("it", add, (1,), {}) == 2
    assert standing.call("it", add, (1,), {}) == 1
    assert met == ["inner of it", "outer of it", "outer of it"]


def test_no_class_is_changed_after_the_first_time() -> None:
    def methods() -> list[Any]:
        classes = [nn.Module, *torch.autograd.Function.__mro__, torch.jit.ScriptFunction]
        return [
            value
            for kind in classes
            for name, value in vars(kind).items()
            if name in ("apply", "__call__", "zero_grad")
        ]

    def enter(look: Callable[[], Any]) -> Any:
        with (
            zero_grad_by(lambda call: call()),
            handle_functions(lambda of, apply, args, kwargs: apply(*args, **kwargs)),
        ):
            return look()

    enter(methods)
    before = methods()
    within = enter(methods)
    assert all(a is b is c for a, b, c in zip(before, within, methods(), strict=True))
