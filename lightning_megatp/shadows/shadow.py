"""One list or dict with a tensor for each weight, whole or in parts."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_megatp.module import ParallelModule
from lightning_megatp.parts.rows import own_part
from lightning_megatp.shadows.entries import Entry
from lightning_megatp.shadows.finding import BUFFERS, Found
from lightning_megatp.shim.torch import tensor_version


class Shadow:
    """What a rank has of it, in the place where its user keeps it.

    Args:
        found: where that is.
        parallel: the module, cut into stages and divided.
        is_part: whether it was made of what this rank holds.
    """

    def __init__(self, found: Found, parallel: ParallelModule, is_part: bool = False) -> None:
        self.path, self.names = found.path, found.names
        self._found, self._parallel = found, parallel
        self._is_part = is_part
        self._aside: Any = None
        """The whole one, while parts stand in its place."""
        self._state_before: Any = None
        self._lists = {} if is_part or parallel.pipeline is None else self._lists_beside()
        self._lists_shown: dict[Any, list[Any]] = {}
        self._shapes = {} if is_part else {key: x.shape for key, x in self._entries(part=False).items()}

    @property
    def in_buffers(self) -> bool:
        """Whether it is the buffers of a module, which are in its state dict."""
        return self._found.key == BUFFERS

    @property
    def slot(self) -> tuple[int, Any]:
        """Where it is."""
        return id(self._found.holder), self._found.key

    @property
    def value(self) -> Any:
        """What is there now."""
        holder, key = self._found.holder, self._found.key
        if isinstance(holder, dict):
            return holder.get(key)
        return holder[key] if key < len(holder) else None

    def show_part(self) -> None:
        """Put parts in its place.

        Raises:
            RuntimeError: which tensor belongs to which weight can't be told any more.
        """
        held = self._held() if self._lists else {}
        for key, whole in self._lists.items():
            shown = [x for x, place in zip(whole, self.names, strict=True) if place in held]
            self._found.holder[key] = self._lists_shown[key] = shown
        if self._is_part and self._fits(part=True):
            return
        if self._fits(part=False):
            self._aside = self.value
            self.cut_anew()
            self._state_before = self._state()
        elif self._is_part and isinstance(self.value, list) and self._parallel.pipeline is not None:
            raise RuntimeError(
                f"MegaTPStrategy: `{self.path}` had a tensor for each of {len(self.names)} weights of the model, and"
                f" this pipeline stage holds {len(self._held())} of these; now there are {len(self.value)}. Make it"
                " anew in `on_train_start`, of the parameters that are there."
            )

    def show_whole(self) -> None:
        """The end of that. What was changed stays: from then on there are only parts."""
        for key, shown in self._lists_shown.items():
            if self._found.holder.get(key) is shown:
                self._found.holder[key] = self._lists[key]
        if self._aside is not None and not self._is_changed():
            self._set(self._aside, is_part=False)
        self._aside = None

    def gathered(self) -> Iterator[Entry]:
        """The whole tensors of the weights that this rank holds.

        Communication: one all-gather over tp, and one over dp with zero > 0, for each whose weight is cut; whatever
        stands here, since a hook may have changed the parts of some ranks only.
        """
        for key, part in self._parts().items():
            yield Entry(key, self.names[key], self._parallel.whole_like(self.names[key], part))

    def put_whole(self, entries: Iterable[Entry]) -> tuple[Any, bool]:
        """Put whole tensors in its place, until what this returns is given to `put_back`."""
        before = self.value, self._is_part
        if whole := [(entry.key, entry.value) for entry in entries]:
            self._put(whole, is_part=False)
        return before

    def put_back(self, before: tuple[Any, bool]) -> None:
        """The end of that."""
        self._set(*before)

    def cut_anew(self) -> None:
        """Put parts of the whole one that is there in its place. No communication."""
        self._put(self._cut().items(), is_part=True)

    def keep_whole(self, name: str) -> None:
        """Gather the tensor of this weight, which will not be split any more."""
        parts = self._parts()
        if any(self.names[key] == name for key in parts):
            whole = [(k, self._parallel.whole_like(name, x) if self.names[k] == name else x) for k, x in parts.items()]
            if self._is_part:
                self._put(whole, is_part=True)

    def tensors(self) -> Iterable[Tensor]:
        """What is there."""
        return self._entries(self._is_part).values()

    def _lists_beside(self) -> dict[Any, list[Any]]:
        """By their keys, lists of the weights that it follows, or of weak references to them, in the same object:
        torch_ema goes over both."""
        holder = self._found.holder
        items = holder.items() if isinstance(holder, dict) else ()
        return {
            key: x
            for key, x in items
            if isinstance(x, list)
            and len(x) == len(self.names)
            and all(isinstance(_referred(y), nn.Parameter) for y in x)
        }

    def _state(self) -> Any:
        """What tells whether an entry was changed or exchanged, but for changes of its `.data`."""
        return [(id(x), tensor_version(own_part(x))) for x in self.tensors()]

    def _parts(self) -> dict[Any, Tensor]:
        """This rank's part of what is there."""
        return self._entries(part=True) if self._is_part and self._fits(part=True) else self._cut()

    def _cut(self) -> dict[Any, Tensor]:
        whole = self._entries(part=False)
        held = self._held() if whole else {}
        return {key: self._parallel.part_like(name, whole[key]) for key, name in held.items()}

    def _entries(self, part: bool) -> dict[Any, Tensor]:
        """What is there, under the keys of the parts or of the whole; nothing if it is something else."""
        keys, value = (self._held() if part else self.names), self.value
        if isinstance(value, list):
            return dict(zip(keys, value, strict=True)) if len(value) == len(keys) else {}
        found = {key: value[key] for key in keys if key in value} if isinstance(value, dict) else {}
        return found if len(found) == len(keys) else {}

    def _fits(self, part: bool) -> bool:
        entries, names = self._entries(part), self._parallel.names

        def shape(key: Any) -> Any:
            of = names.get(self.names[key])
            return self._shapes[key] if not part else entries[key].shape if of is None else of.shape

        def kind(key: Any) -> bool:
            return part and isinstance(names.get(self.names[key]), DTensor)  # the shape of rows is the whole's

        return bool(entries) and all(
            isinstance(x, Tensor) and x.shape == shape(key) and isinstance(x, DTensor) == kind(key)
            for key, x in entries.items()
        )

    def _held(self) -> Mapping[Any, str]:
        """The names of the weights that this rank holds, which are all that hooks find."""
        if self._parallel.pipeline is None:
            return self.names
        held = set(self._parallel.names)
        if self._found.buffers:
            held.update(name for name, _ in self._parallel.module.named_buffers())
        return {key: name for key, name in self.names.items() if name in held}

    def _put(self, entries: Collection[tuple[Any, Tensor]], is_part: bool) -> None:
        value = copy.copy(self.value)
        if isinstance(value, list):
            value[:] = [x for _, x in entries]
        else:
            named = dict(entries)
            others = [item for item in value.items() if self.in_buffers and item[0] not in named]
            first = next((i for i, key in enumerate(value) if key in named), 0)
            value.clear()
            value.update([*others[:first], *entries, *others[first:]])
        self._set(value, is_part)

    def _set(self, value: Any, is_part: bool) -> None:
        self._found.holder[self._found.key], self._is_part = value, is_part

    def _is_changed(self) -> bool:
        """Since the parts were put there."""
        if self._state() != self._state_before:
            return True
        parts = self._entries(part=True)
        whole = dict(zip(self.names, self._aside, strict=True)) if isinstance(self._aside, list) else self._aside
        cut = {key: name for key, name in self._held().items() if parts[key] is not whole[key]}
        return not all(
            torch.equal(own_part(self._parallel.part_like(name, whole[key])), own_part(parts[key]))
            for key, name in cut.items()
        )


def _referred(x: Any) -> Any:
    return x() if isinstance(x, weakref.ref) else x
