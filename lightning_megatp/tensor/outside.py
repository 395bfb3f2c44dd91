"""Split parameters seen from outside their layers: there they behave as the whole ones.

A step may read `self.tok.weight` or loop over `self.parameters()` at any time, in some steps only. The parameters of a
parallel layer therefore hand out a WholeParameter to the code of a step, and the shard itself to everybody else (the
layer, the optimizer, state dicts). Using one gathers the parameter, differentiably, and notes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_megatp.plan.shard import ShardedTensorSpec
from lightning_megatp.shim.torch import FOREACH_IN_PLACE, DisableTorchFunction, tree_leaves, tree_map
from lightning_megatp.tensor.context import TensorContext
from lightning_megatp.tensor.functions import is_in_place, one_by_one, operation_name, operation_names, sets_data
from lightning_megatp.tensor.parameters import gather_parameter, gather_shards
from lightning_megatp.tensor.shards import (
    SIZES,
    GatheredView,
    LayerWeight,
    WeightMatrix,
    changes_nothing,
    is_linear_of_layer,
    linear_of_layer,
    seal,
)


class LayerParameters(dict[str, Any]):
    """`nn.Module._parameters` of a parallel layer, or of another module that has split parameters.

    Args:
        owner: the module.
        is_layer: whether it is a parallel layer.
    """

    def __init__(self, parameters: dict[str, Any], context: TensorContext, owner: Any, is_layer: bool = False) -> None:
        super().__init__(parameters)
        self.context = context
        self._owner = _nobody if owner is None else weakref.ref(owner)
        self._is_layer = is_layer
        self.layers: dict[str, Any] = {}
        """Weights that are no layer's own -> what computes `F.linear` with them (a `BareLayer`)."""

    def __getitem__(self, name: str) -> Any:
        return self._seen(name, super().__getitem__(name))

    def __setitem__(self, name: str, value: Any) -> None:
        """What was handed out and comes back (`torch.func.functional_call`) is the shard again."""
        super().__setitem__(name, value.parameter if isinstance(value, WholeParameter) else value)

    def get(self, name: str, default: Any = None) -> Any:
        return self._seen(name, super().get(name, default))

    def items(self) -> Any:
        return {name: self._seen(name, x) for name, x in super().items()}.items()

    def values(self) -> Any:
        return {name: self._seen(name, x) for name, x in super().items()}.values()

    def __deepcopy__(self, memo: dict[int, Any]) -> LayerParameters:
        owner = memo.get(id(self._owner()), self._owner())
        copied = LayerParameters({}, self.context, owner, self._is_layer)
        copied.layers = {name: layer.of(owner) for name, layer in self.layers.items()}
        memo[id(self)] = copied
        for name, parameter in super().items():
            twin = None if parameter is None else parameter.__deepcopy__(memo)
            dict.__setitem__(copied, name, twin)
            if id(parameter) in self.context.sharded:
                self.context.sharded[id(twin)] = self.context.sharded[id(parameter)]
                # or what comes to have its identity, when the copy is gone, would be taken for split
                weakref.finalize(twin, self.context.sharded.pop, id(twin), None).atexit = False
        return copied

    def __reduce__(self) -> Any:
        return dict, (dict(super().items()),)

    def _seen(self, name: str, parameter: Any) -> Any:
        if not self.context.user_code or parameter is None:
            return parameter
        spec, seen = self.context.sharded.get(id(parameter)), self.context.seen
        if spec is None:
            return parameter
        if id(parameter) not in seen:  # of a tied weight, both layers hand out the same object
            seen[id(parameter)] = WholeParameter.of(parameter, parameter, spec, self.context)
        shown = seen[id(parameter)]
        layer = self._owner() if name == "weight" and self._is_layer else self.layers.get(name)
        if layer is not None:
            shown.layer, shown.matrix_dims = weakref.ref(layer), layer.matrix_dims
        return shown


def _nobody() -> None:
    """The owner of parameters whose module is gone: None."""


class WholeParameter(LayerWeight):
    """A shard of a parameter that behaves as the whole parameter."""

    _is_param: bool
    """What isinstance(x, nn.Parameter) asks for."""
    shard: Tensor
    parameter: Tensor
    spec: ShardedTensorSpec
    context: TensorContext
    layer: weakref.ref[Any] | None = None
    """Whose weight it is, if the module that has it is a parallel layer, or uses it as one."""
    apart: bool = False
    """Whether it is a copy, which the step may change as it likes."""

    @staticmethod
    def of(shard: Tensor, parameter: Tensor, spec: ShardedTensorSpec, context: TensorContext) -> WholeParameter:
        """Let a shard stand for the whole parameter.

        Args:
            shard: the parameter itself, or its `.data`.
            parameter: the parameter.
        """
        with DisableTorchFunction():  # a pipeline's mode would take it for something the step does
            plain = shard.to_local() if isinstance(shard, DTensor) else shard
            seen = plain.detach().as_subclass(WholeParameter)
        seen.shard, seen.parameter, seen.spec, seen.context = shard, parameter, spec, context
        seen._is_param = shard is parameter
        return seen

    @property
    def is_whole(self) -> bool:
        """Whether the parameter was gathered for good since the step got hold of it."""
        return self.shard is self.parameter and id(self.parameter) not in self.context.sharded

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad or func is torch.autograd.backward:
            with DisableTorchFunction():
                return func(*args, **kwargs)  # it is the layers that have used the shard: see `handle_grad`
        name = operation_name(func)
        if is_linear_of_layer(name, args, kwargs):
            return linear_of_layer(name, args, kwargs)
        first = args[0] if args and isinstance(args[0], WholeParameter) else None
        if first is not None and first._computes:
            matrix = WeightMatrix.seen(first, func, name, *args[1:], **kwargs)
            if matrix is not None:
                return matrix
        if first is not None and first._computes and changes_nothing(func, name, first.shard, *args[1:], **kwargs):
            return first
        if any(x.is_whole for x in args if isinstance(x, WholeParameter)):
            args, kwargs = tree_map(
                lambda x: x.shard if isinstance(x, WholeParameter) and x.is_whole else x, (args, kwargs)
            )
            return func(*args, **kwargs)
        if first is not None and name in _METADATA:
            return func(first.shard, *args[1:], **kwargs)
        if first is not None and name in SIZES:
            return size_of(first.spec.shape, func, *args[1:], **kwargs)
        kept_apart = name == "clone" and not torch.is_grad_enabled()  # to be put back later
        if first is not None and (kept_apart or name in ("data", "detach")) and len(args) == 1:
            made = cls.of(func(first.shard, **kwargs), first.parameter, first.spec, first.context)
            made.apart = first.apart or kept_apart
            return made
        if first is not None and name == "grad" and func.__name__ == "__set__" and args[1] is None:
            first.parameter.grad = None  # of a divided one, what hooks and optimizers find follows
            return None
        if first is not None and sets_data(func):
            first._set_data(args[1])
            return None
        if func in FOREACH_IN_PLACE:
            for single, given, named in one_by_one(func, args, kwargs):
                single(*given, **named)
            return None
        if isinstance(out := kwargs.get("out"), WholeParameter):
            del kwargs["out"]
            return out.copy_(func(*args, **kwargs))
        if name in _ARITHMETIC and (moved := _of_shards(func, args, kwargs)) is not None:
            return moved
        if first is not None and name == "copy_" and (value := first._own(args[1])) is not None:
            func(first.shard, value, *args[2:], **kwargs)
            return first
        if first is not None and name == "grad" and func.__name__ == "__get__" and not first.context.pipelined:
            return first._gradient()
        if first is not None and (name in _REFUSED or is_in_place(name)):
            return first._change(func, name, args, kwargs)
        written = [*(args[:1] if is_in_place(name) else ()), kwargs.get("out")]
        if lost := [x for x in tree_leaves(written) if isinstance(x, WholeParameter)]:
            raise RuntimeError(_written(lost[0], name))
        args, kwargs = tree_map(lambda x: used_whole(x, name), (args, kwargs))
        return func(*args, **kwargs)

    def linear(self, x: Any, bias: Any = None) -> Any:
        """In place of its layer's call, if the layer can compute that with its parts; else of the gathered weight."""
        x = used_whole(x, "linear")
        layer = self.layer() if self.layer is not None and self._computes else None
        is_its = layer is not None and layer.computes_with(self.parameter)  # and not that of which it is a copy
        result = layer.linear(x, bias) if layer is not None and is_its else NotImplemented
        if result is not NotImplemented:
            return result
        return F.linear(x, self.matrix_dims.matrix(self.whole("linear")), bias)

    @property
    def _computes(self) -> bool:
        """Whether it is what its layer computes with, and not a copy, a part of it, or a convolution's."""
        own = self.layer is not None and self._is_param and len(self.spec.shape) == len(self.matrix_dims.order)
        return own and not self.is_whole and not isinstance(self.shard, DTensor)

    def whole(self, operation: str) -> Tensor:
        """The whole parameter. It is noted as used outside of its layer.

        Communication: `gather_parameter`.
        """
        if self.is_whole:
            return self.shard
        check_undivided(self, operation)
        if self.context.pipelined:
            raise RuntimeError(f"MegaTPStrategy: {used_outside(self.spec.name)}")
        if id(self.parameter) in self.context.sharded:  # not a copy that is left of one which is whole by now
            self.context.outside.setdefault(id(self.parameter), (self.parameter, operation))
        return gather_parameter(self.shard, self.spec, self.context.group)

    def _change(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation in place: on the shard where each element is by itself, else on the gathered parameter, of which
        the shard takes its part.

        Raises:
            RuntimeError: it does more than change values.
        """
        if name in _ELEMENTWISE_IN_PLACE:
            others = [x for x in tree_leaves((args[1:], kwargs)) if isinstance(x, Tensor) and x.dim() > 0]
            parts = {id(x): self._own(x) for x in others}
            if all(part is not None for part in parts.values()):
                rest, kwargs = tree_map(lambda x: parts.get(id(x), x), (args[1:], kwargs))
                func(self.shard, *rest, **kwargs)
                return self
        if name in _REFUSED:
            raise RuntimeError(_written(self, name))
        (whole, *rest), kwargs = tree_map(lambda x: used_whole(x, name), (args, kwargs))
        func(whole, *rest, **kwargs)
        self.shard.copy_(self.spec.spec(self.context.rank).take(whole))
        return None if name == "__setitem__" else self

    def _set_data(self, value: Any) -> None:
        """`p.data = value`: another tensor from now on, of which this rank has its part."""
        check_undivided(self, "data")
        own = self._own(value)
        if own is None:
            raise RuntimeError(_written(self, "data"))
        with DisableTorchFunction():
            self.shard.data = own.detach()

    def _gradient(self) -> Tensor | None:
        """What `.grad` is on one device, to look at; where the step begins, that of the batch before.

        Communication: one all-gather.
        """
        check_undivided(self, "grad")
        gradient = self.parameter.grad
        if gradient is None:
            return None
        whole = gather_shards(gradient, self.spec, self.context.group)
        return cast(Tensor, seal(whole, _WholeGradient))

    def _own(self, value: Any) -> Tensor | None:
        """This rank's part of a value for all of the parameter, which may be a part already; None if it is neither."""
        if isinstance(value, WholeParameter):
            return value.shard if value.spec.renamed(self.spec.name) == self.spec else None
        if type(value) is Tensor and not isinstance(self.shard, DTensor) and tuple(value.shape) == self.spec.shape:
            return self.spec.spec(self.context.rank).take(value)
        return value if isinstance(value, Tensor) and value.shape == self.shard.shape else None


def _of_shards(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> WholeParameter | None:
    """Arithmetic without a gradient, by which a step moves weights (`q.data = q.data * 0.99 + p.data * 0.01`), on this
    rank's part of each: parameters that are split alike, and numbers. None if there is anything else."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if "out" in kwargs or (torch.is_grad_enabled() and any(x.requires_grad for x in tensors)):
        return None
    first = next(x for x in tensors if isinstance(x, WholeParameter))
    parts = {id(x): first._own(x) for x in tensors if x.dim() > 0}
    if isinstance(first.shard, DTensor) or any(part is None for part in parts.values()):
        return None
    own_args, own_kwargs = tree_map(lambda x: parts.get(id(x), x), (args, kwargs))
    made = WholeParameter.of(func(*own_args, **own_kwargs), first.parameter, first.spec, first.context)
    made.apart = True
    return made


class _WholeGradient(GatheredView):
    """A gathered copy, of which the optimizer would see no change."""

    @staticmethod
    def refusal(name: str) -> str:
        return (
            f"MegaTPStrategy: the step changes a gradient in place (`{name}`), of which each tensor rank holds a part."
            " Inside a step clip with `self.clip_gradients(...)`; change gradients in `on_before_optimizer_step`."
        )


def _written(x: WholeParameter, name: str) -> str:
    return (
        f"MegaTPStrategy: the step uses `{name}` on `{x.spec.name}`, of which each rank holds a part."
        " Inside a step clip with `self.clip_gradients(...)`, change gradients in `on_before_optimizer_step`,"
        " or leave its layer out of the plan."
    )


def used_whole(x: Any, operation: str) -> Any:
    """The whole weight that an operation uses, anything else as it is."""
    return x.whole(operation) if isinstance(x, LayerWeight | WeightMatrix) else x


def check_undivided(x: WholeParameter, operation: str) -> None:
    """Refuse to put a weight together of which this rank has some rows alone.

    Raises:
        RuntimeError: what tensor ranks hold of a parameter, zero > 0 has divided further.
    """
    if isinstance(x.shard, DTensor):
        raise RuntimeError(
            f"MegaTPStrategy: the step uses `{x.spec.name}` outside of its own layer (`{operation}`), while with"
            " zero > 0 only rows of it are here. Take its layer out of the plan, or use zero=0."
        )


def size_of(shape: Sequence[int], ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What a tensor of a shape answers to one of `SIZES`."""
    return ask(torch.empty(shape, device="meta"), *args, **kwargs)


def used_outside(name: str) -> str:
    """What is wrong about that, in pipelines, where optimizers and plans know parameters before any step runs."""
    return (
        f"the step uses `{name}`, which the plan splits, outside of its own layer. With pp > 1 its parts can't be"
        " gathered there: take its layer out of the plan."
    )


_METADATA = operation_names(
    """
    dtype device layout requires_grad requires_grad_ is_leaf grad_fn is_cuda is_cpu is_meta is_sparse is_quantized
    is_nested names dim ndim ndimension is_floating_point is_complex element_size is_inference __hash__ get_device
    register_hook register_post_accumulate_grad_hook
    """
)
_REFUSED = operation_names("grad retain_grad set_ __setstate__ swap")
_ARITHMETIC = operation_names(
    "add sub rsub mul div true_divide neg lerp addcmul addcdiv __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__"
    " __truediv__ __rtruediv__ __neg__"
)
_ELEMENTWISE_IN_PLACE = operation_names(
    "clamp_ clamp_min_ clamp_max_ clip_ mul_ div_ add_ sub_ zero_ fill_ neg_ abs_ nan_to_num_ __imul__ __itruediv__"
    " __iadd__ __isub__ lerp_ addcmul_ addcdiv_"
)
