"""What the executor really does: its actions, its memory, its messages, its deferred weights, its timeline."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import io
import json
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_megatp.mesh import MeshShape
from lightning_megatp.pipeline.executor import Direction, Executor, connect, lane, lanes
from lightning_megatp.pipeline.schedules.check import Times, simulate
from lightning_megatp.pipeline.schedules.generators import NAMES, make_schedule
from lightning_megatp.pipeline.schedules.messages import receive_ahead
from lightning_megatp.pipeline.schedules.schedule import Action, Kind, Schedule
from lightning_megatp.pipeline.settings import PipelineOptions
from lightning_megatp.pipeline.slicing.plan import Key, Relay
from lightning_megatp.strategy.report import stage_table
from lightning_megatp.tensor.context import TensorContext
from lightning_megatp.tensor.deferred import DeferredWeights, defer_linears
from lightning_megatp.tensor.layers import ColumnParallelLinear
from tests.crossing import fewer
from tests.distributed.pipeline.fake_transport import DeadlockError, Fabric, run_threads
from tests.parity.compare import ParityError, compare
from tests.parity.parallel import whole_gradients
from tests.parity.running import Run, Setting, fit, fit_reference
from tests.parity.variants import variant
from tests.ranks import run_ranks, run_reference

COMPUTES = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclasses.dataclass(frozen=True)
class Pipelined:
    """A run on real ranks."""

    model: str = "untied"
    schedule: str = "1f1b"
    microbatches: int = 4
    pp: int = 2
    tp: int = 1
    rows: int = 4
    sequence: bool = False
    virtual_stages: int | None = None

    def __str__(self) -> str:
        return f"{self.model}-{self.schedule}-pp{self.pp}-tp{self.tp}-m{self.microbatches}"

    @property
    def setting(self) -> Setting:
        return Setting(self.model, rows=self.rows)

    @property
    def ir(self) -> Schedule:
        options = PipelineOptions(schedule=self.schedule, virtual_stages=self.virtual_stages)
        return receive_ahead(options.made(self.pp, self.microbatches))


def train(case: Pipelined, callbacks: tuple[Callback, ...] = (), **options: Any) -> Run:
    """Train on this rank."""
    from lightning_megatp import MegaTPStrategy

    plan = variant(case.model).plan if case.tp > 1 else {}
    strategy = MegaTPStrategy(
        tp=case.tp, pp=case.pp, plan=plan, sequence_parallel=case.sequence, microbatches=case.microbatches,
        schedule=case.schedule, virtual_stages=case.virtual_stages, **{"summary": False, **options},
    )  # fmt: skip
    return fit(case.setting, strategy, case.tp * case.pp, 1, whole_gradients, callbacks)


def check_parity(case: Pipelined, runs: list[Run]) -> None:
    compare(run_reference(fit_reference, case.setting), runs, case.tp, "64-true")


# ---- the order ----


class Executed(Callback):
    """The actions of the second batch."""

    def __init__(self) -> None:
        self.rank = -1
        self.actions: list[Action] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            executor = trainer.strategy.pipeline.executor
            self.rank, self.actions = executor.transport.rank, list(executor.executed)


def _executed(rank: int, world_size: int, case: Pipelined) -> tuple[Run, int, list[Action]]:
    executed = Executed()
    return train(case, (executed,)), executed.rank, executed.actions


ORDERS = [
    *(Pipelined("deep", name) for name in NAMES if name != "interleaved"),
    Pipelined("recomputed", "zb_h1"),
    Pipelined("computed", "zb_h1"),
]
FURTHER_ORDERS = [
    Pipelined("deep_tied", "interleaved", virtual_stages=2),
    Pipelined("deep", "1f1b", pp=4),
    Pipelined("deep_tied", "zb_v", pp=4),
    Pipelined("swiglu_rms", "zb_h1", tp=2, sequence=True),
    Pipelined("grouped", "zb_v", tp=2, microbatches=2),
]


@pytest.mark.parametrize(
    "case", [*ORDERS, *(pytest.param(case, marks=pytest.mark.extended) for case in FURTHER_ORDERS)], ids=str
)
def test_every_rank_executes_its_list(case: Pipelined) -> None:
    results = run_ranks(case.pp * case.tp, _executed, case)
    check_parity(case, [run for run, _, _ in results])
    assert sorted(rank for _, rank, _ in results) == sorted([*range(case.pp)] * case.tp)
    for _, rank, actions in results:
        assert tuple(actions) == case.ir.actions[rank]
        at = {action: i for i, action in enumerate(actions)}
        for action in actions:
            if receive := case.ir.receive_for(action) if action.kind in COMPUTES else None:
                between = [other for other in actions[at[receive] : at[action]] if other.kind in COMPUTES]
                first = next(other for other in actions if other.kind in COMPUTES)
                assert between or action == first, f"{receive} is posted a computation ahead of {action}"
        weights = [action for action in actions if action.kind is Kind.BACKWARD_WEIGHT]
        assert bool(weights) == (case.ir.defers_weights and not (case.schedule == "1f1b" and rank == 0))
        if weights:
            inputs = [Action(Kind.BACKWARD_INPUT, w.stage, w.microbatch) for w in weights]
            later = [at[w] - at[i] for w, i in zip(weights, inputs, strict=True)]
            assert max(later) > 1, "another action lies between a backward-input and its weight"


# ---- deferred weights ----


class WeightTimes(Callback):
    """When the gradients of linear weights come, in the first batch."""

    def __init__(self) -> None:
        self.before: dict[Any, dict[str, Tensor | None]] = {}
        self.after: dict[Any, dict[str, Tensor | None]] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        deferred = trainer.strategy.parallel.context.deferred
        deferred.__dict__.pop("compute", None)
        if batch_idx > 0:
            return
        compute = deferred.compute

        def compute_and_look(key: Any) -> None:
            self.before[key] = self._gradients(module)
            compute(key)
            self.after[key] = self._gradients(module)

        deferred.compute = compute_and_look

    @staticmethod
    def _gradients(module: nn.Module) -> dict[str, Tensor | None]:
        linears = {f"{name}.weight" for name, child in module.named_modules() if isinstance(child, nn.Linear)}
        own = {name: p for name, p in module.named_parameters() if name in linears}
        return {name: None if p.grad is None else p.grad.clone() for name, p in own.items()}


def _weight_times(rank: int, world_size: int, case: Pipelined) -> tuple[Any, Any]:
    times = WeightTimes()
    train(case, (times,))
    return times.before, times.after


@pytest.mark.parametrize("tp", [1, 2])
def test_weight_gradients_come_with_their_action(tp: int) -> None:
    case = Pipelined("untied", "zb_h1", tp=tp)
    for all_before, all_after in run_ranks(2 * tp, _weight_times, case):
        assert len(all_before) == case.microbatches
        held: dict[str, Tensor | None] = {}
        for key, before in all_before.items():
            assert len(before) >= 4
            for name, gradient in before.items():
                last = held.get(name)
                same = gradient is None if last is None else gradient is not None and torch.equal(gradient, last)
                assert same, f"{name} got no gradient between two backward-weights, before {key}"
            held = all_after[key]
            for name, gradient in held.items():
                assert gradient is not None and not (before[name] is not None and torch.equal(gradient, before[name]))


def _kept_whole(rank: int, world_size: int) -> tuple[bool, bool]:
    context = TensorContext(dist.group.WORLD)
    x = torch.randn(5, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def gradients(put_off: bool) -> tuple[bool, list[Tensor]]:
        torch.manual_seed(1)
        layer = nn.Linear(6, 8, dtype=torch.float64)
        ColumnParallelLinear.adopt(layer, context, (((0, 5),), ((5, 8),)))
        layer.whole_parameters = frozenset(["weight", "bias"])
        with context.deferred.batch() if put_off else contextlib.nullcontext(), context.deferred.put_off(0):
            layer(x).square().sum().backward()
            at_once = layer.weight.grad is not None
            context.deferred.compute(0)
        return at_once, [p.grad for p in layer.parameters() if p.grad is not None]

    (_, expected), (at_once, found) = gradients(False), gradients(True)
    return at_once, len(found) == 2 and all(map(torch.equal, found, expected))


def test_weights_kept_whole_are_not_put_off() -> None:
    """Their gradients are put together over the ranks, where the backward of all ranks comes by."""
    assert run_ranks(2, _kept_whole) == [(True, True)] * 2


def test_set_up_names_what_cannot_be_put_off() -> None:
    settings = SimpleNamespace(microbatches=4, schedule=lambda m: make_schedule("zb_h1", 2, m))
    units = {"blocks.0": 0, "blocks.1": 1}
    mesh = SimpleNamespace(shape=MeshShape(pp=2))
    found = {"settings": settings, "stage_of_unit": units, "stage_parameters": [3, 4], "compiled": ["blocks.1"]}
    found["mesh"] = mesh
    table = stage_table(SimpleNamespace(slicer=SimpleNamespace(tail=False), **found))  # type: ignore[arg-type]
    assert "compiled, so that weight gradients can't be put off: blocks.1" in str(table.caption)


@pytest.mark.parametrize(
    ("schedule", "ranks"),
    [("1f1b", ["2, 3", "0, 1"]), ("interleaved", ["2, 3", "0, 1"] * 2), ("zb_v", ["0, 1", "2, 3", "2, 3", "0, 1"])],
)
def test_set_up_says_which_global_ranks_have_a_stage(schedule: str, ranks: list[str]) -> None:
    """Global rank 0 has the last stage, wherever a schedule puts that."""
    settings = SimpleNamespace(microbatches=4, schedule=lambda m: make_schedule(schedule, 2, m))
    units = {f"blocks.{stage}": stage for stage in range(len(ranks))}
    found = {"settings": settings, "stage_of_unit": units, "stage_parameters": [1] * len(ranks), "compiled": []}
    found["mesh"] = SimpleNamespace(shape=MeshShape(pp=2, tp=2))
    table = stage_table(SimpleNamespace(slicer=SimpleNamespace(tail=False), **found))  # type: ignore[arg-type]
    assert list(table.columns[1].cells) == ranks
    assert str(table.caption).startswith("up to 4 microbatches")


# ---- memory ----


class SavedBytes(Callback):
    """The most bytes of activations that are saved for backward at once, in the second batch."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._stack = contextlib.ExitStack()
        self._parameters: set[int] = set()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            gc.collect()
            self._parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
            self._stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor))

    def on_train_batch_end(self, *args: Any) -> None:
        self._stack.close()

    def _pack(self, x: Tensor) -> Held:
        held = Held(x)
        if x.untyped_storage().data_ptr() not in self._parameters:
            self._change(x.nbytes)
            weakref.finalize(held, self._change, -x.nbytes)
        return held

    def _change(self, nbytes: int) -> None:
        self.now += nbytes
        self.peak = max(self.peak, self.now)


@dataclasses.dataclass(eq=False)
class Held:
    """A saved tensor, as long as the graph needs it."""

    tensor: Tensor


def _saved(rank: int, world_size: int, case: Pipelined) -> tuple[int, int, int]:
    saved, executed = SavedBytes(), Executed()
    train(case, (saved, executed))
    return executed.rank, saved.peak, saved.now


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("pp", [2, pytest.param(4, marks=pytest.mark.extended)])
def test_saved_activations_are_those_in_flight(schedule: str, pp: int) -> None:
    case = Pipelined("deep", schedule, microbatches=6, pp=pp, rows=6)
    alone = {rank: peak for rank, peak, _ in run_ranks(pp, _saved, Pipelined("deep", schedule, 1, pp, rows=1))}
    for rank, peak, left in run_ranks(pp, _saved, case):
        assert alone[rank] > 0 and left == 0
        assert peak == case.ir.in_flight[rank] * alone[rank]


# ---- messages that go wrong ----


@dataclasses.dataclass
class Tampering:
    """The transport of real ranks, one of whose messages is changed or lost on its way (both ends believe in it)."""

    links: Any
    kind: str
    sent: int = 0
    received: int = 0

    @property
    def rank(self) -> int:
        return int(self.links.rank)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def send(self, x: Tensor, to: int, direction: str) -> Any:
        self.sent += direction == "up"
        if direction == "up" and self.sent == 2 and self.kind == "lost":
            return Arrived()
        changed = x * 1.001 if direction == "up" and self.sent == 2 and self.kind == "changed" else x
        return self.links.send(changed, to, direction)

    def receive(self, x: Tensor, source: int, direction: str) -> Any:
        self.received += direction == "up"
        if direction == "up" and self.received == 2 and self.kind == "lost":
            x.zero_()
            return Arrived()
        return self.links.receive(x, source, direction)


class Arrived:
    """Nothing to wait for."""

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class Tamper(Callback):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_train_start(self, trainer: Any, module: Any) -> None:
        executor = trainer.strategy.pipeline.executor
        executor.transport = Tampering(executor.transport, self.kind)


def _tampered(rank: int, world_size: int, kind: str, case: Pipelined) -> Run:
    return train(case, (Tamper(kind),))


def test_a_wrong_message_is_seen() -> None:
    case = Pipelined()
    check_parity(case, run_ranks(2, _tampered, "none", case))
    for kind in ("changed", "lost"):
        with pytest.raises(ParityError):
            check_parity(case, run_ranks(2, _tampered, kind, case))


# ---- many ranks, in threads ----


class Chain:
    """One rank's stages of a chain of linears, y = A x + b on each stage; the loss is the sum over microbatches, times
    a factor that the last stage knows when it has seen them all.

    Args:
        first: called before each forward, backward and reduction.
    """

    def __init__(
        self, schedule: Schedule, rank: int, deferred: DeferredWeights, first: Callable[[], None] = lambda: None
    ) -> None:
        self.schedule, self.first = schedule, first
        self.retains_graph = False
        self.factor, self.sends_factor = torch.tensor(torch.nan, dtype=torch.float64), True
        self.layers = {stage: chain_layer(stage) for stage in schedule.stages_of(rank)}
        self.completed: list[int] = []
        for layer in self.layers.values():
            defer_linears(layer, ["0"], deferred)

    def relays(self, boundary: int, microbatch: int) -> list[Relay]:
        if boundary == 0:
            return []
        return [Relay(Key(boundary, 0), (2, 3), (3, 1), torch.float64, torch.device("cpu"), requires_grad=True)]

    def forward(self, stage: int, microbatch: int, received: list[Tensor]) -> list[Tensor]:
        self.first()
        x = received[0] if received else chain_input(microbatch)
        y = self.layers[stage](x)
        if stage < self.schedule.stages - 1:
            return [y]
        if microbatch == self.schedule.microbatches - 1:
            self.factor = torch.tensor(FACTOR, dtype=torch.float64)
        return [y.square().sum()]

    def gradient_of(self, received: Tensor, gradient: Tensor) -> Tensor:
        return gradient

    def root_gradients(self, microbatch: int) -> None:
        return None

    def around_backward(self, stage: int, microbatch: int) -> contextlib.AbstractContextManager[None]:
        self.first()
        return contextlib.nullcontext()

    def complete(self, stage: int) -> None:
        self.first()
        self.completed.append(stage)
        for parameter in self.layers[stage].parameters():
            assert parameter.grad is not None
            parameter.grad *= self.factor


FACTOR = 3.0


def chain_layer(stage: int) -> nn.Sequential:
    layer = nn.Linear(3, 3, dtype=torch.float64)
    generator = torch.Generator().manual_seed(stage)
    with torch.no_grad():
        layer.weight.copy_(torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64)).Q)
        layer.bias.copy_(torch.randn(3, generator=generator) / 10)
    return nn.Sequential(layer)


def chain_input(microbatch: int) -> Tensor:
    return torch.randn(2, 3, generator=torch.Generator().manual_seed(1000 + microbatch), dtype=torch.float64)


def run_chain(schedule: Schedule, fabric: Fabric, strict: bool = False) -> dict[int, nn.Module]:
    """Stage -> its layer, with gradients, after one batch through the real executor on a thread per rank.

    Args:
        strict: before a computation, a rank waits for all its messages under way.
    """

    def run(rank: int) -> Chain:
        deferred, transport = DeferredWeights(), fabric.transport(rank)
        stages = Chain(schedule, rank, deferred, *([transport.wait_for_all] if strict else []))
        executor = Executor(transport, deferred)
        executor.run(schedule, stages)
        assert tuple(executor.executed) == schedule.actions[rank]
        assert sorted(stages.completed) == schedule.stages_of(rank)
        return stages

    return {stage: layer for chain in run_threads(schedule.ranks, run) for stage, layer in chain.layers.items()}


def order_of_a_lane(rank: int, peer: int, direction: Direction) -> Any:
    """NCCL's rule for groups that are made with a `device_id`: all messages of a rank in one group keep one order."""
    return rank, lane(rank, peer, direction)


def one_by_one(stages: int, microbatches: int) -> dict[int, nn.Module]:
    layers = {stage: chain_layer(stage) for stage in range(stages)}
    for microbatch in range(microbatches):
        (FACTOR * nn.Sequential(*layers.values())(chain_input(microbatch)).square().sum()).backward()
    return layers


@contextlib.contextmanager
def one_thread_each() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches"),
    fewer(
        ((name, *sizes) for name in NAMES for sizes in [(64, 10), (5, 13), (3, 1), (2, 3)]),
        extended=[("zb_v", 64, 10)],
    ),
)
def test_many_ranks_in_threads(name: str, ranks: int, microbatches: int) -> None:
    schedule = make_schedule(name, ranks, microbatches)
    with one_thread_each():
        layers = run_chain(schedule, Fabric(order_of_a_lane))
        expected = one_by_one(schedule.stages, microbatches)
    assert layers.keys() == expected.keys()
    for stage, layer in layers.items():
        for found, wanted in zip(layer.parameters(), expected[stage].parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-9, atol=1e-9)


def test_fewer_groups_would_deadlock() -> None:
    """The threads do find deadlocks: one group for both directions, or one for both neighbours of a rank."""
    both_directions = Fabric(lambda rank, peer, direction: (rank, peer), patience_s=2.0)
    both_neighbours = Fabric(lambda rank, peer, direction: (rank, direction), patience_s=2.0)
    with one_thread_each(), pytest.raises(DeadlockError, match="never ends"):
        run_chain(receive_ahead(make_schedule("1f1b", 4, 8)), both_directions)
    with one_thread_each(), pytest.raises(DeadlockError, match="never ends"):
        run_chain(receive_ahead(make_schedule("interleaved", 3, 1)), both_neighbours)


@pytest.mark.parametrize("name", NAMES)
def test_ranks_are_connected_before_the_first_batch(name: str) -> None:
    """Where they first meet in a batch of one microbatch, receives posted ahead hold up what the peers wait for."""
    schedule = receive_ahead(make_schedule(name, 4, 1))
    with one_thread_each():
        with pytest.raises(DeadlockError, match="never"):
            run_chain(schedule, Fabric(order_of_a_lane, patience_s=2.0, connects=True))
        fabric = Fabric(order_of_a_lane, connects=True)
        run_threads(schedule.ranks, lambda rank: connect(fabric.transport(rank), schedule))
        run_chain(schedule, fabric)


@pytest.mark.parametrize("name", NAMES)
def test_computations_may_wait_for_all_messages_under_way(name: str) -> None:
    """As on a GPU, where a kernel is loaded or memory allocated; with receives posted ahead ranks then wait forever."""
    schedule = make_schedule(name, 3, 2)
    with one_thread_each():
        run_chain(schedule, Fabric(order_of_a_lane), strict=True)
        with pytest.raises(DeadlockError, match="never"):
            run_chain(receive_ahead(schedule), Fabric(order_of_a_lane, patience_s=2.0), strict=True)


def test_lanes() -> None:
    assert lanes(make_schedule("1f1b", 2, 1)) == [(0, "down"), (0, "up")]
    assert len(lanes(make_schedule("1f1b", 8, 1))) == len(lanes(make_schedule("zb_v", 8, 1))) == 4
    assert len(lanes(make_schedule("interleaved", 2, 1))) == 2 and len(lanes(make_schedule("interleaved", 3, 1))) == 6
    for name in NAMES:
        schedule = make_schedule(name, 7, 3)
        peers: dict[Any, set[int]] = {}
        for message in (action for actions in schedule.actions for action in actions if action.is_message):
            source, destination = schedule.stream(message)
            for rank, peer in ((source, destination), (destination, source)):
                found = lane(rank, peer, schedule.group(message))
                assert found in lanes(schedule)
                peers.setdefault((rank, found), set()).add(peer)
        assert all(len(found) == 1 for found in peers.values()), "a rank has one peer in a lane"


# ---- the timeline ----


def _traced(rank: int, world_size: int, case: Pipelined, path: str) -> str:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        train(case, trace=path)
    return printed.getvalue()


@pytest.mark.parametrize(
    "case",
    [Pipelined("deep", "zb_v"), pytest.param(Pipelined("deep", "1f1b", tp=2), marks=pytest.mark.extended)],
    ids=str,
)
def test_the_trace_is_what_happened(case: Pipelined, tmp_path: Path) -> None:
    from lightning_megatp.cli import main
    from lightning_megatp.pipeline.schedules.trace import Trace

    path = tmp_path / "deeper" / "run.json"
    printed = " ".join(run_ranks(case.pp * case.tp, _traced, case, str(path))[0].split())
    trace, events = Trace.read(path), json.loads(path.read_text())["traceEvents"]
    assert f"bubble {trace.bubble:.0%} measured; {case.schedule} of" in printed
    assert 0 <= trace.bubble < 1 and trace.expected_bubble() == simulate(case.ir).bubble
    assert trace.times.forward > 0 and trace.times.backward_input > 0 and trace.times.backward_weight > 0
    names = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward"}
    names |= {Kind.BACKWARD_INPUT: "backward input", Kind.BACKWARD_WEIGHT: "wgrad"}
    assert [row.pipeline_rank for row in trace.rows] == [*range(case.pp)] * case.tp
    for row in trace.rows:
        actions = case.ir.actions[row.pipeline_rank]
        computed = [(names[a.kind], a.stage, a.microbatch) for a in actions if a.kind in COMPUTES]
        assert [(span.what, span.stage, span.microbatch) for span in row.computing] == computed
        sends = {(a.stage, a.microbatch) for a in actions if a.is_message and not a.is_receive}
        assert {(span.stage, span.microbatch) for span in row.spans if span.what == "send"} == sends
        assert [span.what for span in row.spans][-2:] == ["gradients", "optimizer"]
        order = [span.end for span in row.spans]
        assert order == sorted(order) and all(0 <= span.start <= span.end for span in row.spans)
        assert f"forward, stage {actions_stage(actions)}, microbatch 0" in {
            event["name"] for event in events if event["pid"] == row.rank
        }
    forwards = [(row.pipeline, span) for row in trace.rows for span in row.computing if span.what == "forward"]
    ends = {(pipeline, span.stage, span.microbatch): span.end for pipeline, span in forwards}
    for pipeline, span in forwards:
        if span.stage > 0:
            before = ends[pipeline, span.stage - 1, span.microbatch]
            # what ranks' clocks differ by is a median over barriers, which a busy machine blurs: 1.3 ms were seen
            assert before <= span.start + 10e-3, "the ranks' clocks agree to ten milliseconds"
    main(["trace", str(path), "--png"])
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def actions_stage(actions: tuple[Action, ...]) -> int:
    return next(action.stage for action in actions if action.kind is Kind.FORWARD)


def test_a_drawn_schedule(tmp_path: Path) -> None:
    from lightning_megatp.pipeline.schedules.drawing import draw_timelines

    path = tmp_path / "zb_v.png"
    draw_timelines([simulate(make_schedule(name, 4, 8), Times(message=0.1)) for name in ("1f1b", "zb_v")], path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_other_files_are_refused(tmp_path: Path) -> None:
    from lightning_megatp.pipeline.schedules.trace import Trace

    path = tmp_path / "other.json"
    path.write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match=r"other\.json is not a trace that MegaTPStrategy"):
        Trace.read(path)


def test_a_trace_needs_a_pipeline() -> None:
    from lightning_megatp import MegaTPStrategy

    with pytest.raises(ValueError, match=re.escape("trace='run.json' is a timeline of pipeline stages, and pp=1")):
        MegaTPStrategy(tp=2, trace="run.json")
