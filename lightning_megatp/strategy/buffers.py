"""Buffers that training steps change (statistics of batch norms, codebooks that follow averages): all data-parallel
ranks take the first one's, as under DistributedDataParallel with its `broadcast_buffers`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_megatp.mesh import ParallelMesh
from lightning_megatp.messages import warn_once_per_run
from lightning_megatp.places import Place
from lightning_megatp.plan.parallel_plan import plain_name
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import tensor_version

Kind = tuple[torch.Size, torch.dtype]
State = tuple[Tensor | None, int]
"""What is there, and how often it was changed in place."""


@dataclass(frozen=True)
class _Named(Place):
    """Where a module has a buffer."""

    name: str

    @property
    def state(self) -> State:
        value = self.value
        return value, 0 if value is None else tensor_version(value)

    @property
    def kind(self) -> Kind | None:
        return _kind(self.value)


class SentBuffers:
    """Sends the buffers that training steps change from the first data-parallel rank to the others.

    DDP sends all buffers; here those of modules are sent of which some rank's step has changed one. The ranks tell each
    other which these are after steps 1, 2, 4, 8 and so on, and before each evaluation. They are sent when DDP sends
    them: before a training step, unless the last one only accumulated gradients, and before an evaluation.

    A change shows in a tensor's version, but kernels of batch and instance norms change their statistics without it. So
    a module's buffers are all taken for changed if one is, and steps 1, 2, 4, 8 compare values, too.

    Args:
        module: as it is split.
        mesh: who is where.
        averages: id of `module.__dict__` of modules whose buffers follow parameters; with zero > 0 those are this
            rank's part.
    """

    def __init__(self, module: nn.Module, mesh: ParallelMesh, averages: Collection[int]) -> None:
        self._module, self._mesh, self._averages = module, mesh, averages
        self._steps, self._next = 0, 1
        self._places = self._find()
        self._before: list[State] = []
        self._values: list[Tensor | None] = []
        self._changed: dict[str, set[Kind | None]] = {}
        """Name of a buffer that steps changed -> what kinds of tensors it was, since the ranks told each other last."""
        self._sent: list[tuple[_Named, Kind]] = []
        self._left = set[str]()
        """Names of buffers that can't be sent."""
        self._told = True
        self._stale = self._accumulated = False

    def before_training_step(self) -> None:
        """Send buffers, and note what they are before the step.

        Raises:
            RuntimeError: a buffer that is sent has another shape or dtype than before.

        Communication: one broadcast over dp of all buffers that steps change, unless the last step only accumulated.
        """
        if not self._accumulated:
            self._send()
        self._before = [place.state for place in self._places]
        if self._steps + 1 == self._next:
            sent = {place.name for place, _ in self._sent}
            self._values = [
                None if place.name in sent or old is None else old.detach().clone()
                for place, (old, _) in zip(self._places, self._before, strict=True)
            ]

    def after_training_step(self, accumulated: bool) -> None:
        """Note which buffers the step has changed.

        Args:
            accumulated: whether no optimizer steps after it; the next step then goes on with this rank's own buffers.

        Communication: an object all-gather over dp of names, at steps that are powers of two.
        """
        now = [place.state for place in self._places]
        values = self._values or [None] * len(now)
        changed = {
            place.module
            for place, (old, version), (new, new_version), value in zip(
                self._places, self._before, now, values, strict=True
            )
            if new is not old
            or new_version != version
            or (value is not None and new is not None and not torch.equal(value, new))
        }
        for place, (old, _), (new, _) in zip(self._places, self._before, now, strict=True):
            if place.module in changed:
                self._changed.setdefault(place.name, set()).update((_kind(old), _kind(new)))
        self._before, self._values = [], []
        self._steps += 1
        self._stale, self._told, self._accumulated = True, False, accumulated
        if self._steps == self._next:
            self._next *= 2
            self._agree()

    def before_evaluation(self) -> None:
        """Send buffers, as training has left them.

        Raises:
            RuntimeError: as before a training step.

        Communication: after training steps, an object all-gather over dp of names, and the broadcast above.
        """
        if not self._told:
            self._agree()
        self._send()

    def before_averaged_step(self) -> None:
        """Before the first step of an evaluation for which a callback has put averages in the module's place, after
        `before_evaluation`: each rank has averaged its own buffers.

        Communication: the broadcast above.
        """
        self._stale = True
        self._send()

    def _send(self) -> None:
        if not self._sent or not self._stale:
            return
        self._stale = False
        for place, kind in self._sent:
            if place.kind != kind:
                raise RuntimeError(
                    f"MegaTPStrategy: the buffer `{place.name}`, which training steps change, was {_text(kind)} and is"
                    f" {_text(place.kind)} now. With dp > 1 all data-parallel ranks take the first one's before each"
                    " step. Let it keep its shape and dtype; or assign the tensor as a plain attribute, which stays"
                    " each rank's own."
                )
        with torch.no_grad():
            own = [x.detach() for place, _ in self._sent if (x := place.value) is not None]
            message = torch.cat([x.reshape(-1).view(torch.uint8) for x in own])
            dist.broadcast(message, src=self._mesh.ranks("dp")[0], group=self._mesh.group("dp"))
            if self._mesh.rank("dp") == 0:
                return
            parts = message.split([x.numel() * x.element_size() for x in own])
            for (place, (shape, dtype)), x, part in zip(self._sent, own, parts, strict=True):
                received = part.view(dtype).view(shape)
                if x.is_inference():  # assigned by an evaluation; can't be written into
                    place.put(received.clone())
                else:
                    x.copy_(received)

    def _agree(self) -> None:
        """On what is sent from now on: what steps have changed on some rank, and is of one kind on all."""
        self._told = True
        self._places = self._find()
        known = {place.name: place for place in self._places}
        by_rank = self._mesh.exchange((self._changed, {name: place.kind for name, place in known.items()}), "dp")
        self._changed = {}
        sent, left = {place.name for place, _ in self._sent}, len(self._left)
        for name in sorted({name for changed, _ in by_rank for name in changed} - sent - self._left):
            kinds = {kind for changed, _ in by_rank for kind in changed.get(name, ())}
            kinds |= {held.get(name) for _, held in by_rank}
            kind = kinds.pop()
            if kind is not None and not kinds:
                self._sent.append((known[name], kind))
            else:
                self._left.add(name)
        # bytes of larger elements first: each then begins where its dtype may
        self._sent.sort(key=lambda entry: (-entry[1][1].itemsize, entry[0].name))
        if len(self._left) > left:
            warn_once_per_run(
                f"training steps change the shapes of the buffers {', '.join(sorted(self._left)[:4])}, so"
                " each data-parallel rank keeps its own. Others that steps change are the first rank's on all, as under"
                " DDP."
            )

    def _find(self) -> list[_Named]:
        return [
            _Named(module, "_buffers", leaf, plain_name(f"{name}.{leaf}" if name else leaf))
            for name, module in self._module.named_modules()
            if id(module.__dict__) not in self._averages
            for leaf, x in module._buffers.items()
            if x is None
            or not (x.is_meta or is_fake(x) or isinstance(x, DTensor))  # of another stage; rows of averages
        ]


def _kind(x: Tensor | None) -> Kind | None:
    return None if x is None else (x.shape, x.dtype)


def _text(kind: Kind | None) -> str:
    return "None" if kind is None else f"{tuple(kind[0])} {kind[1]}"
