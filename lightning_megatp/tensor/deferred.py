"""Weight gradients of linear layers, put off: what a zero-bubble schedule fills its bubble with.

The backward of a linear has two halves. The gradient of its input is what the stage before waits for; those of its
weight and bias wait for nobody, and nobody waits for them. Here the first is computed at once, and the second is kept
as what it needs (input and output gradient) until the schedule's backward-weight.

Shapes: n tokens or rows (all dims but the last), i input features, o output features.
Source: Qi et al. 2024 (Zero Bubble Pipeline Parallelism), section 2.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from lightning_megatp.shim.autograd import (
    accumulates_into,
    accumulation_hooks,
    gradient_hooks,
    transforms_are_active,
)
from lightning_megatp.shim.compiler import is_compiled
from lightning_megatp.shim.torch import tensor_version
from lightning_megatp.tensor.functions import OwnFunction, OwnHook


class DeferredWeights:
    """Weight gradients that wait, in a queue per key (a stage's microbatch).

    Outside of `halved` forwards, and wherever a gradient can't be put off without changing it, `linear` is `F.linear`:
    for weights that are computed (slices, casts, parametrizations) or complex, inside torch.func and forward-mode
    differentiation, in compiled code. Weights with gradient hooks of others than this package, and `autograd.grad`
    inside of a backward, get their gradient at once.

    Memory: until it is computed, a put-off gradient holds the layer's input (n, i) and output gradient (n, o).
    """

    def __init__(self) -> None:
        self.active = False
        """Whether a forward runs whose backward will put weights off."""
        self._open: list[_Gradient] | None = None
        self._queues: dict[Hashable, list[_Gradient]] = {}

    def __deepcopy__(self, memo: dict[int, object]) -> DeferredWeights:
        return self  # a copied model runs in the same schedule

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Around a batch. What an exception leaves in the queues is dropped."""
        try:
            yield
        finally:
            self._queues.clear()

    @contextlib.contextmanager
    def halved(self) -> Iterator[None]:
        """Around a forward whose backward will put weights off."""
        before, self.active = self.active, True
        try:
            yield
        finally:
            self.active = before

    @contextlib.contextmanager
    def put_off(self, key: Hashable) -> Iterator[None]:
        """Around a backward of a `halved` forward: meanwhile, weight gradients go to the queue of `key`."""
        self._open = self._queues.setdefault(key, [])
        try:
            with self.halved():  # for what is recomputed
                yield
        finally:
            self._open = None

    def compute(self, key: Hashable) -> None:
        """Compute what was put off for `key`, and add it to the parameters' `.grad`, as their `OwnHook`s are told."""
        with torch.no_grad():
            for gradient in self._queues.pop(key, ()):
                gradient.accumulate()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear`: x (..., i), weight (o, i), bias (o) -> (..., o). Autocast and tensor subclasses are followed."""
        if not self.active:
            return F.linear(x, weight, bias)
        if has_torch_function_unary(x):  # a SequenceShard calls this again, with the tokens of this rank
            result: Tensor = handle_torch_function(self.linear, (x,), x, weight, bias)
            return result
        wanted = torch.is_grad_enabled() and weight.requires_grad and weight.is_leaf and not weight.is_complex()
        if not wanted or transforms_are_active():
            return F.linear(x, weight, bias)
        output: Tensor = _Linear.apply(cast(x), weight, bias, self)
        return output

    def gradients(
        self, x: Tensor | None, grad: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Gradients of a linear layer's weight and bias, in its backward; None where one is put off or not wanted.

        Args:
            x: its input (..., i), needed for the weight's.
            grad: of its output (..., o).
            weight: the parameter, or a value.
            bias: likewise.
            wanted: whether that of the weight is, and that of the bias.
        """
        weight_now, bias_now, *_ = wanted
        if weight_now and self._open is not None and _can_wait(weight) and not torch.is_grad_enabled():
            assert x is not None
            put_off = bias if bias is not None and bias_now and _can_wait(bias) else None
            self._open.append(_Gradient(x, grad, weight, put_off, tensor_version(x)))
            weight_now, bias_now = False, bias_now and put_off is None
        grad_weight = _weight_gradient(x, grad).to(weight.dtype) if weight_now and x is not None else None
        grad_bias = _bias_gradient(grad).to(bias.dtype) if bias_now and bias is not None else None
        return grad_weight, grad_bias


def defer_linears(module: nn.Module, units: Sequence[str], deferred: DeferredWeights) -> list[str]:
    """Let the plain linears of some units (`nn.Linear` itself, no subclass, with its own forward) put their weight
    gradients off.

    Args:
        module: the whole.
        units: names of its modules.

    Returns:
        The compiled modules among them, or in them: the compiler's code computes all gradients at once.
    """
    compiled: list[str] = []
    for unit in units:
        _defer(unit, module.get_submodule(unit), deferred, compiled)
    return compiled


def _defer(name: str, module: nn.Module, deferred: DeferredWeights, compiled: list[str]) -> None:
    if is_compiled(module):
        compiled.append(name)
        return
    if type(module) is nn.Linear and "forward" not in module.__dict__:
        module.__dict__["forward"] = functools.partial(_forward, module, deferred)
    for child_name, child in module.named_children():
        _defer(f"{name}.{child_name}", child, deferred, compiled)


def _forward(module: nn.Linear, deferred: DeferredWeights, input: Tensor) -> Tensor:
    """Stands in for the forward of an `nn.Linear`, whose class stays what users ask for (`type(m) is nn.Linear`)."""
    if not deferred.active or torch.compiler.is_compiling():
        return type(module).forward(module, input)
    return deferred.linear(input, module.weight, module.bias)


class _Linear(OwnFunction):
    """y = x A^T + b. Its backward is made of differentiable operations, for gradients of gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, deferred: DeferredWeights) -> Tensor:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.weight, ctx.bias, ctx.deferred = weight, bias, deferred  # the parameters, whose `.grad` is added to
        return linear_of(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, *wanted = ctx.needs_input_grad
        grad_x = grad @ weight.to(grad.dtype) if needs_x else None
        return grad_x, *ctx.deferred.gradients(x, grad, ctx.weight, ctx.bias, wanted), None


@dataclass(slots=True)
class _Gradient:
    """What is left to compute of one call of one layer."""

    x: Tensor
    grad: Tensor
    weight: Tensor
    bias: Tensor | None
    version: int
    """The version of x, which must not change in the meantime."""

    def accumulate(self) -> None:
        if tensor_version(self.x) != self.version:
            raise RuntimeError(
                f"MegaTPStrategy: the input {tuple(self.x.shape)} of a linear layer was changed in place before the"
                " schedule came to the gradient of its weight. Change a copy instead, or use a schedule that puts no"
                " weight gradients off (interleaved, gpipe)."
            )
        held = self.weight.grad
        if held is not None and held.dtype == self.grad.dtype and held.layout == torch.strided:
            held.addmm_(rows(self.grad).t(), rows(self.x))  # one pass: no gradient of its own
        else:
            _add_gradient(self.weight, _weight_gradient(self.x, self.grad))
        if self.bias is not None:
            _add_gradient(self.bias, _bias_gradient(self.grad))
        for parameter in (self.weight, *(() if self.bias is None else (self.bias,))):
            for hook in accumulation_hooks(parameter).values():
                hook(parameter)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """In which autocast has a linear layer compute with x; None if it lets it be, as it does with float64."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64 or not x.is_floating_point():
        return None
    return torch.get_autocast_dtype(device)


def cast(x: Tensor) -> Tensor:
    """As autocast does for a linear layer."""
    dtype = autocast_dtype(x)
    return x if dtype is None else x.to(dtype)


def linear_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` in the forward of an autograd function, with weight and bias cast. No view, as `F.linear`'s own result
    may be: autograd lets nobody change in place (`nn.ReLU(inplace=True)`) a view that a function returns."""
    if torch.is_autocast_enabled(x.device.type):
        weight, bias = cast(weight), None if bias is None else cast(bias)
    return F.linear(x, weight, bias).detach()


def rows(x: Tensor) -> Tensor:
    """(..., k) -> (n, k)."""
    dims = x.dim()
    return x if dims == 2 else x.flatten(0, -2) if dims > 1 else x.unsqueeze(0)


def _weight_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """(o, n) @ (n, i) -> (o, i)."""
    return rows(grad).t() @ rows(x)


def _bias_gradient(grad: Tensor) -> Tensor:
    """(n, o) -> (o)."""
    return rows(grad).sum(0)


def _can_wait(parameter: Tensor) -> bool:
    """Whether the gradient would only be added to `.grad`, with no user looking."""
    return parameter.is_leaf and not gradient_hooks(parameter, but=OwnHook) and accumulates_into(parameter)


def _add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    held = parameter.grad
    if held is None:
        parameter.grad = gradient.to(parameter.grad_dtype)
    elif held.layout == torch.strided:
        held.add_(gradient)
    else:  # an embedding with sparse gradients, tied to a linear
        parameter.grad = gradient + held
