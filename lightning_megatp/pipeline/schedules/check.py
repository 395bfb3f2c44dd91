"""Is a schedule right, and how long does it take? Both without a process group.

`check` looks at every rank's list by itself and at both ends of every stream. `simulate` runs the lists against each
other, under NCCL's rule for messages, and so finds deadlocks, times, and what is idle.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from lightning_megatp.pipeline.schedules.schedule import Action, Kind, Schedule


class ScheduleError(RuntimeError):
    """A schedule that can't be run, or would compute something else."""


@dataclass(frozen=True)
class Times:
    """How long actions take, the same on all stages, in any one unit. A whole backward takes both of its parts."""

    forward: float = 1
    backward_input: float = 1
    backward_weight: float = 1
    message: float = 0
    """Counted from the moment at which both ends are ready."""


@dataclass(frozen=True)
class Timeline:
    """When every action begins and ends, in the unit of the `Times`."""

    schedule: Schedule
    start: tuple[tuple[float, ...], ...]
    """Rank -> its actions in their order. A message starts when it is posted."""
    end: tuple[tuple[float, ...], ...]
    """Rank -> the ends of its actions in their order."""

    @property
    def makespan(self) -> float:
        """From the first action of any rank to the end of the last."""
        return max(max(ends) for ends in self.end)

    @property
    def busy(self) -> tuple[float, ...]:
        """Rank -> time spent computing."""
        return tuple(sum(end - start for start, end in computed) for computed in self._computations())

    @property
    def idle(self) -> tuple[float, ...]:
        """Rank -> time spent waiting between its first and its last computation. A zero-bubble schedule is one where
        this is 0: what comes before and after is filled by the batches before and after (Qi et al. 2024, section 2)."""
        spans = (computed[-1][1] - computed[0][0] for computed in self._computations())
        return tuple(span - busy for span, busy in zip(spans, self.busy, strict=True))

    @property
    def bubble(self) -> float:
        """The share of all ranks' time, from the first action to the end of the last, in which they don't compute."""
        return 1 - sum(self.busy) / (self.makespan * self.schedule.ranks)

    def _computations(self) -> Iterator[list[tuple[float, float]]]:
        for actions, starts, ends in zip(self.schedule.actions, self.start, self.end, strict=True):
            yield [
                (start, end)
                for action, start, end in zip(actions, starts, ends, strict=True)
                if not action.is_message and action.kind is not Kind.REDUCE
            ]


def peaks(schedule: Schedule) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The most microbatches, of one stage each, that every rank holds at once.

    Returns:
        Rank -> between the forward and the gradient of the input (their whole activations), and rank -> between the
        forward and the gradients of the weights. The two differ where the latter are put off.
    """
    if schedule.forward_only:
        return (1,) * schedule.ranks, (1,) * schedule.ranks
    return (
        tuple(_peak(actions, lambda action: action.is_backward) for actions in schedule.actions),
        tuple(_peak(actions, lambda action: action.completes) for actions in schedule.actions),
    )


def check(schedule: Schedule) -> None:
    """Look at a schedule without running it. Whether the ranks' lists fit each other is for `simulate` to say.

    Raises:
        ScheduleError: an action is missing, there twice, or on the wrong rank; a computation or a send comes before
            what it needs, or a reduction before the stage's last gradient; the receives of a stream are posted in
            another order than its sends; more is in flight than the schedule's bound.
    """
    for rank, actions in enumerate(schedule.actions):
        _check_complete(schedule, rank)
        done: set[Action] = set()
        for action in actions:
            for need in _needs(schedule, action):
                if need not in done:
                    raise ScheduleError(f"{schedule.name}: rank {rank} has {action} before {need}, which it needs.")
            done.update(_parts(action))
    _check_streams(schedule)
    for rank, (most, bound) in enumerate(zip(peaks(schedule)[1], schedule.in_flight, strict=True)):
        if most > bound:
            raise ScheduleError(
                f"{schedule.name}: rank {rank} has {most} microbatches in flight, its bound is {bound}."
            )


def simulate(schedule: Schedule, times: Times | None = None, strict: bool = False, one_queue: bool = False) -> Timeline:
    """Run every rank's list strictly in its order, and take the time.

    A send or receive is posted as soon as its turn comes, and holds nobody up. It ends, together with its other half,
    when both are at the heads of their ends of the stream and the message's time has passed: NCCL's rule, for one
    communicator per pair of ranks and direction. A forward or backward waits for its receive.

    Args:
        schedule: any, right or wrong.
        times: of the actions; by default 1 for each computation (2 for a whole backward) and 0 for a message.
        strict: computations wait for all messages that their rank has posted before. So they may on a GPU, where a
            kernel that is loaded for the first time, or memory that is allocated, can wait for every kernel under way,
            NCCL's too.
        one_queue: with `strict`, messages wait for them, too: a GPU's with CUDA_DEVICE_MAX_CONNECTIONS=1.

    Raises:
        ScheduleError: a deadlock. The message says what each rank that is stuck waits for.
    """
    return _Simulation(schedule, times or Times(), strict, one_queue).run()


class _Post(NamedTuple):
    """One end of a message, where it stands in its rank's list, and when its turn came."""

    action: Action
    rank: int
    place: int
    at: float


class _Stream:
    """The messages from one rank to another, as far as they have been posted and haven't met their other half."""

    def __init__(self) -> None:
        self.sends: deque[_Post] = deque()
        self.receives: deque[_Post] = deque()
        self.free_at: float = 0

    def meet(self) -> tuple[_Post, _Post] | None:
        """Take the send and the receive at the heads away, if they belong together."""
        if self.sends and self.receives and self.sends[0].action.partner == self.receives[0].action:
            return self.sends.popleft(), self.receives.popleft()
        return None


class _Simulation:
    def __init__(self, schedule: Schedule, times: Times, strict: bool, one_queue: bool) -> None:
        self._schedule, self._strict, self._one_queue = schedule, strict, one_queue
        self._message = times.message
        self._durations = {
            Kind.FORWARD: times.forward,
            Kind.BACKWARD: times.backward_input + times.backward_weight,
            Kind.BACKWARD_INPUT: times.backward_input,
            Kind.BACKWARD_WEIGHT: times.backward_weight,
            Kind.REDUCE: 0,
        }
        self._clock: list[float] = [0] * schedule.ranks
        self._done: dict[Action, float] = {}
        """When a computation or receive ended. No two ranks have the same."""
        self._streams: defaultdict[tuple[int, int], _Stream] = defaultdict(_Stream)
        self._start: list[list[float]] = [[] for _ in schedule.actions]
        self._end: list[list[float]] = [[] for _ in schedule.actions]

    def run(self) -> Timeline:
        awake = deque(range(self._schedule.ranks))
        while awake:
            awake.extend(self._advance(awake.popleft()))
        if stuck := list(self._stuck()):
            raise ScheduleError(f"{self._schedule.name}: deadlock. {' '.join(stuck)}")
        return Timeline(self._schedule, tuple(map(tuple, self._start)), tuple(map(tuple, self._end)))

    def _advance(self, rank: int) -> Iterator[int]:
        """Run a rank until it has to wait. Yields the ranks that have received something meanwhile."""
        actions, start, end = self._schedule.actions[rank], self._start[rank], self._end[rank]
        while len(start) < len(actions):
            action = actions[len(start)]
            needs = _needs(self._schedule, action)
            held_up = self._strict and (self._one_queue or not action.is_message) and math.inf in end
            if held_up or any(need not in self._done for need in needs):
                return
            if action.is_message:
                start.append(self._clock[rank])
                end.append(math.inf)
                yield from self._post(_Post(action, rank, len(start) - 1, start[-1]))
                continue
            start.append(
                max([self._clock[rank], *(self._done[need] for need in needs), *(end if self._strict else ())])
            )
            end.append(start[-1] + self._durations[action.kind])
            self._clock[rank] = end[-1]
            self._done.update(dict.fromkeys(_parts(action), end[-1]))

    def _post(self, post: _Post) -> Iterator[int]:
        stream = self._streams[self._schedule.stream(post.action)]
        (stream.receives if post.action.is_receive else stream.sends).append(post)
        while pair := stream.meet():
            send, receive = pair
            stream.free_at = max(stream.free_at, send.at, receive.at) + self._message
            self._end[send.rank][send.place] = self._end[receive.rank][receive.place] = stream.free_at
            self._done[receive.action] = stream.free_at
            yield receive.rank
            if self._strict:
                yield send.rank

    def _stuck(self) -> Iterator[str]:
        """A sentence for each rank that doesn't get on, or for each message without its other half if all did."""
        waiting = False
        for rank, actions in enumerate(self._schedule.actions):
            if len(self._start[rank]) < len(actions):
                waiting = True
                action = actions[len(self._start[rank])]
                need = next((need for need in _needs(self._schedule, action) if need not in self._done), None)
                if need is None:
                    need = actions[self._end[rank].index(math.inf)]
                yield f"Rank {rank} waits at {action} for {need}{self._reason(need)}."
        if not waiting:
            for stream in self._streams.values():
                for post in (*stream.sends, *stream.receives):
                    yield f"Rank {post.rank}'s {post.action} never meets its {post.action.partner}."

    def _reason(self, need: Action) -> str:
        if need.is_message and not need.is_receive:
            return f", and rank {self._schedule.stream(need)[1]} hasn't come to {need.partner}"
        if not need.is_receive:
            return ", which it hasn't done"
        source, destination = self._schedule.stream(need)
        stream = self._streams[source, destination]
        if all(post.action != need for post in stream.receives):
            return ", which it hasn't posted"
        if not stream.sends:
            return f", and rank {source} hasn't come to {need.partner}"
        send, receive = stream.sends[0].action, stream.receives[0].action
        return f", but from rank {source} to {destination} the next send is {send} and the next receive {receive}"


def _parts(action: Action) -> tuple[Action, ...]:
    """A whole backward counts as both of its parts; any other action as itself."""
    if action.kind is not Kind.BACKWARD:
        return (action,)
    at = action.stage, action.microbatch
    return Action(Kind.BACKWARD_INPUT, *at), Action(Kind.BACKWARD_WEIGHT, *at)


def _needs(schedule: Schedule, action: Action) -> list[Action]:
    """What has to be done on the same rank before an action, in parts."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is Kind.FORWARD:
        before = [Action(Kind.FORWARD, stage - 1, microbatch)] if stage else []
        return [receive] if (receive := schedule.receive_for(action)) else before
    if action.is_backward:
        forward = Action(Kind.FORWARD, stage, microbatch)
        before = [Action(Kind.BACKWARD_INPUT, stage + 1, microbatch)] if stage + 1 < schedule.stages else []
        return [forward, receive] if (receive := schedule.receive_for(action)) else [forward, *before]
    if action.kind is Kind.SEND_FORWARD:
        return [Action(Kind.FORWARD, stage, microbatch)]
    if action.kind in (Kind.SEND_BACKWARD, Kind.BACKWARD_WEIGHT):
        return [Action(Kind.BACKWARD_INPUT, stage, microbatch)]
    if action.kind is Kind.REDUCE:
        return [Action(Kind.BACKWARD_WEIGHT, stage, i) for i in range(schedule.microbatches)]
    return []


def _check_complete(schedule: Schedule, rank: int) -> None:
    expected: set[Action] = set()
    for stage in schedule.stages_of(rank):
        kinds = [Kind.FORWARD] if schedule.forward_only else [Kind.FORWARD, Kind.BACKWARD]
        for microbatch in range(schedule.microbatches):
            for action in (Action(kind, stage, microbatch) for kind in kinds):
                messages = schedule.receive_for(action), schedule.send_after(action)
                expected.update(_parts(action), filter(None, messages))
        if not schedule.forward_only:
            expected.add(Action(Kind.REDUCE, stage))
    found = Counter(part for action in schedule.actions[rank] for part in _parts(action))
    problems = {
        "lacks": expected - found.keys(),
        "should not have": found.keys() - expected,
        "has more than once": {action for action, times in found.items() if times > 1},
    }
    for problem, actions in problems.items():
        if actions:
            raise ScheduleError(f"{schedule.name}: rank {rank} {problem} {_show(actions)}.")


def _check_streams(schedule: Schedule) -> None:
    sends: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    receives: defaultdict[tuple[int, int], list[Action]] = defaultdict(list)
    for action in (action for actions in schedule.actions for action in actions if action.is_message):
        (receives if action.is_receive else sends)[schedule.stream(action)].append(action)
    for source, destination in sorted({*sends, *receives}):
        pair = source, destination
        for at, (send, receive) in enumerate(zip_longest(sends[pair], receives[pair])):
            if send is None or send.partner != receive:
                raise ScheduleError(
                    f"{schedule.name}: message {at} from rank {source} to {destination} is sent as {send}"
                    f" and received as {receive}."
                )


def _peak(actions: Sequence[Action], ends: Callable[[Action], bool]) -> int:
    held = most = 0
    for action in actions:
        held += (action.kind is Kind.FORWARD) - ends(action)
        most = max(most, held)
    return most


def _show(actions: set[Action], most: int = 5) -> str:
    names = sorted(map(str, actions))
    return ", ".join(names[:most]) + (f", ... {len(names) - most} more" if len(names) > most else "")
