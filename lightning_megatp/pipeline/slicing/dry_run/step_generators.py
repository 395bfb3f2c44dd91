"""Generators of random numbers that a step makes for itself (`torch.Generator().manual_seed(0)`, for a projection that
stays the same). Every stage makes them alike, and they draw what they do on one device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from lightning_megatp.pipeline.slicing.dry_run.call import Call
from lightning_megatp.pipeline.slicing.operations import generators_given


@dataclass
class _Drawn:
    """What a dry run drew from one generator."""

    generator: torch.Generator
    seed: int
    operations: list[int] = field(default_factory=list)
    replicated: bool = True
    """Every stage does all of them, so that the generator is where it is on one device."""


class StepGenerators:
    """The generators that operations of a dry run were given."""

    def __init__(self) -> None:
        self._drawn: list[_Drawn] = []

    def note(self, call: Call, operation: int) -> None:
        """Note which generators an operation was given.

        Args:
            call: an operation that may draw.
            operation: its index.
        """
        for generator in generators_given(call.args, call.kwargs):
            drawn = next((drawn for drawn in self._drawn if drawn.generator is generator), None)
            if drawn is None:
                drawn = _Drawn(generator, generator.initial_seed())
                self._drawn.append(drawn)
            drawn.operations.append(operation)
            drawn.replicated &= call.stage is None

    def seeds(self) -> Iterator[tuple[int, int]]:
        """After the dry run: the operations that drew from generators which are gone since, as the step that made them
        is over, and how those were seeded."""
        for drawn in self._drawn:
            gone = sys.getrefcount(drawn.generator) <= _OWN_REFERENCES
            if gone and drawn.replicated:
                yield from ((operation, drawn.seed) for operation in drawn.operations)


_OWN_REFERENCES = 2
"""To a generator that nobody else has: the attribute, and the argument of the function that counts. (A weak reference
would tell, too, but torch 2.11's generators have none.)"""
