"""Runs a schedule on one rank: computation in the schedule's order, messages beside it.

The executor knows stages, microbatches and tensors, and nothing of Lightning or of a user's step: what a forward does
is its caller's business (`Stages`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_megatp.pipeline.schedules.recorder import Recorder
from lightning_megatp.pipeline.schedules.schedule import Action, At, Kind, Schedule
from lightning_megatp.pipeline.shares import Shares
from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.pipeline.slicing.plan import Relay
from lightning_megatp.tensor.deferred import DeferredWeights

Direction = Literal["up", "down"]
"""Towards a higher pipeline rank, or a lower one."""
Lane = tuple[int, Direction]
"""A group for messages, in which every rank has one peer, and to which it only sends or from which it only receives."""


class Stages(Protocol):
    """What the executor drives: the stages of this rank on the microbatches of one batch."""

    def relays(self, boundary: int, microbatch: int) -> Sequence[Relay]:
        """What crosses a boundary, from stage `boundary - 1` to stage `boundary`."""

    def forward(self, stage: int, microbatch: int, received: list[Tensor]) -> list[Tensor]:
        """Run a stage.

        Args:
            received: the values of `relays(stage)`, leaves that collect gradients where the relay says so.

        Returns:
            the values of `relays(stage + 1)`; for the last stage what to differentiate: the scaled loss, or nothing.
        """

    factor: Tensor
    """() float64, of all gradients of the batch: the last stage's when it is through with all forwards, on the others
    when the gradients of the last microbatch have arrived."""

    @property
    def retains_graph(self) -> bool:
        """Whether backward leaves the graph as it is."""

    @property
    def sends_factor(self) -> bool:
        """Whether `factor` travels down the stages."""

    def around_backward(self, stage: int, microbatch: int) -> contextlib.AbstractContextManager[None]:
        """What a backward runs in."""

    def root_gradients(self, microbatch: int) -> Sequence[Tensor] | None:
        """The gradients with which the last stage's backward begins; None where it is the loss's."""

    def gradient_of(self, received: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of what a stage received, which its ranks may have in parts."""

    def complete(self, stage: int) -> None:
        """The gradients of a stage are complete on this rank, and `factor` is known."""


class Pending(Protocol):
    """A tensor on its way, as a `torch.distributed.Work` is."""

    def wait(self) -> Any:
        """Return when the tensor has left, or is there. On CUDA: let the current stream wait for it."""

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""


class Transport(Protocol):
    """Moves tensors between pipeline ranks. Messages from one rank to another arrive in the order of their sends."""

    @property
    def rank(self) -> int:
        """This one's pipeline rank."""

    @property
    def device(self) -> torch.device:
        """Where tensors are."""

    def send(self, x: Tensor, to: int, direction: Direction) -> Pending:
        """Send a contiguous tensor to a pipeline rank. Doesn't wait; x must not change until it has left."""

    def receive(self, x: Tensor, source: int, direction: Direction) -> Pending:
        """Post the receive of a tensor into x. Doesn't wait."""


@dataclass(frozen=True)
class Links:
    """The transport of real ranks: a process group per lane.

    NCCL runs the point-to-point calls of one pair of ranks and group in one order, both directions together; if the
    group was made with a `device_id`, even all calls of a rank in that group. A receive that is posted ahead would hold
    up the sends behind it, until ranks wait for each other in a circle. So messages in either direction have groups of
    their own, and so have the two neighbours of a rank.
    """

    ranks: Sequence[int]
    """Pipeline rank -> global rank."""
    rank: int
    groups: Mapping[Lane, dist.ProcessGroup]
    device: torch.device

    def send(self, x: Tensor, to: int, direction: Direction) -> Pending:
        return _work(dist.isend(x, self.ranks[to], self.groups[lane(self.rank, to, direction)]))

    def receive(self, x: Tensor, source: int, direction: Direction) -> Pending:
        return _work(dist.irecv(x, self.ranks[source], self.groups[lane(self.rank, source, direction)]))


def lane(rank: int, peer: int, direction: Direction) -> Lane:
    """The lane between two pipeline ranks: pairs (0, 1), (2, 3), ... share one, so do (1, 2), (3, 4), ..., and the way
    from the last rank back to the first has its own."""
    low, high = sorted((rank, peer))
    return (low % 2 if high == low + 1 else 2), direction


def lanes(schedule: Schedule) -> list[Lane]:
    """The lanes that a schedule needs, in one order on all ranks."""
    return sorted({lane(*stream) for stream in _streams(schedule)})


def connect(transport: Transport, schedule: Schedule) -> None:
    """Send one number each way between the ranks of a schedule. Every rank has to call it.

    NCCL connects two ranks at their first message in a group, and the host of either waits until the other one calls,
    too. In a batch, a receive that is posted ahead would keep a rank from sending what its peer needs to get there.

    Communication: one message of an element per stream.
    """
    for source, destination, direction in _streams(schedule):
        number = torch.zeros(1, device=transport.device)
        if transport.rank == source:
            transport.send(number, destination, direction).wait()
        elif transport.rank == destination:
            transport.receive(number, source, direction).wait()


def _streams(schedule: Schedule) -> list[tuple[int, int, Direction]]:
    """Who sends to whom, lane by lane: in one, each rank has one peer, so that pairs don't wait for each other."""
    placement = schedule.placement
    pairs = {tuple(sorted(placement[s - 1 : s + 1])) for s in range(1, schedule.stages) if schedule.crosses(s)}
    up: list[tuple[int, int, Direction]] = [(low, high, "up") for low, high in pairs]
    down: list[tuple[int, int, Direction]] = [(high, low, "down") for low, high in pairs]
    return sorted(up + down, key=lambda stream: (lane(*stream), stream))


@dataclass(slots=True)
class _Message:
    """Tensors on their way, and what to wait for."""

    relays: Sequence[Relay]
    tensors: list[Tensor]
    """This tensor rank's shares of the values."""
    works: list[Pending]
    factor: Tensor | None = None
    """(1,), behind them."""

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(slots=True)
class _Flight:
    """A microbatch on a stage, between its forward and its backward."""

    received: list[tuple[Tensor, Relay]]
    roots: list[GradientEdge]
    """Where its backward begins: what is sent on with a gradient, and the last stage's loss. The graph without its
    output tensors."""


@dataclass
class Executor:
    """Runs schedules on one rank of a pipeline.

    A sent activation is held until it has left, then only its edge in the graph is kept (torch's own pipelining keeps
    it until its backward).

    Communication: one message per relay, microbatch and boundary each way, of 1 / t of it with t tensor ranks; and one
    of 8 bytes per boundary where the stages' gradients are summed over data-parallel ranks. Receives are posted where
    the schedule says.
    """

    transport: Transport
    deferred: DeferredWeights = field(default_factory=DeferredWeights)
    """Where the layers of the stages put off what `BACKWARD_WEIGHT` computes."""
    shares: Shares = field(default_factory=Shares)
    """How tensor ranks divide what is sent."""
    recorder: Recorder | None = None
    """Takes the time of what is executed."""
    executed: list[Action] = field(default_factory=list)
    """The actions of the last batch, in the order in which they were executed."""

    def run(self, schedule: Schedule, stages: Stages) -> None:
        """Execute one batch.

        Args:
            schedule: for the number of microbatches of this batch.
            stages: what to run.
        """
        batch = _Batch(schedule, stages, self)
        self.executed = []
        with self.deferred.batch():
            for action in schedule.actions[self.transport.rank]:
                batch.execute(action)
                self.executed.append(action)
        batch.finish()

    def recorded(self, what: str, action: Action | None = None) -> contextlib.AbstractContextManager[None]:
        """Around something whose time is taken, if a recorder is there."""
        return contextlib.nullcontext() if self.recorder is None else self.recorder.span(what, action)


class _Batch:
    """One batch on its way through the pipeline, as one rank sees it."""

    def __init__(self, schedule: Schedule, stages: Stages, executor: Executor) -> None:
        self.schedule, self.stages = schedule, stages
        self.transport, self.shares = executor.transport, executor.shares
        self.deferred, self.recorded = executor.deferred, executor.recorded
        self.incoming: dict[Action, _Message] = {}
        """Posted receives."""
        self.outgoing: dict[Action, list[Tensor]] = {}
        """What a computation made and a send will take; with both stages on this rank, what the next one takes."""
        self.leaving: defaultdict[tuple[int, Direction], deque[_Message]] = defaultdict(deque)
        """By peer and direction: these leave in order."""
        self.flights: dict[At, _Flight] = {}
        own = schedule.actions[self.transport.rank]
        self.halved = {(a.stage, a.microbatch) for a in own if a.kind is Kind.BACKWARD_INPUT}
        """Whose backward puts the gradients of weights off."""

    def execute(self, action: Action) -> None:
        match action.kind:
            case Kind.FORWARD:
                self._forward(action)
            case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                self._backward(action)
            case Kind.BACKWARD_WEIGHT:
                with self.recorded("wgrad", action):  # what layers couldn't put off ran inside of BACKWARD_INPUT
                    self.deferred.compute((action.stage, action.microbatch))
            case Kind.RECV_FORWARD:
                self._post(action, self.stages.relays(action.stage, action.microbatch))
            case Kind.RECV_BACKWARD:
                self._post(action, self._with_gradient(action.stage + 1, action.microbatch))
            case Kind.SEND_FORWARD:
                self._send(action, self.stages.relays(action.stage + 1, action.microbatch))
            case Kind.SEND_BACKWARD:
                self._send(action, self._with_gradient(action.stage, action.microbatch))
            case Kind.REDUCE:
                self.stages.complete(action.stage)

    def finish(self) -> None:
        """Wait until everything has left."""
        with self.recorded("wait"):
            for message in itertools.chain(*self.leaving.values()):
                message.wait()

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        relays = self.stages.relays(stage, microbatch)
        arrived = self._arrived(action, Action(Kind.SEND_FORWARD, stage - 1, microbatch), bool(stage))
        halved = self.deferred.halved() if (stage, microbatch) in self.halved else contextlib.nullcontext()
        with self.recorded("forward", action), halved:
            received = [_leaf(x, relay) for x, relay in zip(arrived, relays, strict=True)]
            sent = self.stages.forward(stage, microbatch, received)
        last = stage == self.schedule.stages - 1
        outgoing = () if last else self.stages.relays(stage + 1, microbatch)
        with_gradient = sent if last else [x for x, r in zip(sent, outgoing, strict=True) if r.requires_grad]
        if not self.schedule.forward_only:
            roots = [get_gradient_edge(x) for x in with_gradient]
            self.flights[stage, microbatch] = _Flight(list(zip(received, relays, strict=True)), roots)
        if not last:
            self.outgoing[Action(Kind.SEND_FORWARD, stage, microbatch)] = [x.detach() for x in sent]

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        flight = self.flights.pop((stage, microbatch))
        last = stage == self.schedule.stages - 1
        gradients = self._arrived(action, Action(Kind.SEND_BACKWARD, stage + 1, microbatch), not last)
        putting_off = action.kind is Kind.BACKWARD_INPUT
        with (
            self.recorded("backward input" if putting_off else "backward", action),
            self.deferred.put_off((stage, microbatch)) if putting_off else contextlib.nullcontext(),
            self.stages.around_backward(stage, microbatch),
        ):
            if flight.roots:
                roots = self.stages.root_gradients(microbatch) if last else gradients
                torch.autograd.backward(flight.roots, roots, retain_graph=self.stages.retains_graph)
        # A value nothing differentiable was made of has no gradient; the stage before waits for one all the same.
        leaves = [x for x, relay in flight.received if relay.requires_grad]
        back = [self.stages.gradient_of(x, torch.zeros_like(x) if x.grad is None else x.grad) for x in leaves]
        if any(x.grad is not None for x, relay in flight.received if not relay.requires_grad):
            raise SliceError(
                f"pipeline stage {stage} has a gradient for a value of an earlier stage, and when the step was planned"
                " nothing that was made of this value reached the loss (it was detached). Earlier stages don't wait for"
                " it. Freeze parameters by `requires_grad_(False)`, or detach always."
            )
        self.outgoing[Action(Kind.SEND_BACKWARD, stage, microbatch)] = back

    def _arrived(self, action: Action, sent_here: Action, expected: bool) -> list[Tensor]:
        """What an action waits for: from another rank, or from a neighbouring stage on this one."""
        receive = self.schedule.receive_for(action)
        if receive is not None:
            message = self.incoming.pop(receive)
            with self.recorded("wait", receive):
                message.wait()
                if message.factor is not None:
                    self.stages.factor = message.factor[0]
                pairs = zip(message.tensors, message.relays, strict=True)
                return [self.shares.gather(share, relay) for share, relay in pairs]
        return self.outgoing.pop(sent_here) if expected else []

    def _post(self, action: Action, relays: Sequence[Relay]) -> None:
        transport, (source, _) = self.transport, self.schedule.stream(action)
        buffers = [self.shares.buffer(relay, transport.device) for relay in relays]
        direction = self.schedule.group(action)
        works = [transport.receive(x, source, direction) for x in buffers if x.numel()]
        factor = None
        if self._has_factor(action):
            factor = torch.empty(1, dtype=torch.float64, device=transport.device)
            works.append(transport.receive(factor, source, direction))
        self.incoming[action] = _Message(relays, buffers, works, factor)

    def _send(self, action: Action, relays: Sequence[Relay]) -> None:
        with self.recorded("send", action):
            pairs = zip(self.outgoing.pop(action), relays, strict=True)
            tensors = [self.shares.take(x, relay) for x, relay in pairs]
            _, to = self.schedule.stream(action)
            direction = self.schedule.group(action)
            works = [self.transport.send(x, to, direction) for x in tensors if x.numel()]
            factor = None
            if self._has_factor(action):
                factor = self.stages.factor.reshape(1)
                works.append(self.transport.send(factor, to, direction))
        leaving = self.leaving[to, direction]
        while leaving and all(work.is_completed() for work in leaving[0].works):
            leaving.popleft()
        leaving.append(_Message(relays, tensors, works, factor))

    def _has_factor(self, action: Action) -> bool:
        backward = action.kind in (Kind.SEND_BACKWARD, Kind.RECV_BACKWARD)
        return backward and self.stages.sends_factor and action.microbatch == self.schedule.microbatches - 1

    def _with_gradient(self, boundary: int, microbatch: int) -> list[Relay]:
        return [relay for relay in self.stages.relays(boundary, microbatch) if relay.requires_grad]


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the pipeline's group"
    return work


def _leaf(x: Tensor, relay: Relay) -> Tensor:
    """A received value as the start of a stage's graph, in the memory layout it had where it was made."""
    x = x.detach()
    if x.stride() != relay.stride and _is_dense(relay):
        x = torch.empty_strided(relay.shape, relay.stride, dtype=x.dtype, device=x.device).copy_(x)
    return x.requires_grad_(relay.requires_grad or bool(relay.has_graph))


def _is_dense(relay: Relay) -> bool:
    """Whether a layout holds each element once, without gaps: a transposed matrix, but no expanded vector."""
    expected = 1
    for stride, size in sorted(zip(relay.stride, relay.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
