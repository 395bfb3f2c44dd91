"""The greedy order of a schedule: every rank does, whenever it is free, the first thing of one rule."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence

from lightning_megatp.pipeline.schedules.messages import with_messages
from lightning_megatp.pipeline.schedules.schedule import Action, At, Kind, Schedule


class _Worker:
    """A rank of the list scheduler: what it could do now, and the memory it has left.

    The rule, whenever it is free, is the first of these that is possible:

    1. a forward, of the latest stage that has one, if memory allows;
    2. a deferred weight, if memory is full and forwards are to come: it makes room;
    3. a backward, of the oldest microbatch;
    4. a deferred weight.

    A forward of any but the rank's last stage has to leave room for one more. Else memory could fill up with
    microbatches none of which can reach the last stage, and so none of which can leave.
    """

    def __init__(
        self, stages: Sequence[int], microbatches: int, activations: int, in_flight: int, backward: Kind | None
    ) -> None:
        self.forwards: list[tuple[int, int]] = []
        """Forwards whose input is there: a heap of (-stage, microbatch)."""
        self.backwards: list[tuple[int, int]] = []
        """Backwards whose gradient is there: a heap of (microbatch, stage)."""
        self.is_busy = False
        self._weights: deque[At] = deque()
        self._last_stage = stages[-1]
        self._reserve = 1 if len(stages) > 1 else 0
        self._forwards_to_come = len(stages) * microbatches
        self._backward = backward
        self._room = activations
        """For activations, needed from a forward to the gradient of its input."""
        self._room_with_weights = in_flight
        """For what is needed until the gradients of the weights are there."""

    def take(self) -> Action | None:
        """Begin the next action; None if there is nothing to do now."""
        action: Action | None = None
        if self.forwards and self._has_room(-self.forwards[0][0]):
            stage, microbatch = heapq.heappop(self.forwards)
            action = Action(Kind.FORWARD, -stage, microbatch)
            self._forwards_to_come -= 1
            self._room -= 1
            self._room_with_weights -= 1
        elif self._weights and (self._needs_room() or not self.backwards):
            action = Action(Kind.BACKWARD_WEIGHT, *self._weights.popleft())
        elif self.backwards and self._backward:
            microbatch, stage = heapq.heappop(self.backwards)
            action = Action(self._backward, stage, microbatch)
        self.is_busy = action is not None
        return action

    def finish(self, action: Action) -> None:
        """Free what the action no longer needs, and put off what it leaves."""
        self.is_busy = False
        if action.is_backward:
            self._room += 1
        if action.completes:
            self._room_with_weights += 1
        if action.kind is Kind.BACKWARD_INPUT:
            self._weights.append((action.stage, action.microbatch))

    def _has_room(self, stage: int) -> bool:
        if self._backward is None:
            return True
        reserve = 0 if stage == self._last_stage else self._reserve
        return self._room > 0 and self._room_with_weights > reserve

    def _needs_room(self) -> bool:
        return self._forwards_to_come > 0 and self._room_with_weights <= self._reserve


def list_schedule(
    name: str,
    placement: tuple[int, ...],
    microbatches: int,
    activations: Sequence[int],
    in_flight: Sequence[int],
    backward: Kind | None,
) -> Schedule:
    """Every rank does, whenever it is free, the first thing of `_Worker`'s rule.

    Each of forward, backward for the input and backward for the weights takes one unit of time; messages take none.

    Args:
        activations: rank -> the most microbatches of a stage between forward and backward.
        in_flight: rank -> the same, with those whose weights are put off.
        backward: `BACKWARD`; `BACKWARD_INPUT`, with the weights put off; None for forwards alone.
    """
    last = len(placement) - 1
    workers = [
        _Worker(
            [stage for stage, at in enumerate(placement) if at == rank],
            microbatches,
            activations[rank],
            in_flight[rank],
            backward,
        )
        for rank in range(len(in_flight))
    ]
    workers[placement[0]].forwards = [(0, microbatch) for microbatch in range(microbatches)]
    orders: list[list[Action]] = [[] for _ in workers]
    ending: defaultdict[int, list[tuple[int, Action]]] = defaultdict(list)
    """Time -> the actions that end then, with their ranks."""
    now = 0
    while True:
        for rank, worker in enumerate(workers):
            if not worker.is_busy and (action := worker.take()):
                orders[rank].append(action)
                ending[now + (2 if action.kind is Kind.BACKWARD else 1)].append((rank, action))
        if not ending:
            return with_messages(name, placement, microbatches, in_flight, orders)
        now += 1
        for rank, action in ending.pop(now, ()):
            workers[rank].finish(action)
            if action.kind is Kind.FORWARD and action.stage == last:
                heapq.heappush(workers[rank].backwards, (action.microbatch, last))
            elif action.kind is Kind.FORWARD:
                to = action.stage + 1
                heapq.heappush(workers[placement[to]].forwards, (-to, action.microbatch))
            elif action.is_backward and action.stage > 0:
                to = action.stage - 1
                heapq.heappush(workers[placement[to]].backwards, (action.microbatch, to))
