"""What runs when: a pipeline schedule is data, a list of actions per rank.

The same list is made (`generators`), executed (`executor`), checked and simulated (`check`), and drawn. Words: *rank*
is the index along the pp axis in the order of placement, *stage* a virtual stage in the order of data flow, *boundary*
s lies between stages s - 1 and s.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal


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
