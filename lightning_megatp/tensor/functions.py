"""Torch's functions as `__torch_function__` sees them, and this package's own autograd functions."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import handle_torch_function

from lightning_megatp.origins import THIS_PACKAGE, callers_frame, module_of_frame, package_of_frame
from lightning_megatp.plan.layer import UserOperation
from lightning_megatp.shim.autograd import DirectFunction
from lightning_megatp.shim.torch import FOREACH_IN_PLACE

_READ_GRADIENTS = (
    *("torch.distributed.", "torch.nn.modules.", "torch.optim.", "torch.autograd."),
    *("lightning.", "pytorch_lightning."),
)
"""Modules, by the beginnings of their names, that read gradients for what a step calls."""
_IN_PLACE_OPERATORS = frozenset(
    ["__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__", "__ipow__", "__iand__", "__ior__", "__ixor__"]
)


def operation_name(func: Callable[..., Any]) -> str:
    """`add`, `layer_norm`, or the property's name for a getter (`shape`)."""
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", name) if name in ("__get__", "__set__") else name


def argument(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, *names: str, default: Any = None) -> Any:
    """What a function is given for a parameter, by one of its names or by position."""
    given = (kwargs[name] for name in names if name in kwargs)
    return next(given, args[position] if len(args) > position else default)


def unreflected(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A comparison of two tensors, the same whichever of them was asked: of `a >= b` Python asks `b` by `__le__`, where
    its class is derived from that of `a`."""
    other = REFLECTED.get(func)
    if other is None or len(args) != 2 or not all(isinstance(x, Tensor) for x in args):
        return func, args
    return other, args[::-1]


REFLECTED: dict[Any, Callable[..., Any]] = {Tensor.ge: Tensor.le, Tensor.gt: Tensor.lt}


def without_arguments(call: Callable[..., Any]) -> Callable[..., Any]:
    """What a partial calls at last."""
    while isinstance(call, functools.partial):
        call = call.func
    return call


def operation_names(text: str) -> frozenset[str]:
    """A set of names as `operation_name` gives them."""
    return frozenset(text.split())


_COUPLING = operation_names(
    """
    norm vector_norm matrix_norm renorm renorm_ normalize dist cdist pdist cosine_similarity sum nansum mean nanmean
    std var prod amax amin aminmax max min argmax argmin median nanmedian quantile nanquantile kthvalue topk sort
    argsort msort cumsum cumprod logsumexp softmax log_softmax layer_norm group_norm instance_norm batch_norm
    rms_norm std_mean var_mean trace count_nonzero histc unique numpy tolist flip roll fill_diagonal_ tril tril_
    triu triu_ diag diagonal multi_dot matrix_exp logdet cond any all equal allclose qr svd svdvals eig eigh
    eigvalsh cholesky inv pinv det slogdet matrix_power matrix_rank
    """
)
LOOKS_AT_GRADIENT = operation_names("register_hook retain_grad")
"""What lets code see the gradient of a tensor, in backward."""
_PRODUCTS = operation_names("matmul __matmul__ __rmatmul__ mm mv bmm dot inner outer einsum tensordot")


def bare_name(operation: str) -> str:
    """Without what says where torch has it."""
    return operation.removeprefix("linalg_").removeprefix("_foreach_")


def couples(operation: str) -> bool:
    """Whether an operation, other than a product, looks at several elements of a tensor at once."""
    return bare_name(operation) in _COUPLING


def multiplies(operation: str) -> bool:
    """Whether it is a product of vectors or matrices."""
    return bare_name(operation) in _PRODUCTS


def is_assignment(func: Callable[..., Any]) -> bool:
    """Whether it is an assignment to an attribute of a tensor: `tensor.grad = values`."""
    return getattr(func, "__name__", "") == "__set__"


def sets_data(func: Callable[..., Any]) -> bool:
    """Whether it is the assignment `tensor.data = values`."""
    return is_assignment(func) and operation_name(func) == "data"


def asks_gradient(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Whether the user's code reads the gradient of a parameter. Backward, optimizers and `zero_grad` do, too."""
    if len(args) != 1 or not isinstance(args[0], nn.Parameter) or operation_name(func) != "grad":
        return False
    frame = callers_frame(sys._getframe(1), THIS_PACKAGE)
    return not module_of_frame(frame).startswith(_READ_GRADIENTS)


def done_by_user(operation: str) -> UserOperation:
    """An operation that runs, with the innermost line that is neither torch's nor this package's."""
    frame = callers_frame(sys._getframe(1), "torch", THIS_PACKAGE)
    return operation, frame.f_code.co_filename, frame.f_lineno


def called_by_this_package() -> bool:
    """Asked by a `__torch_function__`: whether the operation's caller is this package, which keeps what a step may
    change, and not the step."""
    return package_of_frame(sys._getframe(2)) == THIS_PACKAGE


def check_caller(func: Callable[..., Any]) -> None:
    """Called first of all by a `__torch_function__` that looks at a user's operations. A function copied from torch
    under another name hands over to torch's own where somebody looks, and only there.

    Raises:
        RuntimeError: that is how `func` comes to be called.
    """
    handing = sys._getframe(2)
    caller = handing.f_back
    if handing.f_code is not handle_torch_function.__code__ or caller is None:
        return
    of_torch = (getattr(func, "__module__", None) or "torch").partition(".")[0] == "torch"
    if not of_torch or package_of_frame(caller) in ("torch", THIS_PACKAGE):
        return
    name, code = operation_name(func), caller.f_code
    raise RuntimeError(
        f"MegaTPStrategy: `{code.co_name}` ({code.co_filename}:{caller.f_lineno}) gives `handle_torch_function` torch's"
        f" `{name}`, which would take its place here; on one device it computes by itself. Delete its lines with"
        " `has_torch_function`, or give its own name there."
    )


def gradient_in_step(name: str, why: str) -> str:
    """What is said of that, where a step can't find what it would on one device.

    Args:
        name: of the parameter.
        why: it can't.
    """
    return (
        f"the step reads the gradient of {name}. {why} Read gradients in `on_after_backward` or"
        " `on_before_optimizer_step`, where `p.grad.norm()` is known of all that a rank holds a part of, and"
        " `self.trainer.strategy.full_gradients()` gives the whole of all."
    )


def one_by_one(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """What a function of `FOREACH_IN_PLACE` (`torch._foreach_mul_`) does, as an operation on each of its tensors, of
    which ranks may hold some: function, arguments and keyword arguments."""

    def of(i: int, given: Any) -> Any:
        return given[i] if isinstance(given, (list, tuple)) else given

    tensors, *rest = args
    for i, tensor in enumerate(tensors):
        yield FOREACH_IN_PLACE[func], (tensor, *(of(i, x) for x in rest)), {k: of(i, x) for k, x in kwargs.items()}


def is_in_place(name: str) -> bool:
    """Whether an operation changes its first operand."""
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_OPERATORS


class OwnFunction(DirectFunction):
    """An autograd function of this package. Its callers see to it that it gets plain tensors, never shards."""


@dataclass(frozen=True)
class OwnHook:
    """A hook of this package on a parameter whose gradient was accumulated. Unlike a user's, it may also be called
    where a backward leaves the gradient undefined, and then does nothing."""

    call: Callable[[Tensor], None]

    def __call__(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.call(parameter)
