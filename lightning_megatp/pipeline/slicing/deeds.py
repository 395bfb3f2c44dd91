"""What a dry run did, in a form in which it can be compared with another one of the same step."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_megatp.pipeline.slicing.operations import generators_given
from lightning_megatp.pipeline.slicing.plan import tensors_in
from lightning_megatp.shim.torch import DisableTorchFunction, is_fake, tree_leaves


class Deed(NamedTuple):
    """One operation, between units or inside of one."""

    name: str
    numbers: tuple[str, ...]
    """Its plain arguments, the states of generators that it is given, and which of the module's tensors it takes."""
    contents: tuple[str, ...] = ()
    """What tells its other tensors from each other; "" for those that can't be told, or have no data here."""

    def __str__(self) -> str:
        shown = [*self.numbers, *filter(None, self.contents)]
        return f"`{self.name}`" + (f" with {', '.join(shown)}" if shown else "")

    def is_like(self, other: Deed | None) -> bool:
        """Whether it is the same, as far as that can be told."""
        if other is None or self[:2] != other[:2]:
            return False
        pairs = zip(self.contents, other.contents, strict=False)
        return all(own == others or not (own and others) for own, others in pairs)


def deed_of(
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    lasting: Callable[[Tensor], str],
    drawing: bool = False,
    content: Callable[[Tensor], str] | None = None,
) -> Deed:
    """Of an operation and its arguments.

    Args:
        lasting: gives the name of a tensor that outlives the step, "" for others.
        drawing: the states of generators that it is given belong to it.
        content: tells others from each other.
    """
    if name.startswith("_record_function"):  # of a profiler
        return Deed(name, ())
    numbers = [_plain(x, lasting) for x in tree_leaves((args, kwargs))]
    others = [x for x in tensors_in(args, kwargs) if content is not None and not lasting(x)]
    generators = generators_given(args, kwargs) if drawing else []
    states = [f"a generator in state {hash(bytes(g.get_state().numpy())):x}" for g in generators]
    return Deed(name, (*filter(None, numbers), *states), tuple(map(content, others)) if content else ())


def are_alike(deeds: Sequence[Deed], others: Sequence[Deed]) -> bool:
    """Whether several are the same."""
    return len(deeds) == len(others) and all(x.is_like(y) for x, y in zip(deeds, others, strict=True))


def _plain(x: Any, lasting: Callable[[Tensor], str]) -> str:
    if isinstance(x, Tensor):
        return lasting(x)
    if isinstance(x, slice):
        return ":".join(_plain(bound, lasting) for bound in (x.start, x.stop, x.step))
    if isinstance(x, np.ndarray):
        return f"an array of {hash(x.tobytes()):x}" if x.size <= _MOST else ""
    return repr(x) if isinstance(x, _PLAIN) else ""


_MOST = 10_000
"""Entries of an array, or a tensor, that are looked at."""
_PLAIN = (bool, int, float, complex, str, torch.dtype, np.number)


def content_of(x: Tensor) -> str:
    """What tells one tensor from another by its values, if it has any and is not large."""
    if is_fake(x) or x.is_meta or x.layout is not torch.strided or not 0 < x.numel() <= _MOST or type(x) is not Tensor:
        return ""
    with DisableTorchFunction():  # nobody has to see this
        values = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"values of {hash(values):x}"


class Moment(NamedTuple):
    """Where the generators of the host are."""

    python: Any
    of_numpy: bytes
    of_torch: bytes

    @classmethod
    def now(cls) -> Moment:
        return cls(random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state().numpy().tobytes())

    def put(self) -> None:
        """Put them there."""
        random.setstate(self.python)
        np.random.set_state(pickle.loads(self.of_numpy))
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
