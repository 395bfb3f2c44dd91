"""Optimizers that step others: one for matrices and one for the rest behind a single `step`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_megatp.optimizers.elementwise import unwrap


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that an optimizer has as attributes, or in lists, tuples and dicts there, with groups of their
    own; and those of these. One that it shares its groups with (a Lookahead's base) is stepped and saved as its own
    part."""
    optimizer = unwrap(optimizer)
    shown = {id(group) for group in optimizer.param_groups}
    found: list[Optimizer] = []
    for value in vars(optimizer).values():
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else (value,)
        for part in parts:
            if isinstance(part, Optimizer) and not shown.intersection(map(id, part.param_groups)):
                found += [part, *inner_optimizers(part)]
    return list(dict.fromkeys(found))


def with_inner(optimizers: Iterable[Optimizer]) -> Iterator[Optimizer]:
    """Each followed by its inner ones, which are looked for when they are asked for."""
    for optimizer in optimizers:
        yield optimizer
        yield from inner_optimizers(optimizer)


@contextlib.contextmanager
def method_replaced(optimizers: Sequence[Optimizer], name: str, by: Callable[..., Any]) -> Iterator[None]:
    """Let `by(optimizer, ...)` stand for a method of these."""
    for optimizer in optimizers:
        optimizer.__dict__[name] = functools.partial(by, optimizer)
    try:
        yield
    finally:
        for optimizer in optimizers:
            del optimizer.__dict__[name]
