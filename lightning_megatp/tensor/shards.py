"""What the tensors of which a rank holds a part have in common: SequenceShard (tokens), FeatureShard (features)."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_megatp.plan.layer import TRANSPOSED, MatrixDims
from lightning_megatp.shim.fakes import as_subclass
from lightning_megatp.shim.torch import DisableTorchFunction, DisableTorchFunctionSubclass, tree_leaves, tree_map
from lightning_megatp.tensor.einsum import LinearEinsum, operands_of
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

    matrix_dims: MatrixDims = MatrixDims()

    @property
    def transposed(self) -> bool:
        """Whether it is a matrix (in, out): `x @ weight` is then what `F.linear` is of others."""
        return self.matrix_dims == TRANSPOSED

    @property
    def is_matrix(self) -> bool:
        return len(self.matrix_dims.order) == 2

    def linear(self, x: Any, bias: Any = None) -> Any:
        """What `F.linear` of this weight as (out, in) is: what the layer makes of it, which no hooks of the layer see.

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


class WeightMatrix(torch.Tensor):
    """A LayerWeight seen as another matrix, which may be the layer's work, too: its transpose, or of a weight of more
    dims one that has the outputs in one dim, and the inputs in the other."""

    of: LayerWeight
    transposed: bool
    """Whether it is (in, out)."""
    make: Callable[[Tensor], Tensor]
    """Makes it of the whole weight."""

    @staticmethod
    def made(weight: LayerWeight, shape: tuple[int, ...], transposed: bool, make: Callable[[Tensor], Tensor]) -> Any:
        """A matrix of that shape."""
        with DisableTorchFunction():  # a pipeline's mode would take it for something the step does
            matrix = torch.empty((), device="meta").expand(shape).as_subclass(WeightMatrix)
        matrix.of, matrix.transposed, matrix.make = weight, transposed, make
        return matrix

    @staticmethod
    def seen(weight: LayerWeight, func: Callable[..., Any], name: str, /, *args: Any, **kwargs: Any) -> Any:
        """What an operation makes of a weight, if it is such a matrix; else None."""
        if not (transposes(name, *args, **kwargs) if weight.is_matrix else name in _RESHAPES):
            return None
        shape = tuple(weight.shape)  # as code sees it
        if weight.is_matrix:
            return WeightMatrix.made(weight, shape[::-1], not weight.transposed, lambda w: w.T)
        made = reshaped(name, func, shape, args, kwargs)
        if made is None:
            return None
        for is_transposed, dims in enumerate((made, made.flipped)):
            if dims == weight.matrix_dims:
                sizes = dims.sizes(shape)
                own = sizes[::-1] if is_transposed else sizes
                return WeightMatrix.made(weight, own, bool(is_transposed), lambda w: func(w, *args, **kwargs))
        return None

    @property
    def T(self) -> Any:  # type: ignore[override]
        """The other way round."""
        if self.of.is_matrix:
            return self.of
        return WeightMatrix.made(self.of, tuple(self.shape)[::-1], not self.transposed, lambda w: self.make(w).T)

    def whole(self, operation: str) -> Tensor:
        """A plain tensor, as `LayerWeight.whole`."""
        return self.make(self.of.whole(operation))

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, operation_name(func)
        if is_linear_of_layer(name, args, kwargs):
            return linear_of_layer(name, args, kwargs)
        if args and isinstance(args[0], WeightMatrix) and transposes(name, *args[1:], **kwargs):
            return args[0].T
        if name in METADATA - DIMS and args and isinstance(args[0], WeightMatrix):
            return func(args[0].of, *args[1:], **kwargs)
        if name in SIZES | DIMS:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = tree_map(lambda x: x.whole(name) if isinstance(x, WeightMatrix) else x, (args, kwargs))
        return func(*args, **kwargs)


def reshaped(
    name: str, func: Callable[..., Any], shape: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> MatrixDims | None:
    """Which dims become the rows, and which the columns, where an operation makes a matrix of a tensor of more dims;
    None if it doesn't."""
    if name not in _RESHAPES or len(shape) < 3 or any(isinstance(x, Tensor) for x in args):
        return None
    with DisableTorchFunction():
        made = func(torch.empty(shape, device="meta"), *args, **kwargs).shape
    dims = tuple(range(len(shape)))
    ways = (MatrixDims(dims[:i], dims[i:]) for i in dims[1:])
    return next((way for way in ways if way.sizes(shape) == tuple(made)), None)


def transposes(name: str, /, *dims: Any, **named: Any) -> bool:
    """Whether an operation transposes a matrix."""
    if name in ("T", "t", "mT"):
        return True
    given = dims[0] if len(dims) == 1 and isinstance(dims[0], (list, tuple)) else (*dims, *named.values())
    return name in ("transpose", "permute", "swapaxes", "swapdims") and [d % 2 for d in given] in ([0, 1], [1, 0])


def changes_nothing(func: Callable[..., Any], name: str, x: Tensor, /, *args: Any, **kwargs: Any) -> bool:
    """Whether an operation returns a plain tensor itself: `.to` of the dtype and device that it has."""
    return name in _CONVERSIONS and func(x, *args, **kwargs) is x


def is_linear_of_layer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operation is `F.linear(x, weight, ...)` with a LayerWeight, or `x @ weight.T`; of a weight (in, out)
    it is `x @ weight`, or `addmm`. An `einsum` may be it, too."""
    if name == "einsum":
        return _einsum_of_layer(args) is not None
    name, args = as_product(name, args, kwargs)
    weight = args[1] if len(args) > 1 else kwargs.get("weight")
    if not isinstance(weight, LayerWeight | WeightMatrix) or (isinstance(weight, LayerWeight) and not weight.is_matrix):
        return False
    return name in PRODUCTS if weight.transposed else name == "linear"


def linear_of_layer(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let the layer compute an operation for which `is_linear_of_layer` holds."""
    if name != "einsum":
        return _linear_of_layer(*as_product(name, args, kwargs)[1], **kwargs)
    found = _einsum_of_layer(args)
    assert found is not None
    weight, others, einsum = found
    return einsum.compute(weight.linear, weight.shape, others)


def as_product(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, tuple[Any, ...]]:
    """An operation and its arguments; `addmm(bias, x, weight)` is `mm(x, weight)` with a bias behind."""
    is_it = name == "addmm" and len(args) == 3 and not kwargs and isinstance(args[0], Tensor) and args[0].dim() == 1
    return ("mm", (*args[1:], args[0])) if is_it else (name, args)


def _linear_of_layer(input: Any, weight: LayerWeight | WeightMatrix, bias: Any = None) -> Any:
    """Parameters as those of `F.linear`."""
    return (weight.of if isinstance(weight, WeightMatrix) else weight).linear(input, bias)


def _einsum_of_layer(args: tuple[Any, ...]) -> tuple[LayerWeight, list[Any], LinearEinsum] | None:
    """The weight, the other operands, and how it is the layer's work."""
    operands = operands_of(args)
    at = [i for i, x in enumerate(operands) if isinstance(x, LayerWeight | WeightMatrix)]
    if len(at) != 1 or not isinstance(operands[at[0]], LayerWeight):
        return None
    einsum = LinearEinsum.of(args[0], operands, at[0])
    weight = operands.pop(at[0])
    return None if einsum is None or einsum.dims != weight.matrix_dims else (weight, operands, einsum)


PRODUCTS = operation_names("matmul __matmul__ mm")
_RESHAPES = operation_names("view reshape flatten")
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
DIMS = operation_names("dim ndim ndimension")
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
