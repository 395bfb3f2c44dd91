"""Numbers that a plan divides, and that somebody outside of their block reads too: a step that scales by the heads."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn


@contextlib.contextmanager
def reads_outside(model: nn.Module, numbers: Collection[str], blocks: Collection[str]) -> Iterator[set[str]]:
    """Note which numbers are read while no block that holds them is called.

    Args:
        model: the whole.
        numbers: names of attributes, behind those of their modules.
        blocks: names of the modules in which the numbers are divided.

    Returns:
        What was read, filled meanwhile.
    """
    read: set[str] = set()
    running: list[str] = []

    def note(number: str) -> None:
        if not any(number.startswith(f"{block}.") for block in running):
            read.add(number)

    owners = {number.rpartition(".")[0] for number in numbers}
    around = {block for block in blocks if any(f"{owner}.".startswith(f"{block}.") for owner in owners)}
    watched = [(name, model.get_submodule(name)) for name in sorted(owners | around)]
    kinds = [type(child) for _, child in watched]
    for (name, child), kind in zip(watched, kinds, strict=True):
        own = {number.rpartition(".")[2]: number for number in numbers if number.rpartition(".")[0] == name}
        child.__class__ = _noting(kind, own, note, name if name in around else None, running)
    try:
        yield read
    finally:
        for (_, child), kind in zip(watched, kinds, strict=True):
            child.__class__ = kind


def _noting(kind: Any, numbers: dict[str, str], note: Any, block: str | None, running: list[str]) -> Any:
    """A module's class that tells who reads its numbers, and when its modules are called, if they are a block."""

    def get(self: Any, name: str) -> Any:
        if name in numbers:
            note(numbers[name])
        return kind.__getattribute__(self, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        running.append(str(block))
        try:
            return kind.__call__(self, *args, **kwargs)
        finally:
            running.pop()

    members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__getattribute__": get}
    return type(kind.__name__, (kind,), members if block is None else {**members, "__call__": call})
