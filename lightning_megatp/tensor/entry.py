"""The entry of a tensor region, with a backward that hides its communication behind the gradients of weights.

A value enters once for all column layers that read it. In backward the gradient of their input is a partial sum, to be
reduced over the tensor ranks; the gradients of their weights wait for nobody. So the autograd graph is

    x -> _Await -> _Enter -> _Column (one per layer) -> ...
         weight -> _Gate  -> _Column

whose nodes torch's engine runs by the order of their creation, the last first: every `_Column` computes the gradient
of its input; `_Enter` starts to reduce their sum; each `_Gate` computes the gradient of its layer's weight; `_Await`
waits. A sequence, of which each rank keeps its own tokens, is gathered again meanwhile. Any other order gives the same
numbers with less overlap, and each gradient still reaches its parameter through autograd, hooks included.

Shapes: b batch, s sequence, h input features, o output features of this rank, t tensor-parallel size.
Source: Shoeybi et al. 2019, section 3 (f and g); Korthikanti et al. 2022, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_megatp.shim.torch import (
    checkpoint_region,
    functorch_is_active,
    runs_in_this_backward,
    storage_id,
    tensor_version,
)
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
from lightning_megatp.tensor.deferred import DeferredWeights, autocast_dtype, cast
from lightning_megatp.tensor.functions import OwnFunction
from lightning_megatp.tensor.sequence import SequenceLayout, SequenceShard


class Entry:
    """A value inside of a tensor region.

    Args:
        x: (..., h) whole, or this rank's tokens of it.
        group: the tensor-parallel process group.
        deferred: where gradients of weights may be put off to.
        readers: weight and bias of the layers that will probably read it. Those that do, as they are, have their
            gradients computed while the input's is reduced; what is made of parameters (a transposed weight, a slice, a
            parametrization) has its gradient before.

    Memory: of a sequence, 1 / t between forward and backward.
    Communication: `copy_to_region` or `gather_sequence`; of a sequence also one all-gather in backward,
        (t - 1) / t of it, for all layers together.
    """

    def __init__(
        self,
        x: Tensor,
        group: dist.ProcessGroup,
        deferred: DeferredWeights,
        readers: Sequence[tuple[Tensor, Tensor | None]] = (),
    ) -> None:
        tokens = x.tokens if isinstance(x, SequenceShard) else None
        plain = x.plain if isinstance(x, SequenceShard) else x
        self._deferred = deferred
        self._transfer = _Transfer(group, tokens)
        self._gates: dict[int, _Gated] = {}
        self._own: Tensor | None = None
        if functorch_is_active() or not torch.is_grad_enabled():
            self.value = _enter(plain, group, tokens)
            return
        self._own = None if tokens is None else plain
        if plain.requires_grad:
            plain = _Await.apply(plain, self._transfer)
            self._gates = {
                id(weight): _Gated(weight, bias, self._transfer, deferred)
                for weight, bias in readers
                if weight.requires_grad and (bias is None or bias.requires_grad)
            }
            self.value = _Enter.apply(plain, self._transfer)
        else:
            self.value = _enter(plain, group, tokens)

    def linear(self, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`F.linear` of the value: weight (o, h), bias (o) -> (..., o). Autocast is followed."""
        x, wanted = self.value, weight.requires_grad or (bias is not None and bias.requires_grad)
        if not torch.is_grad_enabled() or functorch_is_active() or not (wanted or x.requires_grad):
            return F.linear(x, weight, bias)
        dtype = autocast_dtype(x)
        own = None if checkpoint_region() is not None else self._own  # there, all is gathered again before backward
        gate = self._gates.pop(id(weight), None)
        if gate is not None and gate.is_of(weight, bias):
            call, (weight, bias) = gate.call, gate.inside
        else:
            call = _Call(weight, bias, self._transfer, self._deferred)
        y: Tensor = _Column.apply(cast(x, dtype), own, weight, bias, dtype, call)
        return y


def _enter(x: Tensor, group: dist.ProcessGroup, tokens: SequenceLayout | None) -> Tensor:
    if tokens is None:
        return copy_to_region(x, group)
    return gather_sequence(x, group, tokens.dim, tokens.length, "tensor")


class _Transfer:
    """What an entry has under way in backward.

    Args:
        tokens: of a sequence, None for a whole value.
    """

    def __init__(self, group: dist.ProcessGroup, tokens: SequenceLayout | None) -> None:
        self.group, self.tokens = group, tokens
        self.reduced: Pending | None = None
        self._gathered: dict[torch.dtype, Pending] = {}

    def gather(self, own: Tensor, dtype: torch.dtype) -> Pending:
        """Start to gather the sequence, unless a layer has done so in this backward."""
        if dtype not in self._gathered:
            self._gathered[dtype] = begin_all_gather(own.to(dtype), self.group, self._layout.dim, self.sizes)
        return self._gathered[dtype]

    def again(self, own: Tensor, dtype: torch.dtype) -> Tensor:
        """The whole sequence, differentiable."""
        return gather_sequence(own.to(dtype), self.group, self._layout.dim, self._layout.length, "tensor")

    def reduce(self, grad: Tensor) -> Tensor:
        """Start to sum the gradient of what was entered with; the result may be read after `reduced.wait()`. All
        layers have computed theirs, and hold what they gathered for as long as they need it."""
        self._gathered = {}
        if self.tokens is None:
            self.reduced = begin_all_reduce(grad, self.group)
        else:
            self.reduced = begin_reduce_scatter(grad, self.group, self.tokens.dim, self.sizes)
        return self.reduced.result

    def reduced_with_graph(self, grad: Tensor) -> Tensor:
        """The sum itself, differentiable."""
        self.reduced, self._gathered = None, {}  # of a backward that failed
        if self.tokens is None:
            return reduce_from_region(grad, self.group)
        return reduce_scatter_sequence(grad, self.group, self.tokens.dim)

    @property
    def _layout(self) -> SequenceLayout:
        assert self.tokens is not None
        return self.tokens

    @property
    def sizes(self) -> list[int]:
        """Tokens of each rank."""
        return sequence_sizes(self._layout.length, self.group.size())


@dataclass(eq=False)
class _Call:
    """One layer's reading of what entered."""

    weight: Tensor
    """The layer's own, to whose `.grad` a put-off gradient is added."""
    bias: Tensor | None
    transfer: _Transfer
    deferred: DeferredWeights
    gated: bool = False
    grad: Tensor | None = field(default=None, repr=False)
    """Gradient of the output, from `_Column`'s backward to `_Gate`'s."""
    x: Tensor | Pending | None = field(default=None, repr=False)
    """The input, or what gathers it again."""

    def gradients(
        self, grad: Tensor, x: Tensor | Pending | None, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None]:
        """Of weight and bias, None where it was put off, or is not wanted."""
        x = x.wait() if isinstance(x, Pending) else x
        return self.deferred.gradients(x, grad, self.weight, self.bias, wanted)


class _Gated:
    """A layer's parameters behind a `_Gate`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, transfer: _Transfer, deferred: DeferredWeights) -> None:
        self._held = weight, bias
        self._state = [_state(weight), _state(bias)]
        self.call = _Call(weight, bias, transfer, deferred, gated=True)
        self.inside: tuple[Tensor, Tensor | None] = _Gate.apply(weight, bias, self.call)

    def is_of(self, weight: Tensor, bias: Tensor | None) -> bool:
        """Whether these are the parameters, unchanged since."""
        same = self._held[0] is weight and self._held[1] is bias
        return same and self._state == [_state(weight), _state(bias)]


def _state(parameter: Tensor | None) -> object:
    if parameter is None:
        return None
    return tensor_version(parameter), storage_id(parameter), parameter.requires_grad


class _Await(OwnFunction):
    """Identity. Its backward waits for the gradient that `_Enter` began to reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        pending, ctx.transfer.reduced = ctx.transfer.reduced, None
        return grad if pending is None else pending.wait(), None


class _Enter(OwnFunction):
    """Into a tensor region: identity of a whole value, all-gather of a sequence. Its gradient is a partial sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        ctx.region_above, ctx.region_below = "tensor", "whole" if transfer.tokens is None else "sequence"
        if transfer.tokens is None:
            return x.view_as(x)
        return all_gather(x, transfer.group, transfer.tokens.dim, transfer.sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        transfer = ctx.transfer
        if torch.is_grad_enabled():
            return transfer.reduced_with_graph(grad), None
        begun = transfer.reduce(grad)
        at_once = torch.is_anomaly_enabled()  # which looks at every gradient
        return transfer.reduced.wait() if at_once else begun, None


class _Gate(OwnFunction):
    """Identity of a weight and a bias. Its backward computes their gradients from what `_Column` left for it."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, bias: Tensor | None, call: _Call) -> tuple[Tensor, Tensor | None]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return weight.view_as(weight), None if bias is None else bias.view_as(bias)

    @staticmethod
    def backward(ctx: Any, grad_weight: Tensor | None, grad_bias: Tensor | None) -> tuple[Tensor | None, ...]:
        call = ctx.call
        grad, x, call.grad, call.x = call.grad, call.x, None, None
        if grad is None:
            return grad_weight, grad_bias, None
        own_weight, own_bias = call.gradients(grad, x, ctx.needs_input_grad)
        return _sum(own_weight, grad_weight), _sum(own_bias, grad_bias), None


def _sum(own: Tensor | None, other: Tensor | None) -> Tensor | None:
    """The other one comes from uses in the graph of gradients, through which gradients are taken now."""
    return own if other is None else other if own is None else own + other


class _Column(OwnFunction):
    """y = x A^T + b of what entered.

    Its backward leaves the gradients of gated parameters to `_Gate`, if this backward comes to it. With a graph
    (gradients of gradients) everything is computed here, of differentiable operations.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        own: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype | None,
        call: _Call,
    ) -> Tensor:
        ctx.call, ctx.dtype, ctx.gathers = call, x.dtype, own is not None
        ctx.input_outside_region = 1 if ctx.gathers else None  # the tokens have not entered (see `lineage`)
        needs_x, _, needs_weight, *_ = ctx.needs_input_grad
        kept = x if own is None else own
        ctx.save_for_backward(kept if needs_weight else None, weight if needs_x else None)
        return F.linear(x, cast(weight, dtype), None if bias is None else cast(bias, dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight = ctx.saved_tensors
        call, (needs_x, _, *wanted, _, _) = ctx.call, ctx.needs_input_grad
        (below, _), (gate, _) = ctx.next_functions[0], ctx.next_functions[1 + ctx.gathers]
        needs_x = needs_x and runs_in_this_backward(below)
        gated = call.gated and any(wanted)
        if gated and not runs_in_this_backward(gate):
            gated, wanted = False, [False, False]
        with_graph = torch.is_grad_enabled()
        if ctx.gathers and wanted[0]:
            kept = (call.transfer.again if with_graph else call.transfer.gather)(kept, ctx.dtype)
        grad_x = grad @ weight.to(grad.dtype) if needs_x else None
        if gated and not with_graph:
            call.grad, call.x = grad, kept
            return grad_x, None, None, None, None, None
        return grad_x, None, *call.gradients(grad, kept, wanted), None, None
