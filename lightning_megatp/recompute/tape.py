"""A tape: operations whose saved tensors are not kept, but made again by running them once more."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_megatp.shim.torch import tree_leaves, tree_map
from lightning_megatp.tensor.random import RankStream
from lightning_megatp.tensor.saving import Saved, unwrapped


@dataclass(frozen=True, eq=False)
class Output:
    """A tensor that a recorded operation returned."""

    operation: Operation
    index: int
    """Among the tensors of its result."""


class Operation:
    """A call that can be repeated.

    Args:
        number: in the order of calls.
        outputs: id -> origin, for the arguments that recorded operations returned. All others are kept.
        stream: this tensor rank's own random numbers.
        draws: whether the operation draws random numbers.
    """

    def __init__(
        self,
        number: int,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        outputs: dict[int, Output],
        stream: RankStream,
        draws: bool,
    ) -> None:
        self.number, self._func = number, func
        self.slots: list[weakref.ref[_Slot]] = []
        """What it saved for backward, in order."""
        kept: list[Tensor] = []
        self._arguments = tree_map(lambda x: _kept(x, outputs, kept), (args, kwargs))
        self.uses = [x.operation for x in tree_leaves(self._arguments) if isinstance(x, Output)]
        self._kept = Saved(kept)
        self._device = next(x.device for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        kind = self._device.type
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._numbers = _RandomNumbers(stream, self._device) if draws else None

    def opened(self) -> None:
        """After the call."""
        if self._numbers is not None:
            self._numbers.notice()

    def repeat(self, results: dict[Operation, list[Tensor]]) -> list[Tensor]:
        """Run it again; the tensors of its result.

        Args:
            results: of the operations that it uses.
        """
        kept = self._kept.tensors()
        args, kwargs = tree_map(lambda x: _restored(x, results, kept), self._arguments)
        enabled, dtype = self._autocast
        numbers = contextlib.nullcontext() if self._numbers is None else self._numbers.again()
        with torch.autocast(self._device.type, dtype, enabled), numbers:
            return [x for x in tree_leaves(self._func(*args, **kwargs)) if isinstance(x, Tensor)]


class Tape:
    """Operations of one attention core."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []

    @staticmethod
    def joined(tapes: Sequence[Tape]) -> Tape:
        """One tape with the operations of all: where two cores meet, they go on as one."""
        if not tapes:
            return Tape()
        first = tapes[0]
        for other in tapes[1:]:
            if other._operations is not first._operations:
                first._operations += [x for x in other._operations if x not in first._operations]
                first._operations.sort(key=lambda x: x.number)
                other._operations = first._operations
        return first

    def record(self, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operation for the first time."""

        def pack(x: Tensor) -> _Slot:
            slot = _Slot(self)
            operation.slots.append(weakref.ref(slot))
            return slot

        self._operations.append(operation)
        with saved_tensors_hooks(pack, _Slot.take):
            result = operation._func(*args, **kwargs)
        operation.opened()
        return result

    def replay(self) -> None:
        """Run the operations again, up to the last one of which something is needed, and fill what is still needed."""
        needed = [i for i, x in enumerate(self._operations) if any(slot() is not None for slot in x.slots)]
        operations = self._operations[: needed[-1] + 1]
        last_use = {used: x for x in operations for used in x.uses}
        results: dict[Operation, list[Tensor]] = {}
        with torch.enable_grad():
            for operation in operations:
                filling = _Filling(operation.slots, stop=operation is operations[-1])
                with contextlib.suppress(_Enough), filling:
                    results[operation] = operation.repeat(results)
                filling.check()
                for used in operation.uses:
                    if last_use[used] is operation:
                        results.pop(used, None)


class _Slot:
    """Stands for one saved tensor in the autograd graph."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self.value: Tensor | None = None

    def take(self) -> Tensor:
        """The tensor, recomputed unless it just was. It is handed out once: a second backward recomputes again."""
        if self.value is None:
            self._tape.replay()
        value, self.value = self.value, None
        assert value is not None
        return value


class _Enough(Exception):
    """Everything that was saved is there again; the operation itself needs not be computed."""


class _Filling(saved_tensors_hooks):
    """Around a repeated operation: puts what it saves into the slots."""

    def __init__(self, slots: Sequence[weakref.ref[_Slot]], stop: bool) -> None:
        self._slots, self._stop, self._count = slots, stop, 0
        super().__init__(self._pack, _nothing)

    def _pack(self, x: Tensor) -> None:
        slot = self._slots[self._count]() if self._count < len(self._slots) else None
        self._count += 1
        if slot is not None:
            slot.value = x.detach()
        if self._stop and self._count == len(self._slots):
            raise _Enough

    def check(self) -> None:
        """See whether the operation has saved as much as the first time.

        Raises:
            RuntimeError: it has saved more, or less.
        """
        if self._count != len(self._slots):
            raise RuntimeError(
                "MegaTPStrategy: an operation of the attention core saved other tensors when it was recomputed. Use"
                ' recompute="full" or "none".'
            )


class _RandomNumbers:
    """The state of the random numbers at an operation that draws some.

    Args:
        stream: this tensor rank's own.
        device: of the operation.
    """

    def __init__(self, stream: RankStream, device: torch.device) -> None:
        self._stream, self._device = stream, device
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._outside, self._entered = stream.outside, False

    def notice(self) -> None:
        """After the operation: whether RegionWatch entered the rank's own stream for it."""
        self._entered = self._stream.active and self._outside is None

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Draw the same numbers, and leave everything as it was."""
        devices = [] if self._cuda is None else [self._device]
        with torch.random.fork_rng(devices), self._stream.repeated(self._device, self._outside):
            torch.set_rng_state(self._cpu)
            if self._cuda is not None:
                torch.cuda.set_rng_state(self._cuda, self._device)
            if self._entered:
                self._stream.enter(self._device)
            yield


@dataclass(frozen=True, eq=False)
class _Placeholder:
    """An argument that is kept."""

    index: int
    """Among the kept tensors."""
    needs_gradient: bool
    wrap: Callable[[Tensor], Tensor] | None


def _kept(x: Any, outputs: dict[int, Output], kept: list[Tensor]) -> Any:
    if not isinstance(x, Tensor):
        return x
    if id(x) in outputs:
        return outputs[id(x)]
    plain, wrap = unwrapped(x)
    kept.append(plain)
    return _Placeholder(len(kept) - 1, x.requires_grad, wrap)


def _restored(x: Any, results: dict[Operation, list[Tensor]], kept: Sequence[Tensor]) -> Any:
    if isinstance(x, Output):
        return results[x.operation][x.index]
    if not isinstance(x, _Placeholder):
        return x
    own = kept[x.index].detach().requires_grad_(x.needs_gradient)
    return own if x.wrap is None else x.wrap(own)


def _nothing(packed: None) -> Tensor:
    raise RuntimeError("MegaTPStrategy: a recomputed graph has no backward of its own.")
