"""Saving after an exception, for which ranks that hold parts of a model need each other."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

from torch.distributed import Store

from lightning_megatp.failure.cause import is_communication_error
from lightning_megatp.shim.collectives import collectives_begun

_TOGETHER = "together"
_POLL_S = 0.05
_PATIENCE_S = 10.0


class AfterException:
    """Finds out, without a collective, whether all ranks have raised, and at the same point.

    A rank that raises alone has left its peers in a collective: another one of its own would hang, or meet theirs. So
    the ranks leave notes in the store, and the last to come, or the first whose patience ends, decides for all.

    Args:
        store: that all ranks share; the keys of one run, of which there is a new one every time.
        rank: of this process.
        world_size: how many ranks have to come.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._decision: str | None = None

    @property
    def together(self) -> bool:
        """Whether all ranks have agreed to save."""
        return self._decision == _TOGETHER

    def agree(self, exception: BaseException, step: int, groups: Mapping[str, Any]) -> str:
        """Decide whether collectives are possible, once per run.

        Args:
            exception: of this rank.
            step: how many optimizer steps were made.
            groups: the process groups that saving communicates in, each by a name that its ranks share.

        Returns:
            Why they are not; empty if they are.
        """
        if self._decision is None:
            try:
                self._decision = self._decide(exception, step, groups)
            except RuntimeError as error:  # the store is gone, and rank 0 with it
                self._decision = f"rank 0 can't be reached ({error})"
        return "" if self.together else self._decision

    def _decide(self, exception: BaseException, step: int, groups: Mapping[str, Any]) -> str:
        if is_communication_error(exception):
            return self._settle(f"rank {self._rank} has lost a peer")
        begun = {name: collectives_begun(group) for name, group in groups.items()}
        self._store.set(f"note/{self._rank}", json.dumps({"step": step, "begun": begun}))
        if self._store.add("arrived", 1) == self._world_size:
            notes = [json.loads(self._store.get(f"note/{rank}")) for rank in range(self._world_size)]
            return self._settle(_difference(notes))
        limit = time.monotonic() + _PATIENCE_S
        while time.monotonic() < limit:
            if self._store.check(["decision"]):
                return self._store.get("decision").decode()
            time.sleep(_POLL_S)
        return self._settle(f"not all ranks have raised within {_PATIENCE_S:.0f} s")

    def _settle(self, decision: str) -> str:
        """Decide for all ranks, unless one has before."""
        found: bytes = self._store.compare_set("decision", "", decision)
        return found.decode()


def _difference(notes: list[dict[str, Any]]) -> str:
    steps = {note["step"] for note in notes}
    if len(steps) > 1:
        return f"the ranks stopped after different numbers of optimizer steps ({', '.join(map(str, sorted(steps)))})"
    begun: dict[str, set[int]] = {}
    for note in notes:
        for name, count in note["begun"].items():
            begun.setdefault(name, set()).add(count)
    if any(len(counts) > 1 for counts in begun.values()):
        return "the ranks stopped at different points of a step"
    return _TOGETHER
