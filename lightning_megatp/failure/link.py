"""The connections of the failure watch: how the other ranks find rank 0, and one JSON object per line over TCP."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from dataclasses import dataclass
from typing import Any

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_CONNECT_S = 10.0  # per candidate host
_WELCOME_S = 60.0  # rank 0 may hold the GIL (imports, compilation) when we arrive
_MAX_STRANGER_BYTES = 1 << 16


class Link:
    """One TCP connection that carries a JSON object per line."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._rest = b""
        self._unread: list[dict[str, Any]] = []
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A dead process closes its connections; a lost machine doesn't: let the kernel ask, after 10 s and 3 times.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, seconds_or_count in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):  # Linux; elsewhere the system's own times hold
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds_or_count)

    def send(self, **message: Any) -> None:
        """Send a message; a connection that is already broken is found by `receive`."""
        with contextlib.suppress(OSError):
            self.sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Wait for the next messages; None at the end of the connection, or of one that doesn't speak our language."""
        if self._unread:
            messages, self._unread = self._unread, []
            return messages
        try:
            chunk = self.sock.recv(1 << 16)
            if not chunk:
                return None
            *lines, self._rest = (self._rest + chunk).split(b"\n")
            messages = [json.loads(line) for line in lines]
        except (OSError, ValueError):
            return None
        if len(self._rest) > _MAX_STRANGER_BYTES or not all(isinstance(m, dict) for m in messages):
            return None
        return messages

    def receive_first(self) -> dict[str, Any] | None:
        """Wait for one message, and leave those that came with it (a verdict behind the greeting) to `receive`."""
        while (messages := self.receive()) == []:
            pass
        if messages is None:
            return None
        self._unread = messages[1:]
        return messages[0]

    def close(self) -> None:
        """Close; a thread waiting in `receive` gets None."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


@dataclass(frozen=True)
class Address:
    """Where rank 0 listens, as it is published in the store."""

    hosts: tuple[str, ...]
    port: int
    token: str
    who: str

    def connect(self, rank: int, who: str) -> Link:
        """Open this rank's connection to rank 0.

        Raises:
            OSError: No candidate host answered with rank 0's greeting.
        """
        failures = []
        for host in self.hosts:
            try:
                sock = socket.create_connection((host, self.port), timeout=_CONNECT_S)
            except OSError as error:
                failures.append(f"{host}: {error}")
                continue
            link = Link(sock)
            sock.settimeout(_WELCOME_S)
            link.send(hello=self.token, rank=rank, who=who, host=socket.gethostname(), pid=os.getpid())
            if link.receive_first() == {"welcome": self.token}:
                sock.settimeout(None)
                return link
            failures.append(f"{host}: no greeting")
            link.close()
        raise OSError("; ".join(failures))


def listen(backlog: int) -> tuple[socket.socket, tuple[str, ...]]:
    """Open rank 0's listening socket, and name the hosts under which other ranks may reach it, likeliest first."""
    master = os.environ.get("MASTER_ADDR", "localhost")
    if master in _LOOPBACK:
        return socket.create_server(("127.0.0.1", 0), backlog=backlog), ("127.0.0.1",)
    hosts = []
    with contextlib.suppress(OSError):
        family, *_, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: only asks which of our interfaces faces the master
            hosts.append(probe.getsockname()[0])
    hosts += [master, socket.gethostname()]
    if socket.has_dualstack_ipv6():
        server = socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    else:
        server = socket.create_server(("", 0), backlog=backlog)
    return server, tuple(dict.fromkeys(hosts))
