"""Operations on hidden states, as users write them: each is run on a whole tensor and on a SequenceShard of it.

An operation takes `x`, (batch, tokens, D) or (tokens, batch, D), and a Workshop of other values. It returns anything;
tensors in it are compared, and `x` as it is afterwards.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

BATCH, D = 2, 6


@dataclasses.dataclass
class Workshop:
    """What operations find beside their input. Leaves are parameters; `y` and `z` were computed from leaves."""

    dim: int
    """The sequence dim of x."""
    length: int
    y: Tensor
    """Like x, whole."""
    z: Tensor
    """Like x; sharded where x is."""
    mask: Tensor
    """Bool, like x."""
    rows: Tensor
    """Bool, (tokens, 1, 1) or (1, tokens, 1)."""
    weight: nn.Parameter
    """(D,)"""
    bias: nn.Parameter
    """(D,)"""
    matrix: nn.Parameter
    """(D, D)"""
    wide: nn.Parameter
    """(2 D, D)"""
    narrow: nn.Parameter
    """(D - 2, D)"""
    positions: nn.Parameter
    """One vector per token: (tokens, 1, D) or (1, tokens, D)."""
    table: nn.Parameter
    """(20, D), a learned position table longer than any sequence."""
    one: nn.Parameter
    """(1, 1, D)"""
    scalar: nn.Parameter
    """()"""
    kernel: nn.Parameter
    """(D, D, 3), of a convolution over tokens."""
    attention: nn.MultiheadAttention
    """Of D features and 2 heads, with the batch first."""
    norm: nn.LayerNorm
    rms: nn.RMSNorm

    @property
    def other_dim(self) -> int:
        return 1 - self.dim

    def batch_first(self, x: Tensor) -> Tensor:
        return x if self.dim == 1 else x.transpose(0, 1)


Operation = Callable[[Any, Workshop], Any]


class Square(torch.autograd.Function):
    """A user's own function: token-local, and its gradient needs what it saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * grad * x


class OverTokens(torch.autograd.Function):
    """A user's own function that mixes tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return x.cumsum(dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.flip(ctx.dim).cumsum(ctx.dim).flip(ctx.dim), None


class Scaled(torch.autograd.Function):
    """A user's own function with a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum((0, 1))


@torch.jit.script
def over_tokens(x: Tensor, dim: int) -> Tensor:
    """A function that asks nobody how a shard is to be treated."""
    return x.cumsum(dim)


def _in_place(change: Callable[[Any, Workshop], Any]) -> Operation:
    """Change a copy in place, and look at it through another name for it."""

    def operation(x: Any, o: Workshop) -> Any:
        h = x * 1.0
        alias = h
        change(h, o)
        return alias

    return operation


def _augmented(symbol: Callable[[Any, Any], Any], other: Callable[[Workshop], Any]) -> Operation:
    def operation(x: Any, o: Workshop) -> Any:
        h = x * 1.0
        alias = h
        h = symbol(h, other(o))
        return h, alias

    return operation


def _saved(x: Any, o: Workshop) -> Any:
    file = io.BytesIO()
    torch.save({"x": x.detach()}, file)
    file.seek(0)
    return torch.load(file)


def _out(x: Any, o: Workshop) -> Any:
    result = torch.empty_like(o.y)
    with torch.no_grad():
        torch.add(x, o.y, out=result)
    return result


def _norm_by_hand(x: Any, o: Workshop) -> Any:
    return o.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)


def _residual(x: Any, o: Workshop) -> Any:
    h = F.dropout(o.norm(x), 0.0)
    h += x
    return h


def _class_token(x: Any, o: Workshop) -> Any:
    token = o.one.expand(*(BATCH if d == o.other_dim else 1 for d in range(2)), D)
    return torch.cat([token, x], o.dim)


def _iterate(x: Any, o: Workshop) -> Any:
    return [row.sum() for row in x]


def _checkpointed(x: Any, o: Workshop) -> Any:
    function = lambda h: o.norm(h) + h.mean(o.dim, keepdim=True)  # noqa: E731
    return torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)


def _sensitivity(x: Any, o: Workshop) -> Any:
    """The gradient of a leaf that is no parameter, taken within the step."""
    noise = torch.zeros(D, dtype=x.dtype, requires_grad=True)
    (grad,) = torch.autograd.grad((x + noise).pow(3).sum(), noise, create_graph=True)
    return grad


def _gradient_of_a_copy(x: Any, o: Workshop) -> Any:
    h = x.detach().requires_grad_()
    (h * o.y.detach() + h * o.bias).sum().backward()
    return h.grad


def _hook_on_weights(x: Any, o: Workshop) -> Any:
    """A parameter's gradient scaled by hand: as a computed operand."""
    return x * (o.weight * 2.0 - o.weight.detach())


def _straight_through(x: Any, o: Workshop) -> Any:
    return x + (x.round() - x).detach()


def _gated(x: Any, o: Workshop) -> Any:
    a, b = F.linear(x, o.wide).chunk(2, -1)
    return F.silu(a) * b + x


def _rotary(x: Any, o: Workshop) -> Any:
    half = torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1)
    return x * o.positions.cos() + half * o.positions.sin()


def _unequal_masks(x: Any, o: Workshop) -> Any:
    return torch.where(o.rows, x, o.z).masked_fill(~o.rows, 0.5)


OPERATIONS: dict[str, dict[str, Operation]] = {
    "pointwise": {
        "add whole": lambda x, o: x + o.y,
        "add whole from the left": lambda x, o: o.y + x,
        "add shard": lambda x, o: x + o.z,
        "add itself": lambda x, o: x + x,
        "add vector": lambda x, o: x + o.bias,
        "add positions": lambda x, o: x + o.positions,
        "add positions from a table": lambda x, o: x + o.table[: o.length].unsqueeze(o.other_dim),
        "add computed positions": lambda x, o: x + 2 * o.positions,
        "add one token": lambda x, o: x + o.one,
        "add computed token": lambda x, o: x + o.one.tanh(),
        "add scalar parameter": lambda x, o: x + o.scalar,
        "add number": lambda x, o: 1.5 + x + 2,
        "add with alpha": lambda x, o: torch.add(x, o.y, alpha=3),
        "add by keywords": lambda x, o: torch.add(input=x, other=o.y),
        "add more tokens": lambda x, o: x + o.y.repeat(*((3, 1, 1) if o.length == 1 and o.dim == 0 else (1, 1, 1))),
        "add a longer batch": lambda x, o: x + o.y.unsqueeze(0).repeat(3, 1, 1, 1),
        "sub": lambda x, o: (x - o.y) - (o.weight - x),
        "sub number": lambda x, o: 1 - x - 2,
        "rsub": lambda x, o: torch.rsub(x, o.y),
        "subtract": lambda x, o: torch.subtract(x, o.z),
        "mul": lambda x, o: x * o.y * o.weight * 2.0 * o.z,
        "mul scalar parameter": lambda x, o: x * o.scalar,
        "mul computed scalar": lambda x, o: x * o.scalar.exp(),
        "mul computed vector": lambda x, o: x * o.weight.exp(),
        "multiply": lambda x, o: torch.multiply(o.weight, x),
        "div": lambda x, o: x / (2 + o.y**2) + o.y / (1 + x**2),
        "div number": lambda x, o: x / 3 + 1 / (x.square() + 1),
        "divide": lambda x, o: torch.divide(x, 1 + o.weight**2),
        "true_divide": lambda x, o: torch.true_divide(x, 2),
        "div with rounding": lambda x, o: torch.div(x, 0.3, rounding_mode="floor"),
        "neg": lambda x, o: -x + torch.neg(x) * 2 + x.neg(),
        "pow": lambda x, o: x**2 + x.pow(3) + torch.pow(x.square() + 1, 0.5),
        "pow of tensors": lambda x, o: torch.pow(x.square() + 0.5, o.weight) + 2.0**x,
        "square sqrt rsqrt": lambda x, o: (x.square() + 1).sqrt() + torch.rsqrt(x**2 + 1),
        "exp log abs": lambda x, o: x.exp() + (x.abs() + 1).log(),
        "sin cos": lambda x, o: x.sin() * torch.cos(x),
        "addcmul": lambda x, o: torch.addcmul(x, o.y, o.weight) + torch.addcmul(o.bias, x, o.z, value=2),
        "lerp": lambda x, o: torch.lerp(x, o.y, 0.3) + x.lerp(o.z, o.weight.sigmoid()),
        "clamp": lambda x, o: x.clamp(-0.5, 0.5) + x.clamp(min=o.bias),
        "maximum minimum": lambda x, o: torch.maximum(x, o.y) + torch.minimum(o.weight, x),
        "maximum of a number": lambda x, o: torch.maximum(x, torch.tensor(0.1, dtype=x.dtype)),
        "where": lambda x, o: torch.where(o.mask, x, o.y),
        "where number": lambda x, o: torch.where(o.mask, x, 0.0) + torch.where(o.rows, 1.0, x),
        "where of rows": _unequal_masks,
        "where of itself": lambda x, o: torch.where(x > 0, x, x * 0.1),
        "where indices": lambda x, o: torch.where(x > 0),
        "masked_fill": lambda x, o: x.masked_fill(o.mask, 0.0) + x.masked_fill(o.rows, -1.0),
    },
    "activations": {
        "gelu": lambda x, o: F.gelu(x) + F.gelu(x, approximate="tanh"),
        "relu": lambda x, o: F.relu(x) + x.relu() + torch.relu(x),
        "silu": lambda x, o: F.silu(x) + F.mish(x),
        "sigmoid tanh": lambda x, o: torch.sigmoid(x) + x.tanh() + F.sigmoid(x),
        "softplus": lambda x, o: F.softplus(x) + F.softplus(x, beta=2),
        "leaky_relu elu": lambda x, o: F.leaky_relu(x, 0.1) + F.elu(x),
        "hard": lambda x, o: F.hardswish(x) + F.hardtanh(x) + F.relu6(x),
        "relu in place": _in_place(lambda h, o: F.relu(h, inplace=True)),
        "silu in place": _in_place(lambda h, o: F.silu(h, inplace=True)),
        "module in place": _in_place(lambda h, o: nn.LeakyReLU(0.1, inplace=True)(h)),
        "dropout of nothing": lambda x, o: F.dropout(x, 0.0) + F.dropout(x, 0.5, training=False) + nn.Dropout(0.0)(x),
        "dropout in evaluation": lambda x, o: nn.Dropout(0.5).eval()(x),
        "dropout of nothing in place": _in_place(lambda h, o: F.dropout(h, 0.0, inplace=True)),
    },
    "norms and projections": {
        "layer_norm": lambda x, o: F.layer_norm(x, (D,), o.weight, o.bias),
        "layer_norm plain": lambda x, o: F.layer_norm(x, (D,)),
        "layer_norm by keywords": lambda x, o: F.layer_norm(input=x, normalized_shape=(D,), weight=o.weight),
        "layer_norm with a computed weight": lambda x, o: F.layer_norm(x, (D,), o.weight + 1, o.bias * 2),
        "layer_norm over two dims": lambda x, o: F.layer_norm(x, x.shape[1:]),
        "layer_norm over all dims": lambda x, o: F.layer_norm(x, x.shape),
        "nn.LayerNorm": lambda x, o: o.norm(x),
        "rms_norm": lambda x, o: F.rms_norm(x, (D,), o.weight),
        "nn.RMSNorm": lambda x, o: o.rms(x),
        "norm by hand": _norm_by_hand,
        "linear": lambda x, o: F.linear(x, o.matrix, o.bias),
        "linear narrow": lambda x, o: F.linear(x, o.narrow),
        "linear wide": lambda x, o: F.linear(x, o.wide),
        "linear by keywords": lambda x, o: F.linear(input=x, weight=o.matrix),
        "linear with a computed weight": lambda x, o: F.linear(x, o.matrix * 2, o.bias + 1),
        "linear with a detached weight": lambda x, o: F.linear(x, o.matrix.detach()),
        "linear of its own": lambda x, o: F.linear(x, x[0]),
        "mean of features": lambda x, o: x.mean(-1, keepdim=True) + x.mean(dim=2, keepdim=True),
        "mean of features by keywords": lambda x, o: torch.mean(input=x, dim=-1, keepdim=True),
        "mean of features without keepdim": lambda x, o: x.mean(-1),
        "sum of features": lambda x, o: x.sum(-1, keepdim=True) + torch.sum(x, (-1,), keepdim=True),
        "sum of features in another dtype": lambda x, o: x.sum(-1, keepdim=True, dtype=torch.float32),
        "var of features": lambda x, o: x.var(-1, keepdim=True) + x.var(-1, unbiased=False, keepdim=True),
        "amax of features": lambda x, o: x.amax(-1, keepdim=True) - torch.amin(x, dim=-1, keepdim=True),
        "mean of what lies behind the first dim": lambda x, o: x.mean((1, 2), keepdim=True) + x.sum((-1, -2), True),
        "mean of every single dim": lambda x, o: [x.mean(d, keepdim=True) for d in (0, 1, 2, -1, -2, -3)],
        "var of everything": lambda x, o: torch.var(x, True) + x.var(False),
        "gated": _gated,
        "residual": _residual,
    },
    "over tokens": {
        "mean of tokens": lambda x, o: x.mean(o.dim),
        "mean of tokens kept": lambda x, o: x - x.mean(o.dim, keepdim=True),
        "mean of everything": lambda x, o: x.mean() + x.sum(),
        "max of tokens": lambda x, o: x.max(o.dim),
        "amax of tokens": lambda x, o: x.amax(o.dim, keepdim=True),
        "argmax": lambda x, o: (x.argmax(o.dim), x.argmax()),
        "softmax of tokens": lambda x, o: x.softmax(o.dim),
        "softmax of features": lambda x, o: F.softmax(x, -1) + x.log_softmax(-1),
        "cumsum": lambda x, o: x.cumsum(o.dim),
        "conv1d": lambda x, o: F.conv1d(o.batch_first(x).transpose(1, 2), o.kernel, padding=1),
        "conv1d without padding": lambda x, o: F.conv1d(o.batch_first(x).transpose(1, 2), o.kernel),
        "interpolate": lambda x, o: F.interpolate(o.batch_first(x).transpose(1, 2), scale_factor=2.0, mode="linear"),
        "batch_norm": lambda x, o: F.batch_norm(o.batch_first(x).transpose(1, 2), None, None, o.weight, training=True),
        "roll and flip": lambda x, o: x.roll(1, o.dim) + x.flip(o.dim),
        "sort": lambda x, o: x.sort(o.dim),
        "topk": lambda x, o: x.topk(1, o.dim),
        "std": lambda x, o: x.std(o.other_dim, correction=0),
        "norm": lambda x, o: (x.norm(), x.norm(dim=-1), torch.linalg.vector_norm(x, dim=o.dim)),
        "einsum": lambda x, o: torch.einsum("abd,abe->de", x, o.z) + torch.einsum("abd,de->abe", x, o.matrix).sum(),
        "matmul": lambda x, o: o.batch_first(x) @ o.batch_first(o.y).transpose(1, 2),
        "matmul of weights": lambda x, o: x @ o.matrix + torch.matmul(x, o.matrix),
        "bmm": lambda x, o: torch.bmm(x, o.z.transpose(1, 2)),
        "attention": lambda x, o: F.scaled_dot_product_attention(*[o.batch_first(x)] * 3, is_causal=True),
        "nn.MultiheadAttention": lambda x, o: o.attention(*[o.batch_first(x)] * 3),
        "nn.MultiheadAttention in evaluation": lambda x, o: o.attention.eval()(
            *[o.batch_first(x)] * 3, need_weights=False
        ),
        "pairwise distances": lambda x, o: torch.cdist(o.batch_first(x), o.batch_first(o.y) + 3.0),
    },
    "indices and shapes": {
        "first token": lambda x, o: x.select(o.dim, 0),
        "last token": lambda x, o: x[-1] if o.dim == 0 else x[:, -1],
        "slice of tokens": lambda x, o: x[1:] if o.dim == 0 else x[:, 1:],
        "slice of features": lambda x, o: x[..., :2],
        "index list": lambda x, o: x[[0, -1]],
        "index tensor": lambda x, o: x.index_select(o.dim, torch.tensor([0])),
        "new dim": lambda x, o: x[None] + x.unsqueeze(0),
        "boolean mask": lambda x, o: x[o.mask],
        "boolean mask of itself": lambda x, o: x[x > 0],
        "mask by a sharded value": lambda x, o: o.y[x > 0],
        "masked_select": lambda x, o: x.masked_select(o.mask),
        "gather": lambda x, o: x.gather(o.dim, torch.zeros_like(o.y, dtype=torch.long)),
        "scatter": lambda x, o: torch.zeros_like(x).scatter(2, torch.zeros_like(o.y, dtype=torch.long), x),
        "take_along_dim": lambda x, o: torch.take_along_dim(x, x.argsort(o.dim), o.dim),
        "cat with a class token": _class_token,
        "cat of features": lambda x, o: torch.cat([x, o.y, o.z], -1),
        "cat of itself": lambda x, o: torch.cat((x, x), o.dim),
        "stack": lambda x, o: torch.stack([x, o.z]),
        "split": lambda x, o: x.split(2, -1),
        "chunk and unbind": lambda x, o: (*x.chunk(3, -1), *x.unbind(o.other_dim)),
        "pad": lambda x, o: F.pad(x, (0, 0, 1, 1)),
        "transpose": lambda x, o: x.transpose(0, 1) * 2,
        "permute": lambda x, o: x.permute(2, 0, 1),
        "T": lambda x, o: (x.mT, x.movedim(0, 1)),
        "view": lambda x, o: x.view(-1, D),
        "view as": lambda x, o: x.view_as(o.y) + x.reshape_as(o.y),
        "view by shape": lambda x, o: x.view(x.shape[0], x.shape[1], 2, -1),
        "reshape": lambda x, o: x.reshape(x.size(0) * x.size(1), x.size(-1)),
        "flatten": lambda x, o: (x.flatten(), x.flatten(0, 1), x.unflatten(-1, (2, 3))),
        "expand and repeat": lambda x, o: x.expand(3, *x.shape) + x.repeat(3, 1, 1, 1),
        "squeeze": lambda x, o: x.squeeze(),
        "contiguous": lambda x, o: (x.contiguous(), x.is_contiguous(), x.stride()),
        "shape": lambda x, o: (
            x.shape,
            x.size(),
            x.size(0),
            x.size(-2),
            x.size(dim=1),
            len(x),
            x.numel(),
            x.nelement(),
        ),
        "shape by function": lambda x, o: (torch.numel(x), x.dim(), x.ndim, x.ndimension(), x.nbytes, x.element_size()),
        "shape by keywords": lambda x, o: torch.numel(input=x),
        "shape unpacked": lambda x, o: torch.arange(o.batch_first(x).shape[1]),
        "as an index": lambda x, o: list(range(o.batch_first(x).size(1))),
        "iteration": _iterate,
        "unpacking": lambda x, o: (lambda first, *rest: first)(*x),
        "likes": lambda x, o: [torch.zeros_like(x), torch.ones_like(x), torch.full_like(x, 2.0), x.new_zeros(3, 2)],
        "shape of likes": lambda x, o: (
            torch.empty_like(x).shape,
            x.new_empty(x.shape).shape,
            torch.rand_like(x).shape,
        ),
    },
    "values and types": {
        "comparisons": lambda x, o: (x > 0, x <= o.y, x == x, x != o.z, torch.isnan(x), x.isfinite().all()),
        "all any": lambda x, o: ((x > -9).all(), (x > 9).any(), torch.equal(x, o.y), torch.allclose(x, x)),
        "numpy": lambda x, o: x.detach().numpy(),
        "numpy array": lambda x, o: np.asarray(x.detach()) + np.mean(x.detach().numpy()),
        "tolist": lambda x, o: x.tolist(),
        "item": lambda x, o: (x.sum().item(), float(x.mean()), bool(x.sum() > 0), int(x.sum())),
        "repr": lambda x, o: (repr(x.detach()), str(x.detach()), f"{x.detach()}", f"{x.sum().detach():.3f}"),
        "dtype and device": lambda x, o: (
            x.dtype,
            x.device,
            x.layout,
            x.is_cuda,
            x.is_floating_point(),
            x.requires_grad,
        ),
        "is_tensor": lambda x, o: (torch.is_tensor(x), isinstance(x, Tensor), torch.is_floating_point(x)),
        "to dtype": lambda x, o: x.to(torch.float32) * 2 + x.float(),
        "to half": lambda x, o: (x.half(), x.bfloat16(), x.to(dtype=torch.bfloat16)),
        "to device": lambda x, o: x.to("cpu") + x.cpu(),
        "to copy": lambda x, o: x.to(torch.float64, copy=True),
        "to other": lambda x, o: x.to(o.y) + x.type_as(o.weight),
        "type": lambda x, o: (x.type(torch.float32), x.double(), x.type()),
        "a vector like it": lambda x, o: o.weight.to(x) * x + o.weight.type_as(x),
        "a token like it": lambda x, o: (o.one.type_as(x), o.one.to(x)),
        "add a token like it": lambda x, o: o.one.type_as(x) + o.one.to(x) * x,
        "a whole value like it": lambda x, o: (o.y.type_as(x), o.positions.to(x)),
        "clone": lambda x, o: x.clone() + x * 1,
        "detach": lambda x, o: (x.detach(), x.detach() * x),
        "data": lambda x, o: x.data * 2,
        "no_grad": lambda x, o: torch.no_grad()(lambda: x * 2)(),
        "deepcopy": lambda x, o: copy.deepcopy(x.detach()),
        "copy": lambda x, o: copy.copy(x.detach()),
        "pickle": lambda x, o: pickle.loads(pickle.dumps(x.detach())),
        "torch.save": _saved,
        "out": _out,
        "straight-through": _straight_through,
        "scaled gradient of a weight": _hook_on_weights,
        "rotary": _rotary,
        "checkpoint": _checkpointed,
        "own function": lambda x, o: Square.apply(x) + x,
        "own function over tokens": lambda x, o: OverTokens.apply(x, o.dim),
        "scripted function over tokens": lambda x, o: over_tokens(x, o.dim) + x,
        "own function with a weight": lambda x, o: Scaled.apply(x, o.weight),
        "own function of a computed value": lambda x, o: Square.apply(x * 2).sum(),
        "vmap": lambda x, o: torch.vmap(lambda row: row.cumsum(0))(x),
        "vmap of vmap": lambda x, o: torch.vmap(torch.vmap(lambda h, y: h * y + o.weight))(x, o.y).mean(o.dim),
        "torch.func.grad": lambda x, o: torch.func.grad(lambda h: (h.pow(3) * o.y).sum())(x),
        "torch.func.vjp": lambda x, o: torch.func.vjp(lambda h: h.pow(3), x)[1](o.y),
        "torch.func.jvp": lambda x, o: torch.func.jvp(lambda h: h.pow(3).mean(o.dim), (x,), (o.y,)),
        "inference_mode": lambda x, o: torch.inference_mode()(lambda: ((x * 2).mean(o.dim), x + o.bias))(),
        "gradient inside": lambda x, o: torch.autograd.grad((x.pow(3) * o.y).sum(), o.y, create_graph=True)[0],
    },
    "in place": {
        "add in place": _augmented(operator.iadd, lambda o: o.y),
        "add shard in place": _augmented(operator.iadd, lambda o: o.z),
        "add vector in place": _augmented(operator.iadd, lambda o: o.bias),
        "add positions in place": _augmented(operator.iadd, lambda o: o.positions),
        "sub in place": _augmented(operator.isub, lambda o: o.y),
        "mul in place": _augmented(operator.imul, lambda o: 2.0),
        "div in place": _augmented(operator.itruediv, lambda o: 2.0),
        "methods in place": _in_place(lambda h, o: h.add_(o.y).mul_(2).sub_(o.weight).div_(3).relu_()),
        "add_ with alpha": _in_place(lambda h, o: h.add_(o.y, alpha=2)),
        "in place twice": _in_place(lambda h, o: (operator.iadd(h, o.y), operator.imul(h, o.z.detach()))),
        "in place after use": lambda x, o: (lambda h: (h * 2, operator.iadd(h, o.y)))(x * 1.0),
        "in place on a whole tensor": lambda x, o: (lambda h: (operator.iadd(h, x), h))(o.y * 1.0),
        "copy_ into a whole tensor": lambda x, o: (o.y * 1.0).copy_(x),
        "assign": _in_place(lambda h, o: operator.setitem(h, (slice(None), 0), 0.0)),
        "masked_fill_": _in_place(lambda h, o: h.masked_fill_(o.mask, 0.0)),
        "index_add_": _in_place(lambda h, o: h.index_add_(0, torch.tensor([0]), o.y[:1])),
        "assign a weight": _in_place(lambda h, o: operator.setitem(h, (slice(None), 1), o.weight)),
        "assign by a mask": _in_place(lambda h, o: operator.setitem(h, h.detach().mean(-1) > 0, 2.0)),
        "assign into a whole tensor": lambda x, o: (lambda h: (operator.setitem(h, 0, x[0]), h))(o.y * 1.0),
    },
}
"""Must work."""

REFUSED: dict[str, Operation] = {
    "assign to a slice": _in_place(lambda h, o: operator.iadd(h[0], 1.0)),
    "fill_": _in_place(lambda h, o: h.fill_(1.0)),
    "zero_": _in_place(lambda h, o: h.zero_()),
    "copy_": _in_place(lambda h, o: h.copy_(o.y)),
    "clamp_": _in_place(lambda h, o: h.clamp_(-1, 1)),
    "exp_": _in_place(lambda h, o: h.exp_()),
    "transpose_": _in_place(lambda h, o: h.transpose_(0, 1)),
    "init": _in_place(lambda h, o: nn.init.zeros_(h.detach())),
    "add_ with more tokens": _in_place(lambda h, o: h.add_(torch.ones(3, 1, 1, 1))),
    "selu in place": _in_place(lambda h, o: F.selu(h, inplace=True)),
    "hardsigmoid in place": _in_place(lambda h, o: F.hardsigmoid(h, inplace=True)),
    "alpha_dropout in place": _in_place(lambda h, o: F.alpha_dropout(h, 0.0, inplace=True)),
    "through a slice": _in_place(lambda h, o: h[0].zero_()),
    "through a slice of features": _in_place(lambda h, o: h[..., 0].mul_(2.0)),
    "through a transpose": _in_place(lambda h, o: h.transpose(0, 1).add_(1.0)),
    "through a view": _in_place(lambda h, o: h.view(-1).add_(1.0)),
    "through data": _in_place(lambda h, o: h.data.mul_(2.0)),
    "through detach": _in_place(lambda h, o: h.detach().zero_()),
    "through unbind": _in_place(lambda h, o: h.unbind(0)[0].mul_(2.0)),
    "through chunks": _in_place(lambda h, o: h.chunk(2, -1)[0].mul_(2.0)),
    "through iteration": _in_place(lambda h, o: next(iter(h)).mul_(2.0)),
    "through numpy": _in_place(lambda h, o: operator.iadd(h.detach().numpy(), 1.0)),
    "set data": _in_place(lambda h, o: setattr(h, "data", o.y.detach())),
    "foreach": _in_place(lambda h, o: torch._foreach_add_([h], 1.0)),
    "out": torch.no_grad()(_in_place(lambda h, o: torch.add(h, 1.0, out=h))),
    "out of a sort": torch.no_grad()(_in_place(lambda h, o: torch.sort(o.y, out=(h, torch.empty(0).long())))),
    "vmap that returns a shard": lambda x, o: torch.vmap(lambda row: x + row)(o.matrix),
    "pow in place": _augmented(operator.ipow, lambda o: 2),
    "floordiv in place": _augmented(operator.ifloordiv, lambda o: 0.3),
    "mod in place": _augmented(operator.imod, lambda o: 0.3),
    "gradient of a leaf inside": _sensitivity,
    "gradient of a copy": _gradient_of_a_copy,
    "gradient for a copy": lambda x, o: (lambda h: torch.autograd.grad((h * o.y).sum(), h))(
        x.detach().requires_grad_()
    ),
    "set requires_grad": lambda x, o: (lambda h: setattr(h, "requires_grad", True) or h * 2)(x.detach()),
    "hook": lambda x, o: x.register_hook(lambda grad: grad * 2),
    "retain_grad": lambda x, o: x.retain_grad(),
    "in place through a view without gradients": torch.no_grad()(_in_place(lambda h, o: h[0].zero_())),
}
"""May work; otherwise must raise. Never anything else than on a whole tensor."""
