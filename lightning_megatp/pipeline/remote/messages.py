"""The arguments and results of calls between two processes, so that each finds the objects it already knows.

A call hands over nested Python objects with tensors in them. What the callee changes in place (a cache that it fills, a
list that it appends to) is changed on the caller's side, too, after the call; and a tensor that came once, and has not
changed since, does not travel again.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_megatp.pipeline.slicing.errors import SliceError
from lightning_megatp.shim.torch import storage_id, tensor_version

_ATOMS = (Tensor, nn.Module, type, FunctionType, MethodType, ModuleType, torch.dtype, torch.device, torch.Generator)
"""What is not looked into for what else it holds."""


@dataclasses.dataclass(frozen=True)
class _Payload:
    """A tensor that the other side does not have: what it is, and where its bytes begin."""

    index: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    on_device: bool
    start: int


class _Known(NamedTuple):
    """A tensor that both sides have."""

    held: Callable[[], Tensor | None]
    version: int
    """When both had the same."""
    id: int


class Table:
    """The tensors that two processes have in common: each of them has one, and both number them alike.

    Args:
        module: its parts are named, not sent.
        device: where this side computes; what was on the other one's comes there.
        keeps: whether tensors live as long as this side does not drop them. The caller's live as long as the step
            refers to them, and it says which are gone.
    """

    def __init__(self, module: nn.Module, device: torch.device, keeps: bool) -> None:
        self._device, self._keeps = device, keeps
        self._modules = {id(part): name for name, part in module.named_modules()}
        self._module = module
        self._tensors: dict[int, _Known] = {}
        self._numbers: dict[int, int] = {}
        """id -> number of a tensor, as long as it lives."""
        self._count = 0
        self._gone: list[int] = []

    def packed(self, value: Any, objects: Iterable[Any] = ()) -> bytes:
        """For `unpacked` on the other side.

        Args:
            value: nested Python objects.
            objects: those that the other side has, by their place here.

        Raises:
            SliceError: something in it can't be pickled.
        """
        gone, self._gone = self._gone, []
        for number in gone:
            self._forget(number)
        file, parts = io.BytesIO(), _Parts()
        file.write(pickle.dumps(gone))
        pickler = _Pickler(file, self, parts, {id(x): i for i, x in enumerate(objects)})
        try:
            pickler.dump(value)
        except (pickle.PicklingError, AttributeError, TypeError, NotImplementedError) as error:
            raise SliceError(
                "a step that can't be cut gives a module of another pipeline stage, or gets from it, what can't be sent"
                f" ({error}). Let it be tensors, and what can be pickled."
            ) from error
        end = file.tell()
        return b"".join([end.to_bytes(8, "little"), file.getvalue(), *parts.bytes])

    def unpacked(self, data: bytes, objects: list[Any] | None = None) -> Any:
        """What the other side packed.

        Args:
            data: its bytes.
            objects: those that it knew to be here, in its order.
        """
        end = 8 + int.from_bytes(data[:8], "little")
        file = io.BytesIO(data[8:end])
        for number in pickle.load(file):
            self._forget(number)
        return _Unpickler(file, self, data, end, objects or []).load()

    def changed(self) -> list[tuple[int, Tensor]]:
        """Number and new values of the tensors that were changed in place since both sides had the same."""
        pairs = ((number, known.held(), known.version) for number, known in self._tensors.items())
        found = [(number, x) for number, x, version in pairs if x is not None and tensor_version(x) != version]
        for number, x in found:
            self._note(number, x)
        return [(number, x.detach().clone()) for number, x in found]

    def change(self, number: int, value: Tensor) -> None:
        """Do to a tensor what was done to it on the other side.

        Raises:
            SliceError: others share its memory, and would not have been changed there.
        """
        x = self._tensors[number].held()
        if x is None:
            return
        others = (known.held() for known in self._tensors.values())
        if any(y is not None and y is not x and storage_id(y) == storage_id(x) for y in others):
            raise SliceError(
                "a step that can't be cut calls a module of another pipeline stage that changes a tensor in place, and"
                " others are views of it. Give it a tensor of its own, or let it return a new one."
            )
        x.copy_(value)
        self._note(number, x)

    def _note(self, number: int, x: Tensor) -> None:
        held = (lambda: x) if self._keeps else weakref.ref(x, lambda _: self._gone.append(number))
        self._tensors[number] = _Known(held, tensor_version(x), id(x))

    def _forget(self, number: int) -> None:
        known = self._tensors.pop(number, None)
        if known is not None and self._numbers.get(known.id) == number:
            del self._numbers[known.id]

    def reference(self, x: Any, parts: _Parts, places: dict[int, int]) -> Any:
        """What stands for an object in a message; None for those that are sent as they are."""
        if id(x) in places:
            return "object", places[id(x)]
        if isinstance(x, nn.Module) and id(x) in self._modules:
            return "module", self._modules[id(x)]
        if isinstance(x, torch.device):
            return ("device",) if x.type == self._device.type else None
        if not isinstance(x, Tensor):
            return None
        known = self._tensors.get(self._numbers.get(id(x), -1))
        if known is not None and known.held() is x and known.version == tensor_version(x) and not x.is_inference():
            return "known", self._numbers[id(x)]
        return "tensor", self._payload(x, parts)

    def _payload(self, x: Tensor, parts: _Parts) -> _Payload:
        if x.layout != torch.strided or x.is_quantized:
            raise TypeError(f"a tensor of layout {x.layout}")
        plain = x.detach().resolve_conj().resolve_neg()
        own = plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
        payload = _Payload(self._new(x), x.dtype, tuple(x.shape), x.device.type == self._device.type, parts.length)
        parts.add(own)
        return payload

    def _new(self, x: Tensor) -> int:
        old = self._numbers.get(id(x))
        if old is not None and not self._keeps:  # of what it was before it changed
            self._gone.append(old)
            self._forget(old)
        number, self._count = self._count, self._count + 1
        self._numbers[id(x)] = number
        self._note(number, x)
        return number

    def referred(self, reference: Any, data: bytes, start: int, objects: list[Any]) -> Any:
        """The other way: what is meant on this side."""
        kind, *of = reference
        if kind == "object":
            return objects[of[0]]
        if kind == "module":
            return self._module.get_submodule(of[0])
        if kind == "device":
            return self._device
        if kind == "known":
            return self._tensors[of[0]].held()
        return self._made(of[0], data, start)

    def _made(self, payload: _Payload, data: bytes, start: int) -> Tensor:
        size = payload.dtype.itemsize
        for n in payload.shape:
            size *= n
        begin = start + payload.start
        with torch.inference_mode(False):  # inference tensors can't tell in-place changes
            row = torch.frombuffer(bytearray(data[begin : begin + size]), dtype=torch.uint8) if size else None
            x = torch.empty(payload.shape, dtype=payload.dtype) if row is None else row.view(payload.dtype)
            x = x.view(payload.shape).to(self._device if payload.on_device else "cpu")
        assert payload.index == self._count, "both sides number alike"
        self._new(x)
        return x


class _Parts:
    """The bytes of the tensors of one message."""

    def __init__(self) -> None:
        self.bytes: list[bytes] = []
        self.length = 0

    def add(self, part: bytes) -> None:
        self.bytes.append(part)
        self.length += len(part)


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, table: Table, parts: _Parts, places: dict[int, int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._table, self._parts, self._places = table, parts, places

    def persistent_id(self, obj: Any) -> Any:
        return self._table.reference(obj, self._parts, self._places)


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, table: Table, data: bytes, start: int, objects: list[Any]) -> None:
        super().__init__(file)
        self._table, self._data, self._start, self._objects = table, data, start, objects

    def persistent_load(self, pid: Any) -> Any:
        return self._table.referred(pid, self._data, self._start, self._objects)


class Contents:
    """What hangs together in some arguments, at one moment: everything that can be changed in place, in an order that
    is the same where they were unpacked.

    Args:
        value: nested Python objects.
    """

    def __init__(self, value: Any) -> None:
        self.objects = list(_objects(value))
        self.kinds = [type(x).__qualname__ for x in self.objects]
        """By which the other side sees that it has the same."""
        self._before = [_contents(x) for x in self.objects]

    def changes(self) -> dict[int, Any]:
        """Place -> new contents, of what was changed since."""
        now = [_contents(x) for x in self.objects]
        return {i: new for i, (new, old) in enumerate(zip(now, self._before, strict=True)) if not _are_same(new, old)}

    def adopt(self, changes: dict[int, Any]) -> None:
        """Change the same things alike."""
        for place, (entries, attributes) in changes.items():
            _fill(self.objects[place], entries, attributes)


def _objects(value: Any) -> Iterator[Any]:
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        x = waiting.pop()
        if id(x) in seen or isinstance(x, _ATOMS):
            continue
        seen.add(id(x))
        entries, attributes = _contents(x)
        if isinstance(x, (dict, list, set, collections.deque)) or attributes is not None:
            yield x
        if not isinstance(x, set):  # which has another order in another process
            waiting += entries.values() if isinstance(entries, dict) else entries or ()
        waiting += (attributes or {}).values()


def _contents(x: Any) -> tuple[Any, dict[str, Any] | None]:
    """The entries of a container, and the attributes of an object: copies."""
    entries: Any = None
    if isinstance(x, dict):
        entries = dict(x)
    elif isinstance(x, (list, tuple, collections.deque)):
        entries = list(x)
    elif isinstance(x, set):
        entries = set(x)
    attributes = getattr(x, "__dict__", None)
    return entries, dict(attributes) if isinstance(attributes, dict) else None


def _are_same(new: tuple[Any, Any], old: tuple[Any, Any]) -> bool:
    return all(_alike(x, y) for x, y in zip(new, old, strict=True))


def _alike(new: Any, old: Any) -> bool:
    if isinstance(new, dict) and isinstance(old, dict):
        return list(new) == list(old) and all(_is_same(new[key], old[key]) for key in new)
    if isinstance(new, list) and isinstance(old, list):
        return len(new) == len(old) and all(map(_is_same, new, old))
    return bool(new == old)


def _is_same(x: Any, y: Any) -> bool:
    return x is y or (type(x) is type(y) and isinstance(x, (bool, int, float, str, bytes)) and x == y)


def _fill(x: Any, entries: Any, attributes: dict[str, Any] | None) -> None:
    if isinstance(x, collections.OrderedDict):
        for key in list(x):
            collections.OrderedDict.__delitem__(x, key)
        for key, value in entries.items():
            collections.OrderedDict.__setitem__(x, key, value)
    elif isinstance(x, dict):
        dict.clear(x)
        dict.update(x, entries)
    elif isinstance(x, set):
        x.clear()
        x.update(entries)
    elif isinstance(x, (list, collections.deque)):
        x.clear()
        x.extend(entries)
    if attributes is not None:
        x.__dict__.clear()
        x.__dict__.update(attributes)
