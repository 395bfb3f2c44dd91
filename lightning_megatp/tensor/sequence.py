"""SequenceShard: this rank's tokens of a tensor, that behaves as the whole one.

Between a row layer's exit and the next column layer's entry, LayerNorm, dropout, residual adds and other operations
that treat every token alike run on the shard. Any other operation (a mean over tokens, a convolution, indexing) gathers
the whole tensor first. So a block may be run this way whatever it does: what is not local is merely not faster.
Source: Korthikanti et al. 2022, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatp.shim.fakes import as_subclass
from lightning_megatp.shim.torch import DisableTorchFunctionSubclass, tree_flatten, tree_unflatten
from lightning_megatp.tensor.collectives import copy_to_region, gather_sequence, scatter_sequence, use_on_tokens
from lightning_megatp.tensor.context import TensorContext
from lightning_megatp.tensor.draws import drops
from lightning_megatp.tensor.functions import argument, is_in_place, operation_name, operation_names
from lightning_megatp.tensor.shards import (
    METADATA,
    GatheredView,
    Shard,
    becomes_leaf,
    change_whole,
    changes,
    gathered,
    is_collective,
    is_flat,
    is_linear_of_layer,
    linear_of_layer,
    map_arguments,
    of_whole,
    send_whole,
)


@dataclass(frozen=True)
class SequenceLayout:
    """Where the sequence lies in a sharded tensor."""

    dim: int
    """Negative, counted from the last dim."""
    length: int
    """Tokens of all ranks together."""
    context: TensorContext
    """The group, and the random stream for dropout on the shard."""

    @property
    def group(self) -> dist.ProcessGroup:
        return self.context.group

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, SequenceLayout) and (self.dim, self.length) == (other.dim, other.length)

    def __hash__(self) -> int:
        return hash((self.dim, self.length))


class SequenceShard(Shard):
    """A tensor of which this rank holds some tokens; shape, size and operations are those of the whole tensor."""

    tokens: SequenceLayout

    @staticmethod
    def wrap(local: Tensor, layout: SequenceLayout) -> SequenceShard:
        """This rank's tokens as a shard of the whole tensor.

        Args:
            local: the tokens of this rank, a plain tensor.
            layout: where the sequence lies, and how long it is in all.
        """
        shard = as_subclass(local, SequenceShard)
        shard.plain, shard.tokens = local, layout
        return shard

    @staticmethod
    def shard(x: Tensor, dim: int, context: TensorContext) -> SequenceShard:
        """Shard a whole tensor along `dim` (counted from the front)."""
        layout = SequenceLayout(dim - x.dim(), x.shape[dim], context)
        return SequenceShard.wrap(scatter_sequence(x, context.group, layout.dim), layout)

    def whole(self, operation: str = "whole") -> Tensor:
        """All tokens as a plain tensor, the same on every rank.

        Communication: `gather_sequence` into whole values.
        """
        layout = self.tokens
        return gather_sequence(self.plain, layout.group, layout.dim, layout.length, "whole")

    def take_part(self, whole: Tensor) -> None:
        """No communication: each rank has the whole value."""
        self.plain.copy_(scatter_sequence(whole, self.tokens.group, self.tokens.dim))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = operation_name(func)
        if len(types) > 1 and is_linear_of_layer(name, args, kwargs):
            return linear_of_layer(name, args, kwargs)
        if name in METADATA and not becomes_leaf(func, name, args):
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if name == "data" and len(args) == 1 and isinstance(args[0], SequenceShard):
            return SequenceShard.wrap(args[0].plain.data, args[0].tokens)
        if name in _SHAPE and args:
            return _shape(name, *args, **kwargs)
        if name in _TOKEN_LOCAL and args and kwargs.get("out") is None and _TOKEN_LOCAL[name](args, kwargs):
            result = _run_on_tokens(func, name, args, kwargs)
            if result is not None:
                return result
        if name in ("register_hook", "retain_grad") or becomes_leaf(func, name, args):
            raise RuntimeError(
                f"MegaTPStrategy: `{name}` on a tensor of which this rank holds some tokens would see a part of its"
                " gradient. Take the `sequence` style of this block out of the plan."
            )
        if is_collective(func):
            return send_whole(func, name, args, kwargs)
        if changes(SequenceShard, name, args, kwargs):
            return change_whole(SequenceShard, _SequenceView, func, name, args, kwargs)
        own_args, own_kwargs = map_arguments(_gathered, args, kwargs)
        result = func(*own_args, **own_kwargs)
        return of_whole(name, result, _SequenceView)


def _gathered(x: Any) -> Any:
    return x.whole() if isinstance(x, SequenceShard) else x


class _SequenceView(GatheredView):
    """A view of a sequence shard's gathered copy."""

    @staticmethod
    def refusal(name: str) -> str:
        return (
            f"MegaTPStrategy: `{name}` changes a sequence-sharded tensor in place, and needs all of its tokens. Write"
            " it without in-place change, or take the `sequence` style of this block out of the plan (of an automatic"
            " one: `sequence_parallel=False`)."
        )


def _shape(name: str, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    assert isinstance(x, SequenceShard)
    size = list(x.plain.shape)
    size[x.tokens.dim] = x.tokens.length
    shape = torch.Size(size)
    if name == "size":
        dim = args[0] if args else kwargs.get("dim")
        return shape if dim is None else shape[dim]
    if name == "__len__":
        return shape[0]
    return shape if name == "shape" else shape.numel()


def _run_on_tokens(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that treats all tokens alike on the shards; None where the operands don't fit together."""
    pointwise, in_place = name in _POINTWISE, is_in_place(name)
    own: list[Any] = [*args, *kwargs.values()]
    spec = None
    if not is_flat(own):
        own, spec = tree_flatten(own)
    layout: SequenceLayout | None = None
    whole = []
    for i, x in enumerate(own):
        if isinstance(x, SequenceShard):
            own[i] = plain = x.plain
            if layout is None:
                layout, ndim = x.tokens, plain.dim()
            elif not pointwise or x.tokens != layout or plain.dim() != ndim:
                return None
        elif isinstance(x, Tensor):
            own[i] = gathered(x)  # of a shard of features, since its tokens are here
            whole.append(i)
    assert layout is not None
    if pointwise and not all(_fits(own[i], layout, ndim) for i in whole):
        return None
    if in_place and not isinstance(args[0], SequenceShard):
        return None  # a whole tensor would be changed by a shard
    for i in whole:
        own[i] = _localise(own[i], layout) if pointwise else _partial(own[i], layout)
    if spec is not None:
        own = tree_unflatten(own, spec)
    own_args, own_kwargs = own, kwargs
    if kwargs:
        own_args, own_kwargs = own[: len(args)], dict(zip(kwargs, own[len(args) :], strict=True))
    if name == "dropout" and drops(args, kwargs):
        with layout.context.stream.inside(own[0].device):
            result = func(*own_args, **own_kwargs)
    else:
        result = func(*own_args, **own_kwargs)
    if in_place:
        return args[0]
    return SequenceShard.wrap(result, layout) if isinstance(result, Tensor) and result.dim() == ndim else None


def _fits(x: Tensor, layout: SequenceLayout, ndim: int) -> bool:
    return x.dim() <= ndim and (x.dim() < -layout.dim or x.shape[layout.dim] in (1, layout.length))


def _localise(x: Tensor, layout: SequenceLayout) -> Tensor:
    """A whole operand beside a shard: its tokens are sliced; for one that spans no tokens see `_partial`."""
    if x.dim() >= -layout.dim and x.shape[layout.dim] == layout.length and layout.length != 1:
        return scatter_sequence(x, layout.group, layout.dim)
    return _partial(x, layout)


def _partial(x: Tensor, layout: SequenceLayout) -> Tensor:
    """A whole operand used on these tokens only: its gradient is summed over the ranks. Here if it was computed, or
    is a parameter used elsewhere too; otherwise together with the other parameters at the end of backward."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    if not x.is_leaf:
        return copy_to_region(x, layout.group, "sequence")
    return use_on_tokens(x, layout.group) if id(x) in layout.context.kept_whole else x


def _always(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return True


def _is_shard(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return isinstance(args[0], SequenceShard)


def _normalises_features(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """layer_norm and rms_norm over dims behind the sequence, of a shard, by whole weights."""
    x, shape = args[0], args[1] if len(args) > 1 else kwargs["normalized_shape"]
    return isinstance(x, SequenceShard) and len(shape) < -x.tokens.dim


def _maps_features(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A plain linear on the last dim. Not one that widens (a head): gathering its input is cheaper than its output."""
    x, weight = args[0], args[1] if len(args) > 1 else kwargs["weight"]
    matrix = isinstance(x, SequenceShard) and x.tokens.dim < -1 and weight.dim() == 2
    return matrix and bool(weight.shape[0] <= weight.shape[1])


def _reduces_features(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """mean, sum, ... over dims behind the sequence, which are kept with size 1."""
    x = args[0]
    dims = argument(args, kwargs, 1, "dim")
    keep = kwargs.get("keepdim", False)
    if not isinstance(x, SequenceShard) or len(args) > 2 or keep is not True or dims is None:
        return False
    dims = [dims] if isinstance(dims, int) else dims
    ndim = x.plain.dim()
    return (
        isinstance(dims, (list, tuple))
        and len(dims) > 0
        and all((d if d < 0 else d - ndim) > x.tokens.dim for d in dims)
    )


_SHAPE = operation_names("shape size numel nelement __len__")
_POINTWISE = operation_names(
    """
    add sub subtract rsub mul multiply div divide true_divide __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__
    __truediv__ __rtruediv__ __div__ __rdiv__ __iadd__ __isub__ __imul__ __itruediv__ add_ sub_ mul_ div_ neg __neg__
    addcmul pow __pow__ square sqrt rsqrt exp log abs sin cos gelu relu relu_ silu sigmoid tanh softplus leaky_relu elu
    mish hardswish hardtanh relu6 clamp dropout float half bfloat16 double to type_as contiguous clone detach where
    masked_fill lerp maximum minimum
    """
)
_TOKEN_LOCAL: dict[str, Callable[[tuple[Any, ...], dict[str, Any]], bool]] = {
    **dict.fromkeys(_POINTWISE, _always),
    **dict.fromkeys(["to", "type_as"], _is_shard),
    "layer_norm": _normalises_features,
    "rms_norm": _normalises_features,
    "linear": _maps_features,
    **dict.fromkeys(["mean", "sum", "var", "amax", "amin"], _reduces_features),
}
