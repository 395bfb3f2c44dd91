"""Hooks that do something on rank 0 only: a forward there, or a checkpoint, would wait for the other ranks of a copy
forever."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store

from lightning_megatp.detour import Detour
from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.tensor.context import TensorContext
from lightning_megatp.user_hooks import HOOKS, is_for_rank_zero, is_users

_LOOK_S = 0.005


class Meetings:
    """Lets ranks meet, in such hooks, before the first call of what each of them has a part of: the tensor ranks of a
    copy, before that of a split layer; with zero > 0 all ranks, before that of a module; with pp > 1 all stages, before
    that of a unit; any of these before a checkpoint is saved, or a number of divided weights logged. A rank that leaves
    the hook without one says so, too.

    Args:
        context: of the split layers.
        mesh: tp or pp > 1, or dp > 1 with zero > 0.
        store: of the default process group.
        divided: whether data-parallel ranks hold rows of what one of them computes with (zero > 0).

    Communication: one message to the store at the end of each call of such a hook; in a call with a forward one, and
    questions for the other ranks until these have come.
    """

    def __init__(self, context: TensorContext, mesh: ParallelMesh, store: Store, divided: bool) -> None:
        self._context, self._mesh = context, mesh
        axes = ("pp", "dp", "tp") if divided else ("pp", "tp")
        self._ranks = next(ranks for ranks in mesh.shape.groups(*axes) if mesh.global_rank in ranks)
        # Every rank counts its own runs, so that the n-th of one meets the n-th of the others on one store.
        run = PrefixStore("megatp_meetings", store).add(f"runs/{mesh.global_rank}", 1)
        self._store = PrefixStore(f"megatp_meetings/{run}", store)
        self._calls: Counter[str] = Counter()

    def around_hooks(self, trainer: Any) -> Iterator[Detour]:
        """Detours around the hooks of the module and callbacks that do something on rank 0 only.

        Args:
            trainer: about to run.
        """
        for index, owner in enumerate((trainer.lightning_module, *trainer.callbacks)):
            for hook in HOOKS:
                if is_users(owner, hook) and is_for_rank_zero(owner, hook):
                    yield Detour(owner, hook, functools.partial(self._run, trainer, hook, f"{index}.{hook}"))

    def _run(self, trainer: Any, hook: str, name: str, call: Callable[[], Any]) -> Any:
        self._calls[name] += 1
        number = self._calls[name]
        # Everybody has come further by now: batches lie between two calls of a hook, which no rank begins alone.
        self._store.delete_key(f"{name}.{number - 2}/{self._mesh.global_rank}")
        context = self._context
        before = context.meeting
        context.meeting = _Meeting(context, self._mesh, self._ranks, self._store, hook, f"{name}.{number}")
        saving = Detour(trainer, "save_checkpoint", self._save)
        try:
            result = call()
            if context.meeting is not None:  # an exception has its own way to the others
                context.meeting.leave()
            return result
        finally:
            saving.end()
            context.meeting = before

    def _save(self, call: Callable[[], Any]) -> Any:
        self._context.meet("trainer.save_checkpoint")
        return call()


class _Meeting:
    """The meeting of ranks in one call of a hook."""

    def __init__(
        self, context: TensorContext, mesh: ParallelMesh, ranks: Sequence[int], store: Store, hook: str, place: str
    ) -> None:
        self._context, self._mesh, self._ranks, self._store = context, mesh, ranks, store
        self._hook, self._place = hook, place

    def wait(self, name: str) -> None:
        self.answer()
        limit = time.monotonic() + (self._mesh.timeout or timedelta(minutes=30)).total_seconds()
        for rank in self._ranks:
            key = f"{self._place}/{rank}"
            while not self._store.check([key]):
                if time.monotonic() > limit:
                    raise RuntimeError(self._why(name, rank, "did not come to it in time"))
                time.sleep(_LOOK_S)
            if self._store.get(key) == b"left":
                raise RuntimeError(self._why(name, rank, "left that hook without a call"))

    def answer(self) -> None:
        self._context.meeting = None
        self._say("calls")

    def leave(self) -> None:
        """Without a call."""
        self._say("left")

    def _why(self, name: str, rank: int, what: str) -> str:
        return (
            f"MegaTPStrategy: `{self._hook}` calls `{name}` on {self._mesh.describe()}, and"
            f" {self._mesh.describe(rank)}, which holds another part of the model, {what}"
            " (`if trainer.is_global_zero:`, `@rank_zero_only`). Call it on all ranks, and let rank 0 alone print,"
            " log or write what comes out."
        )

    def _say(self, what: str) -> None:
        self._store.set(f"{self._place}/{self._mesh.global_rank}", what)
