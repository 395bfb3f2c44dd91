"""Private names of torch. Seen in 2.11 and 2.13."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

# torch.utils._pytree is what torch's own containers go through (torch.func, export, FSDP2); the public alternative
# (torch.utils.pytree) does not exist before 2.14. DisableTorchFunctionSubclass is documented in "Extending PyTorch" but
# has no public home.
__all__ = [
    "DisableTorchFunctionSubclass",
    "accumulated_parameter",
    "all_gather_single",
    "current_backward_node",
    "intercept_functions",
    "reduce_scatter_single",
    "tensor_version",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]

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


def current_backward_node() -> object:
    """The autograd node whose backward runs on this thread, None outside of backward. No public name (2.11-2.13)."""
    return torch._C._current_autograd_node()


@contextlib.contextmanager
def intercept_functions(convert: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any]]) -> Iterator[None]:
    """Let `convert(args, kwargs)` replace the arguments of every `torch.autograd.Function.apply`.

    `apply` is a classmethod that consults neither `__torch_function__` nor a TorchFunctionMode (2.11-2.13).
    """
    before = torch.autograd.Function.__dict__["apply"]

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = convert(args, kwargs)
        return before.__get__(None, cls)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = before  # type: ignore[method-assign]
