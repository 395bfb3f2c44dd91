"""The schedules by name: five generators, and 1F1B with a split end.

Formulas: p ranks, m microbatches, v stages per rank; T_F, T_B, T_W are the times of a forward, of a backward for the
input and of one for the weights. GPipe, 1F1B, ZB-H1 and ZB-V are one list scheduler with different memory; interleaved
1F1B is an order of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from lightning_megatp.pipeline.schedules.list_scheduler import list_schedule
from lightning_megatp.pipeline.schedules.messages import with_messages
from lightning_megatp.pipeline.schedules.schedule import Action, At, Kind, Schedule
from lightning_megatp.plan.ranges import split_evenly


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards.

    Bubble: (p - 1) / (m + p - 1) of the time. In flight: m.
    Source: Huang et al. 2019 (GPipe), section 2.3; backwards run from the first microbatch to the last, as in torch.
    """
    limits = [microbatches] * ranks
    return list_schedule("gpipe", tuple(range(ranks)), microbatches, limits, limits, Kind.BACKWARD)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """One forward, one backward, after a warm-up as long as the way to the last rank and back.

    Bubble: (p - 1) / (m + p - 1) of the time. In flight on rank r: min(m, p - r).
    Source: Narayanan et al. 2021, section 2.2.1 (PipeDream-Flush).
    """
    limits = [min(microbatches, ranks - rank) for rank in range(ranks)]
    return list_schedule("1f1b", tuple(range(ranks)), microbatches, limits, limits, Kind.BACKWARD)


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
    return with_messages("interleaved", looped(ranks, virtual_stages), microbatches, limits, orders)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B with the gradients of the weights put off, so that they fill the bubble, in 1F1B's memory.

    Bubble: (p - 1) (T_F + T_B - T_W) of time, a third of 1F1B's if the three are equal, for m >= p and T_W <= T_B.
    In flight: min(m, p), as on the first rank of 1F1B. On rank r these are at most min(m, p - r) with all of their
    activations, as in 1F1B; the weights of the others are put off.
    Source: Qi et al. 2024 (Zero Bubble Pipeline Parallelism), section 2.1.
    """
    activations = [min(microbatches, ranks - rank) for rank in range(ranks)]
    limits = [min(microbatches, ranks)] * ranks
    return list_schedule("zb_h1", tuple(range(ranks)), microbatches, activations, limits, Kind.BACKWARD_INPUT)


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """ZB-V: rank r holds the stages r and 2p - 1 - r, so that the last stage is on the first rank, beside the first.

    Bubble: none for T_F = T_B = T_W and m >= 2p - 1: no rank waits between its first action and its last.
    In flight: at most min(2m, 2p) microbatches of one stage each, 1F1B's memory, since a stage is half as long here.
    Source: Qi et al. 2024, section 6.
    """
    limits = [2 * min(microbatches, ranks)] * ranks
    placement = (*range(ranks), *reversed(range(ranks)))
    return list_schedule("zb_v", placement, microbatches, limits, limits, Kind.BACKWARD_INPUT)


def forward_only(placement: Sequence[int], microbatches: int) -> Schedule:
    """Forwards alone, for validation, test and predict.

    Args:
        placement: stage -> rank, that of the schedule trained with: the stages are where they are.
        microbatches: 1 or more.

    In flight: 1, since nothing is kept for a backward.
    """
    limits = [1] * (max(placement) + 1)
    return list_schedule("forward_only", tuple(placement), microbatches, limits, limits, None)


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
