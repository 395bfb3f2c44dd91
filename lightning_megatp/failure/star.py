"""The star of the failure watch: rank 0 hears of every rank's end, decides on the first cause and tells all others."""

from __future__ import annotations

import contextlib
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from lightning_megatp.failure.cause import Evidence, Kind, first_cause
from lightning_megatp.failure.link import Link, listen

_GOODBYE_S = 5.0  # a bound only: the threads take no time to say goodbye


@dataclass
class _Member:
    link: Link
    rank: int
    who: str
    host: str
    pid: int


@dataclass(frozen=True)
class _Told:
    to: Sequence[int]
    note: Any


class Hub(threading.Thread):
    """Rank 0's side: hears of every rank's end, decides on the first cause, and tells all.

    It lives until its own rank has stopped and all the others have left, so that ranks still training stay watched.

    Args:
        token: What a rank must say to be taken for one.
        settle_s: How long to wait, after the first evidence, for evidence that explains it.
        on_verdict: Called with the cause, and whether it needs to be said at all: not when every rank raised the same.
            The others hear of it afterwards, so it must not wait for long.
        describe_exit: Says how the process of a pid on this machine ended, None where that is not known.
        on_ask: Called when another rank was asked to stop in order.
        on_told: Called with what another rank told rank 0.
    """

    def __init__(
        self,
        world_size: int,
        token: str,
        settle_s: float,
        on_verdict: Callable[[Evidence, bool], None],
        describe_exit: Callable[[int], str | None],
        on_ask: Callable[[], None],
        on_told: Callable[[Any], None],
    ) -> None:
        super().__init__(name="megatp-failure-hub", daemon=True)
        self._world_size = world_size
        self._token = token
        self._settle_s = settle_s
        self._on_verdict = on_verdict
        self._describe_exit = describe_exit
        self._on_ask = on_ask
        self._on_told = on_told
        self._server, self.hosts = listen(backlog=world_size)
        self.port: int = self._server.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        self._inbox: queue.SimpleQueue[Evidence | _Told | None] = queue.SimpleQueue()
        self._said_goodbye = threading.Event()
        self._strangers: dict[socket.socket, Link] = {}
        self._members: dict[socket.socket, _Member] = {}
        self._evidence: dict[int, Evidence] = {}
        self._left: set[int] = set()
        self._deadline: float | None = None
        self._verdict: Evidence | None = None

    def report(self, evidence: Evidence) -> None:
        """Hand over rank 0's own end."""
        self._put(evidence)

    def tell(self, ranks: Sequence[int], note: Any) -> None:
        """Send something to other ranks."""
        self._put(_Told(ranks, note))

    def leave(self) -> None:
        """Say goodbye to all, after a verdict where one is pending; others that still train stay watched."""
        self._put(None)
        self._said_goodbye.wait(_GOODBYE_S)
        if len(self._left) == self._world_size:
            self.join(_GOODBYE_S)

    def close_after_fork(self) -> None:
        """Drop the descriptors that a forked child inherited, or a dead rank would seem alive as long as its child."""
        for sock in (self._server, self._wake_in, self._wake_out, *self._strangers, *self._members):
            sock.close()
        self._selector.close()

    def run(self) -> None:
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        while len(self._left) < self._world_size:
            timeout = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            for key, _ in self._selector.select(timeout):
                self._on_ready(key.fileobj)
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._decide()
        for sock in (self._server, self._wake_in, self._wake_out, *self._strangers):
            sock.close()
        self._selector.close()

    def _put(self, item: Evidence | _Told | None) -> None:
        self._inbox.put(item)
        with contextlib.suppress(OSError):  # closed: all ranks have left
            self._wake_in.send(b"!")

    def _on_ready(self, sock: Any) -> None:
        if sock is self._server:
            self._accept()
        elif sock is self._wake_out:
            self._wake_out.recv(64)
            self._read_inbox()
        elif sock in self._strangers:
            self._greet(sock)
        else:
            self._read(self._members[sock])

    def _accept(self) -> None:
        try:
            sock, _ = self._server.accept()
        except OSError:  # it went away again
            return
        sock.settimeout(None)
        self._strangers[sock] = Link(sock)
        self._selector.register(sock, selectors.EVENT_READ)

    def _greet(self, sock: socket.socket) -> None:
        link = self._strangers.pop(sock)
        messages = link.receive()
        if messages == []:  # half a line
            self._strangers[sock] = link
        elif messages is None or messages[0].get("hello") != self._token:
            self._drop(link)
        else:
            hello = messages[0]
            self._members[sock] = _Member(link, hello["rank"], hello["who"], hello["host"], hello["pid"])
            link.send(welcome=self._token)
            if self._verdict is not None:
                link.send(verdict=asdict(self._verdict))

    def _read_inbox(self) -> None:
        while not self._inbox.empty():
            item = self._inbox.get()
            if isinstance(item, _Told):
                self._hand_on(item)
                continue
            if item is not None:
                self._hear(item)
                continue
            self._left.add(0)
            if self._deadline is not None:
                self._decide()  # this process may end now: nobody would hear of it later
            for member in self._members.values():
                member.link.send(bye=True)
            self._said_goodbye.set()

    def _read(self, member: _Member) -> None:
        messages = member.link.receive()
        for message in messages or []:
            if "evidence" in message:
                self._hear(_evidence_from(message["evidence"]))
            if "stop" in message:
                self._on_ask()
            if "tell" in message:
                self._hand_on(_Told(**message["tell"]))
            if "bye" in message:
                self._left.add(member.rank)
        if messages is None or member.rank in self._left:
            del self._members[member.link.sock]
            self._drop(member.link)
            if member.rank not in self._left:
                unexplained = member.rank not in self._evidence and self._verdict is None
                local = member.host == socket.gethostname()
                how = self._describe_exit(member.pid) if unexplained and local else None
                self._hear(Evidence(member.rank, member.who, Kind.DEATH, how or ""))

    def _hand_on(self, told: _Told) -> None:
        if 0 in told.to:
            self._on_told(told.note)
        for member in self._members.values():
            if member.rank in told.to:
                member.link.send(told=told.note)

    def _drop(self, link: Link) -> None:
        self._selector.unregister(link.sock)
        link.close()

    def _hear(self, evidence: Evidence) -> None:
        if evidence.kind is Kind.DEATH:
            if evidence.rank in self._left:  # it said goodbye before, or its connection has told us
                return
            self._left.add(evidence.rank)
        if self._verdict is not None:
            return
        self._evidence.setdefault(evidence.rank, evidence)
        if self._deadline is None:
            self._deadline = time.monotonic() + self._settle_s
        if len(self._evidence.keys() | self._left) == self._world_size:
            self._deadline = time.monotonic()  # there is nobody left to wait for

    def _decide(self) -> None:
        self._deadline = None
        evidence = list(self._evidence.values())
        everywhere = len(evidence) == self._world_size and len({(e.kind, e.error) for e in evidence}) == 1
        self._verdict = replace(first_cause(evidence), everywhere=everywhere)
        self._on_verdict(self._verdict, not everywhere)  # said before any rank's traceback
        for member in self._members.values():
            member.link.send(verdict=asdict(self._verdict))


class Spoke(threading.Thread):
    """Another rank's side: waits for rank 0's verdict, or for its end.

    Args:
        link: The connection to rank 0.
        hub_who: Who rank 0 is, for people.
        on_verdict: Called with the cause, and whether this rank must say it since rank 0 can't.
        on_release: Called when rank 0 has left in order and nobody watches any more.
        on_told: Called with what another rank told this one.
    """

    def __init__(
        self,
        link: Link,
        hub_who: str,
        on_verdict: Callable[[Evidence, bool], None],
        on_release: Callable[[], None],
        on_told: Callable[[Any], None],
    ) -> None:
        super().__init__(name="megatp-failure-watch", daemon=True)
        self._link = link
        self._hub_who = hub_who
        self._on_verdict = on_verdict
        self._on_release = on_release
        self._on_told = on_told
        self._left = False

    def report(self, evidence: Evidence) -> None:
        """Send this rank's end to rank 0."""
        self._link.send(evidence=asdict(evidence))

    def tell(self, ranks: Sequence[int], note: Any) -> None:
        """Send something to other ranks, by way of rank 0."""
        self._link.send(tell=asdict(_Told(ranks, note)))

    def ask_to_stop(self) -> None:
        """Tell rank 0 that this rank was asked to stop in order."""
        self._link.send(stop=True)

    def leave(self) -> None:
        """Say goodbye to rank 0 and close the connection."""
        self._left = True
        self._link.send(bye=True)
        self._link.close()
        self.join(_GOODBYE_S)

    def close_after_fork(self) -> None:
        """See `Hub.close_after_fork`."""
        self._link.sock.close()

    def run(self) -> None:
        hub_left = False
        while (messages := self._link.receive()) is not None:
            for message in messages:
                hub_left = hub_left or "bye" in message
                if "told" in message:
                    self._on_told(message["told"])
                if "verdict" in message:
                    self._on_verdict(_evidence_from(message["verdict"]), False)
                    return
        if hub_left or self._left:
            self._on_release()
        else:
            self._on_verdict(Evidence(0, self._hub_who, Kind.DEATH), True)


def _evidence_from(fields: dict[str, Any]) -> Evidence:
    return Evidence(**{**fields, "kind": Kind(fields["kind"])})
