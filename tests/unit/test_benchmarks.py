"""The benchmarks' own machinery: turns, ratios, and what they refuse to compare."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import random
import statistics
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd import DeviceType
from torch.utils.flop_counter import FlopCounterMode

from tests import devices
from tests.benchmarks import alone, data, gpu, optimizer, pipeline, single, tensor
from tests.benchmarks.layer import LayerSize, Ours, Plain
from tests.benchmarks.models import Size
from tests.benchmarks.ratios import OURS, Figure, Ratio, Row, check_losses, compare, interval
from tests.benchmarks.report import tables
from tests.benchmarks.standin import StandIn, Wire, _Stream, standin_world
from tests.benchmarks.turns import Program, Taken, alternate, loop
from tests.ranks import run_ranks

CPU = torch.device("cpu")
LAYER = LayerSize(tp=4, layers=2, hidden=32, ffn=64, heads=8, kv_heads=4, tokens=16)
BATCH = dataclasses.replace(LAYER, sequences=2)
BENCH = gpu.Bench(
    LAYER, BATCH, Size("tiny", 16, 32, 4, 1, 1, 8), square=16, gigabytes_per_second=1, rounds=1, steps=3, device="cpu",
    dtype="float32", compiler=None,
)  # fmt: skip


def test_programs_take_turns_in_an_order_that_goes_round() -> None:
    ran: list[str] = []

    def noting(name: str) -> Callable[[Program], None]:
        def step() -> torch.Tensor:
            ran.append(name)
            return torch.tensor(2.0)

        return loop(step)

    taken = alternate({"a": noting("a"), "b": noting("b")}, steps=3, warm_up=1)
    assert ran[:8] == ["a", "b", "b", "a", "a", "b", "b", "a"]
    assert [len(t.seconds) for t in taken.values()] == [3, 3]
    assert [t.loss for t in taken.values()] == [2.0, 2.0]
    assert all(t.python for t in taken.values())


def test_an_error_of_a_program_is_raised_where_it_is_waited_for() -> None:
    def step() -> torch.Tensor:
        raise ValueError("broken")

    program = Program(loop(step))
    with pytest.raises(ValueError, match="broken"):
        program.step()


def test_the_interval_holds_the_median_as_often_as_it_says() -> None:
    draw = random.Random(0)
    found = [interval([draw.lognormvariate(0, 1) for _ in range(60)]) for _ in range(1000)]  # its median is 1
    assert 0.93 <= statistics.fmean(ratio.low <= 1 <= ratio.high for ratio in found) <= 0.985


def test_a_step_lasts_until_the_slowest_rank_is_done() -> None:
    ranks = [{OURS: _taken([2.0, 1.0]), "peer": _taken([1.0, 2.0])}, {OURS: _taken([1.0, 4.0]), "peer": _taken([1, 1])}]
    (row,) = compare("tensor", "what", [ranks], {"peer": 1.0})
    assert row.ratio == Ratio(2.0, 2.0, 2.0) and row.met is False
    assert "**2.000**" in tables([row]) and "missed" in tables([row])


def test_programs_with_different_losses_are_not_compared() -> None:
    with pytest.raises(AssertionError, match="first losses differ"):
        check_losses("what", [{OURS: _taken([1.0]), "peer": Taken([1.0], [1.0], loss=3.1)}])


PAIRS = torch.tensor([0.0, 1.0] * 4 + [2.0, 3.0] * 4)


def test_what_a_stand_in_sends_is_there_after_the_wait_and_not_before() -> None:
    wire = Wire(CPU, 1e3, poison=True)  # bytes per second
    group = StandIn(wire, rank=0, size=4)
    own, whole, part = torch.arange(4.0), torch.empty(16), torch.empty(4)
    for begin, result, value, nbytes in [
        (lambda: group.all_gather_single(whole, own), whole, own.repeat(4), 48),
        (lambda: group.reduce_scatter_single(part, torch.arange(16.0)), part, own, 48),
        (lambda: group.allreduce([part]), part, own, 24),
        (lambda: group.all_gather_single_coalesced([*whole.view(2, 8)], [*own.view(2, 2)]), whole, PAIRS, 48),
        (lambda: group.reduce_scatter_single_coalesced([*part.view(2, 2)], [*PAIRS.view(2, 8)]), part, own, 48),
    ]:
        work = begin()
        assert result.isnan().all()
        assert work.wait() and torch.equal(result, value)
        planned, taken = wire.timed(begin)
        assert planned == nbytes / 1e3 <= taken
    with wire.silent():
        assert group.allreduce([part.fill_(7.0)]).wait() and part.eq(7.0).all()
    wire.close()


def test_what_a_stand_in_sends_at_once_is_there() -> None:
    group, whole = StandIn(Wire(CPU, at_once=True), rank=0, size=4), torch.empty(16)
    assert group.all_gather_single(whole, torch.arange(4.0)).wait()
    assert torch.equal(whole, torch.arange(4.0).repeat(4))


def test_a_rank_alone_is_compared_with_the_loop_by_hand() -> None:
    size = Size("tiny", d=16, ffn=32, heads=4, layers=1, rows=2, length=4, rounds=1, steps=2)
    found = list(alone.rows([size], [True, False], tp=2))
    assert [row.peer for row in found] == ["by hand"] * 2
    assert all(0 < row.ratio.low <= row.ratio.high for row in found)


def _gradients(
    rank: int, world_size: int, size: LayerSize, long_row: int, sequence: bool, poison: bool
) -> list[torch.Tensor]:
    torch.distributed.destroy_process_group()
    wire = Wire(CPU, 1e6, poison)
    with standin_world(size.tp, wire), mock.patch("lightning_megatp.tensor.collectives.LONG_ROW", long_row):
        ours = Ours(size, sequence, CPU, torch.float32)
        y = ours.forward()
        ours.backward(y)
        return [y.detach(), *(x.grad.clone() for x in (ours.x, *ours.model.parameters()))]


TINY = Size("small", d=16, ffn=32, heads=4, layers=2, rows=2, length=4, rounds=1, steps=1)
COMPARISONS: dict[str, tuple[int, Callable[..., Any], tuple[Any, ...]]] = {
    "tensor": (2, tensor.measure, (TINY, True)),
    "pipeline": (2, pipeline.measure, (TINY, 2)),
    "pipeline, processor": (2, pipeline.measure_processor, (TINY, 2)),
    "zero=0": (2, data.measure, (TINY, 0)),
    "zero=3": (2, data.measure, (TINY, 3)),
    "single": (1, single.measure, (TINY,)),
    **{f"optimizer {kind}": (2, optimizer.measure, (4, 8, kind, 1)) for kind in optimizer.KINDS},
}


@pytest.mark.parametrize("what", COMPARISONS)
def test_all_that_is_compared_runs(what: str) -> None:
    ranks, measure, args = COMPARISONS[what]
    for taken in run_ranks(ranks, measure, *args):
        assert len(taken) > 1 and all(len(each.seconds) == 1 for each in taken.values())
        assert all(each.processor[0] > 0 for each in taken.values())


@pytest.mark.parametrize("sequence, size, long_row", [(True, LAYER, 2**20), (False, LAYER, 2**20), (True, BATCH, 0)])
def test_layers_wait_for_the_results_of_collectives(sequence: bool, size: LayerSize, long_row: int) -> None:
    """Values that were read too early are NaN."""
    (expected,) = run_ranks(1, _gradients, size, long_row, sequence, False)
    (found,) = run_ranks(1, _gradients, size, long_row, sequence, True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not any(x.isnan().any() for x in found)


@pytest.mark.parametrize("size", [LAYER, BATCH])
@pytest.mark.parametrize("sequence", [True, False])
def test_a_layers_operations_are_counted_by_formula(sequence: bool, size: LayerSize) -> None:
    plain = Plain(size, sequence, CPU, torch.float32)
    with FlopCounterMode(display=False) as counter:
        plain.step()
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    attention = 3 * 2 * size.sequences * size.tokens**2 * size.hidden // size.tp
    assert products == size.layers * (size.flops - attention)


COMPILERS = [None, pytest.param("eager", marks=pytest.mark.extended)]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_rows_of_a_gpu_run_in_small_on_a_cpu(compiler: str | None) -> None:
    found = list(gpu.rows(dataclasses.replace(BENCH, compiler=compiler)))
    ratios = [x for x in found if isinstance(x, Row)]
    figures = {x.what: x.value for x in found if isinstance(x, Figure)}
    assert [(row.peer, row.goal) for row in ratios[:2]] == [(gpu.PLAIN, 1.01), (gpu.PLAIN, None)]
    assert len(ratios) == 2 * 5 + (compiler is not None) and len(figures) == len(found) - len(ratios)
    assert all(math.isfinite(x) for x in figures.values())
    close = [x for x in found if isinstance(x, Figure) and x.goal == gpu.LOSS_GOAL]
    assert len(close) == 2 and all(x.met for x in close)
    assert "### One GPU" in tables(found)


def test_processes_with_other_variables_are_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = mock.Mock()
    monkeypatch.setattr(gpu, "pools", pools)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    with gpu.started_with("cuda", **gpu.ONE_QUEUE):
        assert devices.chosen() == "cuda" and os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        assert pools.close.call_count == 1
    assert devices.chosen() == "cpu" and "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
    assert pools.close.call_count == 2


class _Cuda:
    """Stands in for torch.cuda: a device on which streams do at once what they are told, and events take a second."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.Stream = lambda device: self
        self.stream = lambda stream: contextlib.nullcontext()
        self.current_stream = lambda: self

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: self.calls.append(name)

    def Event(self, enable_timing: bool) -> _Cuda:
        return self

    def elapsed_time(self, end: object) -> float:
        return 1000.0

    def memory_allocated(self) -> int:
        return 100

    def max_memory_allocated(self) -> int:
        return 350


def test_on_a_stream_a_collective_takes_its_time_between_two_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the order of calls: what they do needs a GPU."""
    cuda = _Cuda()
    monkeypatch.setattr(torch, "cuda", cuda)

    def move(source: torch.Tensor, target: torch.Tensor, seconds: float) -> None:
        cuda.calls.append(f"move for {seconds} s")
        target.copy_(source)

    stream, logged = _Stream(CPU, move), list[float]()
    x = torch.empty(4)
    cuda.calls.clear()
    work = stream.run(x, torch.arange(4.0), 2.0, lambda seconds, start, end: logged.append(seconds))
    assert cuda.calls == ["wait_stream", "record", "move for 2.0 s", "record"] and torch.equal(x, torch.arange(4.0))
    assert work.wait() and cuda.calls[4:] == ["wait_event"] and logged == [2.0]
    assert stream.between(cuda, cuda) == 1.0
    stream.finish()
    assert cuda.calls[5:] == ["synchronize"]


def test_of_a_gpu_memory_beside_the_model_and_kernels_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(2, 3, bias=False)  # 24 bytes
    program = gpu.Program(lambda: torch.ones(2), lambda: None, model)
    kernels = [
        ("gemm", False),
        ("Memcpy DtoD", False),
        ("Memset", False),
        ("a range of the user", True),
        ("add", False),
    ]
    events = [mock.Mock(device_type=DeviceType.CUDA, is_user_annotation=user) for _, user in kernels]
    for event, (name, _) in zip(events, kernels, strict=True):
        event.name = name
    taken = mock.MagicMock()
    taken.return_value.__enter__.return_value.events.return_value = [
        *events, mock.Mock(device_type=DeviceType.CPU, is_user_annotation=False)
    ]  # fmt: skip
    monkeypatch.setattr(torch, "cuda", _Cuda())
    monkeypatch.setattr(gpu, "profile", taken)
    assert gpu._peak(program, torch.device("cuda")) == 350 - 100 + 24
    assert gpu._launched(program, torch.device("cuda")) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_there_are_no_rows(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(gpu.rows(dataclasses.replace(BENCH, device="cuda"))) == []
    assert "needs a CUDA device" in capsys.readouterr().out


def _taken(seconds: list[float]) -> Taken:
    return Taken(seconds, [0.0], loss=3.0)
