"""Convolutions whose output channels are split, against the model on one device, on real ranks."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from lightning_megatp.checkpoint.full import full_state_dict
from lightning_megatp.module import ParallelModule
from tests.distributed.tensor.whole_and_split import compare
from tests.ranks import run_ranks


class Sound(nn.Module):
    """(batch, 6, time): uneven channels, string padding, groups, depthwise, back up by a transposed one."""

    def __init__(self, weight_norm: Callable[..., Any] = parametrizations.weight_norm) -> None:
        super().__init__()
        self.dense = nn.Conv1d(6, 12, 3, padding="same", dilation=2, padding_mode="reflect")
        self.grouped = nn.Conv1d(12, 16, 4, stride=2, padding=1, groups=4, bias=False)
        self.depthwise = nn.Conv1d(16, 32, 3, padding=1, groups=16)
        self.by_output = weight_norm(nn.Conv1d(32, 32, 3, padding=1, groups=4), dim=-3)
        self.by_place = weight_norm(nn.Conv1d(32, 32, 3, padding=1, groups=4), dim=2)
        self.pointwise = nn.Conv1d(32, 9, 1)
        self.up = nn.ConvTranspose1d(9, 7, 3, stride=2, padding=1)
        self.normed_up = weight_norm(nn.ConvTranspose1d(7, 6, 3, padding=1), dim=-3)
        self.of_all = weight_norm(nn.Conv1d(6, 4, 3, padding=1), dim=None)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.grouped(torch.tanh(self.dense(x))))
        y = self.by_place(torch.tanh(self.by_output(self.depthwise(y))))
        y = torch.tanh(self.up(torch.tanh(self.pointwise(y)), output_size=[x.shape[-1]]))
        return self.of_all(self.normed_up(y))


def older() -> Sound:
    """By the hook that keeps the weight as an attribute."""
    with pytest.warns(FutureWarning, match="weight_norm"), torch.no_grad():  # deepcopy refuses a weight with a graph
        return Sound(nn.utils.weight_norm)


class Image(nn.Module):
    """(batch, 3, height, width): two that read one tensor, BatchNorm between, grouped transposed; and a volume."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 8, 3, padding=(1, 1), padding_mode="circular"), nn.Conv2d(3, 8, 1)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 12, 2, stride=2, groups=4, bias=False)
        self.volume = nn.Conv3d(12, 6, (1, 3, 3), bias=False)
        self.up_volume = nn.ConvTranspose3d(6, 5, (2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(torch.tanh(self.norm(self.left(x) + self.right(x))))
        return self.up_volume(torch.tanh(self.volume(y.unsqueeze(2))))


PLAN = dict.fromkeys(["dense", "grouped", "depthwise", "by_*", "pointwise", "*up", "of_all"], "column_gather")
IMAGE_PLAN = dict.fromkeys(["left", "right", "up", "volume", "up_volume"], "column_gather")


def _run(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(2)
    sound, image = (torch.randn(*shape, generator=generator).double() for shape in ((2, 6, 12), (2, 3, 6, 5)))
    compare(older, PLAN, [sound], _call)
    found: ParallelModule = compare(Sound, PLAN, [sound], _call)
    layers = found.module
    assert len(found.sharded) == 18 and isinstance(layers.up, nn.ConvTranspose1d)
    known = dict(found.sharded)
    copied = copy.deepcopy(layers)
    assert len(found.sharded) > len(known)
    del copied
    gc.collect()
    assert found.sharded == known, "what comes to have the identity of a copy that is gone would be taken for split"
    assert (layers.grouped.groups, layers.grouped.in_channels, layers.grouped.out_channels) == (4, 12, 16)
    if world_size == 2:
        shapes = [tuple(p.shape) for p in (layers.grouped.weight, layers.up.weight, layers.up.bias)]
        assert shapes == [(8, 3, 4), (9, 4 - rank, 3), (4 - rank,)]
    tokens = layers.pointwise(torch.randn(2, 12, 32).double().transpose(1, 2))
    assert tokens.is_contiguous(), "as on one device, and a dropout behind it draws in the order of memory"
    compare(Sound, PLAN, [sound[0]], _call)  # without a batch
    found = compare(Image, IMAGE_PLAN, [image], _call)
    y = found.module.right(image.to(memory_format=torch.channels_last))
    assert y.is_contiguous(memory_format=torch.channels_last)
    whole = Image().double()
    whole.load_state_dict(full_state_dict(found.module.state_dict(), found, keep=True))
    colours = torch.randn(2, 4, 6, 5, generator=generator).double().to(memory_format=torch.channels_last)
    # One channel on the last rank, whose own output is contiguous in both memory formats.
    layer = nn.Conv2d(4, 2 * world_size - 1, 3, padding=1)
    compare(lambda: nn.Sequential(layer), {"0": "column_gather"}, [colours], _call)
    found.module.eval(), whole.eval()
    torch.testing.assert_close(found.module(image), whole(image))


def _call(model: nn.Module, inputs: list[Tensor]) -> Any:
    return model(*inputs)


def _outside(rank: int, world_size: int, kind: Callable[[], Sound]) -> None:
    """Penalties on split weights, computed ones too: gathered in that step, and whole from the next one on."""

    def call(model: nn.Module, inputs: list[Tensor]) -> Any:
        layers = model.dense, model.grouped, model.by_output, model.by_place
        return model(*inputs), *((layer.weight**2).sum() for layer in layers)

    x = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(2)).double()
    found = compare(kind, PLAN, [x], call)
    found.keep_whole_where_used_outside()
    with found.user_code():
        assert found.module.dense.weight.shape == (12, 6, 3) and found.module.by_place.weight.shape == (32, 8, 3)
    whole = kind().double()
    whole.load_state_dict(full_state_dict(found.module.state_dict(), found, keep=True))
    torch.testing.assert_close(found.module(x), whole(x))


@pytest.mark.parametrize("kind", [Sound, older])
def test_weights_that_the_step_also_uses_outside_their_layers(kind: Callable[[], Sound]) -> None:
    run_ranks(2, _outside, kind)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.extended)])
def test_convolutions_of_every_kind(world_size: int) -> None:
    run_ranks(world_size, _run)
