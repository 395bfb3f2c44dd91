"""What a rank holds, counted by its memory: storages once, however many tensors lie in them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_megatp.module import ParallelModule
from lightning_megatp.planner.rehearsal import skeleton, without_values
from lightning_megatp.planner.sizes import Bytes
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import DisableTorchFunctionSubclass, storage_id, tree_leaves


class MemoryAccount:
    """What a run has to remember for its report: the model without values, a microbatch without values, and the bytes
    that are saved for backward.

    Args:
        module: before its layers are swapped.
    """

    def __init__(self, module: Any) -> None:
        self.module = skeleton(module)
        self.microbatch: Any = None
        """The last one."""
        self.now = 0
        self.peak = 0
        """The peak of the last batch."""
        self._held: set[int] = set()
        self._users: dict[int, int] = {}

    def watching(self, step: Callable[..., Any], parallel: ParallelModule) -> Callable[..., Any]:
        """A user's step on a batch, or a microbatch of it, whose saved tensors are counted as long as they live."""

        def run(batch: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or any(map(is_fake, tree_leaves(batch))):
                return step(batch, *args, **kwargs)  # of which no backward comes; a dry run
            self.microbatch = without_values(batch)
            if not self._users:
                self.peak = 0
            with parallel.context.running(user_code=False):
                own = [*parallel.module.parameters(), *parallel.module.buffers(), *_plain(tree_leaves(batch))]
                self._held = {storage_id(x) for x in [*own, *(p.whole for p in parallel.divided.values())]}
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor):
                return step(batch, *args, **kwargs)

        return run

    def _pack(self, x: Tensor) -> _Held:
        held = _Held(x)
        with DisableTorchFunctionSubclass():
            storage, nbytes = storage_id(x), x.untyped_storage().nbytes() if x.layout == torch.strided else x.nbytes
        if storage not in self._held and not is_fake(x):
            self._users[storage] = self._users.get(storage, 0) + 1
            if self._users[storage] == 1:
                self.now += nbytes
                self.peak = max(self.peak, self.now)
            weakref.finalize(held, self._free, storage, nbytes)
        return held

    def _free(self, storage: int, nbytes: int) -> None:
        self._users[storage] -= 1
        if self._users[storage] == 0:
            del self._users[storage]
            self.now -= nbytes


class _Held:
    """A saved tensor, as long as the graph needs it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def measure(parallel: ParallelModule, optimizers: Iterable[Optimizer], account: MemoryAccount | None) -> Bytes:
    """What this rank holds now; gradients are there from a backward until the next one begins."""
    held = [x for _, x in parallel.named_held() if x.untyped_storage().nbytes()]
    states = [x for o in optimizers for state in o.state.values() for x in tree_leaves(state) if isinstance(x, Tensor)]
    return Bytes(
        parameters=_nbytes(held),
        gathered=_nbytes({divided.whole for divided in parallel.divided.values()}),
        gradients=_nbytes(x.grad for x in held if x.grad is not None),
        optimizer=_nbytes(states),
        activations=None if account is None or account.microbatch is None else account.peak,
    )


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum({storage_id(x): x.untyped_storage().nbytes() for x in tensors}.values())


def _plain(leaves: Iterable[Any]) -> list[Tensor]:
    return [x for x in leaves if isinstance(x, Tensor) and x.layout == torch.strided]
