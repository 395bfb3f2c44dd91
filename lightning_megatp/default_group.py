"""What the user's code sends by torch.distributed itself, in a step, goes between copies of the model.

A step written for DDP gathers embeddings, or sums statistics, over all ranks. Those of tp and pp hold the same samples:
gathered from them, every sample would come several times. So where such code names no group it gets the dp axis's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

_NAMES = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast",
    "broadcast_object_list", "gather", "gather_object", "get_rank", "get_world_size", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list",
)  # fmt: skip
_ROOTS = ("src", "dst")
_PACKAGE = os.path.join(Path(__file__).parent, "")


class DefaultGroup:
    """Another default group for the functions of torch.distributed. (To replace torch's own for a while would not do:
    ranks in other groups are told by it, and threads that save in the background use those.)

    Args:
        group: of the ranks that see other samples.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        found = {name: getattr(dist, name) for name in _NAMES if hasattr(dist, name)}
        self._functions = {name: (function, self._with_default(function)) for name, function in found.items()}

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Around the user's code. This package names its groups."""
        if dist.get_rank is self._functions["get_rank"][1]:  # a backward within a step
            yield
            return
        for name, (_, replaced) in self._functions.items():
            setattr(dist, name, replaced)
        try:
            yield
        finally:
            for name, (function, _) in self._functions.items():
                setattr(dist, name, function)

    def _with_default(self, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        roots = {name: signature.parameters[name].default for name in _ROOTS if name in signature.parameters}

        @functools.wraps(function)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if sys._getframe(1).f_code.co_filename.startswith(_PACKAGE):
                return function(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            if given.arguments.get("group") not in (None, dist.group.WORLD):
                return function(*args, **kwargs)
            given.arguments["group"] = self._group
            for root, default in roots.items():
                rank = given.arguments.get(root, default)
                if rank is not None:
                    given.arguments[root] = dist.get_global_rank(self._group, rank)
            return function(*given.args, **given.kwargs)

        return replaced
