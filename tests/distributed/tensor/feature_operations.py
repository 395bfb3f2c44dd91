"""Single operations on heads, as users write them: each is run on a whole tensor and on a FeatureShard of it.

x and z are (2, HEADS, T, D), sharded on dim 1; the other operands are whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS, T, D = 8, 3, 4


@dataclass
class Workshop:
    z: Tensor
    """Like x; sharded where x is."""
    y: Tensor
    """Like x, whole, computed."""
    row: Tensor
    """(T, D), whole, computed."""
    mask: Tensor
    """Bool, like x."""
    per_head: nn.Parameter
    """(HEADS, 1, 1)"""
    weight: nn.Parameter
    """(D,)"""
    matrix: nn.Parameter
    """(D, D)"""
    mix: nn.Parameter
    """(HEADS, HEADS)"""


Operation = Callable[[Any, Workshop], Any]

LOCAL: dict[str, Operation] = {
    "pointwise": lambda x, o: 2.0 - (x + o.z) * o.y / 3 + o.row - x.square().add(1).rsqrt(),
    "whole first": lambda x, o: (o.y * x, o.row - x, torch.maximum(o.y, x), o.y.where(o.mask, x)),
    "parameters": lambda x, o: x * o.per_head + o.weight,
    "two shards": lambda x, o: torch.where(x > o.z, x, o.z) * (x != o.z),
    "masks": lambda x, o: (x.masked_fill(o.mask, 0.5), x.masked_fill(o.mask[:, :1], 1.0), x.clamp(min=o.y)),
    "types": lambda x, o: (x.float().double(), x.to(torch.float32), o.y.to(x), x.type_as(o.z), x.detach(), x > 0),
    "like": lambda x, o: (torch.zeros_like(x) + o.y, x.new_ones(T, D), x.new_zeros(x.shape) + x),
    "activations": lambda x, o: F.gelu(F.silu(F.leaky_relu(x))) + torch.sigmoid(x).tanh(),
    "functions": lambda x, o: (F.logsigmoid(x), F.softshrink(x), torch.special.expit(x), x.abs().lgamma(), x.asinh()),
    "norm of groups": lambda x, o: (
        F.group_norm(x, HEADS, o.per_head.flatten(), o.y[0, :, 0, 0], 1e-3),
        nn.functional.group_norm(x.transpose(1, 2).reshape(2 * T, -1), HEADS),
        torch.group_norm(input=x.flatten(2), num_groups=HEADS, weight=o.per_head.flatten()),
    ),
    "softmax": lambda x, o: x.softmax(-1) + F.log_softmax(x, dim=2) + torch.cumsum(x, -2),
    "norms": lambda x, o: F.layer_norm(x, (T, D)) + F.rms_norm(x, (D,), o.weight) + F.normalize(x, dim=-1),
    "reductions": lambda x, o: (x.mean(-1), x.sum((0, 2)), x.var(-1, keepdim=True), x.amax(dim=[-1, -2])),
    "more reductions": lambda x, o: (x.max(-1).values, x.argmax(2), x.norm(2, -1), (x > 0).any(-1), x.logsumexp(3)),
    "max of two": lambda x, o: (torch.max(x, o.z), x.min(o.y)),
    "sort": lambda x, o: (x.sort(-1).values, x.topk(2, dim=-1)[0], x.flip(-1, 0), x.roll(1, 2)),
    "triangle and pad": lambda x, o: (x.tril(), F.pad(x, (1, 0)), F.pad(x, (0, 0, 2, 1), value=1.0)),
    "views": lambda x, o: (x.view(16, T, D), x.reshape(2, 1, -1, T * D).sum(3), x.flatten(0, 1), x[None].squeeze(0)),
    "views of heads": lambda x, o: x.transpose(1, 2).reshape(2, T, -1).view(2, T, HEADS, -1).movedim(2, 1).unsqueeze(2),
    "view like": lambda x, o: (x.view_as(o.y), o.y.flatten(2).view_as(x), o.row.expand_as(x), x.reshape_as(o.z)),
    "all in one dim": lambda x, o: x.reshape(-1).view(2, HEADS, -1),
    "permutations": lambda x, o: (x.permute(3, 1, 0, 2), x.mT, x.swapdims(0, 1), x.moveaxis((0, 1), (-1, 0)), x[0].mT),
    "last dims": lambda x, o: (x[0, :, :, 0].t(), x[0, :, 0].T, x.select(0, 1), x.narrow(2, 1, 2), x.unbind(2)[0]),
    "slices": lambda x, o: (x[:, 2:7], x[:, :4, 1], x[..., ::2], x[1, 3:, None, :, -1], x[:, 1:6].narrow(1, 2, 2)),
    "index tensors": lambda x, o: (
        x[:, :, torch.tensor([0, 2])],
        x[torch.tensor([1, 0, 1])],
        x.transpose(1, 3)[:, torch.arange(D), torch.tensor([0, 1, 1, 2])],
        x.movedim(1, -1)[o.mask[:, 0]],
        x.index_select(2, torch.tensor([1])),
    ),
    "index lists": lambda x, o: (x[..., [1, 2]], x[:, [2, 3, 4]], x.mT[:, [-2], :, None], x[[1]] * 2),
    "splits": lambda x, o: (*x.split(3, dim=1), *x.chunk(2, 1), *x.tensor_split([2, 7], dim=1), *x.split([1, 2], 2)),
    "in parts": lambda x, o: torch.cat([p * i for i, p in enumerate(x.split([4, 4], dim=1))], dim=1),
    "cat": lambda x, o: (torch.cat([x, o.z, o.y], -1), torch.cat((o.y, x), dim=1), torch.stack([o.y, x], 2)),
    "cat of other sizes": lambda x, o: (torch.cat([x, o.z[:, :3]], 1), torch.cat([x[:, 2:], o.y, x], 1)[:, 3:]),
    "cat with nothing": lambda x, o: torch.cat([torch.tensor([], dtype=x.dtype), x, o.z], dim=-2),
    "cat and part": lambda x, o: torch.cat([x, o.y, o.z], 1)[:, 5:20],
    "repeats": lambda x, o: (x.repeat(1, 2, 1, 1), x.repeat_interleave(2, dim=1), x.repeat_interleave(2, -1)),
    "repeats of a size": lambda x, o: (
        x.repeat_interleave(2, dim=1, output_size=2 * x.shape[1]),
        torch.repeat_interleave(x, 3, 2, output_size=3 * x.shape[2]),
    ),
    "repeated heads": lambda x, o: x[:, :, None].expand(-1, HEADS, 3, T, D).reshape(2, -1, T, D) * 2,
    "matmul": lambda x, o: (x @ o.z.mT, x @ o.matrix, o.y @ x.mT, torch.matmul(o.row, x.transpose(2, 3)), x @ o.weight),
    "linear": lambda x, o: (F.linear(x, o.matrix, o.weight), F.linear(o.y, o.row) * x[..., :T]),
    "bmm": lambda x, o: (
        x.flatten(0, 1).bmm(o.z.flatten(0, 1).mT),
        torch.baddbmm(x[0], x[0] @ o.matrix, o.matrix + o.z[0].mT @ o.z[0]),
    ),
    "outer dims": lambda x, o: (x[0, :, 0] @ o.matrix, torch.outer(o.weight, x[0, :, 0, 0]), o.matrix @ x[0, :, 0].t()),
    "einsum": lambda x, o: (
        torch.einsum("bhqd,bhkd->bhqk", x, o.z),
        torch.einsum("...qd,...kd", x, o.y),
        torch.einsum("bhqd, de -> hbqe", x, o.matrix),
        torch.einsum("bhqd,hij->bhqd", x, o.per_head),
    ),
    "attention": lambda x, o: (
        F.scaled_dot_product_attention(x, o.z, o.y),
        F.scaled_dot_product_attention(o.y, x, o.z, attn_mask=o.mask[..., :T] | torch.eye(T, dtype=torch.bool)),
        F.scaled_dot_product_attention(o.y, x, x, is_causal=True),
        F.scaled_dot_product_attention(x, o.y[:, :1], o.y[:, 1:2]),
    ),
    "complex": lambda x, o: torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (2, 2))) * (1 + 2j)).flatten(-2),
    "metadata": lambda x, o: (x.shape, x.size(1), x.size()[-1], len(x), x.numel(), x.dim(), x.dtype, x.requires_grad),
    "glu": lambda x, o: F.glu(x, -1),
}  # fmt: skip
ADDED: dict[str, Operation] = {
    "sums and means": lambda x, o: (x.mean(1), x.sum(), torch.sum(x, (1, -1), keepdim=True), x.mean((0, 1)), x.mean()),
    "other dtypes": lambda x, o: (x.float().sum(1), x.mean(1, dtype=torch.float32), x.sum(dim=-3, dtype=torch.float32)),
    "spreads": lambda x, o: (x.std(), x.var(1), x.std((1, 3), unbiased=False), *torch.var_mean(x, 1, correction=0)),
    "more spreads": lambda x, o: (x.var(dim=(1, 2), keepdim=True), *torch.std_mean(x, (1,)), x.var(unbiased=False)),
    "lengths": lambda x, o: (x.norm(dim=1), x.norm(), torch.norm(x, 2, (1, 3)), torch.linalg.vector_norm(x, dim=1)),
    "length of nothing": lambda x, o: ((x * 0).norm(dim=1), (x * 0.0).std(1), F.normalize(x * 0.0, dim=1)),
    "directions": lambda x, o: (F.normalize(x), F.normalize(x, dim=1, eps=1.0), F.normalize(x, 2.0, (1, 3))),
    "layer norms": lambda x, o: (
        F.layer_norm(x, (HEADS, T, D), o.per_head.expand(HEADS, T, D), o.y[0]),
        F.layer_norm(x.movedim(1, -1), (HEADS,), o.per_head.flatten(), eps=1e-3),
        torch.layer_norm(x.mT.transpose(1, 3), (D, HEADS)[1:], None, o.per_head[:, 0, 0]),
    ),
    "rms norms": lambda x, o: (
        F.rms_norm(x.movedim(1, -1), (HEADS,), o.per_head.flatten(), 1e-2),
        F.rms_norm(x.movedim(1, -1), (HEADS,)),
        F.rms_norm(x, x.shape[1:], o.y[0]),
    ),
    "largest": lambda x, o: (x.argmax(1), x.max(1).values, x.min(1, keepdim=True)[1], x.detach().amax(1), x.argmin(-3)),
    "softmax over heads": lambda x, o: (x.softmax(1), F.log_softmax(x, 1), x.logsumexp(1), torch.logsumexp(x, 1, True)),
    "chosen": lambda x, o: (
        x.gather(1, torch.tensor([[3, 7], [0, 3]]).view(2, 2, 1, 1).expand(2, 2, T, D)),
        torch.gather(x, 1, torch.arange(6).view(1, 6, 1, 1)),
        torch.gather(x, 3, torch.zeros(2, HEADS, T, 1, dtype=torch.long)),
    ),
    "by hand": lambda x, o: (
        x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6) * o.per_head,
        (x - x.mean(1, keepdim=True)) / (x.std(1, keepdim=True) + 1e-6) + o.per_head,
    ),
}
"""Over the heads themselves, of which ranks add up their parts."""
GATHERS: dict[str, Operation] = {
    "over the heads": lambda x, o: (x.amax(1), x.prod(1), x.cumsum(1), x.sort(1).values, x.flip(1), x.norm(1, 1)),
    "some heads": lambda x, o: (x[:, 3], x[:, ::2], x[:, torch.tensor([1, 5])], x.select(1, -1), x[o.mask]),
    "all heads one by one": lambda x, o: [head * 2 for head in x.unbind(1)],
    "mixing heads": lambda x, o: (torch.einsum("bhqd,hg->bgqd", x, o.mix), x.movedim(1, -1) @ o.mix),
    "no rule": lambda x, o: (F.avg_pool2d(x, 2), F.conv2d(x, o.mix[:, :, None, None]), torch.diagonal(x, 0, 1, 2)),
    "another dim": lambda x, o: x.transpose(1, 2).reshape(2, T, -1)[..., :HEADS] + o.z[:, :, :, 0].mT,
    "numbers": lambda x, o: (x.prod().item(), x.tolist(), x.detach().numpy().shape, bool(x.mean() > 9), repr(x)[:6]),
    "iteration": lambda x, o: [head for batch in x for head in batch],
    "whole in place": lambda x, o: (o.y * 1.0).add_(x),
    "whole set": lambda x, o: _set(o.y * 1.0, x),
    "norm of groups of two": lambda x, o: F.group_norm(x[:, 1:7], 3, o.per_head.flatten()[1:7]),
    "odd view": lambda x, o: x.transpose(1, 2).reshape(2, T, -1).view(2, T, 2, -1, 8).sum(-1),
    "gather": lambda x, o: torch.gather(x, 3, torch.zeros(2, 3, T, 1, dtype=torch.long)),
}
IN_PLACE: dict[str, Operation] = {
    "arithmetic": lambda x, o: x.mul_(2.0).add_(o.z).sub_(o.y).div_(o.row),
    "operators": lambda x, o: _operators(x, o),
    "set": lambda x, o: _set_parts(x, o),
    "a view": lambda x, o: x[:, 2:6].mul_(3.0),
    "views": lambda x, o: [p.transpose(1, 2).add_(i) for i, p in enumerate((x[:, :4], x[:, 4:]))],
    "masked": lambda x, o: x.masked_fill_(o.mask, 2.0).clamp_(max=1.0),
    "activation": lambda x, o: F.relu(x, inplace=True) * F.dropout(o.z, 0.0, True, True),
    "copy": lambda x, o: x.copy_(o.y),
    "filled heads": lambda x, o: (x * 2).index_fill_(1, torch.tensor([1, 6]), 0.5).mul_(o.z),
    "added heads": lambda x, o: x.index_add_(1, torch.tensor([1, 6]), o.y[:, :2] * o.z[:, 3:5]),
    "set one head": lambda x, o: x.__setitem__((slice(None), 3), 0.0),
    "one hot": lambda x, o: torch.zeros_like(x).scatter_(1, x.argmax(1, keepdim=True), 1.0) * x,
    "gathered before and after": lambda x, o: (x.sum(1), x.mul_(2.0).sum(1)),
}
REFUSED: dict[str, Operation] = {
    "cumsum over the heads": lambda x, o: x.cumsum_(1),
    "one head": lambda x, o: x[:, 3].mul_(2.0),
    "out": lambda x, o: torch.add(o.y, 1.0, out=x),
    "hook": lambda x, o: x.register_hook(print),
    "retain_grad": lambda x, o: x.retain_grad(),
    "leaf": lambda x, o: x.detach().requires_grad_(),
    "data": lambda x, o: setattr(x, "data", o.y),
}


def _set(y: Tensor, x: Tensor) -> Tensor:
    y[:, :] = x
    return y


def _operators(x: Tensor, o: Workshop) -> Tensor:
    x += o.z
    x *= o.per_head
    x -= 1.0
    x /= 2.0
    return x


def _set_parts(x: Tensor, o: Workshop) -> None:
    x[:, 1:5, 0] = o.z[:, 1:5, 1]
    x[:, 2:, 1] = o.y[:, 2:, 1]
    x[0, :, :, 3] = o.row[:, 0]
    x[:, :, torch.tensor([2]), torch.tensor([1])] = 7.0
    x[..., -1] += 1.0


ALL = copy.copy(LOCAL) | GATHERS | IN_PLACE
