"""A transport between threads, that keeps NCCL's order of messages: many pipeline ranks in one process."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class DeadlockError(AssertionError):
    """Nobody gets on."""


@dataclass(eq=False)
class Post:
    """One end of a message, and whether it has met the other."""

    fabric: Fabric
    tensor: Tensor
    source: int
    destination: int
    is_send: bool
    done: bool = False
    queue: Any = None
    other_queue: Any = None

    def wait(self) -> None:
        with self.fabric.changed:
            if not self.fabric.changed.wait_for(self._may_go_on, self.fabric.patience_s) or not self.done:
                self.fabric.stuck = True
                self.fabric.changed.notify_all()
                end = "the send" if self.is_send else "the receive"
                raise DeadlockError(f"{end} from rank {self.source} to {self.destination} never ends")

    def is_completed(self) -> bool:
        return self.done

    def _may_go_on(self) -> bool:
        return self.done or self.fabric.stuck


@dataclass
class Fabric:
    """What connects the threads.

    Posts wait in queues, and two ends of a message meet when both are at the heads of theirs. Which queues there are is
    what `queue` says, for (rank, peer, direction).

    Args:
        patience_s: how long a thread waits before it calls it a deadlock.
        connects: the first message from one rank to another in a direction holds up either's thread until both have
            called, as NCCL does, which connects them then.
    """

    queue: Callable[[int, int, Any], Any]
    queues: defaultdict[Any, deque[Post]] = field(default_factory=lambda: defaultdict(deque))
    changed: threading.Condition = field(default_factory=threading.Condition)
    stuck: bool = False
    patience_s: float = 20.0
    connects: bool = False
    called: defaultdict[Any, set[bool]] = field(default_factory=lambda: defaultdict(set))
    """By source, destination and direction, which ends have."""

    def transport(self, rank: int) -> FakeTransport:
        return FakeTransport(self, rank)

    def post(self, post: Post, direction: str) -> Post:
        """Queue one end; let those meet that can."""
        ends = (post.source, post.destination) if post.is_send else (post.destination, post.source)
        post.queue, post.other_queue = self.queue(*ends, direction), self.queue(*reversed(ends), direction)
        with self.changed:
            self.queues[post.queue].append(post)
            todo = [post.queue]
            while todo:
                todo += self._meet(todo.pop())
            self._connect(post, direction)
        return post

    def _connect(self, post: Post, direction: str) -> None:
        called = self.called[post.source, post.destination, direction]
        called.add(post.is_send)
        self.changed.notify_all()
        if not self.connects or self.changed.wait_for(lambda: len(called) == 2 or self.stuck, self.patience_s):
            return
        self.stuck = True
        self.changed.notify_all()
        raise DeadlockError(f"rank {post.source} and {post.destination} never connect")

    def _meet(self, key: Any) -> list[Any]:
        """Let the head of a queue meet its other end, if that is at the head too. The queues that have new heads."""
        if not self.queues[key]:
            return []
        head = self.queues[key][0]
        others = self.queues[head.other_queue]
        message = head.source, head.destination
        if not others or (others[0].source, others[0].destination) != message or others[0].is_send == head.is_send:
            return []
        send, receive = (head, others[0]) if head.is_send else (others[0], head)
        assert (send.tensor.shape, send.tensor.dtype) == (receive.tensor.shape, receive.tensor.dtype)
        receive.tensor.copy_(send.tensor)
        send.done = receive.done = True
        self.queues[key].popleft()
        others.popleft()
        self.changed.notify_all()
        return [key, head.other_queue]


@dataclass
class FakeTransport:
    """One rank's end of it."""

    fabric: Fabric
    rank: int
    posts: list[Post] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def send(self, x: Tensor, to: int, direction: str) -> Post:
        return self._post(Post(self.fabric, x, self.rank, to, is_send=True), direction)

    def receive(self, x: Tensor, source: int, direction: str) -> Post:
        return self._post(Post(self.fabric, x, source, self.rank, is_send=False), direction)

    def wait_for_all(self) -> None:
        """For everything posted."""
        for post in self.posts:
            post.wait()

    def _post(self, post: Post, direction: str) -> Post:
        self.posts.append(post)
        return self.fabric.post(post, direction)


def run_threads(ranks: int, fn: Callable[[int], Any]) -> list[Any]:
    """`fn(rank)` on a thread each; the results by rank. Raises what the first one raised."""
    results: list[Any] = [None] * ranks
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = fn(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
