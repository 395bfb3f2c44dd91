"""Hugging Face's Conv1D under the styles of linear layers, against the model on one device, on real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from lightning_megatp.checkpoint.full import full_state_dict
from lightning_megatp.module import ParallelModule
from lightning_megatp.tensor.conv1d import ColumnParallelPermuted, RowParallelPermuted
from tests.distributed.tensor.splitting import parallelize
from tests.distributed.tensor.whole_and_split import compare
from tests.ranks import run_ranks

HEAD = 3


class Attention(nn.Module):
    def __init__(self, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = Conv1D(3 * heads * HEAD, hidden), Conv1D(hidden, heads * HEAD)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(-2, -3) for y in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))


class Block(nn.Module):
    """Attention and an MLP of Conv1D layers, and one layer before and after that stand alone."""

    def __init__(self, heads: int, hidden: int, feed_forward: int) -> None:
        super().__init__()
        self.before, self.after = Conv1D(hidden, hidden), Conv1D(5, hidden)
        self.attn = Attention(heads, hidden)
        self.up, self.down = Conv1D(feed_forward, hidden), Conv1D(hidden, feed_forward)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = x + self.attn(x)
        return self.after(x + self.down(torch.tanh(self.up(x))))


class Model(nn.Module):
    def __init__(self, heads: int, hidden: int, feed_forward: int) -> None:
        super().__init__()
        self.block = Block(heads, hidden, feed_forward)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


PLAN: dict[str, Any] = {
    "block.before": "row_split",
    "block.attn.qkv": {"style": "column", "parts": 3, "unit": HEAD},
    "block.attn.out": {"style": "row", "unit": HEAD},
    "block.attn.heads": "divide",
    "block.up": "column",
    "block.down": "row",
    "block.after": "column_gather",
}


def _run(rank: int, world_size: int, sizes: tuple[int, int, int], sequence: bool) -> None:
    x = torch.randn(2, 5, sizes[1], dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    plan = {**PLAN, "block": "sequence"} if sequence else PLAN
    compare(lambda: Model(*sizes), plan, [x], lambda model, inputs: model(*inputs))


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(
    ("world_size", "sizes"), [(2, (4, 8, 16)), (2, (3, 7, 9)), (4, (4, 8, 16)), (4, (6, 9, 7))], ids=str
)
def test_a_block_of_conv1d(world_size: int, sizes: tuple[int, int, int], sequence: bool) -> None:
    run_ranks(world_size, _run, sizes, sequence)


def _objects(rank: int, world_size: int) -> None:
    model = Model(4, 8, 16)
    layers, calls = dict(model.named_modules()), []
    model.block.up.register_forward_hook(lambda module, args, y: calls.append(y.shape))
    parallelize(model, PLAN)
    assert all(module is layers[name] for name, module in model.named_modules())
    block = model.block
    assert isinstance(block.up, Conv1D) and isinstance(block.up, ColumnParallelPermuted)
    assert isinstance(block.down, Conv1D) and isinstance(block.down, RowParallelPermuted)
    assert type(block.up) is type(block.attn.qkv) and not isinstance(block.up, nn.Linear)
    assert (block.up.nf, block.up.nx, tuple(block.up.weight.shape), tuple(block.up.bias.shape)) == (16, 8, (8, 8), (8,))
    assert (block.down.nf, block.down.nx, tuple(block.down.weight.shape)) == (8, 16, (8, 8))
    assert (block.after.nf, tuple(block.after.weight.shape)) == (5, (8, 3 - rank))
    assert not hasattr(block.up, "out_features") and not hasattr(block.down, "in_features")
    assert repr(block.up) == "Conv1D(nf=16, nx=8)"
    model(torch.randn(1, 2, 8))
    assert calls == [(1, 2, 8)]
    block.up(x=torch.randn(1, 2, 8))  # the argument's name stays


def test_objects_classes_and_names_stay() -> None:
    run_ranks(2, _objects)


def _outside(rank: int, world_size: int) -> tuple[bool, bool]:
    """A penalty on split parameters: they are gathered in that step and whole from the next one on."""

    def call(model: nn.Module, inputs: list[Tensor]) -> Any:
        return model(*inputs), (model.block.up.weight**2).sum(), (model.block.down.weight**2).sum()

    x = torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    found: ParallelModule = compare(lambda: Model(4, 8, 16), PLAN, [x], call)
    found.keep_whole_where_used_outside()
    block = found.module.block
    shapes = tuple(block.up.weight.shape) == (8, 16), tuple(block.down.weight.shape) == (16, 8)
    whole = Model(4, 8, 16).double()
    whole.load_state_dict(full_state_dict(found.module.state_dict(), found, keep=True))
    torch.testing.assert_close(found.module(x), whole(x))
    return shapes


def test_weights_that_the_step_also_uses_outside_their_layers() -> None:
    assert run_ranks(2, _outside) == [(True, True)] * 2
