"""What was done to the tensors of a model while its layers were created, as data that can be done again.

Memory is followed by storage. A tensor is a view of one: what an operation reads or writes is a storage and a geometry,
so views need no entry of their own, and a parameter's value is what the operations that wrote to its storage leave
there.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lightning_megatp.plan.shard import ShardSpec
from lightning_megatp.shim.torch import tensor_version, tree_map

Memory = dict[int, torch.UntypedStorage]
"""Number of a storage -> the storage, with values."""

_COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)


@dataclass(frozen=True)
class View:
    """A tensor of the recording: where it lies in which storage."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """The tensor, in a storage with values."""
        empty = torch.empty(0, dtype=self.dtype, device="cpu")  # whatever the default device is just now
        return empty.set_(storage, self.offset, self.shape, self.stride)

    def covers(self, nbytes: int) -> bool:
        """Whether it is all of a storage, each element once."""
        expected = 1
        for stride, size in sorted((t, s) for t, s in zip(self.stride, self.shape, strict=True) if s > 1):
            if stride != expected:
                return False
            expected *= size
        return self.offset == 0 and math.prod(self.shape) * self.dtype.itemsize == nbytes

    @property
    def in_order(self) -> bool:
        """Whether it begins its storage, its elements one after another."""
        strides = [math.prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))]
        return self.offset == 0 and all(
            s == 1 or a == b for s, a, b in zip(self.shape, self.stride, strides, strict=True)
        )


class Given:
    """A tensor with values that an operation reads. It is kept by reference, since it may be large."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, tensor_version(tensor)

    def keep(self) -> None:
        """It is about to be changed: go on with a copy."""
        self._tensor = self.get().clone()
        self._version = tensor_version(self._tensor)

    def get(self) -> Tensor:
        """The tensor.

        Raises:
            RuntimeError: somebody changed it since.
        """
        if tensor_version(self._tensor) != self._version:
            raise RuntimeError(
                "MegaTPStrategy: a tensor that `configure_model` initialised parameters with was changed in place"
                " afterwards, before each rank has made its parameters. Use a copy of it there: `tensor.clone()`."
            )
        return self._tensor.detach()


@dataclass(frozen=True)
class Source:
    """A tensor that lies elsewhere, such as in a file.

    Args:
        shape: of all of it.
        dtype: of all of it.
        read: all of it, for None, or a rank's part.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[ShardSpec | None], Tensor]


@dataclass
class Operation:
    """One entry of a recording."""

    func: Callable[..., Any] | Source
    args: tuple[Any, ...] = ()
    """Views stand for recorded tensors, Given for others."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    reads: frozenset[int] = frozenset()
    """Storages whose values it needs."""
    writes: frozenset[int] = frozenset()
    """Storages it makes or changes."""
    whole: frozenset[int] = frozenset()
    """Storages among `writes` in which nothing is left of what was there before."""
    made: dict[int, View] = field(default_factory=dict)
    """Which of its results are new storages: index among the results -> the tensor."""
    generator: Tensor | None = None
    """State of the generator that it draws from."""
    dtype: torch.dtype = torch.float32
    """The default one at its time."""

    @property
    def needs(self) -> frozenset[int]:
        """The storages whose values before it matter."""
        return self.reads | (self.writes - self.whole)


class Recording:
    """Operations in the order of time, and what can be asked about them."""

    def __init__(self) -> None:
        self._operations: list[Operation] = []
        self._writers: dict[int, list[int]] = {}
        self.sizes: dict[int, int] = {}
        """Storage -> its bytes."""
        self._spare = torch.UntypedStorage(0, device="cpu")

    def __len__(self) -> int:
        return len(self._operations)

    def add(self, operation: Operation) -> None:
        """Record what was done last."""
        for storage in operation.writes:
            self._writers.setdefault(storage, []).append(len(self._operations))
        self._operations.append(operation)

    def values(self, views: Iterable[View]) -> list[Tensor]:
        """What tensors hold after all operations. Those that share a storage do so here.

        Memory: their storages and, one operation at a time, what they are made of.
        """
        wanted = list(views)
        memory = self._replay({view.storage for view in wanted})
        return [view.of(memory[view.storage]) for view in wanted]

    def part(self, view: View, spec: ShardSpec) -> Tensor:
        """A rank's part of a tensor. Where it is a copy of what lies elsewhere, no more than the part is read.

        Memory: otherwise that of `values`, used for the next one again.
        """
        found = self._part_elsewhere(view, spec, len(self._operations))
        if found is not None:
            return found
        memory = self._replay({view.storage}, {view.storage: self.spare(self.sizes[view.storage])})
        return spec.take(view.of(memory[view.storage]))

    def spare(self, nbytes: int) -> torch.UntypedStorage:
        """Memory for a moment, always the same: blocks that come and go would leave holes in the heap."""
        if self._spare.nbytes() < nbytes:
            self._spare = torch.UntypedStorage(nbytes, device="cpu")
        return self._spare

    def _part_elsewhere(self, view: View, spec: ShardSpec, until: int) -> Tensor | None:
        """A part of a tensor that is, at some time, a copy of another or of a source; else None."""
        index = max((i for i in self._writers[view.storage] if i < until), default=None)
        if index is None or not view.in_order:
            return None
        last = self._operations[index]
        if view.storage not in last.whole:
            return None
        if isinstance(last.func, Source):
            return last.func.read(spec) if last.func.shape == view.shape else None
        if last.func not in _COPIES:
            return None
        target, origin = last.args[:2] if last.func is _COPIES[0] else (last.made[0], last.args[0])
        if target != view or not isinstance(origin, (View, Given)):
            return None
        if isinstance(origin, View):
            part = self._part_elsewhere(origin, spec, index) if origin.shape == view.shape else None
        else:
            part = spec.take(origin.get()) if origin.get().shape == view.shape else None
        return None if part is None else part.to(view.dtype)

    def _replay(self, storages: set[int], memory: Memory | None = None) -> Memory:
        """Do again what the values of some storages depend on.

        Args:
            memory: to be written to, where it has one of them.
        """
        memory = {} if memory is None else memory
        needed = sorted(self._needed(storages))
        last_use = {storage: i for i in needed for storage in self._operations[i].needs | self._operations[i].writes}
        with torch.no_grad():
            for index in needed:
                operation = self._operations[index]
                self._run(operation, memory)
                for storage in operation.needs | operation.writes:
                    if last_use[storage] == index and storage not in storages:
                        del memory[storage]
        return memory

    def _needed(self, storages: set[int]) -> set[int]:
        """The operations that the values of some storages depend on. What was written over is not among them."""
        found: set[int] = set()
        waiting = [(storage, len(self._operations)) for storage in storages]
        while waiting:
            for index in self._since_whole(*waiting.pop()):
                if index not in found:
                    found.add(index)
                    waiting += [(storage, index) for storage in self._operations[index].needs]
        return found

    def _since_whole(self, storage: int, until: int) -> Iterator[int]:
        """The operations before a time that wrote to a storage, back to one that left nothing of what was there."""
        for index in reversed(self._writers[storage]):
            if index < until:
                yield index
                if storage in self._operations[index].whole:
                    return

    def _run(self, operation: Operation, memory: Memory) -> None:
        if isinstance(operation.func, Source):
            results: Any = operation.func.read(None)
        else:
            args, kwargs = tree_map(lambda x: self._actual(x, memory), (operation.args, operation.kwargs))
            with default_dtype(operation.dtype), drawing_from(operation.generator, kwargs):
                results = operation.func(*args, **kwargs)
        results = results if isinstance(results, (tuple, list)) else [results]
        for index, view in operation.made.items():
            made = results[index]
            if (made.stride(), made.storage_offset()) != (view.stride, 0):  # a kernel's own order, as of a QR's
                made = torch.empty_strided(view.shape, view.stride, dtype=view.dtype, device="cpu").copy_(made)
            memory[view.storage] = made.untyped_storage()

    def _actual(self, x: Any, memory: Memory) -> Any:
        if isinstance(x, Given):
            return x.get()
        if not isinstance(x, View):
            return x
        if x.storage not in memory:  # what made it was left out, as all of it is written now
            memory[x.storage] = torch.UntypedStorage(self.sizes[x.storage], device="cpu")
        return x.of(memory[x.storage])


@contextlib.contextmanager
def drawing_from(state: Tensor | None, kwargs: dict[str, Any]) -> Iterator[None]:
    """Let an operation draw from a generator in a state, and leave the default generator as it was.

    Args:
        state: None for an operation that draws nothing.
        kwargs: of the operation; a generator of the user's own in it is replaced.
    """
    if state is None:
        yield
    elif kwargs.get("generator") is not None:
        kwargs["generator"] = torch.Generator("cpu")
        kwargs["generator"].set_state(state)
        yield
    else:
        with torch.random.fork_rng([]):
            torch.set_rng_state(state)
            yield


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make tensors of a dtype where none is asked for."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
