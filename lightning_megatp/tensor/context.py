"""What the parallel layers of one model share: their group, the entry into regions, and the random stream inside."""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_megatp.messages import OfOneRank
from lightning_megatp.plan.shard import ShardedTensorSpec
from lightning_megatp.shim.fakes import is_fake
from lightning_megatp.shim.torch import tensor_version
from lightning_megatp.tensor.deferred import DeferredWeights
from lightning_megatp.tensor.exchange import GroupExchange
from lightning_megatp.tensor.random import RankStream
from lightning_megatp.tensor.shards import Shard

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Meeting(Protocol):
    """A meeting of the ranks that have to call something together; see `hooks.meeting`."""

    def wait(self, name: str) -> None:
        """Until the others call, too: a split layer, a divided module, or a block, of that name.

        Raises:
            RuntimeError: one of them does not.
        """

    def answer(self) -> None:
        """Say that this rank is there for calls of the others."""


class Reader(Protocol[T_co]):
    """A layer that reads what enters a region."""

    @property
    def training(self) -> bool:
        """Whether dropout is active in its region."""

    @property
    def any_weight(self) -> Tensor:
        """A weight of it, or what stands for that in a dry run."""

    def bring_in(self, x: Tensor) -> T_co:
        """Make an `Entry` of a value."""


@dataclass(eq=False)
class Region:
    """Column layers and the row layers that consume them: an attention, an MLP.

    Between its first column layer and its row layer each rank computes other features, so random numbers there must
    differ from rank to rank. `random` is set as soon as a step was seen drawing numbers inside.

    Args:
        tracked: features in there are `FeatureShard`s, which draw their own numbers: any other value is whole.
    """

    name: str
    random: bool = False
    tracked: bool = False
    columns: list[weakref.ref[Any]] = field(default_factory=list, repr=False)
    """Its column layers."""


@dataclass(frozen=True)
class OpenStack:
    """A stack of experts whose own code runs, on some of the features inside."""

    name: str
    parts: tuple[Tensor, ...]
    """What only this rank has of its parameters."""


class TensorContext(OfOneRank):
    """Shared by every parallel layer of a model.

    Args:
        group: the tensor-parallel process group.
        rehearsal: a step runs without data, as a real one would (see `planner.rehearsal`).
    """

    def __init__(self, group: dist.ProcessGroup, rehearsal: bool = False) -> None:
        self.group = group
        self._rehearsal = rehearsal
        self.rank = group.rank()
        self.size = group.size()
        self.stream = RankStream(self.rank)
        self.exchange: Any = GroupExchange(group)
        """What feature shards send with."""
        self.feature_shards = False
        """Whether layers hand out feature shards."""
        self.gathers: Counter[str] = Counter()
        """Operation -> how many feature shards were gathered for it."""
        self.deferred = DeferredWeights()
        self.open_region: Region | None = None
        self.open_stack: OpenStack | None = None
        self.entered = 0
        """How often a column layer was called."""
        self.sharded: dict[int, ShardedTensorSpec] = {}
        """id(parameter) -> its shards."""
        self.pipelined = False
        """Whether the model is cut into pipeline stages, between which a split parameter can't be gathered."""
        self.meeting: Meeting | None = None
        """The meeting of a hook that asks for ranks, until its first call of something that several of them have."""
        self.user_code = False
        """Whether the code of a user's step runs, and not that of a layer, an optimizer or the strategy."""
        self.outside: dict[int, tuple[Tensor, str]] = {}
        """id(parameter) -> (parameter, the operation in which this step used it outside its layer)."""
        self.seen: dict[int, Any] = {}
        """id(parameter) -> what its layers hand out for it in this step."""
        self.kept_whole: set[int] = set()
        """id(parameter) of those whose gradients are completed at each use on a rank's part, since the step may use
        them on whole values too."""
        self._entered = _Entered()

    def meet(self, name: str) -> None:
        """Before the first collective of a hook that may have none on other ranks, of something of this name."""
        if self.meeting is not None:
            self.meeting.wait(name)

    @contextlib.contextmanager
    def running(self, user_code: bool) -> Iterator[None]:
        """Say whose code runs meanwhile."""
        before, self.user_code = self.user_code, user_code
        try:
            yield
        finally:
            self.user_code = before

    def is_dry(self, x: Tensor) -> bool:
        """Whether this tensor is of a dry run that asks for shapes, which are those of whole values."""
        return is_fake(x) and not self._rehearsal

    def __deepcopy__(self, memo: dict[int, object]) -> TensorContext:
        return self  # a copied model works in the same group

    def enter(self, x: Tensor, reader: Reader[T], region: Region | None = None) -> T:
        """Bring a value into a tensor region: one collective per input tensor, shared by all column layers reading it.
        What entered is known until something enters another region. In a dry run it isn't: the next layer may be on
        another pipeline stage.

        Args:
            x: (..., h) whole, or a SequenceShard.
            reader: brings it in, if it wasn't before.
            region: the region entered, if a row layer closes it.

        Returns:
            what was brought in.
        """
        self.entered += 1
        entered: T | None = self._entered.get(x)
        if entered is None:
            if region is None or region is not self.open_region:
                self._entered.clear()
            entered = reader.bring_in(x)
            if not (self.is_dry(x) or self.is_dry(reader.any_weight)):  # a batch has its values in a dry run
                self._entered.put(x, entered)
        self.open_region = region
        if region is not None and region.random and reader.training and not is_fake(x):
            self.stream.enter(x.device)
        return entered

    def leave(self) -> None:
        """A row layer is reached: what follows is the same on all ranks, and so are its random numbers."""
        self.stream.leave()
        self.open_region = self.open_stack = None

    def draw_inside(self, device: torch.device, dry: bool) -> None:
        """A random operation was seen in an open region: from here on it has its own stream, or after a dry run."""
        if self.open_region is not None and not self.stream.active:
            self.open_region.random = True
            if not dry:
                self.stream.enter(device)

    def end_step(self) -> None:
        """Forget the step's tensors; a region left without a row layer hands its random stream back."""
        self._entered.clear()
        self.seen.clear()
        self.leave()


_ENTERED = 4
"""So many are known at once: the input of q, k and v, and of an adapter's second layer beside each of these."""


class _Entered:
    """The last tensors that entered a region, and what they became: a few, where some layers of a region read another
    tensor than the rest.

    A tensor counts as the same only if it is the same object, unmodified since, in the same grad mode.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[weakref.ref[Tensor], tuple[int, bool, bool], Any]] = {}
        """id of a tensor -> itself, its state, and what it became."""

    def get(self, x: Tensor) -> Any:
        source, key, value = self._held.get(id(x), (None, None, None))
        return value if source is not None and source() is x and key == self._key(x) else None

    def put(self, x: Tensor, value: object) -> None:
        if len(self._held) == _ENTERED:
            del self._held[next(iter(self._held))]
        self._held[id(x)] = weakref.ref(x), self._key(x), value

    def clear(self) -> None:
        self._held.clear()

    @staticmethod
    def _key(x: Tensor) -> tuple[int, bool, bool]:
        x = x.plain if isinstance(x, Shard) else x
        with_graph = torch.is_grad_enabled() and x.requires_grad
        return tensor_version(x), with_graph, torch.is_inference_mode_enabled()
