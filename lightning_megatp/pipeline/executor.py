"""Runs a schedule on one rank: computation in the schedule's order, messages beside it.

The executor knows stages, microbatches and tensors, and nothing of Lightning or of a user's step: what a forward does
is its caller's business (`Stages`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_megatp.pipeline.plan import Relay
from lightning_megatp.pipeline.schedule import Action, At, Kind, Schedule


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

    def before_backward(self, stage: int, microbatch: int) -> None:
        """Called right before a backward."""

    def complete(self, stage: int) -> None:
        """The gradients of a stage are complete on this rank."""


@dataclass(slots=True)
class _Message:
    """Tensors on their way, and what to wait for."""

    tensors: list[Tensor]
    works: list[dist.Work]

    def wait(self) -> list[Tensor]:
        for work in self.works:
            work.wait()
        return self.tensors


@dataclass(slots=True)
class _Flight:
    """A microbatch on a stage, between its forward and its backward."""

    received: list[Tensor]
    roots: list[GradientEdge]
    """Of what is sent on with a gradient, and of the last stage's loss: the graph without its output tensors."""


@dataclass
class Links:
    """The ranks of a pipeline and how they talk.

    Two groups: one for messages to higher pipeline ranks, one to lower. NCCL runs the point-to-point calls of a pair
    and group in one order, both directions together, so that one group could deadlock where both ranks send first.
    """

    ranks: Sequence[int]
    """Pipeline rank -> global rank."""
    rank: int
    """This one's pipeline rank."""
    up: dist.ProcessGroup
    down: dist.ProcessGroup
    device: torch.device


@dataclass
class Executor:
    """Runs schedules on one rank of a pipeline.

    A sent activation is held until it has left, then only its edge in the graph is kept (design: torch's own pipelining
    keeps it until its backward).

    Communication: one message per relay, microbatch and boundary each way; receives are posted where the schedule says,
    ahead of the computation that needs them.
    """

    links: Links
    executed: list[Action] = field(default_factory=list)
    """The actions of the last batch, in the order in which they were executed."""

    def run(self, schedule: Schedule, stages: Stages) -> None:
        """Execute one batch.

        Args:
            schedule: for the number of microbatches of this batch.
            stages: what to run.
        """
        batch = _Batch(schedule, stages, self.links)
        self.executed = []
        for action in schedule.actions[self.links.rank]:
            batch.execute(action)
            self.executed.append(action)
        batch.finish()


class _Batch:
    """One batch on its way through the pipeline, as one rank sees it."""

    def __init__(self, schedule: Schedule, stages: Stages, links: Links) -> None:
        self.schedule, self.stages, self.links = schedule, stages, links
        self.incoming: dict[Action, _Message] = {}
        """Posted receives."""
        self.outgoing: dict[Action, list[Tensor]] = {}
        """What a computation made and a send will take; with both stages on this rank, what the next one takes."""
        self.leaving: list[_Message] = []
        self.flights: dict[At, _Flight] = {}

    def execute(self, action: Action) -> None:
        match action.kind:
            case Kind.FORWARD:
                self._forward(action)
            case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                self._backward(action)
            case Kind.BACKWARD_WEIGHT:
                pass  # what could be put off was put off by the stage itself; the rest ran inside BACKWARD_INPUT
            case Kind.RECV_FORWARD:
                self._post(action, self.stages.relays(action.stage, action.microbatch))
            case Kind.RECV_BACKWARD:
                relays = self.stages.relays(action.stage + 1, action.microbatch)
                self._post(action, [r for r in relays if r.requires_grad])
            case Kind.SEND_FORWARD | Kind.SEND_BACKWARD:
                self._send(action)
            case Kind.REDUCE:
                self.stages.complete(action.stage)

    def finish(self) -> None:
        """Wait until everything has left."""
        for message in self.leaving:
            message.wait()

    def _forward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        relays = self.stages.relays(stage, microbatch)
        arrived = self._arrived(action, Action(Kind.SEND_FORWARD, stage - 1, microbatch), bool(stage))
        received = [_leaf(x, relay) for x, relay in zip(arrived, relays, strict=True)]
        sent = self.stages.forward(stage, microbatch, received)
        last = stage == self.schedule.stages - 1
        outgoing = () if last else self.stages.relays(stage + 1, microbatch)
        with_gradient = sent if last else [x for x, r in zip(sent, outgoing, strict=True) if r.requires_grad]
        if not self.schedule.forward_only:
            roots = [get_gradient_edge(x) for x in with_gradient]
            self.flights[stage, microbatch] = _Flight([x for x in received if x.requires_grad], roots)
        if not last:
            self.outgoing[Action(Kind.SEND_FORWARD, stage, microbatch)] = [x.detach() for x in sent]

    def _backward(self, action: Action) -> None:
        stage, microbatch = action.stage, action.microbatch
        flight = self.flights.pop((stage, microbatch))
        last = stage == self.schedule.stages - 1
        gradients = self._arrived(action, Action(Kind.SEND_BACKWARD, stage + 1, microbatch), not last)
        self.stages.before_backward(stage, microbatch)
        if flight.roots:
            torch.autograd.backward(flight.roots, None if last else gradients)
        # A value nothing differentiable was made of has no gradient; the stage before waits for one all the same.
        back = [torch.zeros_like(x) if x.grad is None else x.grad for x in flight.received]
        self.outgoing[Action(Kind.SEND_BACKWARD, stage, microbatch)] = back

    def _arrived(self, action: Action, sent_here: Action, expected: bool) -> list[Tensor]:
        """What an action waits for: from another rank, or from a neighbouring stage on this one."""
        receive = self.schedule.receive_for(action)
        if receive is not None:
            return self.incoming.pop(receive).wait()
        return self.outgoing.pop(sent_here) if expected else []

    def _post(self, action: Action, relays: Sequence[Relay]) -> None:
        buffers = [torch.empty(r.shape, dtype=r.dtype, device=self.links.device) for r in relays]
        source, _ = self.schedule.stream(action)
        peer, group = self.links.ranks[source], self._group(action)
        works = [_work(dist.irecv(x, peer, group)) for x in buffers if x.numel()]
        self.incoming[action] = _Message(buffers, works)

    def _send(self, action: Action) -> None:
        tensors = [x.contiguous() for x in self.outgoing.pop(action)]
        _, destination = self.schedule.stream(action)
        peer, group = self.links.ranks[destination], self._group(action)
        works = [_work(dist.isend(x, peer, group)) for x in tensors if x.numel()]
        self.leaving = [message for message in self.leaving if not all(work.is_completed() for work in message.works)]
        self.leaving.append(_Message(tensors, works))

    def _group(self, action: Action) -> dist.ProcessGroup:
        return self.links.up if self.schedule.group(action) == "up" else self.links.down


def _work(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not in the pipeline's group"
    return work


def _leaf(x: Tensor, relay: Relay) -> Tensor:
    """A received value as the start of a stage's graph, in the memory layout it had where it was made."""
    x = x.detach()
    if x.stride() != relay.stride and _is_dense(relay):
        x = torch.empty_strided(relay.shape, relay.stride, dtype=x.dtype, device=x.device).copy_(x)
    return x.requires_grad_(relay.requires_grad)


def _is_dense(relay: Relay) -> bool:
    """Whether a layout holds each element once, without gaps: a transposed matrix, but no expanded vector."""
    expected = 1
    for stride, size in sorted(zip(relay.stride, relay.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
