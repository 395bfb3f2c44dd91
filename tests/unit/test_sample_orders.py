"""Where a step puts samples beside others of its batch (mixup), a plan says by what; where it only sorts them, not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_megatp.pipeline.slicing.slicer import Slicer


class Net(nn.Module):
    def __init__(self, step: Callable[[Net, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.block = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head, self.step = nn.Linear(6, 3), step

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x)).relu())

    def training_step(self, batch: Any, batch_idx: int = 0) -> Tensor:
        return self.step(self, *batch)


def _mixed(x: Tensor, others: Tensor, share: float = 0.3) -> Tensor:
    return share * x + (1 - share) * others


def _of_labels(net: Net, x: Tensor, y: Tensor) -> Tensor:
    order = torch.randperm(len(x), device=x.device)
    out = net(_mixed(x, x[order]))
    return _mixed(F.cross_entropy(out, y), F.cross_entropy(out, y[order]))


def _only_labels(net: Net, x: Tensor, y: Tensor) -> Tensor:
    out = net(x)
    return F.cross_entropy(out, y) + F.cross_entropy(out, y[torch.randperm(len(x))])


def _in_place(net: Net, x: Tensor, y: Tensor) -> Tensor:
    others = x.flip(0).mul_(0.7)
    return F.cross_entropy(net(x.mul(0.3).add_(others)), y)


def _cut(net: Net, x: Tensor, y: Tensor) -> Tensor:
    order, x = torch.randperm(len(x)), x.clone()
    x[:, 2:4] = x[order, 2:4]
    return F.cross_entropy(net(x), y)


def _hidden(net: Net, x: Tensor, y: Tensor) -> Tensor:
    h = net.embed(x)
    return F.cross_entropy(net.head(net.block(_mixed(h, h.index_select(0, torch.randperm(len(x)))))), y)


def _statistics(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """MixStyle's."""
    h = net.embed(x)
    mean, order = h.mean(1, keepdim=True), torch.randperm(len(x))
    return F.cross_entropy(net.head(net.block(h - mean + _mixed(mean, mean[order]))), y)


def _joined(net: Net, x: Tensor, y: Tensor) -> Tensor:
    others = torch.cat([x[:, :3], x.roll(1, 0)[:, 3:]], 1)
    return F.cross_entropy(net(others), y)


def _of_numpy(net: Net, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(net(_mixed(x, x[np.random.permutation(len(x))])), y)


def _whole_step_in_another_order(net: Net, x: Tensor, y: Tensor) -> Tensor:
    order = torch.randperm(len(x))
    return F.cross_entropy(net(x[order]), y[order])


def _there_and_back(net: Net, x: Tensor, y: Tensor) -> Tensor:
    order = torch.randperm(len(x))
    return F.cross_entropy(net(x[order])[order.argsort()], y) + F.cross_entropy(net(x.flip(0)).flip([0]), y)


def _out_of_sight(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """In between the rows are no samples."""
    order = torch.randperm(len(x))
    h = net.block(net.embed(x)[order]).view(-1, 2).exp().view(len(x), 6)
    return F.cross_entropy(net.head(h[order.argsort()]), y)


def _own_rows(net: Net, x: Tensor, y: Tensor) -> Tensor:
    """What looks like it: each sample's own entry, a table of classes, the features turned round."""
    out = net(x.flip(-1) + x)
    centers = torch.randn(len(x), 3, dtype=x.dtype)
    return -out.log_softmax(-1)[torch.arange(len(x)), y].mean() + (out - centers[y]).square().mean()


MIXES = {
    "mixup of labels": (_of_labels, "add"),
    "of labels only": (_only_labels, "cross_entropy"),
    "in place": (_in_place, "add_"),
    "cutmix": (_cut, "__setitem__"),
    "hidden states": (_hidden, "add"),
    "statistics": (_statistics, "add"),
    "joined": (_joined, "cat"),
    "order of NumPy's": (_of_numpy, "add"),
}
KEEPS = [_whole_step_in_another_order, _there_and_back, _out_of_sight, _own_rows]


def _plan(step: Callable[[Net, Tensor, Tensor], Tensor]) -> str:
    torch.manual_seed(1)
    net = Net(step)
    batch = torch.randn(7, 6), torch.randint(0, 3, (7,))
    return Slicer(net, {"embed": 0, "block": 0, "head": 1}, 2).plan(net.training_step, batch).mixes


@pytest.mark.parametrize("name", MIXES)
def test_what_mixes_samples_is_named(name: str) -> None:
    step, by = MIXES[name]
    assert _plan(step).startswith(f"`{by}` (")


@pytest.mark.parametrize("step", KEEPS)
def test_what_only_orders_them_is_not(step: Callable[[Net, Tensor, Tensor], Tensor]) -> None:
    assert not _plan(step)
