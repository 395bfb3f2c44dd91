"""Private names of torch. Seen in 2.11 and 2.13."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

# torch.utils._pytree is what torch's own containers go through (torch.func, export, FSDP2); the public alternative
# (torch.utils.pytree) does not exist before 2.14. DisableTorchFunctionSubclass is documented in "Extending PyTorch" but
# has no public home. FakeTensorMode (what torch.compile and torch.export plan with: shapes, dtypes and devices without
# data) has no public import path.
__all__ = [
    "DataDependentOutputException",
    "DisableTorchFunctionSubclass",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "UnsupportedOperatorException",
    "accumulated_parameter",
    "accumulates_into",
    "all_gather_single",
    "as_subclass",
    "checkpoint_region",
    "current_backward_node",
    "functorch_is_active",
    "gradient_hooks",
    "handle_functions",
    "is_compiled",
    "is_fake",
    "reduce_scatter_single",
    "storage_id",
    "tensor_version",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
    "without_mode",
]

T = TypeVar("T", bound=Tensor)

# torch 2.13 renames these two and warns at the names that 2.11 knows.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def tensor_version(x: Tensor) -> int:
    """How often a tensor was modified in place. `Tensor._version` is what autograd's own check reads; inference tensors
    have none, and can't be modified outside inference mode."""
    if x.is_inference():
        return 0
    return int(x._version)


def accumulated_parameter(node: Any) -> Tensor | None:
    """The leaf an AccumulateGrad node adds to, None for other nodes. `variable` has no public name (2.13)."""
    variable = getattr(node, "variable", None)
    return variable if isinstance(variable, torch.Tensor) else None


def accumulates_into(leaf: Tensor) -> bool:
    """Whether the backward that runs on this thread adds to the `.grad` of a leaf. False in `autograd.grad`, where the
    engine refuses to answer, and where `backward(inputs=...)` leaves it out. No public name (2.11-2.13)."""
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False


def gradient_hooks(leaf: Tensor) -> bool:
    """Whether somebody registered a hook on the gradient of a leaf; no public name (2.11-2.13). Both kinds are called,
    with None, where a backward leaves the gradient undefined."""
    return bool(leaf._backward_hooks) or bool(leaf._post_accumulate_grad_hooks)


def current_backward_node() -> object:
    """The autograd node whose backward runs on this thread, None outside of backward. No public name (2.11-2.13)."""
    return torch._C._current_autograd_node()


@contextlib.contextmanager
def handle_functions(
    handle: Callable[[Any, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any],
) -> Iterator[None]:
    """Let `handle(cls, apply, args, kwargs)` stand for every `torch.autograd.Function.apply`.

    `apply` asks neither `__torch_function__` nor a TorchFunctionMode. It is replaced one class further down than where
    it is documented: `gelu = GeluFunction.apply` in a model file binds `Function.apply` before anything can replace it,
    but that method calls its base class's (2.11-2.13). Contexts may be nested: the inner one is asked first.
    """
    base = torch.autograd.function._SingleLevelFunction
    outer = base.__dict__.get("apply")
    original = outer or torch._C._FunctionBase.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return handle(cls, original.__get__(None, cls), args, kwargs)

    base.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if outer is None:
            del base.apply  # type: ignore[attr-defined]
        else:
            base.apply = outer  # type: ignore[attr-defined]


@contextlib.contextmanager
def without_mode(mode: TorchFunctionMode) -> Iterator[None]:
    """Take a mode off the stack of modes, wherever in it it is; the others stay active.

    `torch._C.DisableTorchFunction` disables all of them, `torch.set_default_device`'s too. The stack has no public
    interface (2.11-2.13).
    """
    above = []
    while (top := _pop_mode()) is not mode:
        above.append(top)
    for other in reversed(above):
        _push_mode(other)
    try:
        yield
    finally:
        for _ in above:
            _pop_mode()
        _push_mode(mode)
        for other in reversed(above):
            _push_mode(other)


def is_compiled(module: nn.Module) -> bool:
    """Whether this is what `torch.compile(module)` returned, or `module.compile()` was called (2.11-2.13)."""
    return "_orig_mod" in module._modules or module.__dict__.get("_compiled_call_impl") is not None


def is_fake(x: object) -> bool:
    """Whether this is a tensor without data, as a dry run has them. Collectives return one of the right shape for it:
    the c10d operations have no fake kernels for a real process group (2.13)."""
    return isinstance(x, FakeTensor)


def as_subclass(x: Tensor, kind: type[T]) -> T:
    """`x.as_subclass(kind)`, for fake tensors too: these are a subclass of Tensor already, and a view of one can become
    an object of both (2.11-2.13)."""
    if not is_fake(x):
        return x.as_subclass(kind)
    view: Any = x.view_as(x)
    view.__class__ = _fake_kind(kind)
    found: T = view
    return found


@functools.cache
def _fake_kind(kind: type[Tensor]) -> type[Tensor]:
    return type(f"Fake{kind.__name__}", (kind, FakeTensor), {})


def storage_id(x: Tensor) -> int:
    """The same for tensors that share memory. Storages of fake tensors have no address to compare (2.13), and sparse
    tensors have no storage."""
    return int(x.untyped_storage()._cdata) if x.layout == torch.strided else id(x)


def functorch_is_active() -> bool:
    """Whether this is inside torch.func's grad, vmap, jvp, ...; no public name (2.13)."""
    return bool(torch._C._are_functorch_transforms_active())


def checkpoint_region() -> object | None:
    """The innermost activation-checkpointing region (use_reentrant=False) whose forward runs now, as an object that is
    the same for all of it. Such a region is known by its saved-tensor hooks (2.11-2.13)."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks[0] if hooks and hooks[0].__module__ == "torch.utils.checkpoint" else None
