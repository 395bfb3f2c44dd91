"""Tensors that forwards change: which are found, and that a batch leaves the module with its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_megatp.pipeline.own_values import OwnValues
from lightning_megatp.places import changeable


class Block(nn.Module):
    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("scale", torch.ones(3))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.weight = nn.Parameter(torch.ones(3))
        self.plain = torch.ones(3)
        self.alias = self.scale

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return x * self.scale * self.alias * self.frozen * self.plain * self.weight


def _in_place(block: Any) -> None:
    block.scale.data.mul_(2)


def _frozen(block: Any) -> None:
    block.frozen.data.add_(1)


def _plain(block: Any) -> None:
    block.plain.mul_(3)


def _replaced(block: Any) -> None:
    block.scale = block.scale * 2  # nothing to do: graphs keep the old one


@pytest.mark.parametrize("change", [_in_place, _frozen, _plain, _replaced])
@pytest.mark.parametrize("batches", [1, 3])
def test_each_microbatch_has_its_own_and_the_module_has_the_last(change: Any, batches: int) -> None:
    def gradients(block: Block, together: bool) -> list[Tensor]:
        own, found = OwnValues({0: [block]}), []
        for _ in range(batches):
            with own.batch():
                losses = []
                for _ in range(3):
                    with own.forward(0):
                        losses.append(block(torch.ones(3)).sum())
                    if not together:
                        found.append(torch.autograd.grad(losses[-1], block.weight)[0])
                found += [torch.autograd.grad(loss, block.weight)[0] for loss in losses if together]
        return found

    one, other = Block(change), Block(change)
    held = other.scale, other.frozen, other.plain
    expected, found = gradients(one, together=False), gradients(other, together=True)
    assert all(map(torch.equal, found, expected)) and not torch.equal(found[0], found[1])
    for name in ("scale", "frozen", "plain", "alias"):
        assert torch.equal(getattr(one, name), getattr(other, name))
    if change is not _replaced:
        assert all(map(lambda x, y: x is y, (other.scale, other.frozen, other.plain), held))
        assert other.alias is other.scale


def test_tensors_that_take_another_shape_are_left_so() -> None:
    def grow(block: Any) -> None:
        block.scale.data = torch.ones(len(block.scale) + 3)

    block = Block(grow)
    block.forward = lambda x: (grow(block), x)[1]  # type: ignore[method-assign]
    own, scale = OwnValues({0: [block]}), block.scale
    with own.batch():
        for _ in range(2):
            with own.forward(0):
                block(torch.ones(3))
    assert block.scale is scale and len(scale) == 9


def test_an_error_in_a_batch_leaves_the_module_whole() -> None:
    block = Block(_in_place)
    own, scale = OwnValues({0: [block]}), block.scale
    with pytest.raises(ZeroDivisionError), own.batch():
        for _ in range(2):
            with own.forward(0):
                block(torch.ones(3))
        raise ZeroDivisionError
    assert block.scale is scale and scale.tolist() == [4.0] * 3


def test_weights_and_large_frozen_parameters_are_not_looked_at() -> None:
    block = Block(_in_place)
    block.large = nn.Parameter(torch.ones(2**18), requires_grad=False)
    assert {place.leaf for place, _ in changeable(block)} == {"scale", "frozen", "plain", "alias"}
