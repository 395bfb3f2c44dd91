"""From the order of computations to that of messages: when each is sent, and its receive posted."""

from __future__ import annotations

from collections import Counter, defaultdict
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
