"""What is known of single tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

from torch import Tensor

Entry = TypeVar("Entry")


class ByTensor(Generic[Entry]):
    """A table by the identity of tensors, which it keeps alive, so that no other tensor gets the id of one.

    Args:
        entries: the first ones.
    """

    def __init__(self, entries: Iterable[tuple[Tensor, Entry]] = ()) -> None:
        self._entries = {id(x): (x, entry) for x, entry in entries}

    def __contains__(self, x: Tensor) -> bool:
        return id(x) in self._entries

    def __getitem__(self, x: Tensor) -> Entry:
        return self._entries[id(x)][1]

    def __setitem__(self, x: Tensor, entry: Entry) -> None:
        self._entries[id(x)] = x, entry

    def get(self, x: Tensor) -> Entry | None:
        """The entry of a tensor, if there is one."""
        return self._entries.get(id(x), (x, None))[1]

    def pop(self, x: Tensor) -> Entry | None:
        """Take the entry of a tensor out, if there is one."""
        return self._entries.pop(id(x), (x, None))[1]
