"""Schedules: complete, free of deadlocks, as short and as small as published, and in torch's order."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining import schedules as theirs

from lightning_megatp.pipeline.schedules.check import ScheduleError, Timeline, Times, check, peaks, simulate
from lightning_megatp.pipeline.schedules.generators import (
    NAMES,
    forward_only,
    gpipe,
    interleaved,
    looped,
    make_schedule,
    one_f_one_b,
    split_end,
    zb_h1,
    zb_v,
)
from lightning_megatp.pipeline.schedules.messages import receive_ahead
from lightning_megatp.pipeline.schedules.schedule import Action, Kind, Schedule
from lightning_megatp.pipeline.settings import on_device

Order = list[list[tuple[str, int, int]]]
"""Rank -> (kind, stage, microbatch) of what it computes."""
UNEVEN = Times(forward=2, backward_input=3, backward_weight=1, message=2)
COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@functools.cache
def every(most_ranks: int, most_rounds: int = 3) -> tuple[Schedule, ...]:
    """Every schedule for every p up to a number, and every m up to a few times p."""
    return tuple(_every(most_ranks, most_rounds))


def _every(most_ranks: int, most_rounds: int) -> Iterator[Schedule]:
    for p in range(1, most_ranks + 1):
        for m in range(1, most_rounds * p + 2):
            yield from (gpipe(p, m), one_f_one_b(p, m), zb_h1(p, m), zb_v(p, m))
            yield from (interleaved(p, m, v) for v in (1, 2, 3))
            yield split_end(one_f_one_b(p, m))
            yield from (forward_only(placement, m) for placement in (looped(p, 1), looped(p, 3), zb_v(p, m).placement))


def computed(schedule: Schedule) -> Order:
    return [[(a.kind.value, a.stage, a.microbatch) for a in rank if a.kind in COMPUTES] for rank in schedule.actions]


def names(schedule: Schedule, rank: int) -> list[str]:
    return list(map(str, schedule.actions[rank]))


def lost(timeline: Timeline) -> float:
    """Time on the longest way from the first action to the last in which a rank doesn't compute."""
    return timeline.makespan - max(timeline.busy)


# ---- properties of all ----


def test_all_schedules_are_right_and_end() -> None:
    count = 0
    for schedule in every(6):
        check(schedule)
        assert simulate(schedule).makespan > 0
        count += 1
    assert count > 600


def test_no_deadlock_whatever_the_times() -> None:
    for schedule in every(4):
        assert simulate(schedule, UNEVEN).makespan > 0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("microbatches", [1, 100])
def test_64_ranks(name: str, microbatches: int) -> None:
    schedule = make_schedule(name, 64, microbatches)
    check(schedule)
    assert simulate(schedule).makespan > 0


def test_no_deadlock_where_computations_wait_for_all_messages_under_way() -> None:
    """What a GPU may do. One pipeline of two ranks did, at its first batch, when receives were posted a computation
    ahead of their need: the gradient's before the forward whose gradient it is."""
    for schedule in every(5):
        assert simulate(schedule, UNEVEN, strict=True).makespan >= simulate(schedule, UNEVEN).makespan
    ahead = receive_ahead(gpipe(2, 1))
    assert str(ahead.actions[0][0]) == "RB0.0" and simulate(ahead).makespan > 0
    with pytest.raises(ScheduleError, match=r"Rank 0 waits at F0.0 for RB0.0, and rank 1 hasn't come to SB1.0"):
        simulate(ahead, strict=True)


def test_one_queue_of_a_gpu_is_enough_for_most_schedules() -> None:
    for p, m in itertools.product(range(1, 6), range(1, 9)):
        for schedule in (gpipe(p, m), one_f_one_b(p, m), split_end(one_f_one_b(p, m)), zb_h1(p, m)):
            assert simulate(schedule, strict=True, one_queue=True).makespan > 0


def test_one_queue_is_refused_where_ranks_would_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = zb_v(2, 3)
    assert on_device(schedule, torch.device("cuda")) is schedule
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    assert on_device(schedule, torch.device("cpu")) == receive_ahead(schedule)
    assert on_device(one_f_one_b(2, 3), torch.device("cuda")) == one_f_one_b(2, 3)
    with pytest.raises(ValueError, match=r"CUDA_DEVICE_MAX_CONNECTIONS=1 .*schedule='zb_v' and 3 microbatches"):
        on_device(schedule, torch.device("cuda"))


def test_receives_are_few() -> None:
    for schedule in every(6):
        for actions in schedule.actions:
            posted: set[Action] = set()
            for action in actions:
                if action.is_receive:
                    posted.add(action)
                    assert len(posted) <= schedule.ranks + 1, "buffers are bounded"
                elif action.kind in COMPUTES and (receive := schedule.receive_for(action)):
                    posted.remove(receive)
            assert not posted


def test_receives_are_posted_a_computation_ahead_where_messages_hold_nobody_up() -> None:
    for plain in every(5):
        schedule = receive_ahead(plain)
        check(schedule)
        assert simulate(schedule).makespan == simulate(plain).makespan
        assert computed(schedule) == computed(plain)
        for actions in schedule.actions:
            posted: dict[Action, int] = {}
            computations = 0
            for action in actions:
                if action.is_receive:
                    posted[action] = computations
                elif action.kind in COMPUTES:
                    if receive := schedule.receive_for(action):
                        assert posted.pop(receive) < computations or computations == 0
                    computations += 1
            assert not posted


def test_each_direction_has_its_group_and_a_turn_has_no_message() -> None:
    for schedule in (zb_v(3, 4), interleaved(2, 5, 3), interleaved(3, 5, 2)):
        for actions in schedule.actions:
            for action in filter(lambda action: action.is_message, actions):
                source, destination = schedule.stream(action)
                assert source != destination
                assert schedule.group(action) == ("up" if source < destination else "down")
                assert schedule.group(action.partner) == schedule.group(action)
                assert action.partner.partner == action
    assert not zb_v(3, 4).crosses(3), "stages 2 and 3 are both on rank 2"
    wrap = Action(Kind.SEND_FORWARD, 2, 0)
    assert interleaved(3, 5, 2).group(wrap) == "down", "from the last rank on to the first"


# ---- time ----


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_the_bubbles_of_gpipe_and_1f1b(p: int) -> None:
    """(p - 1) / (m + p - 1): Huang et al. 2019, section 2.3; Narayanan et al. 2021, section 2.2.1."""
    for m in range(1, 3 * p + 2):
        for times in (Times(), Times(1, 3, 2)):
            assert simulate(gpipe(p, m), times).bubble == pytest.approx((p - 1) / (m + p - 1))
            assert simulate(one_f_one_b(p, m), times).bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("v", [2, 3, 4])
def test_the_bubble_of_interleaved(p: int, v: int) -> None:
    """(p - 1) / (v m + p - 1) for m a multiple of p: Narayanan et al. 2021, section 2.2.2, whose (p - 1) / (v m) is
    relative to the ideal time."""
    for m in (p, 2 * p, 5 * p):
        assert simulate(interleaved(p, m, v)).bubble == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize("times", [Times(), Times(3, 4, 2), Times(2, 2, 1)])
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_a_split_end_saves_the_weights_of_every_rank_but_one(p: int, times: Times) -> None:
    for m in range(1, 3 * p + 2):
        found = lost(simulate(split_end(one_f_one_b(p, m)), times))
        assert found == (p - 1) * (times.forward + times.backward_input)


def test_a_split_end_needs_no_memory_and_leaves_the_rest() -> None:
    for p, m in itertools.product(range(1, 6), range(1, 10)):
        plain, split = one_f_one_b(p, m), split_end(one_f_one_b(p, m))
        assert peaks(split) == peaks(plain)
        assert split.actions[0] == plain.actions[0], "nobody waits for the first stage"
        assert split.splits_end == split.defers_weights == (p > 1) and not plain.defers_weights
        halves = [sum(action.kind is Kind.BACKWARD_WEIGHT for action in actions) for actions in split.actions]
        assert halves == [0] + [min(m, p - 1)] * (p - 1)
    assert not zb_h1(2, 2).splits_end
    assert " ".join(names(split_end(one_f_one_b(2, 2)), 1)) == "RF1.0 F1.0 RF1.1 B1.0 SB1.0 F1.1 I1.1 SB1.1 W1.1 R1"


@pytest.mark.parametrize("times", [Times(), Times(3, 4, 2), Times(1, 2, 1), Times(2, 2, 0)])
@pytest.mark.parametrize("p", [1, 2, 3, 5, 8])
def test_the_bubble_of_zb_h1(p: int, times: Times) -> None:
    """(p - 1) (T_F + T_B - T_W), with T_B the input's part: Qi et al. 2024, section 2, table 2."""
    expected = (p - 1) * (times.forward + times.backward_input - times.backward_weight)
    for m in range(p, 3 * p + 2):
        assert lost(simulate(zb_h1(p, m), times)) == expected


@pytest.mark.parametrize("p", [1, 2, 3, 5, 8, 16])
def test_zb_v_has_no_bubble(p: int) -> None:
    """No rank waits between its first and last action, for T_F = T_B = T_W: Qi et al. 2024, section 6. Then nothing is
    shorter: the last rank can't begin before p - 1 forwards."""
    for m in (max(1, 2 * p - 1), 2 * p, 2 * p + 1, 3 * p + 1):
        timeline = simulate(zb_v(p, m))
        assert set(timeline.idle) == {0}
        assert timeline.makespan == 6 * m + p - 1


def test_zero_bubble_schedules_are_never_slower_than_1f1b() -> None:
    for p, m in itertools.product(range(1, 7), range(1, 14)):
        plain = simulate(one_f_one_b(p, m)).makespan
        assert simulate(zb_h1(p, m)).makespan <= plain
        assert simulate(zb_v(p, m), Times(0.5, 0.5, 0.5)).makespan <= plain


def test_a_message_takes_its_time() -> None:
    timeline = simulate(forward_only(looped(3, 1), 1), Times(message=5))
    assert timeline.makespan == 3 + 2 * 5
    assert timeline.start[2] == (0, 12), "the receive is posted at once, the forward waits"
    assert timeline.end[2] == (12, 13)
    assert timeline.busy == (1, 1, 1)
    assert timeline.bubble == pytest.approx(1 - 3 / (13 * 3))


# ---- memory ----


def test_peaks_in_flight_are_the_published_ones() -> None:
    """1F1B: Narayanan et al. 2021, section 2.2.1; interleaved: Megatron-LM's warm-up, one more; ZB-H1 and ZB-V: Qi et
    al. 2024, sections 2.1 and 6."""
    for p, m in itertools.product(range(1, 7), range(1, 20)):
        ranks = range(p)
        one_after_one = tuple(min(m, p - r) for r in ranks)
        assert peaks(gpipe(p, m)) == ((m,) * p,) * 2
        assert peaks(one_f_one_b(p, m)) == (one_after_one,) * 2
        assert peaks(zb_h1(p, m)) == (one_after_one, (min(m, p),) * p)
        assert max(peaks(zb_v(p, m))[1]) <= min(2 * m, 2 * p)
        if m >= 2 * p - 1:
            assert peaks(zb_v(p, m))[1] == (2 * p,) * p
        for v in (2, 3):
            longest = -(-m // max(1, m // p))
            bound = tuple(min(v * m, (v - 1) * longest + 2 * (p - 1 - r) + 1) for r in ranks)
            assert peaks(interleaved(p, m, v)) == (bound, bound)
        assert peaks(forward_only(looped(p, 2), m)) == ((1,) * p,) * 2


def test_declared_bounds_are_reached() -> None:
    for schedule in every(5):
        if schedule.name != "zb_v" or schedule.microbatches >= 2 * schedule.ranks - 1:
            assert peaks(schedule)[1] == schedule.in_flight


# ---- order ----


class RecordingStage:
    """Stands in for torch's stage in its own step loop; there are no neighbours, so no messages."""

    def __init__(self, stage_index: int, num_stages: int) -> None:
        self.stage_index, self.num_stages = stage_index, num_stages
        self.is_first, self.is_last, self.has_backward = stage_index == 0, False, True
        self.order: list[tuple[str, int, int]] = []

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.order.append(("F", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> None:
        self.order.append(("B", self.stage_index, microbatch))

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: []  # get_fwd_recv_ops and its like, clear_runtime_states, perform_reduce_grad


@pytest.mark.parametrize(("ours", "torchs"), [(gpipe, theirs.ScheduleGPipe), (one_f_one_b, theirs.Schedule1F1B)])
def test_gpipe_and_1f1b_have_the_order_of_torchs_loops(
    ours: Callable[[int, int], Schedule], torchs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchs, "_initialize_stage", lambda *_: None)
    for p in range(1, 7):
        for m in range(p, 3 * p + 2):  # torch refuses fewer microbatches than stages for 1F1B
            stages = [RecordingStage(rank, p) for rank in range(p)]
            for stage in stages:
                torchs(stage, m, loss_fn=lambda *_: None)._step_microbatches()
            assert computed(ours(p, m)) == [stage.order for stage in stages]


def test_interleaved_has_torchs_order() -> None:
    compared = 0
    for p, m, v in itertools.product(range(1, 7), range(1, 20), (2, 3)):
        if m % max(1, m // p):
            continue  # rounds of different lengths: torch refuses them
        stages: Any = [
            SimpleNamespace(num_stages=p * v, group_size=p, group_rank=0, stage_index=c * p) for c in range(v)
        ]
        order = theirs.ScheduleInterleaved1F1B(stages, m).pipeline_order
        wanted = [[(a.computation_type.value, a.stage_index, a.microbatch_index) for a in order[r] if a] for r in order]
        assert computed(interleaved(p, m, v)) == wanted
        compared += 1
    assert compared > 100


def test_schedules_in_full() -> None:
    assert [" ".join(names(one_f_one_b(2, 3), rank)) for rank in (0, 1)] == [
        "F0.0 SF0.0 F0.1 SF0.1 RB0.0 B0.0 F0.2 SF0.2 RB0.1 RB0.2 B0.1 B0.2 R0",
        "RF1.0 F1.0 RF1.1 B1.0 SB1.0 F1.1 RF1.2 B1.1 SB1.1 F1.2 B1.2 SB1.2 R1",
    ]
    assert names(forward_only((0, 0), 2), 0) == ["F0.0", "F1.0", "F0.1", "F1.1"]
    assert names(zb_h1(1, 2), 0) == ["F0.0", "I0.0", "W0.0", "F0.1", "I0.1", "W0.1", "R0"]


def test_a_stage_is_reduced_once_right_after_its_last_gradient() -> None:
    for schedule in every(4):
        for rank, actions in enumerate(schedule.actions):
            reduced = [action.stage for action in actions if action.kind is Kind.REDUCE]
            assert sorted(reduced) == ([] if schedule.forward_only else schedule.stages_of(rank))
            for at, action in enumerate(actions):
                if action.kind is Kind.REDUCE:
                    before = next(a for a in reversed(actions[:at]) if not a.is_message)
                    assert before.completes and before.stage == action.stage


# ---- what is wrong is found ----


def edit(schedule: Schedule, rank: int, change: Callable[[list[str]], list[str]]) -> Schedule:
    """The schedule with one rank's list, as short names, changed."""
    known = {str(action): action for action in schedule.actions[rank]}
    actions = list(schedule.actions)
    actions[rank] = tuple(known[name] for name in change(names(schedule, rank)))
    return replace(schedule, actions=tuple(actions))


def without(name: str) -> Callable[[list[str]], list[str]]:
    return lambda found: [other for other in found if other != name]


def swap(first: str, second: str) -> Callable[[list[str]], list[str]]:
    return lambda found: [{first: second, second: first}.get(name, name) for name in found]


def move(name: str, after: str) -> Callable[[list[str]], list[str]]:
    def change(found: list[str]) -> list[str]:
        rest = without(name)(found)
        at = rest.index(after) + 1
        return [*rest[:at], name, *rest[at:]]

    return change


@pytest.mark.parametrize(
    ("rank", "change", "text"),
    [
        (1, without("RF1.1"), "1f1b: rank 1 lacks RF1.1."),
        (0, without("SF0.1"), "1f1b: rank 0 lacks SF0.1."),
        (0, without("F0.1"), "1f1b: rank 0 lacks F0.1."),
        (0, lambda found: found[:1], "1f1b: rank 0 lacks F0.1, F0.2, F0.3, I0.0, I0.1, ... 15 more."),
        (0, lambda found: [*found, "B0.2"], "1f1b: rank 0 has more than once I0.2, W0.2."),
        (1, swap("SB1.1", "F1.1"), "1f1b: rank 1 has SB1.1 before I1.1, which it needs."),
        (1, move("RF1.1", after="F1.1"), "1f1b: rank 1 has F1.1 before RF1.1, which it needs."),
        (0, move("R0", after="B0.2"), "1f1b: rank 0 has R0 before W0.3, which it needs."),
        (
            1,
            lambda found: ["RF1.1", *without("RF1.1")(found)],
            "1f1b: message 0 from rank 0 to 1 is sent as SF0.0 and received as RF1.1.",
        ),
        (0, move("SF0.1", after="SF0.2"), "1f1b: message 1 from rank 0 to 1 is sent as SF0.2 and received as RF1.1."),
        (0, move("B0.0", after="F0.3"), "1f1b: rank 0 has 4 microbatches in flight, its bound is 3."),
    ],
)
def test_check_finds_it(rank: int, change: Callable[[list[str]], list[str]], text: str) -> None:
    with pytest.raises(ScheduleError, match=f"^{re.escape(text)}"):
        check(edit(one_f_one_b(3, 4), rank, change))


def test_check_finds_what_does_not_belong() -> None:
    schedule = one_f_one_b(2, 2)
    stray = Action(Kind.FORWARD, 1, 0)
    with pytest.raises(ScheduleError, match=re.escape("1f1b: rank 0 should not have F1.0.")):
        check(replace(schedule, actions=((*schedule.actions[0], stray), schedule.actions[1])))


@pytest.mark.parametrize(
    ("rank", "change", "texts"),
    [
        (1, without("RF1.1"), ["Rank 1 waits at F1.1 for RF1.1, which it hasn't posted."]),
        (0, without("SF0.3"), ["Rank 1 waits at F1.3 for RF1.3, and rank 0 hasn't come to SF0.3."]),
        (
            0,
            swap("SF0.1", "SF0.2"),
            ["Rank 0 waits at SF0.2 for F0.2, which it hasn't done."],
        ),
        (
            0,
            move("SF0.1", after="SF0.2"),
            ["Rank 1 waits at F1.1 for RF1.1, but from rank 0 to 1 the next send is SF0.2 and the next receive RF1.1."],
        ),
        (
            1,
            move("RF1.1", after="F1.1"),  # a late receive holds up everyone
            [
                "Rank 0 waits at B0.0 for RB0.0, and rank 1 hasn't come to SB1.0.",
                "Rank 1 waits at F1.1 for RF1.1, which it hasn't posted.",
                "Rank 2 waits at F2.1 for RF2.1, and rank 1 hasn't come to SF1.1.",
            ],
        ),
        (
            2,
            lambda found: move("SB2.0", after="B2.0")(move("B2.0", after="F2.3")(found)),  # a circle of two ranks
            [
                "Rank 1 waits at B1.0 for RB1.0,"
                " but from rank 2 to 1 the next send is SB2.1 and the next receive RB1.0.",
                "Rank 2 waits at F2.2 for RF2.2, and rank 1 hasn't come to SF1.2.",
            ],
        ),
    ],
)
def test_simulate_says_who_waits_for_what(
    rank: int, change: Callable[[list[str]], list[str]], texts: list[str]
) -> None:
    with pytest.raises(ScheduleError, match=r"^1f1b: deadlock\.") as caught:
        simulate(edit(one_f_one_b(3, 4), rank, change))
    for text in texts:
        assert text in str(caught.value)


# ---- by name ----


def test_schedules_by_name() -> None:
    for name in NAMES:
        assert make_schedule(name, 3, 5).name == name
    assert make_schedule("interleaved", 2, 4).stages == 4
    assert make_schedule("interleaved", 2, 4, 3).stages == 6
    assert make_schedule("zb_v", 2, 4, 2).placement == (0, 1, 1, 0)
    assert make_schedule("1f1b", 2, 4, 1) == one_f_one_b(2, 4)
    assert not make_schedule("1f1b", 2, 4).forward_only
    assert forward_only((0, 1), 4).forward_only


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("2f2b", 2, 4), "schedule='2f2b' is not known. Use one of gpipe, 1f1b, interleaved, zb_h1, zb_v."),
        (("1f1b", 0, 4), "pp=0, but a pipeline needs 1 rank or more."),
        (("1f1b", 2, 0), "microbatches=0, but a batch needs 1 or more."),
        (
            ("1f1b", 2, 4, 2),
            "schedule='1f1b' with virtual_stages=2, but it has 1 per rank."
            " Use virtual_stages=1, or schedule='interleaved'.",
        ),
        (
            ("zb_v", 2, 4, 1),
            "schedule='zb_v' with virtual_stages=1, but it has 2 per rank."
            " Use virtual_stages=2, or schedule='1f1b' or 'zb_h1'.",
        ),
        (
            ("interleaved", 2, 4, 1),
            "schedule='interleaved' with virtual_stages=1, but it interleaves 2 stages per rank or more."
            " Use virtual_stages=2, or schedule='1f1b'.",
        ),
    ],
)
def test_what_can_not_be_scheduled(arguments: Any, text: str) -> None:
    with pytest.raises(ValueError, match=f"^MegaTPStrategy: {re.escape(text)}$"):
        make_schedule(*arguments)
