"""Selective recomputation: the attention core (scores, softmax, dropout) of plain code, found by following the data.

Its tensors are large (heads x sequence x sequence) and cheap to compute again. A product of two activations, such as q
and k, starts a core; operations on each element, softmax, dropout and views carry it on; the product with a further
activation, such as v, ends it. What these operations would save for backward is not kept. The first time backward asks
for any of it, the recorded operations run again on the inputs of the core, with the same random numbers.
Source: Korthikanti et al. 2022, section 5.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_megatp.recompute.tape import Operation, Output, Tape
from lightning_megatp.shim.autograd import checkpoint_region
from lightning_megatp.shim.torch import is_parameter_view, sdpa_is_fused, tensor_version, tree_leaves
from lightning_megatp.tensor.context import TensorContext
from lightning_megatp.tensor.draws import draws_random
from lightning_megatp.tensor.functions import is_in_place, operation_name, operation_names
from lightning_megatp.tensor.shards import VIEWS, Shard


def recomputing_core(context: TensorContext, call: Callable[[], Any]) -> Any:
    """Run a block such that its attention core is not kept, but computed again in backward."""
    with _CoreMode(context):
        return call()


class _Known(NamedTuple):
    """Where a tensor of a core comes from."""

    tape: Tape
    output: Output
    version: int
    """The version of the tensor; a change in place that was not recorded makes it a tensor like any other."""


class _CoreMode(TorchFunctionMode):
    """Active while a block's forward runs.

    Args:
        context: of the parallel layers.
    """

    def __init__(self, context: TensorContext) -> None:
        super().__init__()
        self._context = context
        self._core: Any = WeakTensorKeyDictionary()
        self._numbers = itertools.count()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = operation_name(func)
        if not self._core and name not in _STARTS:
            return func(*args, **kwargs)
        if not torch.is_grad_enabled() or kwargs.get("out") is not None or checkpoint_region() is not None:
            return func(*args, **kwargs)
        if name in _PRODUCTS:
            return self._product(func, name, args, kwargs)
        if name == "scaled_dot_product_attention":
            fused = sdpa_is_fused(*_plain(args), **dict(zip(kwargs, _plain(kwargs.values()), strict=True)))
            return func(*args, **kwargs) if fused else self._record(func, name, args, kwargs)[0]
        known = self._tensors_of_core(args, kwargs) if name in _CARRIED else {}
        if not known or (is_in_place(name) and id(args[0]) not in known):
            return func(*args, **kwargs)
        result, tape, operation = self._record(func, name, args, kwargs, known)
        for index, x in enumerate(_tensors(result)):
            self._core[x] = _Known(tape, Output(operation, index), tensor_version(x))
        return result

    def _product(self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        known = self._tensors_of_core(args, kwargs)
        if known:
            return self._record(func, name, args, kwargs, known)[0]
        factors = _tensors((args, kwargs))[-2:]
        if len(factors) < 2 or not all(map(_is_activation, factors)) or is_in_place(name):
            return func(*args, **kwargs)
        result, tape, operation = self._record(func, name, args, kwargs)
        self._core[result] = _Known(tape, Output(operation, 0), tensor_version(result))
        return result

    def _tensors_of_core(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, _Known]:
        """id -> where it comes from, for the arguments that belong to a core."""
        found = {id(x): (x, self._core.get(x)) for x in _tensors((args, kwargs))}
        return {i: at for i, (x, at) in found.items() if at is not None and at.version == tensor_version(x)}

    def _record(
        self,
        func: Callable[..., Any],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        known: dict[int, _Known] | None = None,
    ) -> tuple[Any, Tape, Operation]:
        known = known or {}
        tape = Tape.joined([at.tape for at in known.values()])
        outputs = {i: at.output for i, at in known.items()}
        draws = draws_random(name, args, kwargs)
        operation = Operation(next(self._numbers), func, args, kwargs, outputs, self._context.stream, draws)
        return tape.record(operation, args, kwargs), tape, operation


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def _plain(values: Any) -> list[Any]:
    return [getattr(x, "plain", x) if isinstance(x, Shard) else x for x in values]


def _is_activation(x: Tensor) -> bool:
    """Whether this was computed, and has a gradient; no parameter, nor a view of one."""
    own = getattr(x, "plain", x) if isinstance(x, Shard) else x
    return own.requires_grad and not own.is_leaf and not is_parameter_view(own)


_PRODUCTS = operation_names("matmul __matmul__ __rmatmul__ bmm baddbmm einsum")
_STARTS = _PRODUCTS | {"scaled_dot_product_attention"}
_CARRIED = VIEWS | operation_names(
    """
    softmax log_softmax dropout masked_fill masked_fill_ where tril triu cat clone contiguous detach to type type_as
    float half bfloat16 double add sub subtract rsub mul multiply div divide true_divide add_ sub_ mul_ div_ __add__
    __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __iadd__ __isub__ __imul__ __itruediv__ neg
    __neg__ pow __pow__ square sqrt rsqrt exp log abs clamp clamp_min clamp_max clip tanh sigmoid relu maximum minimum
    nan_to_num
    """
)
