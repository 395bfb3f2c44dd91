"""FailureWatch: what a rank starts, reports its exception to, and stops."""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from torch.distributed import PrefixStore, Store

from lightning_megatp.failure.cause import Evidence, Kind, evidence_of
from lightning_megatp.failure.ending import end_process, say
from lightning_megatp.failure.link import Address
from lightning_megatp.failure.screen import print_nothing, print_shortened
from lightning_megatp.failure.star import Hub, Spoke


class FailureWatch:
    """Ends all ranks when one raises or dies, and names the first cause.

    Every rank keeps one TCP connection to rank 0. The kernel closes it when a process dies, so there are no heartbeats
    that a long compilation could miss. Rank 0 collects what the ranks report, decides which came first, prints it and
    tells all ranks. A rank that raises too by then (its collectives fail) unwinds as usual and finds the cause as a
    note under its exception; one that stays blocked is ended with status 1.

    One instance watches one run: make a new one, on the same store, for the next.

    Args:
        rank: This process's global rank.
        world_size: The number of ranks.
        store: The c10d store all ranks share.
        name: Who this rank is, for people: `rank 2 (tp 0, dp 1)`.
        grace_s: How long a rank may go on after the verdict before it is ended, unless it raises itself.
        settle_s: How long rank 0 waits, after the first evidence, for evidence that explains it.
        unwind_s: How long a rank that raised may take, after the verdict, until `stop`.
        describe_exit: On rank 0: says how the process of a pid on this machine ended, None where that is not known.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        name: str | None = None,
        grace_s: float = 5.0,
        *,
        settle_s: float = 1.5,
        unwind_s: float = 20.0,
        describe_exit: Callable[[int], str | None] = lambda pid: None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._pid = os.getpid()
        self._who = f"{name or f'rank {rank}'} [{socket.gethostname()}, pid {self._pid}]"
        # rank 0 is the launcher, or what people see: the last to end
        self._grace_s = grace_s + 1.0 if rank == 0 else grace_s
        self._settle_s = settle_s
        self._unwind_s = unwind_s
        self._describe_exit = describe_exit
        self.on_ask: Callable[[], None] = lambda: None
        """On rank 0: called when another rank has asked for an orderly stop."""
        self.on_told: Callable[[Any], str | None] = lambda note: None
        """Called with what another rank told this one, in a thread of its own; returns the error that it means here."""
        self._end: Hub | Spoke | None = None
        self._verdict: Evidence | None = None
        self._interrupted = False
        self._decided = threading.Event()
        self._unwinding = threading.Event()
        self._stopped = threading.Event()
        self._lock = threading.Lock()

    @property
    def active(self) -> bool:
        """Whether it watches: started, and not stopped."""
        return self._end is not None and not self._stopped.is_set()

    def start(self) -> None:
        """Connect to rank 0; returns once this rank is watched.

        Raises:
            RuntimeError: This instance was started before, or rank 0 can't be reached.
        """
        if self._end is not None or self._stopped.is_set():
            raise RuntimeError("FailureWatch: an instance can be started once. Make a new one for the next run.")
        if self.world_size == 1:
            return
        store = PrefixStore("megatp_failure_watch", self._store)
        # Every rank counts its own watches, so that the n-th of one meets the n-th of the others on one store.
        key = f"address/{store.add(f'starts/{self.rank}', 1)}"
        if self.rank == 0:
            self._end = self._open(store, key)
        else:
            self._end = self._join(store, key)
        _close_in_forked_children(self._end)
        self._end.start()

    def report(self, exc: BaseException) -> str | None:
        """Report the exception that ends this rank; from here on it unwinds, and gets `unwind_s` for that.

        Waits some seconds for the verdict. Where the first cause is another rank's, adds it to `exc` as a note, so that
        the last line of the traceback names it. An error of this package that all ranks have is printed by rank 0 only.

        Returns:
            The verdict in one line, or None where there is none (yet).
        """
        if not self.active or self._end is None or os.getpid() != self._pid:
            return None
        evidence = evidence_of(exc, self.rank, self._who)
        self._interrupted = evidence.kind is Kind.INTERRUPT
        self._unwinding.set()
        self._end.report(evidence)
        if self._interrupted:  # a person waits, and knows the cause
            return None
        self._decided.wait(self._settle_s + 3.0)
        cause = self._verdict
        if cause is None:
            return None
        if cause.rank != self.rank and cause.error != evidence.error:
            exc.add_note(cause.sentence())
        self._choose_printing(exc, evidence, cause)
        return cause.sentence()

    def _choose_printing(self, exc: BaseException, evidence: Evidence, cause: Evidence) -> None:
        if cause.everywhere and cause.is_ours and self.rank != 0:
            print_nothing(exc)
        elif cause.everywhere and cause.is_ours:
            print_shortened(exc, "All ranks raised this:")
        elif evidence.is_ours or (evidence.kind is Kind.BYSTANDER and cause.kind is Kind.EXCEPTION):
            print_shortened(exc, "Without the frames of Lightning, torch and MegaTPStrategy:")

    def ask_to_stop(self) -> None:
        """Tell rank 0 that this rank was asked to stop in order; it is no failure. Waits for nobody."""
        if self.active and isinstance(self._end, Spoke):
            self._end.ask_to_stop()

    def tell(self, ranks: Sequence[int], note: Any) -> None:
        """Tell other ranks something, of JSON's kinds, that they hear whatever they wait for. Waits for nobody."""
        if self.active and self._end is not None:
            self._end.tell([rank for rank in ranks if rank != self.rank], note)

    def _hear(self, note: Any) -> None:
        error = self.on_told(note)
        if error is not None and self.active and self._end is not None:
            self._end.report(Evidence(self.rank, self._who, Kind.EXCEPTION, error))

    def report_death(self, rank: int, pid: int, how: str) -> None:
        """Report the end of a rank that this process launched, and that may have failed before it could connect."""
        if self.active and self._end is not None:
            who = f"rank {rank} [{socket.gethostname()}, pid {pid}]"
            self._end.report(Evidence(rank, who, Kind.DEATH, how))

    def stop(self) -> None:
        """Leave in order; after this the watch never ends this process. May be called again, and before `start`."""
        with self._lock:
            if self._stopped.is_set() or os.getpid() != self._pid:
                return
            self._stopped.set()
            self._unwinding.set()
        if self._end is not None:
            self._end.leave()

    def _open(self, store: Store, key: str) -> Hub:
        token = secrets.token_hex(16)
        hub = Hub(
            self.world_size,
            token,
            self._settle_s,
            self._conclude,
            self._describe_exit,
            on_ask=lambda: self.on_ask(),
            on_told=self._hear,
        )
        store.set(key, json.dumps(asdict(Address(hub.hosts, hub.port, token, self._who))))
        return hub

    def _join(self, store: Store, key: str) -> Spoke:
        address = Address(**json.loads(store.get(key)))
        try:
            link = address.connect(self.rank, self._who)
        except OSError as error:
            raise RuntimeError(
                f"MegaTPStrategy: {self._who} can't reach rank 0 at TCP port {address.port} ({error})."
                " Rank 0 has ended, or TCP connections between the machines must be allowed."
            ) from error
        return Spoke(link, address.who, self._conclude, self._decided.set, self._hear)

    def _conclude(self, cause: Evidence, announce: bool) -> None:
        self._verdict = cause
        threading.Thread(target=self._enforce, args=(cause,), name="megatp-failure-enforcer", daemon=True).start()
        if announce and not (cause.kind is Kind.INTERRUPT and self._interrupted):
            say(cause.sentence())
        self._decided.set()

    def _enforce(self, cause: Evidence) -> None:
        limit = time.monotonic() + self._unwind_s
        if self._unwinding.wait(self._grace_s):
            self._stopped.wait(max(0.0, limit - time.monotonic()))
        with self._lock:  # so that a `stop` that has returned is final
            if not self._stopped.is_set():
                quiet = cause.kind is Kind.INTERRUPT
                end_process(None if quiet else f"{cause.sentence()} Ending {self._who}.")


def _close_in_forked_children(end: Hub | Spoke) -> None:
    """A forked child (a worker of a DataLoader) must not keep its parent's connection open after the parent's death."""
    reference = weakref.ref(end)

    def close() -> None:
        if (target := reference()) is not None:
            target.close_after_fork()

    os.register_at_fork(after_in_child=close)
