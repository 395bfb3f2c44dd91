"""What a dry run did, in a form in which it can be compared with another one of the same step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_megatp.containers import leaves_in
from lightning_megatp.pipeline.slicing.operations import generators_given
from lightning_megatp.random_states import HostState
from lightning_megatp.shim.autograd import generator_bytes


class Deed(NamedTuple):
    """One operation, between units or inside of one."""

    name: str
    numbers: tuple[str, ...]
    """Its plain arguments, the states of generators that it is given, and which of the module's tensors it takes."""

    def __str__(self) -> str:
        return f"`{self.name}`" + (f" with {', '.join(self.numbers)}" if self.numbers else "")


def deed_of(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    lasting: Callable[[Tensor], str],
    drawing: bool = False,
) -> Deed:
    """The deed of an operation with these arguments.

    Args:
        lasting: gives the name of a tensor that outlives the step, "" for others.
        drawing: the states of generators that it is given belong to it.
    """
    if name.startswith("_record_function"):  # of a profiler
        return Deed(name, ())
    numbers = [_plain(x, lasting) for x in leaves_in(args, kwargs)]
    generators = generators_given(args, kwargs) if drawing else []
    states = [f"a generator in state {hash(generator_bytes(g)):x}" for g in generators]
    return Deed(name, (*filter(None, numbers), *states))


def _plain(x: Any, lasting: Callable[[Tensor], str]) -> str:
    if isinstance(x, Tensor):
        return lasting(x)
    if isinstance(x, slice):
        return ":".join(_plain(bound, lasting) for bound in (x.start, x.stop, x.step))
    if isinstance(x, np.ndarray):
        return f"an array of {hash(x.tobytes()):x}" if x.size <= _MOST else ""
    return repr(x) if isinstance(x, _PLAIN) else ""


_MOST = 100_000
"""Entries of an array that are looked at."""
_PLAIN = (bool, int, float, complex, str, torch.dtype, np.number)


class Moment(NamedTuple):
    """Where the generators of the host are."""

    beside_torch: HostState
    of_torch: bytes

    @classmethod
    def now(cls) -> Moment:
        return cls(HostState.now(), torch.get_rng_state().numpy().tobytes())

    def put(self) -> None:
        """Put them there."""
        self.beside_torch.put()
        torch.set_rng_state(torch.frombuffer(bytearray(self.of_torch), dtype=torch.uint8))


@dataclass
class Deeds:
    """What one operation of a plan did.

    Args:
        begin: the generators before it.
        inside: what it did, one after another: a unit or an autograd function more than itself.
        compared: whether a run by another way does the same.
    """

    begin: Moment
    inside: list[Deed] = field(default_factory=list)
    compared: bool = True
