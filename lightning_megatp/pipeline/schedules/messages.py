"""From the order of computations to that of messages: when each is sent, and its receive posted."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from lightning_megatp.pipeline.schedules.schedule import Action, Kind, Schedule


def with_messages(
    name: str,
    placement: tuple[int, ...],
    microbatches: int,
    in_flight: Sequence[int],
    orders: Sequence[Sequence[Action]],
) -> Schedule:
    """Add to the computations of every rank its messages and reductions.

    A send follows what makes it. A receive is posted one computation before the one that needs it, so that it overlaps
    with that, if what it receives does not wait for that computation in the end; else just before its need. It is
    earlier where its sender could otherwise not go on, or where another one behind it in its stream is needed earlier,
    so that both ends of a stream have the same order. The reduction of a stage follows its last gradients of weights.

    On a GPU a computation may have to wait for all messages under way (`simulate` with `strict`). If one of them waited
    for this very computation, ranks would wait for each other forever.
    """
    computed = Schedule(
        name=name,
        ranks=len(orders),
        stages=len(placement),
        microbatches=microbatches,
        placement=placement,
        in_flight=tuple(in_flight),
        actions=tuple(tuple(_with_reductions(order)) for order in orders),
    )
    ranks = zip(computed.actions, _Posting(computed).run(), strict=True)
    return replace(computed, actions=tuple(tuple(_weave(computed, order, posts)) for order, posts in ranks))


class _Posting:
    """Runs the computations of all ranks against each other, to see where receives have to be posted."""

    def __init__(self, computed: Schedule) -> None:
        self._computed = computed
        self._at = [0] * computed.ranks
        """Rank -> its next computation."""
        self._posts: list[defaultdict[int, list[Action]]] = [defaultdict(list) for _ in self._at]
        """Rank -> a computation -> the receives posted before it."""
        self._under_way: list[set[Action]] = [set() for _ in self._at]
        """Rank -> its sends that nobody receives yet, and its receives that nobody has sent."""
        self._streams: dict[tuple[int, int], deque[Action]] = {}
        """The receives still to be posted, in the order of their sends."""
        self._posted: set[Action] = set()
        self._awake = dict.fromkeys(range(computed.ranks))
        """Ranks for which something has changed."""
        for order in computed.actions:
            for send in filter(None, map(computed.send_after, order)):
                self._streams.setdefault(computed.stream(send), deque()).append(send.partner)

    def run(self) -> Sequence[Mapping[int, Sequence[Action]]]:
        """Rank -> index of a computation -> what is posted before it."""
        while True:
            while self._awake:
                rank = next(iter(self._awake))
                if not self._advance(rank, ahead=True):
                    del self._awake[rank]
            if not any(self._advance(rank, ahead=False) for rank in range(len(self._at))) and not self._help():
                return self._posts

    def _advance(self, rank: int, ahead: bool) -> bool:
        """Let a rank do its next computation, if no message holds it up.

        Args:
            ahead: only if what the computation after it needs has been sent: that is posted before it, too.

        Returns:
            Whether it did.
        """
        computed, own = self._computed, self._under_way[rank]
        action, *following = computed.actions[rank][self._at[rank] : self._at[rank] + 2] or (None,)
        if action is None:
            return False
        for receive in self._before(action):
            self._post(receive)
        if own:
            return False
        if ahead:
            receives = [receive for other in following for receive in self._before(other)]
            if any(receive.partner not in self._under_way[computed.stream(receive)[0]] for receive in receives):
                return False
            for receive in receives:
                self._post(receive)
        self._at[rank] += 1
        self._awake[rank] = None
        if send := computed.send_after(action):
            self._begin(send, rank, computed.stream(send)[1])
        return True

    def _before(self, action: Action) -> list[Action]:
        """What has still to be posted for a computation: its receive, and those that its stream has before it."""
        receive = self._computed.receive_for(action)
        if receive is None or receive in self._posted:
            return []
        stream = self._streams[self._computed.stream(receive)]
        return [*itertools.takewhile(lambda other: other != receive, stream), receive]

    def _help(self) -> bool:
        """Nobody gets on: post a receive for somebody who has sent. Whether there is one."""
        for (sender, _), stream in sorted(self._streams.items()):
            if stream and stream[0].partner in self._under_way[sender]:
                self._post(stream[0])
                return True
        return False

    def _post(self, receive: Action) -> None:
        """The first of its stream that has not been."""
        sender, rank = stream = self._computed.stream(receive)
        self._streams[stream].popleft()
        self._posted.add(receive)
        self._posts[rank][self._at[rank]].append(receive)
        self._begin(receive, rank, sender)

    def _begin(self, message: Action, rank: int, peer: int) -> None:
        """A message of a rank, whose other half its peer may have begun."""
        self._awake |= {rank: None, peer: None}
        if message.partner in self._under_way[peer]:
            self._under_way[peer].remove(message.partner)
        else:
            self._under_way[rank].add(message)


def _with_reductions(order: Sequence[Action]) -> Iterator[Action]:
    """One rank's computations, and the reduction of a stage behind its last."""
    remaining = Counter(action.stage for action in order if action.completes)
    for action in order:
        yield action
        if action.completes:
            remaining[action.stage] -= 1
            if not remaining[action.stage]:
                yield Action(Kind.REDUCE, action.stage)


def _weave(computed: Schedule, order: Sequence[Action], posts: Mapping[int, Sequence[Action]]) -> Iterator[Action]:
    """What one rank does, with the messages before and after each."""
    for at, action in enumerate(order):
        yield from posts.get(at, ())
        yield action
        if send := computed.send_after(action):
            yield send


def receive_ahead(schedule: Schedule) -> Schedule:
    """A schedule with every receive posted at least one computation before the one that needs it, for messages that
    hold up nothing but what needs them: gloo's between CPUs."""
    return replace(schedule, actions=tuple(tuple(_ahead(schedule, actions)) for actions in schedule.actions))


def _ahead(schedule: Schedule, actions: Sequence[Action]) -> Iterator[Action]:
    computations: list[Action] = []
    behind: defaultdict[int, list[Action]] = defaultdict(list)  # index of a computation -> what follows it
    posted, needed = dict[Action, int](), dict[Action, int]()
    for action in actions:
        if action.is_receive:
            posted[action] = len(computations)
        elif action.is_message or action.kind is Kind.REDUCE:
            behind[len(computations) - 1].append(action)
        else:
            if receive := schedule.receive_for(action):
                needed[receive] = len(computations)
            computations.append(action)
    before: defaultdict[int, list[Action]] = defaultdict(list)
    latest: dict[tuple[int, int], int] = {}
    for receive in reversed(posted):
        stream, at = schedule.stream(receive), min(posted[receive], max(0, needed[receive] - 1))
        latest[stream] = at = min(at, latest.get(stream, at))
        before[at].append(receive)
    for at, action in enumerate(computations):
        yield from reversed(before[at])
        yield action
        yield from behind[at]
