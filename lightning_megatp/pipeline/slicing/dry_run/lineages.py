"""What units make inside that every stage would make alike: of shapes, numbers, and tensors that all have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor

from lightning_megatp.containers import tensors_in
from lightning_megatp.pipeline.slicing.dry_run.by_tensor import ByTensor
from lightning_megatp.pipeline.slicing.dry_run.values import Values
from lightning_megatp.pipeline.slicing.operations import HOST_READS, LIKE_ANOTHER, SHAPE_ONLY
from lightning_megatp.shim.torch import DisableTorchFunction
from lightning_megatp.tensor.draws import OF_TENSORS
from lightning_megatp.tensor.functions import is_in_place, operation_names


class Lineage(NamedTuple):
    """What a tensor is made of that every stage would make alike."""

    origins: frozenset[int] = frozenset()
    """id of the module's tensors among that; none is trained."""
    of_batch: bool = False
    """Whether values of the batch are among that."""

    def with_batch(self) -> Lineage:
        """This lineage, but of the batch, too."""
        return Lineage(self.origins, True)


class Lineages:
    """Finds out which tensors every stage would make alike in one call of a unit.

    Args:
        values: the tensors of the step.
        known: those that calls have made so far. What this one makes is added.
    """

    def __init__(self, values: Values, known: ByTensor[Lineage]) -> None:
        self._values, self._known = values, known
        self._by_values = False
        """Whether what the call makes may depend on values that were read, which not every stage has."""
        self._by_batch = False
        """Whether it may depend on values that were read, which every stage has."""

    def of_result(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Lineage | None:
        """The lineage of what an operation makes, if every stage would make it alike; of one that overwrites its first
        tensor, of what it puts there."""
        tensors = tensors_in(args, kwargs)
        if name in SHAPE_ONLY:
            tensors = []
        elif name in LIKE_ANOTHER:
            tensors = tensors[:1]
        elif name in _OVERWRITE and tensors[:1] and self._of(tensors[0]) is not None:
            tensors = tensors[1:]
        if name in OF_TENSORS:
            return None
        found = []
        for x in tensors:
            if (lineage := self._of(x)) is None:
                return None
            found.append(lineage)
        return _joined(found)

    def note(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        lineage: Lineage | None,
        made: Iterable[Tensor],
    ) -> None:
        """After an operation.

        Args:
            out: what it has made, or changed.
            lineage: of that.
            made: all that the call has made so far.
        """
        changes = (is_in_place(name) and args[0] in self._known) or "out" in kwargs
        if lineage is None:
            self._by_values |= name in HOST_READS or changes
        elif lineage.of_batch:
            self._by_batch |= name in HOST_READS or changes
        if changes and (lineage is None or lineage.of_batch):  # views of what is changed are among what was made
            for x in made:
                if (known := self._known.pop(x)) is not None and lineage is not None:
                    self._know(x, known.with_batch())
        if lineage is not None and not self._by_values:
            for x in tensors_in(out):
                self._know(x, lineage)

    def overwrites_alike(self, name: str, x: Tensor, lineage: Lineage | None) -> bool:
        """Whether an operation overwrites a tensor that units of several stages share with what each of these would put
        there; it is known then."""
        if name not in _OVERWRITE or lineage is None or self._by_values or id(x) in lineage.origins:
            return False
        self._know(x, lineage)
        return True

    def is_of_numbers(self, x: Tensor) -> bool:
        """Whether a tensor would be made alike for any batch."""
        known = self._known.get(x)
        return known is not None and not known.of_batch

    def _know(self, x: Tensor, lineage: Lineage) -> None:
        self._known[x] = lineage.with_batch() if self._by_batch else lineage

    def _of(self, x: Tensor) -> Lineage | None:
        if (known := self._known.get(x)) is not None:
            return known
        value, is_persistent = self._values.get(x), self._values.is_persistent(x)
        if not (is_persistent if value is None else value.stage is None):
            return None
        with DisableTorchFunction():  # nobody has to see this
            if x.requires_grad:
                return None
        of_batch = value is not None and not value.constant
        return Lineage(frozenset([id(x)] if is_persistent else []), of_batch)


def _joined(lineages: Iterable[Lineage]) -> Lineage:
    """The lineage of what is made of several."""
    all_of_them = list(lineages)
    return Lineage(frozenset().union(*(x.origins for x in all_of_them)), any(x.of_batch for x in all_of_them))


_OVERWRITE = operation_names("__setitem__ copy_ fill_ zero_")
"""They read nothing of what they change."""
