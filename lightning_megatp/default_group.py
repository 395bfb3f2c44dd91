"""What the user's code sends by torch.distributed itself, in a step, goes between copies of the model.

A step written for DDP gathers embeddings, or sums statistics, over all ranks. Those of tp and pp hold the same samples:
gathered from them, every sample would come several times. So where such code names no group it gets the dp axis's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from lightning_megatp.origins import THIS_PACKAGE, package_of_frame
from lightning_megatp.snapshots.snapshot import places_of

_NAMES = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single",
    "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast",
    "broadcast_object_list", "gather", "gather_into_tensor", "gather_object", "gather_single", "get_rank",
    "get_world_size", "irecv", "isend", "monitored_barrier", "P2POp", "recv", "recv_object_list", "reduce",
    "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
    "send_object_list",
)  # fmt: skip
_PEERS = ("src", "dst", "peer")
_FROM_FIRST = {
    "broadcast_object_list": "src", "gather": "dst", "gather_into_tensor": "dst", "gather_object": "dst",
    "gather_single": "dst", "scatter": "src", "scatter_object_list": "src",
}  # fmt: skip
"""Where a peer that is not given is the group's first rank; torch would take the first of all."""

_WITHOUT = frozenset({"torch", THIS_PACKAGE, "numpy", "sympy", "mpmath"})
"""Packages whose modules are not searched for such functions: most of all names that a program has are theirs."""


class DefaultGroup:
    """Another default group for the functions of torch.distributed. (To replace torch's own for a while would not do:
    ranks in other groups are told by it, and threads that save in the background use those.)

    Args:
        group: of the ranks that see other samples.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        found = {name: getattr(dist, name) for name in _NAMES if hasattr(dist, name)}
        self._functions = {name: (function, self._with_default(name, function)) for name, function in found.items()}
        self._originals = {replaced: function for function, replaced in self._functions.values()}
        self._places = [(vars(dist), name, *both) for name, both in self._functions.items()]
        self._places += [(names, name, *self._functions[of]) for names, name, of in _imported(found)]
        self._kept: list[tuple[Any, Any, Any, Any]] = []

    def stand_on(self, owner: nn.Module) -> None:
        """Stand for the functions that a module or something on it keeps, too, by themselves or as partials: a layer
        that is made when the processes are there may have `self.sum = torch.distributed.all_reduce`."""
        known = {id(function): replaced for function, replaced in self._functions.values()}

        def standing(x: Any) -> Any:
            if not isinstance(x, functools.partial):
                return known.get(id(x))
            return functools.partial(known[id(x.func)], *x.args, **x.keywords) if id(x.func) in known else None

        places = places_of(owner.modules(), lambda x: standing(x) is not None)
        self._kept = [(holder, key, holder[key], standing(holder[key])) for holder, key in places]

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Around the user's code. This package names its groups. Python forgets what it had learned of the modules
        whose names change, so a pipeline does this once for a batch."""
        if dist.get_rank is self._functions["get_rank"][1]:  # a step within its batch, a backward within a step
            yield
            return
        for names, name, _, replaced in (*self._places, *self._kept):
            names[name] = replaced
        try:
            yield
        finally:
            for names, name, function, _ in (*self._places, *self._kept):
                names[name] = function

    def _with_default(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        peers = {peer: signature.parameters[peer].default for peer in _PEERS if peer in signature.parameters}

        @functools.wraps(function, updated=())
        def replaced(*args: Any, **kwargs: Any) -> Any:
            if package_of_frame(sys._getframe(1)) == THIS_PACKAGE:
                return function(*args, **kwargs)
            given = signature.bind(*args, **kwargs)
            if given.arguments.get("group") not in (None, dist.group.WORLD):
                return function(*args, **kwargs)
            given.arguments["group"] = self._group
            for peer, default in peers.items():
                rank = given.arguments.get(peer, default)
                if rank is None and _FROM_FIRST.get(name) == peer and given.arguments.get(f"group_{peer}") is None:
                    rank = 0
                if rank is not None:
                    given.arguments[peer] = dist.get_global_rank(self._group, rank)
            if name == "P2POp":  # is told what to do by one of torch's own functions
                given.arguments["op"] = self._originals.get(given.arguments["op"], given.arguments["op"])
            found = function(*given.args, **given.kwargs)
            return dist.get_group_rank(self._group, found) if name == "recv" and found >= 0 else found

        return replaced


def _imported(functions: Mapping[str, Callable[..., Any]]) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Where modules of others have these by names of their own (`from torch.distributed import all_gather`)."""
    known = {id(function): name for name, function in functions.items()}
    for path, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if not isinstance(names, dict) or path.partition(".")[0] in _WITHOUT:
            continue
        if not known.keys().isdisjoint(map(id, list(names.values()))):  # few of the thousands of modules have any
            yield from ((names, name, known[id(x)]) for name, x in list(names.items()) if id(x) in known)
