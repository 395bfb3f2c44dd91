"""Real processes for tests: a pool of gloo ranks per world size, kept for the pytest session.

`run_ranks(2, fn, *args)` runs `fn(rank, world_size, *args)` on two processes and returns the results by rank. `fn` must
be a module-level function of an importable module; arguments and results are pickled. Each call gets a fresh default
process group (a prefix of the pool's store), so one test's groups, keys and half-done collectives never meet the next
test's. The processes are forked from servers that have the imports done (tests/fork_server.py).

Lightning in a rank finds LOCAL_RANK and starts no process: `Trainer(devices=world_size, accelerator="cpu",
strategy=...)` works. A rank runs in a temporary directory of its pool, not in the repository.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import io
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests import devices
from tests.fork_server import LIGHTNING, PACKAGE, Forked, ForkServer, ServerEnded, inherited

COLLECTIVE_TIMEOUT_S = 150
CALL_TIMEOUT_S = 300.0  # a machine may have other things to do, and be slow
GRACE_S = 30.0  # how long the other ranks may go on after one has raised
LOG_TAIL = 6000
MOST_THREADS = 20
"""Of a rank between calls. Some tests leave groups behind (a module that is in a hook of its own parameter is never
freed), each with three threads, of which gloo wakes one a hundred times a second: with hundreds of these a sixth of the
machine is gone. So the pool is renewed."""
NOT_CONNECTED = "Gloo connectFullMesh failed"


@dataclasses.dataclass
class Failure:
    """What one rank raised."""

    rank: int
    type_name: str
    message: str
    traceback: str
    at: float


class RankError(AssertionError):
    """A rank raised, died or did not finish. `failures` holds one entry per failed rank, the first cause first."""

    def __init__(self, headline: str, failures: list[Failure]) -> None:
        self.failures = sorted(failures, key=lambda failure: failure.at)
        super().__init__("\n".join([headline, *(f"--- rank {f.rank}\n{f.traceback}" for f in self.failures)]))


class RankPool:
    """`world_size` processes that wait for calls.

    Args:
        world_size: number of processes.
        distributed: initialise a gloo group for each call and set the environment Lightning reads. Without it the
            process is what a user's plain one-device program is.
        forbidden: no module of this name may be imported in these processes.
        device: a kind of `tests/devices.py`. Other than the CPU it has groups for its tensors alone.
        servers: which fork the processes; without them the pool starts its own.
    """

    def __init__(
        self,
        world_size: int,
        distributed: bool = True,
        forbidden: str = "",
        device: str = "cpu",
        servers: Sequence[ForkServer] = (),
    ) -> None:
        self.world_size = world_size
        self.calls = 0
        self.directory = tempfile.TemporaryDirectory(prefix=f"ranks{world_size}_")
        port = free_port()
        count = 0 if servers else servers_for(world_size)
        self.own_servers = [ForkServer(LIGHTNING, device == "simulated", forks=device != "cuda") for _ in range(count)]
        self.servers = servers or self.own_servers
        self.connections: list[Connection] = []
        self.processes: list[Forked] = []
        for server in self.servers:
            server.ready()  # a rank waits a minute for the others, and imports of a busy machine may take longer
        for rank in range(world_size):
            ours, theirs = socket.socketpair()
            environment = inherited() | devices.environment(device, rank)
            if distributed:
                local, node = (0, rank) if device == "cuda" else (rank, 0)
                environment |= {"RANK": str(rank), "LOCAL_RANK": str(local), "NODE_RANK": str(node)}
                environment |= {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            # Neighbours in any dim of a mesh of twos come from different servers: with other hash seeds and addresses,
            # as processes that are executed have, their sets are in different orders.
            server = self.servers[rank.bit_count() % 2]
            self.connections.append(Connection(ours.detach()))
            self.processes.append(
                server.start(
                    _serve, forbidden, device,
                    connection=theirs.fileno(), environment=environment, cwd=self.directory.name, log=self._log(rank),
                )
            )  # fmt: skip
            theirs.close()

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = CALL_TIMEOUT_S) -> list[Any]:
        """`fn(rank, world_size, *args)` on every rank; the results by rank.

        Raises:
            RankError: a rank raised, died, or was not done after `timeout` seconds.
        """
        self.calls += 1
        request = pickle.dumps((self.calls, fn, args))
        name = f"{fn.__module__}.{fn.__qualname__}"
        with contextlib.suppress(OSError):  # a rank died between two calls: its connection reports it below
            for connection in self.connections:
                connection.send_bytes(request)
        results, failures = self._collect(name, timeout)
        if failures:
            first = min(failures, key=lambda failure: failure.at)
            headline = f"{name}: rank {first.rank} of {self.world_size}: {first.type_name}: {first.message}"
            raise RankError(headline, failures)
        return [results[rank] for rank in range(self.world_size)]

    def close(self) -> None:
        """End every process of the pool, and what they started."""
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(ServerEnded):
                process.wait()
        for server in self.own_servers:
            server.close()
        self.connections, self.processes, self.own_servers = [], [], []
        self.directory.cleanup()

    @property
    def usable(self) -> bool:
        if not self.processes or not all(server.usable for server in self.servers):
            return False
        return all(process.poll() is None for process in self.processes)

    def threads(self) -> int:
        """The most that a process of the pool has; 0 where the system doesn't tell."""
        folders = [Path(f"/proc/{process.pid}/task") for process in self.processes]
        return max((len(os.listdir(folder)) for folder in folders if folder.exists()), default=0)

    def _collect(self, name: str, timeout: float) -> tuple[dict[int, Any], list[Failure]]:
        results: dict[int, Any] = {}
        failures: list[Failure] = []
        broken = False  # a dead or late rank: the pool can't be used again
        pending = dict(enumerate(self.connections))
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                after = f"{GRACE_S:.0f} s after another rank failed" if failures else f"after {timeout:.0f} s"
                failures += [self._unanswered(rank, "Timeout", f"not done {after} in {name}") for rank in pending]
                broken = True
                break
            for rank, connection in list(pending.items()):
                if connection not in ready:
                    continue
                del pending[rank]
                try:
                    ok, value = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    self.processes[rank].wait()
                    death = f"ended with status {self.processes[rank].returncode} in {name}"
                    ok, value, broken = False, self._unanswered(rank, "Died", death), True
                if ok:
                    results[rank] = value
                else:
                    failures.append(value)
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if broken:
            self.close()
        return results, failures

    def _unanswered(self, rank: int, type_name: str, message: str) -> Failure:
        if self.processes[rank].poll() is None:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)  # faulthandler writes where each thread is
            time.sleep(0.5)
        log = self._log(rank).read_text(errors="replace")[-LOG_TAIL:]
        return Failure(rank, type_name, message, f"{message}; the end of its output:\n{log}", time.time())

    def _log(self, rank: int) -> Path:
        return Path(self.directory.name) / f"rank{rank}.log"


class RankPools:
    """The session's pools and their servers, started when first used and restarted when broken."""

    def __init__(self) -> None:
        self.pools: dict[str, RankPool] = {}
        self.servers: dict[tuple[str, int], ForkServer] = {}
        atexit.register(self.close)

    def get(self, world_size: int, device: str = "cpu") -> RankPool:
        def make() -> RankPool:
            kind = {"cpu": "ranks"}.get(device, device)
            return RankPool(world_size, device=device, servers=self._servers(kind, world_size))

        return self._usable(f"{device} {world_size}", make)

    def reference(self) -> RankPool:
        """One process that knows nothing of this package."""
        device = "cuda" if devices.chosen() == "cuda" else "cpu"

        def make() -> RankPool:
            servers = self._servers("plain on cuda" if device == "cuda" else "plain", 1)
            return RankPool(1, distributed=False, forbidden="lightning_megatp", device=device, servers=servers)

        return self._usable("reference", make)

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()
        self.pools.clear()
        for server in reversed(self.servers.values()):  # before the one it was forked from
            server.close()
        self.servers.clear()

    def _servers(self, kind: str, world_size: int) -> Sequence[ForkServer]:
        if kind == "ranks":
            self._servers("plain", world_size)  # they import side by side
        return [self._server(kind, index) for index in range(servers_for(world_size))]

    def _server(self, kind: str, index: int) -> ForkServer:
        if (kind, index) in self.servers and not self.servers[kind, index].usable:
            self.servers.pop((kind, index)).close()
        if (kind, index) not in self.servers:
            both = (*LIGHTNING, *PACKAGE)
            imports = {"plain": LIGHTNING, "plain on cuda": LIGHTNING, "ranks": PACKAGE}.get(kind, both)
            base = self._server("plain", index) if kind == "ranks" else None
            self.servers[kind, index] = ForkServer(imports, kind == "simulated", base, forks="cuda" not in kind)
        return self.servers[kind, index]

    def _usable(self, name: str, make: Callable[[], RankPool]) -> RankPool:
        if name in self.pools and (not self.pools[name].usable or self.pools[name].threads() > MOST_THREADS):
            self.pools.pop(name).close()
        if name not in self.pools:
            self.pools[name] = make()
        return self.pools[name]


pools = RankPools()  # processes belong to the test session, not to a test: the one global of the suite


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = CALL_TIMEOUT_S) -> list[Any]:
    """Run `fn(rank, world_size, *args)` on `world_size` real processes, of the device chosen (by default the CPU, with
    gloo), and return the results by rank.

    About one in 100,000 times gloo does not connect the ranks of a group that is made ("Connection closed by peer",
    though nobody left). Then new processes run the call again, once, and a warning says so.
    """
    device = devices.chosen()
    try:
        return pools.get(world_size, device).run(fn, *args, timeout=timeout)
    except RankError as error:
        if NOT_CONNECTED not in error.failures[0].message:
            raise
        warnings.warn(f"{error.failures[0].message}; once more", stacklevel=2)
    pools.get(world_size, device).close()
    return pools.get(world_size, device).run(fn, *args, timeout=timeout)


def run_on_cuda(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = CALL_TIMEOUT_S) -> list[Any]:
    """The same on ranks that have a CUDA device, a simulated one unless real ones are chosen."""
    device = "cuda" if devices.chosen() == "cuda" else "simulated"
    return pools.get(world_size, device).run(fn, *args, timeout=timeout)


def run_reference(fn: Callable[..., Any], *args: Any, timeout: float = CALL_TIMEOUT_S) -> Any:
    """Run `fn(*args)` in one plain process in which this package is never imported (checked after each call)."""
    return pools.reference().run(_without_rank, fn, args, timeout=timeout)[0]


def _without_rank(rank: int, world_size: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return fn(*args)


def servers_for(world_size: int) -> int:
    return min(world_size, 2)


def free_port() -> int:
    """A port for processes that listen on it some seconds later. It is none of those that the system lends to
    connections (32768 and above), of which one could be taken until then; and workers of pytest-xdist that draw at the
    same time have ranges of their own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = range(12_000 + worker % 10 * 2_000, 14_000 + worker % 10 * 2_000)
    for port in random.SystemRandom().sample(ports, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"of 100 ports in {ports} none is free")


# What follows runs in the rank.


def _serve(connection: Connection, forbidden: str, device: str) -> None:
    import torch

    torch.set_num_threads(1)
    _check_what_is_sent()
    _tell_rank()
    environment = dict(os.environ)
    store = _join_store() if "RANK" in os.environ else None
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            return
        os.environ.clear()
        os.environ.update(environment)  # Lightning's teardown removes WORLD_SIZE
        try:
            call, fn, args = pickle.loads(request)
            answer = _dumps((True, _call(call, store, devices.backend(device), fn, args, forbidden)))
        except BaseException as error:
            rank = int(os.environ.get("RANK", "0"))
            at = getattr(error, "raised_at", time.time())
            failure = Failure(rank, type(error).__name__, str(error), traceback.format_exc(), at)
            answer = pickle.dumps((False, failure))
        connection.send_bytes(answer)


class _Pickler(pickle.Pickler):
    """Tensors of a device arrive in the host's memory."""

    def reducer_override(self, x: Any) -> Any:
        import torch

        if isinstance(x, torch.Tensor) and type(x) is torch.Tensor and x.is_cuda:
            return x.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return NotImplemented


def _dumps(x: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(x)
    return buffer.getvalue()


def _tell_rank() -> None:
    """Give Lightning and torchmetrics the rank, which they read from the environment when they are imported."""
    import lightning_utilities.core.rank_zero
    import torchmetrics.utilities.prints

    for module in (lightning_utilities.core.rank_zero, torchmetrics.utilities.prints):
        module.rank_zero_only.rank = int(os.environ.get("RANK", "0"))


def _check_what_is_sent() -> None:
    """Refuse tensors that are not contiguous where gloo would send, and overwrite, as many bytes as they have from
    where they begin: other elements, or memory that is not theirs. (NCCL refuses them itself.)"""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    def checked(send: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(send)
        def send_checked(*args: Any, **kwargs: Any) -> Any:
            for x in (*args, *kwargs.values()):
                if type(x) in (torch.Tensor, torch.nn.Parameter) and not x.is_contiguous():
                    raise AssertionError(f"{send.__name__} of a tensor {tuple(x.shape)} with strides {x.stride()}")
            return send(*args, **kwargs)

        return send_checked

    for name in ("all_reduce", "broadcast", "reduce", "send", "recv", "isend", "irecv", "all_to_all_single"):
        send = checked(getattr(dist, name))
        for module in (distributed_c10d, dist):  # the same in both: `dist.P2POp` asks whether it is
            setattr(module, name, send)


def _join_store() -> Any:
    from datetime import timedelta

    import torch.distributed as dist

    rank, world_size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    return dist.TCPStore("127.0.0.1", port, world_size, is_master=rank == 0, timeout=timedelta(seconds=60))


def _call(number: int, store: Any, backend: str, fn: Callable[..., Any], args: tuple[Any, ...], forbidden: str) -> Any:
    import gc
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.manual_seed(0)  # a test alone and the same test after others see the same numbers
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if store is not None:
        prefix = dist.PrefixStore(f"call{number}", store)
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        bound = torch.device("cuda", 0) if backend == "nccl" else None
        dist.init_process_group(
            backend, store=prefix, rank=rank, world_size=world_size, timeout=timeout, device_id=bound
        )
        dist.barrier()  # nobody fails, and leaves, while a peer still connects: the pool would be out of step for good
    try:
        result = fn(rank, world_size, *args)
    except BaseException as error:
        error.raised_at = time.time()  # type: ignore[attr-defined]  # before the peers learn of it
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()  # after an error this also frees the peers: their collectives fail at once
        torch.set_default_dtype(torch.float32)
        gc.collect()  # or a DataLoader worker forked later collects this call's groups, and joins their threads
    found = sorted(name for name in sys.modules if forbidden and name.split(".")[0] == forbidden)
    if found:
        raise AssertionError(f"a process that must not know {forbidden} imported {found}")
    return result
