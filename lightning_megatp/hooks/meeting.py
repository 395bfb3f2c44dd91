"""Hooks that do something on rank 0 only: a forward there would wait for the other tensor ranks forever."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store

from lightning_megatp.hooks.users import HOOKS, is_for_rank_zero, is_users
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.pipeline.detour import Detour
from lightning_megatp.tensor.context import TensorContext

_LOOK_S = 0.005


class Meetings:
    """Lets the tensor ranks of a copy meet, in such hooks, before the first call of a split layer; with zero > 0 all
    ranks, before that of a module. A rank that leaves the hook without one says so, too.

    Args:
        context: of the split layers.
        mesh: tp > 1, or dp > 1 with zero > 0.
        store: of the default process group.
        divided: whether data-parallel ranks hold rows of what one of them computes with (zero > 0).

    Communication: one message to the store at the end of each call of such a hook; in a call with a forward one, and
    questions for the other ranks until these have come.
    """

    def __init__(self, context: TensorContext, mesh: ParallelMesh, store: Store, divided: bool = False) -> None:
        self._context, self._mesh = context, mesh
        self._ranks = mesh.ranks("dp", "tp") if divided else mesh.ranks("tp")
        # Every rank counts its own runs, so that the n-th of one meets the n-th of the others on one store.
        run = PrefixStore("megatp_meetings", store).add(f"runs/{mesh.global_rank}", 1)
        self._store = PrefixStore(f"megatp_meetings/{run}", store)
        self._calls: Counter[str] = Counter()

    def around_hooks(self, trainer: Any) -> Iterator[Detour]:
        """Of the module and callbacks.

        Args:
            trainer: about to run.
        """
        for index, owner in enumerate((trainer.lightning_module, *trainer.callbacks)):
            for hook in HOOKS:
                if is_users(owner, hook) and is_for_rank_zero(owner, hook):
                    yield Detour(owner, hook, functools.partial(self._run, hook, f"{index}.{hook}"))

    def _run(self, hook: str, name: str, call: Callable[[], Any]) -> Any:
        self._calls[name] += 1
        number = self._calls[name]
        self._forget(f"{name}.{number - 2}")
        with self._expecting(hook, f"{name}.{number}"):
            return call()

    @contextlib.contextmanager
    def _expecting(self, hook: str, place: str) -> Iterator[None]:
        context = self._context
        before, context.meet = context.meet, functools.partial(self._meet, hook, place)
        try:
            yield
            if context.meet is not None:  # an exception has its own way to the others
                self._say(place, "left")
        finally:
            context.meet = before

    def _meet(self, hook: str, place: str, label: str) -> None:
        """Wait until the others call something split or divided in this hook.

        Raises:
            RuntimeError: one of them has left the hook, or does not come.
        """
        self._context.meet = None
        self._say(place, "calls")
        limit = time.monotonic() + (self._mesh.timeout or timedelta(minutes=30)).total_seconds()
        for rank in self._ranks:
            key = f"{place}/{rank}"
            while not self._store.check([key]):
                if time.monotonic() > limit:
                    raise RuntimeError(self._why(hook, label, rank, "did not come to it in time"))
                time.sleep(_LOOK_S)
            if self._store.get(key) == b"left":
                raise RuntimeError(self._why(hook, label, rank, "left that hook without a call"))

    def _why(self, hook: str, label: str, rank: int, what: str) -> str:
        return (
            f"MegaTPStrategy: `{hook}` calls `{label}` on {self._mesh.describe()}, and {self._mesh.describe(rank)},"
            f" which holds another part of its weights, {what} (`if trainer.is_global_zero:`,"
            " `@rank_zero_only`). Call the model on all ranks, and let rank 0 alone print, log or write what comes out."
        )

    def _say(self, place: str, what: str) -> None:
        self._store.set(f"{place}/{self._mesh.global_rank}", what)

    def _forget(self, place: str) -> None:
        """Everybody has come further by now: batches lie between two calls of a hook, which no rank begins alone."""
        self._store.delete_key(f"{place}/{self._mesh.global_rank}")
