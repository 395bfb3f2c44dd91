"""The entry of a tensor region, with a backward that hides its communication behind the gradients of weights.

A value enters once for all column layers that read it. In backward the gradient of their input is a partial sum, to be
reduced over the tensor ranks; the gradients of their weights wait for nobody. So the autograd graph is

    x, weights -> _Enter            makes the output of the layer that reads x first
                    -> _Column      one per other layer, which reads its weight through `_Enter` too

In backward every `_Column` leaves its gradients to `_Enter`. That one adds up those of x, each matrix product onto the
ones before, starts to reduce the sum, computes the gradients of all weights, and waits. A sequence, of which each rank
keeps its own tokens, is gathered again meanwhile. Every gradient reaches its parameter through autograd, and hooks.

Under autocast a value enters in the dtype that its linear layers compute in, and that is what is sent.

Shapes: b batch, s sequence, h input features, o output features of this rank, t tensor-parallel size.
Source: Shoeybi et al. 2019, section 3 (f and g); Korthikanti et al. 2022, section 4.2.2.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_megatp.shim.autograd import (
    backward_id,
    checkpoint_region,
    functorch_is_active,
    gradient_hooks,
    transforms_are_active,
    wants_gradient,
)
from lightning_megatp.shim.torch import storage_id, tensor_version
from lightning_megatp.tensor.collectives import (
    Pending,
    all_gather,
    begin_all_gather,
    begin_all_reduce,
    begin_reduce_scatter,
    copy_to_region,
    gather_sequence,
    reduce_from_region,
    reduce_scatter_sequence,
    sequence_sizes,
)
from lightning_megatp.tensor.deferred import DeferredWeights, autocast_dtype, cast, linear_of, rows
from lightning_megatp.tensor.functions import OwnFunction, OwnHook
from lightning_megatp.tensor.sequence import SequenceLayout, SequenceShard

Parameters = tuple[Tensor, Tensor | None]
"""Weight and bias of a linear layer."""

KEPT_BYTES = 2**18
"""A sequence of this size, all tokens, stays gathered until backward: a message costs more than so little memory."""


class Entry:
    """A value inside of a tensor region.

    Args:
        x: (..., h) whole, or this rank's tokens of it.
        group: the tensor-parallel process group.
        deferred: where gradients of weights may be put off to.
        readers: of the layers that will probably read it. Those that do, as they are, have their gradients computed
            while the input's is reduced. What is made of parameters (a transposed weight, a slice, a parametrization)
            has its gradient before, unless its layer reads first; so has a parameter with a user's hook: that would be
            called, with None, for a layer that this backward does not come to.

    Memory: of a sequence, 1 / t between forward and backward; all of it up to `KEPT_BYTES`.
    Communication: `copy_to_region` or `gather_sequence`; of a sequence that is larger also one all-gather in backward,
        (t - 1) / t of it, for all layers together.
    """

    def __init__(
        self,
        x: Tensor,
        group: dist.ProcessGroup,
        deferred: DeferredWeights,
        readers: Sequence[Parameters] = (),
    ) -> None:
        tokens = x.tokens if isinstance(x, SequenceShard) else None
        self._plain = x.plain if isinstance(x, SequenceShard) else x
        self._transfer = _Transfer(group, tokens, self._plain)
        self._deferred, self._readers = deferred, readers
        self._gates: dict[int, _Gate] = {}
        self._value: Tensor | None = None
        self._cast: Entry | None = None

    @property
    def value(self) -> Tensor:
        """What entered: (..., h), in the dtype it was given in."""
        if self._value is None:
            self._bring_in()
        assert self._value is not None
        return self._value

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear` of the value: weight (o, h), bias (o) -> (..., o). Autocast is followed."""
        x, wanted = self._plain, weight.requires_grad or (bias is not None and bias.requires_grad)
        dtype = autocast_dtype(x)
        if dtype is not None and dtype != x.dtype and self._value is None:
            return self._in(dtype).linear(weight, bias)
        left = transforms_are_active() or weight.is_complex()
        if left or not torch.is_grad_enabled() or not (wanted or x.requires_grad):
            return F.linear(self.value, weight, bias)
        if self._value is None and (y := self._bring_in(weight, bias)) is not None:
            return y
        gate = self._gates.pop(id(weight), None)
        if gate is not None and gate.is_of(weight, bias):
            call, (weight, bias) = gate.call, gate.inside
        else:
            call = _Call(weight, bias, self._transfer, self._deferred)
        own, value = self._plain if self._transfer.again_in_backward else None, self.value
        output: Tensor = _Column.apply(cast(value), own, weight, bias, call)
        return output

    def _in(self, dtype: torch.dtype) -> Entry:
        """This value, entering in another dtype."""
        if self._cast is None or self._cast._plain.dtype != dtype:
            x, tokens = self._plain.to(dtype), self._transfer.tokens
            x = x if tokens is None else SequenceShard.wrap(x, tokens)
            self._cast = Entry(x, self._transfer.group, self._deferred, self._readers)
        return self._cast

    def _bring_in(self, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor | None:
        """Let the value enter, and make the output of the layer that asks for it; None if that takes a `_Column`, since
        its parameters have hooks."""
        x, transfer = self._plain, self._transfer
        if transforms_are_active() or not (torch.is_grad_enabled() and x.requires_grad):
            self._value = _enter(x, transfer.group, transfer.tokens)
            return None
        first = None
        if weight is not None and not _has_hooks(weight, bias):
            first = _Call(weight, bias, transfer, self._deferred)
        gates = []
        for parameters in self._readers:
            if first is not None and parameters[0] is weight:
                continue
            if all(p is None or p.requires_grad for p in parameters) and not _has_hooks(*parameters):
                gates.append(_Gate(parameters, _Call(*parameters, transfer, self._deferred)))
        if first is None:
            weight = bias = None
        gated = [gate.call for gate in gates]
        inputs = (parameter for gate in gates for parameter in gate.parameters)
        y, self._value, *inside = _Enter.apply(x, weight, bias, first, gated, transfer, *inputs)
        for gate, own_weight, own_bias in zip(gates, inside[::2], inside[1::2], strict=True):
            gate.inside = own_weight, own_bias
        self._gates = {id(gate.parameters[0]): gate for gate in gates}
        return y


def _has_hooks(*parameters: Tensor | None) -> bool:
    return any(p is not None and gradient_hooks(p, but=OwnHook) for p in parameters)


def _enter(x: Tensor, group: dist.ProcessGroup, tokens: SequenceLayout | None) -> Tensor:
    if tokens is None:
        return copy_to_region(x, group)
    return gather_sequence(x, group, tokens.dim, tokens.length, "tensor")


def _stays(x: Tensor, tokens: SequenceLayout) -> bool:
    """Whether a sequence stays gathered; every rank says the same. In a checkpoint, backward begins with gathering."""
    size = list(x.shape)
    size[tokens.dim] = tokens.length
    return checkpoint_region() is not None or math.prod(size) * x.element_size() <= KEPT_BYTES


class _Transfer:
    """What an entry has under way in backward.

    Args:
        tokens: of a sequence, None for a whole value.
        x: what enters.
    """

    def __init__(self, group: dist.ProcessGroup, tokens: SequenceLayout | None, x: Tensor) -> None:
        self.group, self.tokens, self.dtype = group, tokens, x.dtype
        self.again_in_backward = tokens is not None and not _stays(x, tokens)
        """Whether all tokens are gathered once more; else they are kept."""
        self.shape = x.shape
        """The shape of the value, all tokens of it, once it has entered."""
        self._gathered: dict[torch.dtype, Pending] = {}

    def again(self, x: Tensor, dtype: torch.dtype) -> Tensor | Pending:
        """What entered, again, of what was kept. A sequence is on its way, unless a layer has gathered it in this
        backward. With a graph (gradients of gradients) it is differentiable."""
        if self.tokens is None or not self.again_in_backward:
            return x
        if torch.is_grad_enabled():
            return _enter(x.to(dtype), self.group, self.tokens)
        if dtype not in self._gathered:
            self._gathered[dtype] = begin_all_gather(x.to(dtype), self.group, self.tokens.dim, self.sizes)
        return self._gathered[dtype]

    def reduce(self, grad: Tensor, spend: bool) -> Pending:
        """Start to sum the gradient of what was entered with; with `spend` the sum may take its place. All layers have
        computed theirs, and hold what they gathered for as long as they need it."""
        self._gathered = {}
        if self.tokens is None:
            return begin_all_reduce(grad, self.group, spend)
        return begin_reduce_scatter(grad, self.group, self.tokens.dim, self.sizes)

    def reduced_with_graph(self, grad: Tensor) -> Tensor:
        """The sum itself, differentiable."""
        self._gathered = {}  # of a backward that failed
        if self.tokens is None:
            return reduce_from_region(grad, self.group)
        return reduce_scatter_sequence(grad, self.group, self.tokens.dim)

    @functools.cached_property
    def sizes(self) -> list[int]:
        """Tokens of each rank."""
        assert self.tokens is not None
        return sequence_sizes(self.tokens.length, self.group.size())


@dataclass(eq=False)
class _Call:
    """One layer's reading of what entered."""

    weight: Tensor
    """The layer's own, to whose `.grad` a put-off gradient is added."""
    bias: Tensor | None
    transfer: _Transfer
    deferred: DeferredWeights
    gated: bool = False
    left: _Left | None = field(default=None, repr=False)

    def wanted(self, *need: bool) -> list[bool]:
        """Whether this backward asks for the gradients of weight and bias."""
        parameters = zip(need, (self.weight, self.bias), strict=True)
        return [needed and parameter is not None and wants_gradient(parameter) for needed, parameter in parameters]

    def gradients(self, left: _Left) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of weight and bias, None where it was put off, or is not wanted."""
        x = left.x.wait() if isinstance(left.x, Pending) else left.x
        return self.deferred.gradients(x, left.grad, self.weight, self.bias, left.wanted)

    def take_left(self) -> _Left | None:
        """What was left in this backward."""
        left, self.left = self.left, None
        return left if left is not None and left.backward == backward_id() else None


@dataclass(slots=True)
class _Left:
    """What a layer's gradients are made of: its `_Column` may leave them to `_Enter`.

    Args:
        backward: which one it is.
        grad: (n, o) of the layer's output.
        weight: (o, h), for the input's gradient; None if that was computed.
        x: (..., h), for the weight's gradient.
        wanted: whether the weight's gradient is, and the bias's.
    """

    backward: int
    grad: Tensor
    weight: Tensor | None
    x: Tensor | Pending | None
    wanted: list[bool]


class _Gate:
    """A layer's parameters, as they are behind `_Enter`."""

    def __init__(self, parameters: Parameters, call: _Call) -> None:
        self.parameters, self.call = parameters, call
        self.inside = parameters
        self._state = [_state(parameter) for parameter in parameters]
        call.gated = True

    def is_of(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether these are the parameters, unchanged since."""
        same = self.parameters[0] is weight and self.parameters[1] is bias
        return same and self._state == [_state(weight), _state(bias)]


def _state(parameter: Tensor | None) -> object:
    if parameter is None:
        return None
    return tensor_version(parameter), storage_id(parameter), parameter.requires_grad


class _Enter(OwnFunction):
    """Into a tensor region: identity of a whole value, all-gather of a sequence. Its gradient is a partial sum.

    Besides the value it returns what the layer that reads first makes of it, y = x A^T + b, and weights and biases of
    other layers as they are. Of these, the gated readings, its backward computes the gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        first: _Call | None,
        gated: Sequence[_Call],
        transfer: _Transfer,
        *others: Tensor | None,
    ) -> tuple[Tensor | None, ...]:
        ctx.first, ctx.gated, ctx.transfer = first, gated, transfer
        ctx.region_above, ctx.region_below = "tensor", "whole" if transfer.tokens is None else "sequence"
        ctx.crossing_input = 0
        ctx.set_materialize_grads(False)
        if transfer.tokens is None:
            value = x.view_as(x)
        else:
            value = all_gather(x, transfer.group, transfer.tokens.dim, transfer.sizes)
            transfer.shape = value.shape
        y = None
        if weight is not None:
            _, needs_weight, *_ = ctx.needs_input_grad
            kept = x if transfer.again_in_backward else value
            ctx.save_for_backward(kept if needs_weight else None, weight)
            y = linear_of(value, weight, bias)
        return y, value, *(None if other is None else other.view_as(other) for other in others)

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, grad_value: Tensor | None, *passed: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        first, transfer, with_graph = ctx.first, ctx.transfer, torch.is_grad_enabled()
        if grad is not None:
            kept, weight = ctx.saved_tensors
            wanted = first.wanted(*ctx.needs_input_grad[1:3])
            x = transfer.again(kept, kept.dtype) if wanted[0] else None
            first.left = _Left(backward_id(), rows(grad), weight, x, wanted)
        calls = (first, *ctx.gated)
        left = [None if call is None else call.take_left() for call in calls]
        total = _sum(_sum_of_products(left, transfer.shape), grad_value)
        pending = None if total is None or with_graph else transfer.reduce(total, spend=total is not grad_value)
        own_weight, own_bias, *others = itertools.chain(*map(_gradients, calls, left))
        if total is not None:
            total = transfer.reduced_with_graph(total) if pending is None else pending.wait()
        return total, own_weight, own_bias, None, None, None, *map(_sum, others, passed)


def _gradients(call: _Call | None, left: _Left | None) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias, if there is such a layer and this backward came to it."""
    return (None, None) if call is None or left is None else call.gradients(left)


def _sum_of_products(left: Sequence[_Left | None], shape: torch.Size) -> Tensor | None:
    """The gradient of what these layers read, (..., h), without a tensor for each of them."""
    total: Tensor | None = None
    for each in left:
        if each is None or each.weight is None:
            continue
        grad, weight = each.grad, each.weight.to(each.grad.dtype)
        if total is None:
            total = grad @ weight
        elif grad.dtype != total.dtype or functorch_is_active():
            total = total + grad @ weight
        else:
            total.addmm_(grad, weight)
    return None if total is None else total.view(shape)


def _sum(own: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The gradients of two uses."""
    return own if other is None else other if own is None else own + other


class _Column(OwnFunction):
    """y = x A^T + b of what entered.

    Its backward leaves the gradients to `_Enter` where its parameters are gated; that of an input which was cast behind
    `_Enter` is computed here. So is everything with a graph (gradients of gradients), of differentiable operations.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        own: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        call: _Call,
    ) -> Tensor:
        ctx.call, ctx.dtype, ctx.gathers = call, x.dtype, own is not None
        ctx.is_inside = True  # also where the input has no gradient, as a batch, and left no `_Enter`
        if ctx.gathers:  # the tokens have not entered
            ctx.region_above, ctx.region_below, ctx.crossing_input = "tensor", "sequence", 1
        needs_x, _, needs_weight, *_ = ctx.needs_input_grad
        kept = x if own is None else own
        ctx.save_for_backward(kept if needs_weight else None, weight if needs_x else None)
        return linear_of(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight = ctx.saved_tensors
        call, (needs_x, _, *needed, _) = ctx.call, ctx.needs_input_grad
        wanted = call.wanted(*needed)
        x = call.transfer.again(kept, ctx.dtype) if wanted[0] and ctx.gathers else kept
        left = _Left(backward_id(), rows(grad), weight, x, wanted)
        leaves, grad_x = call.gated and not torch.is_grad_enabled(), None
        if needs_x and not (leaves and ctx.dtype == call.transfer.dtype):
            left.weight, grad_x = None, grad @ weight.to(grad.dtype)
        if leaves:
            call.left = left
            return grad_x, None, None, None, None
        return grad_x, None, *call.gradients(left), None
