"""What runs when: a pipeline schedule is data, a list of actions per rank, and five generators make it.

The same list is executed (`executor`), checked and simulated (`check`), and drawn. Words: *rank* is the index along the
pp axis in the order of placement, *stage* a virtual stage in the order of data flow, *boundary* s lies between stages
s - 1 and s. Formulas: p ranks, m microbatches, v stages per rank; T_F, T_B, T_W are the times of a forward, of a
backward for the input and of one for the weights.

GPipe, 1F1B, ZB-H1 and ZB-V are one list scheduler with different memory; interleaved 1F1B is an order of its own.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from lightning_megatp.plan.ranges import split_evenly


class Kind(Enum):
    """What an action does; the value is its short name."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of input and weights together."""
    BACKWARD_INPUT = "I"
    """The gradient of the stage's input only: what the stage before waits for."""
    BACKWARD_WEIGHT = "W"
    """The gradients of the weights, which `BACKWARD_INPUT` left for later."""
    SEND_FORWARD = "SF"
    """Send what crosses the boundary after the stage. Doesn't block computation."""
    RECV_FORWARD = "RF"
    """Post the receive of what crosses the boundary before the stage. The forward that needs it waits for it."""
    SEND_BACKWARD = "SB"
    """Send the gradients of what crossed the boundary before the stage. Doesn't block computation."""
    RECV_BACKWARD = "RB"
    """Post the receive of the gradients of what the stage sent. The backward that needs it waits for it."""
    REDUCE = "R"
    """The gradients of the stage are complete on this rank: what has to be summed over dp can be."""


At = tuple[int, int]
"""Stage and microbatch."""

_PARTNERS = {
    Kind.SEND_FORWARD: (Kind.RECV_FORWARD, 1),
    Kind.RECV_FORWARD: (Kind.SEND_FORWARD, -1),
    Kind.SEND_BACKWARD: (Kind.RECV_BACKWARD, -1),
    Kind.RECV_BACKWARD: (Kind.SEND_BACKWARD, 1),
}
"""The other half of a message, and how many stages further it is."""


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a rank does. `str` is kind, stage and microbatch: "F3.0" is stage 3's forward of microbatch 0, "R3"
    its reduction."""

    kind: Kind
    stage: int
    microbatch: int = -1
    """-1 for `REDUCE`, which is about all of them."""

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}" + (f".{self.microbatch}" if self.microbatch >= 0 else "")

    @property
    def is_message(self) -> bool:
        """Whether this is half of a message: a send, or the post of a receive."""
        return self.kind in _PARTNERS

    @property
    def is_receive(self) -> bool:
        """Whether this posts a receive."""
        return self.kind is Kind.RECV_FORWARD or self.kind is Kind.RECV_BACKWARD

    @property
    def is_backward(self) -> bool:
        """Whether this makes the gradient of the stage's input (and perhaps those of its weights)."""
        return self.kind is Kind.BACKWARD or self.kind is Kind.BACKWARD_INPUT

    @property
    def completes(self) -> bool:
        """Whether this ends a microbatch on its stage: the gradients of its weights are there, its memory is free."""
        return self.kind is Kind.BACKWARD or self.kind is Kind.BACKWARD_WEIGHT

    @property
    def partner(self) -> Action:
        """The other half of a message: the receive of a send, the send of a receive."""
        kind, further = _PARTNERS[self.kind]
        return Action(kind, self.stage + further, self.microbatch)


@dataclass(frozen=True)
class Schedule:
    """The actions of one batch on every rank, in the order in which each rank takes them up.

    Messages between two ranks come in *streams*, one per pair and direction, in which sends and receives pair up in
    order. That is NCCL's rule for point-to-point calls on one communicator; two groups, "up" and "down", keep the two
    directions of a pair apart, without which two ranks that both send first would wait for each other forever.
    """

    name: str
    ranks: int
    stages: int
    microbatches: int
    placement: tuple[int, ...]
    """Stage -> rank."""
    in_flight: tuple[int, ...]
    """Rank -> the most microbatches of one stage each that it holds between their forward and the end of their
    backward (of the weights, where that is deferred)."""
    actions: tuple[tuple[Action, ...], ...]
    """Rank -> its actions."""

    @property
    def forward_only(self) -> bool:
        """Whether there is no backward: evaluation."""
        return not any(action.is_backward for actions in self.actions for action in actions)

    @property
    def defers_weights(self) -> bool:
        """Whether the gradients of weights are computed by themselves, after those of the inputs."""
        return any(action.kind is Kind.BACKWARD_WEIGHT for actions in self.actions for action in actions)

    @property
    def splits_end(self) -> bool:
        """Whether only some backwards are in halves: see `split_end`."""
        kinds = {action.kind for actions in self.actions for action in actions}
        return {Kind.BACKWARD, Kind.BACKWARD_WEIGHT} <= kinds

    def stages_of(self, rank: int) -> list[int]:
        """The stages on a rank, in the order of data flow."""
        return [stage for stage, at in enumerate(self.placement) if at == rank]

    def crosses(self, boundary: int) -> bool:
        """Whether the stages on both sides of a boundary are on different ranks, so that there are messages. False for
        the outer boundaries, 0 and the number of stages."""
        return 0 < boundary < self.stages and self.placement[boundary - 1] != self.placement[boundary]

    def receive_for(self, action: Action) -> Action | None:
        """The receive that a forward or backward waits for; None if its input is made on the same rank."""
        if action.kind is Kind.FORWARD and self.crosses(action.stage):
            return Action(Kind.RECV_FORWARD, action.stage, action.microbatch)
        if action.is_backward and self.crosses(action.stage + 1):
            return Action(Kind.RECV_BACKWARD, action.stage, action.microbatch)
        return None

    def send_after(self, action: Action) -> Action | None:
        """The send of what a forward or backward makes; None if it is used on the same rank, or nowhere."""
        if action.kind is Kind.FORWARD and self.crosses(action.stage + 1):
            return Action(Kind.SEND_FORWARD, action.stage, action.microbatch)
        if action.is_backward and self.crosses(action.stage):
            return Action(Kind.SEND_BACKWARD, action.stage, action.microbatch)
        return None

    def stream(self, message: Action) -> tuple[int, int]:
        """The rank that sends a message and the rank that receives it."""
        own, peer = self.placement[message.stage], self.placement[message.partner.stage]
        return (peer, own) if message.is_receive else (own, peer)

    def group(self, message: Action) -> Literal["up", "down"]:
        """The group a message travels in: "up" towards a higher rank, "down" towards a lower."""
        source, destination = self.stream(message)
        return "up" if source < destination else "down"


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    Bubble: (p - 1) / (m + p - 1) of the time. In flight: m.
    Source: Huang et al. 2019 (GPipe), section 2.3; backwards run from the first microbatch to the last, as in torch.
    """
    limits = [microbatches] * ranks
    return _list_schedule("gpipe", tuple(range(ranks)), microbatches, limits, limits, Kind.BACKWARD)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """One forward, one backward, after a warm-up as long as the way to the last rank and back.

    Bubble: (p - 1) / (m + p - 1) of the time. In flight on rank r: min(m, p - r).
    Source: Narayanan et al. 2021, section 2.2.1 (PipeDream-Flush).
    """
    limits = [min(microbatches, ranks - rank) for rank in range(ranks)]
    return _list_schedule("1f1b", tuple(range(ranks)), microbatches, limits, limits, Kind.BACKWARD)


def interleaved(ranks: int, microbatches: int, virtual_stages: int) -> Schedule:
    """Interleaved 1F1B: rank r holds the stages r, r + p, r + 2p, ...

    Microbatches go through all stages in rounds of p. Any number is allowed: where p doesn't divide m, the
    max(1, m // p) rounds differ by at most one microbatch, longer ones first (torch refuses unequal rounds).

    Bubble: (p - 1) / (v m + p - 1) of the time, for m a multiple of p. In flight on rank r:
    min(v m, (v - 1) g + 2 (p - 1 - r) + 1) for a longest round of g microbatches.
    Source: Narayanan et al. 2021, section 2.2.2; the length of the warm-up is Megatron-LM's.
    """
    rounds = split_evenly(microbatches, max(1, microbatches // ranks))
    chunks = range(virtual_stages)
    limits, orders = [], []
    for rank in range(ranks):
        ahead = (virtual_stages - 1) * (rounds[0][1] - rounds[0][0]) + 2 * (ranks - 1 - rank)
        forwards = [(c * ranks + rank, i) for start, stop in rounds for c in chunks for i in range(start, stop)]
        backwards = [(c * ranks + rank, i) for start, stop in rounds for c in chunks[::-1] for i in range(start, stop)]
        limits.append(min(ahead + 1, len(forwards)))
        orders.append(_alternate(forwards, backwards, limits[rank]))
    return _with_messages("interleaved", looped(ranks, virtual_stages), microbatches, limits, orders)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with the gradients of the weights put off, so that they fill the bubble, in 1F1B's memory.

    Bubble: (p - 1) (T_F + T_B - T_W) of time, a third of 1F1B's if the three are equal, for m >= p and T_W <= T_B.
    In flight: min(m, p), as on the first rank of 1F1B. On rank r these are at most min(m, p - r) with all of their
    activations, as in 1F1B; the weights of the others are put off.
    Source: Qi et al. 2024 (Zero Bubble Pipeline Parallelism), section 2.1.
    """
    activations = [min(microbatches, ranks - rank) for rank in range(ranks)]
    limits = [min(microbatches, ranks)] * ranks
    return _list_schedule("zb_h1", tuple(range(ranks)), microbatches, activations, limits, Kind.BACKWARD_INPUT)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """ZB-V: rank r holds the stages r and 2p - 1 - r, so that the last stage is on the first rank, beside the first.

    Bubble: none for T_F = T_B = T_W and m >= 2p - 1: no rank waits between its first action and its last.
    In flight: at most min(2m, 2p) microbatches of one stage each, 1F1B's memory, since a stage is half as long here.
    Source: Qi et al. 2024, section 6.
    """
    limits = [2 * min(microbatches, ranks)] * ranks
    placement = (*range(ranks), *reversed(range(ranks)))
    return _list_schedule("zb_v", placement, microbatches, limits, limits, Kind.BACKWARD_INPUT)


def forward_only(placement: Sequence[int], microbatches: int) -> Schedule:
    """Forwards alone, for validation, test and predict.

    Args:
        placement: stage -> rank, that of the schedule trained with: the stages are where they are.
        microbatches: 1 or more.

    In flight: 1, since nothing is kept for a backward.
    """
    limits = [1] * (max(placement) + 1)
    return _list_schedule("forward_only", tuple(placement), microbatches, limits, limits, None)


def split_end(schedule: Schedule) -> Schedule:
    """1F1B whose last p - 1 backwards, on every rank, are in halves: the gradient of the input leaves before those of
    the weights are made.

    At the end of a batch, ranks only wait for each other's backwards; nobody waits for the weights. Earlier backwards
    hold nobody up as they are.

    Bubble: the time (p - 1) (T_F + T_B), without the (p - 1) T_W of `one_f_one_b`, for T_F <= T_B + T_W.
    In flight: as before; between the halves, linear layers hold the gradients of their outputs as well, on ranks above
    the first, which hold a microbatch less than that.
    Source: the halves are Qi et al. 2024, section 2.
    """
    return replace(schedule, actions=tuple(tuple(_split_end(schedule, actions)) for actions in schedule.actions))


def _split_end(schedule: Schedule, actions: Sequence[Action]) -> Iterator[Action]:
    whole = [action for action in actions if action.kind is Kind.BACKWARD and schedule.crosses(action.stage)]
    split = {action: schedule.send_after(action) for action in whole[-(schedule.ranks - 1) :]}
    sends = {send: action for action, send in split.items()}
    for action in actions:
        yield replace(action, kind=Kind.BACKWARD_INPUT) if action in split else action
        if action in sends:
            yield replace(sends[action], kind=Kind.BACKWARD_WEIGHT)


def looped(ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """Stage -> rank, round and round: 2 ranks, 2 stages each -> 0, 1, 0, 1."""
    return tuple(range(ranks)) * virtual_stages


_GENERATORS: dict[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zb_h1": zb_h1,
    "zb_v": zb_v,
}
NAMES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")
"""What `make_schedule` knows."""


def make_schedule(name: str, ranks: int, microbatches: int, virtual_stages: int | None = None) -> Schedule:
    """A training schedule by name.

    Args:
        name: one of `NAMES`.
        ranks: size of the pp axis.
        microbatches: per batch.
        virtual_stages: stages per rank; by default what the schedule has to have (1, zb_v: 2), interleaved: 2.

    Raises:
        ValueError: an unknown name, a number below 1, or a number of stages per rank that the schedule can't have.
    """
    if name not in NAMES:
        raise ValueError(f"MegaTPStrategy: schedule={name!r} is not known. Use one of {', '.join(NAMES)}.")
    if ranks < 1:
        raise ValueError(f"MegaTPStrategy: pp={ranks}, but a pipeline needs 1 rank or more.")
    if microbatches < 1:
        raise ValueError(f"MegaTPStrategy: microbatches={microbatches}, but a batch needs 1 or more.")
    if name == "interleaved":
        stages = 2 if virtual_stages is None else virtual_stages
        if stages < 2:
            raise ValueError(
                f"MegaTPStrategy: schedule='interleaved' with virtual_stages={stages}, but it interleaves 2 stages per"
                " rank or more. Use virtual_stages=2, or schedule='1f1b'."
            )
        return interleaved(ranks, microbatches, stages)
    stages = 2 if name == "zb_v" else 1
    if virtual_stages not in (None, stages):
        other = "'1f1b' or 'zb_h1'" if virtual_stages == 1 else "'interleaved'"
        raise ValueError(
            f"MegaTPStrategy: schedule={name!r} with virtual_stages={virtual_stages}, but it has {stages} per rank."
            f" Use virtual_stages={stages}, or schedule={other}."
        )
    return _GENERATORS[name](ranks, microbatches)


def _alternate(forwards: Sequence[At], backwards: Sequence[At], in_flight: int) -> list[Action]:
    """Forwards up to a number in flight, then a backward and a forward in turn, then the backwards that are left."""
    starts = [Action(Kind.FORWARD, *at) for at in forwards]
    ends = [Action(Kind.BACKWARD, *at) for at in backwards]
    steady = [action for pair in zip(ends, starts[in_flight:], strict=False) for action in pair]
    return starts[:in_flight] + steady + ends[len(starts) - in_flight :]


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
        """Those whose input is there: a heap of (-stage, microbatch)."""
        self.backwards: list[tuple[int, int]] = []
        """Those whose gradient is there: a heap of (microbatch, stage)."""
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


def _list_schedule(
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
            return _with_messages(name, placement, microbatches, in_flight, orders)
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


def _with_messages(
    name: str,
    placement: tuple[int, ...],
    microbatches: int,
    in_flight: Sequence[int],
    orders: Sequence[Sequence[Action]],
) -> Schedule:
    """Add to the computations of every rank its messages and reductions.

    A send follows what makes it. A receive is posted one computation before the one that needs it, so that it overlaps
    with that; earlier where another one behind it in its stream is needed earlier, so that both ends of a stream have
    the same order. The reduction of a stage follows its last gradients of weights.
    """
    computed = Schedule(
        name=name,
        ranks=len(orders),
        stages=len(placement),
        microbatches=microbatches,
        placement=placement,
        in_flight=tuple(in_flight),
        actions=tuple(map(tuple, orders)),
    )
    needed: dict[Action, int] = {}
    streams: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for order in orders:
        for at, action in enumerate(order):
            if receive := computed.receive_for(action):
                needed[receive] = at
            if send := computed.send_after(action):
                streams[computed.stream(send)].append(send.partner)
    posts: list[defaultdict[int, list[Action]]] = [defaultdict(list) for _ in orders]
    for (_, rank), receives in streams.items():
        at = len(orders[rank])
        for receive in reversed(receives):
            at = min(at, max(0, needed[receive] - 1))
            posts[rank][at].append(receive)
    return replace(computed, actions=tuple(tuple(_weave(computed, order, posts[r])) for r, order in enumerate(orders)))


def _weave(computed: Schedule, order: Sequence[Action], posts: Mapping[int, Sequence[Action]]) -> Iterator[Action]:
    """One rank's computations with what belongs before and after each; `posts` has the last receives first."""
    remaining = Counter(action.stage for action in order if action.completes)
    for at, action in enumerate(order):
        yield from reversed(posts.get(at, ()))
        yield action
        if send := computed.send_after(action):
            yield send
        if action.completes:
            remaining[action.stage] -= 1
            if not remaining[action.stage]:
                yield Action(Kind.REDUCE, action.stage)
