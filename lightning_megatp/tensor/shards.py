"""What the tensors of which a rank holds a part have in common: SequenceShard (tokens), FeatureShard (features)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_megatp.shim.fakes import as_subclass
from lightning_megatp.shim.torch import DisableTorchFunction, DisableTorchFunctionSubclass, tree_leaves, tree_map
from lightning_megatp.tensor.functions import is_in_place, operation_name, operation_names


class Shard(torch.Tensor):
    """A part of a tensor that behaves as the whole one. Not a tensor by itself."""

    plain: Tensor
    """This rank's part as a plain tensor; the shard is a view of it."""

    def whole(self, operation: str = "whole") -> Tensor:
        """The whole tensor, a plain one, the same on every rank.

        Args:
            operation: what needs it, for an account of gathers.
        """
        raise NotImplementedError

    def take_part(self, whole: Tensor) -> None:
        """Take this rank's part of another value of the whole tensor."""
        raise NotImplementedError


class LayerWeight(torch.Tensor):
    """The weight of a layer, as code sees it that reads the layer's attributes. Not a tensor by itself."""

    transposed: bool = False
    """Whether it is (in, out): `x @ weight` is then what `F.linear` is of others."""

    def linear(self, x: Any, bias: Any = None) -> Any:
        """What `F.linear` of this weight (out, in) is: what the layer makes of it, which no hooks of the layer see.

        Args:
            x: (..., in_features), whole or a shard.
            bias: (out_features), as code sees it, or None.
        """
        raise NotImplementedError

    def whole(self, operation: str) -> Tensor:
        """A plain tensor, for what can't be done by the layer.

        Args:
            operation: what needs it.
        """
        raise NotImplementedError


class TransposedWeight(torch.Tensor):
    """`weight.T` of a LayerWeight, which may be the layer's work, too."""

    of: LayerWeight

    @staticmethod
    def transposed(weight: LayerWeight) -> TransposedWeight:
        """The transpose of a layer's weight, a matrix."""
        shape = tuple(weight.shape)[::-1]  # as code sees it
        with DisableTorchFunction():  # a pipeline's mode would take it for something the step does
            made = torch.empty((), device="meta").expand(shape).as_subclass(TransposedWeight)
        made.of = weight
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, operation_name(func)
        if is_linear_of_layer(name, args, kwargs):
            return linear_of_layer(*args, **kwargs)
        if args and isinstance(args[0], TransposedWeight) and transposes(name, *args[1:], **kwargs):
            return args[0].of
        if name in METADATA and args and isinstance(args[0], TransposedWeight):
            return func(args[0].of, *args[1:], **kwargs)
        if name in SIZES:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = tree_map(lambda x: x.of.whole(name).T if isinstance(x, TransposedWeight) else x, (args, kwargs))
        return func(*args, **kwargs)


def transposes(name: str, *dims: Any, **named: Any) -> bool:
    """Whether an operation transposes a matrix."""
    if name in ("T", "t", "mT"):
        return True
    given = dims[0] if len(dims) == 1 and isinstance(dims[0], (list, tuple)) else (*dims, *named.values())
    return name in ("transpose", "permute", "swapaxes", "swapdims") and [d % 2 for d in given] in ([0, 1], [1, 0])


def changes_nothing(func: Callable[..., Any], name: str, x: Tensor, *args: Any, **kwargs: Any) -> bool:
    """Whether an operation returns a plain tensor itself: `.to` of the dtype and device that it has."""
    return name in _CONVERSIONS and func(x, *args, **kwargs) is x


def is_linear_of_layer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation is `F.linear(x, weight, ...)` with a LayerWeight, or `x @ weight.T`; of a weight (in, out)
    it is `x @ weight`."""
    weight = args[1] if len(args) > 1 else kwargs.get("weight")
    if not isinstance(weight, LayerWeight | TransposedWeight):
        return False
    is_product = not weight.of.transposed if isinstance(weight, TransposedWeight) else weight.transposed
    return name in PRODUCTS if is_product else name == "linear"


def linear_of_layer(input: Any, weight: LayerWeight | TransposedWeight, bias: Any = None) -> Any:
    """Let the layer compute an operation for which `is_linear_of_layer` holds; parameters as those of `F.linear`."""
    return (weight.of if isinstance(weight, TransposedWeight) else weight).linear(input, bias)


PRODUCTS = operation_names("matmul __matmul__ mm")
_CONVERSIONS = operation_names("to type_as type float double half bfloat16 contiguous cpu cuda")


class GatheredView(torch.Tensor):
    """A view (a slice, a transpose) of a shard, made of its gathered copy: a plain tensor, except that a change in
    place raises, since the shard would not see it."""

    @staticmethod
    def refusal(name: str) -> str:
        """What to say of a change in place by the operation of this name."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = operation_name(func)
        if changes(cls, name, args, kwargs):
            raise RuntimeError(cls.refusal(name))
        result = func(*tree_map(unsealed, args), **tree_map(unsealed, kwargs))
        return seal(result, cls) if name in _SAME_MEMORY else of_whole(name, result, cls)


def seal(result: Any, kind: type[GatheredView]) -> Any:
    """The tensors of a result as views that can't be changed in place."""
    return tree_map(lambda x: as_subclass(x, kind) if isinstance(x, Tensor) else x, result)


def unsealed(x: Any) -> Any:
    """The plain tensor of a gathered view; anything else as it is."""
    if not isinstance(x, GatheredView):
        return x
    with DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def of_whole(name: str, result: Any, kind: type[GatheredView]) -> Any:
    """What an operation made of whole copies of shards: views and arrays of them must not be changed."""
    if name in VIEWS:
        return seal(result, kind)
    if isinstance(result, np.ndarray):
        result.flags.writeable = False
    return result


def map_arguments(
    change: Callable[[Any], Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`tree_map` over the arguments of an operation, which are rarely containers of tensors."""
    if is_flat([*args, *kwargs.values()]):
        return tuple(map(change, args)), {name: change(x) for name, x in kwargs.items()}
    return tree_map(change, args), tree_map(change, kwargs)


def is_flat(values: list[Any]) -> bool:
    """Whether no container of tensors is among the arguments of an operation; there may be tuples of sizes."""
    for x in values:
        if isinstance(x, (dict, list, tuple)) and (isinstance(x, dict) or any(type(item) is not int for item in x)):
            return False
    return True


def gathered(x: Any) -> Any:
    """The whole tensor of a shard; anything else as it is."""
    return x.whole() if isinstance(x, Shard) else x


def change_whole(
    kind: type[Shard],
    view: type[GatheredView],
    func: Callable[..., Any],
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """An operation in place that needs all of a tensor: it changes the gathered one, of which each rank takes its own
    part back.

    Args:
        kind: of the shards.
        view: says what is refused.

    Raises:
        RuntimeError: it changes more than values, or another tensor than the first.
    """
    shard = args[0]
    if not isinstance(shard, kind) or name not in CHANGE_VALUES or kwargs.get("out") is not None:
        raise RuntimeError(view.refusal(name))
    (whole, *rest), options = map_arguments(lambda x: x.whole("in place") if isinstance(x, kind) else x, args, kwargs)
    whole = whole.clone()  # what was gathered may be held for others
    func(whole, *rest, **options)
    shard.take_part(whole)
    return None if name == "__setitem__" else shard


def is_collective(func: Callable[..., Any]) -> bool:
    """Whether it is a function of torch.distributed: torch's own ask `__torch_function__` (2.13)."""
    return str(getattr(func, "__module__", "")).startswith("torch.distributed")


def send_whole(func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of torch.distributed on the whole tensors of shards, which take their part of what it has received."""
    given = inspect.signature(func).bind(*args, **kwargs)
    received: list[tuple[Shard, Tensor]] = []

    def take(x: Any) -> Any:
        if not isinstance(x, Shard):
            return x
        received.append((x, x.whole(name).detach().clone()))  # what was gathered may be held for others
        return received[-1][1]

    for parameter, x in given.arguments.items():
        receives = parameter not in _SENT and not (parameter == "tensor" and name in _SENDING)
        given.arguments[parameter] = tree_map(take if receives else gathered, x)
    work = func(*given.args, **given.kwargs)
    if received and work is not None:
        work.wait()
    with torch.no_grad():
        for shard, whole in received:
            shard.take_part(whole)
    return work


def becomes_leaf(func: Callable[..., Any], name: str, args: tuple[Any, ...]) -> bool:
    """Whether a shard that needs no gradient is told to collect one."""
    sets = name == "requires_grad_" or (name == "requires_grad" and func.__name__ == "__set__")
    wanted = args[1] if len(args) > 1 else True
    if not sets or not isinstance(args[0], Shard) or not wanted:
        return False
    with DisableTorchFunctionSubclass():
        return not args[0].requires_grad


def changes(kind: type[Tensor], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation changes an operand of this kind in place."""
    if any(isinstance(x, kind) for x in tree_leaves(kwargs.get("out"))):
        return True
    written = is_in_place(name) or bool(kwargs.get("inplace")) or (name == "data" and len(args) == 2)
    return written and bool(args) and any(isinstance(x, kind) for x in tree_leaves(args[0]))


_SENT = frozenset(["group", "input", "input_list", "input_tensor", "input_tensor_list", "op", "scatter_list"])
"""Parameters of torch.distributed's functions that are only sent."""
_SENDING = frozenset(["all_gather", "gather", "isend", "send"])
"""Functions of torch.distributed where `tensor` is only sent, too."""
METADATA = operation_names(
    """
    dtype device layout requires_grad requires_grad_ is_leaf grad_fn is_cuda is_cpu is_meta is_sparse is_quantized
    is_nested names dim ndim ndimension is_floating_point is_complex element_size is_inference __hash__ get_device
    _version
    """
)
SIZES = operation_names("shape size numel nelement __len__ stride is_contiguous")
"""What asks a tensor for no more than its size."""
NO_VALUES = METADATA | SIZES
CHANGE_VALUES = operation_names(
    "scatter_ scatter_add_ scatter_reduce_ index_fill_ index_add_ index_copy_ index_put_ masked_fill_ masked_scatter_"
    " __setitem__"
)
"""Operations in place that change values of the first operand, and nothing else."""
_SAME_MEMORY = operation_names("data detach")
VIEWS = operation_names(
    """
    __getitem__ select narrow view view_as transpose permute split split_with_sizes tensor_split chunk unbind squeeze
    unsqueeze flatten unflatten reshape expand expand_as T mT movedim moveaxis swapaxes swapdims diagonal unfold
    as_strided __iter__ hsplit vsplit
    """
)
